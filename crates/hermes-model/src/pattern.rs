//! Patterns: what a match may say of an authority, a path, a header's value or a user.
//!
//! In: a string of the document. Out: a pattern that tests, prints and compares itself.
//! Never: regular expressions; `*` is the only wildcard, and only where it is allowed.

mod authority;
mod path;

use std::fmt;
use std::sync::Arc;

use http::HeaderValue;

use crate::spiffe::is_user_name;

pub use authority::{AuthorityPattern, HostPattern, PortPattern};
pub use path::PathPattern;
pub(crate) use path::Skeleton;

/// What a header's line must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValuePattern {
    /// `*`: any value at all.
    Present,
    /// `value*`: it begins with this.
    Prefix(Box<str>),
    /// `value`: exactly this.
    Exact(HeaderValue),
}

impl ValuePattern {
    /// Reads a value; a `*` at its end is the wildcard, others stand for themselves.
    ///
    /// # Errors
    /// A sentence, without the value: it may be a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let legal = |text: &str| {
            HeaderValue::from_str(text).map_err(|_| {
                "this is no header value; it may hold visible ASCII characters, spaces and tabs".to_owned()
            })
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

    /// True where everything that `other` matches is matched by this one as well.
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

/// Whose session it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserPattern {
    /// `*`: any user, but not nobody.
    Any,
    /// This one.
    Is(Arc<str>),
}

impl UserPattern {
    /// Reads a user's name, or `*`.
    ///
    /// # Errors
    /// A sentence where it is neither.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "*" => Ok(UserPattern::Any),
            name if is_user_name(name) => Ok(UserPattern::Is(Arc::from(name))),
            _ => Err(format!(
                "{text:?} is no user's name; write visible ASCII characters without commas and quotes, or *"
            )),
        }
    }

    /// Tests the user of a session.
    pub fn matches(&self, user: Option<&str>) -> bool {
        match self {
            UserPattern::Any => user.is_some(),
            UserPattern::Is(name) => user == Some(name),
        }
    }

    /// True where everything that `other` matches is matched by this one as well.
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
