//! Patterns of a match: for an authority, a path, a field value or a user.
//!
//! In: a string of the document. Out: a pattern that tests, formats and compares itself.
//! Never: regular expressions; `*` is the only wildcard, and only in specified positions.

mod authority;
mod path;

use std::fmt;
use std::sync::Arc;

use http::HeaderValue;

use crate::spiffe::is_user_name;

pub use authority::{AuthorityPattern, HostPattern, PortPattern};
pub use path::PathPattern;
pub(crate) use path::SegmentPattern;

/// Pattern for the value of a header field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValuePattern {
    /// `*`: any value.
    Present,
    /// `value*`: a value with this prefix.
    Prefix(Box<str>),
    /// `value`: exactly this value.
    Exact(HeaderValue),
}

impl ValuePattern {
    /// Parses a pattern; a trailing `*` is the wildcard, any other `*` is literal.
    ///
    /// # Errors
    /// The message leaves out the value, which may be a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let legal = |text: &str| {
            HeaderValue::from_str(text)
                .map_err(|_| "invalid field value; use visible ASCII characters, spaces and tabs".to_owned())
        };
        match text.strip_suffix('*') {
            Some("") => Ok(ValuePattern::Present),
            Some(prefix) => legal(prefix).map(|_| ValuePattern::Prefix(Box::from(prefix))),
            None => legal(text).map(ValuePattern::Exact),
        }
    }

    /// Tests one line of the field.
    pub fn matches(&self, value: &HeaderValue) -> bool {
        match self {
            ValuePattern::Present => true,
            ValuePattern::Prefix(prefix) => value.as_bytes().starts_with(prefix.as_bytes()),
            ValuePattern::Exact(exact) => value == exact,
        }
    }

    /// True if this pattern covers everything that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (ValuePattern::Present, _) => true,
            (ValuePattern::Prefix(prefix), ValuePattern::Prefix(longer)) => longer.starts_with(&**prefix),
            (_, ValuePattern::Exact(value)) => self.matches(value),
            _ => false,
        }
    }
}

impl fmt::Display for ValuePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValuePattern::Present => f.write_str("*"),
            ValuePattern::Prefix(prefix) => write!(f, "{prefix}*"),
            ValuePattern::Exact(value) => f.write_str(&String::from_utf8_lossy(value.as_bytes())),
        }
    }
}

/// Pattern for the user of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserPattern {
    /// `*`: any user, but not an anonymous session.
    Any,
    /// The user with this name.
    Is(Arc<str>),
}

impl UserPattern {
    /// Parses a user name or `*`.
    ///
    /// # Errors
    /// The text is neither.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "*" => Ok(UserPattern::Any),
            name if is_user_name(name) => Ok(UserPattern::Is(Arc::from(name))),
            _ => {
                Err(format!("invalid user name {text:?}; use visible ASCII characters without commas and quotes, or *"))
            }
        }
    }

    /// Tests the user of a session.
    pub fn matches(&self, user: Option<&str>) -> bool {
        match self {
            UserPattern::Any => user.is_some(),
            UserPattern::Is(name) => user == Some(name),
        }
    }

    /// True if this pattern covers everything that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        *self == UserPattern::Any || self == other
    }
}

impl fmt::Display for UserPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UserPattern::Any => f.write_str("*"),
            UserPattern::Is(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests;
