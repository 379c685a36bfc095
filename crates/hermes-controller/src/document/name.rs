//! Names of documents, and references to them.
//!
//! In: text. Out: a name that is safe in file names, URIs and headers; or a reference with an optional provider.
//! Never: host names. Applications address services by authorities, which follow other rules.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use hermes_model::document::scalar::text_scalar;

/// The maximum length of a name, as of a DNS label.
const MAX_NAME: usize = 63;

/// A document's name: 1 to 63 letters, digits, `-`, `_` and `.`, the first a letter or a digit.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// The lower bound of all names.
    pub(crate) fn lowest() -> Self {
        Self(Arc::from(""))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_legal = (1..=MAX_NAME).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if is_legal {
            return Ok(Self(Arc::from(text)));
        }
        let shown: String = text.chars().take(MAX_NAME).collect();
        Err(format!(
            "invalid name {shown:?}; expected 1 to {MAX_NAME} letters, digits, hyphens, underscores and dots, \
             beginning with a letter or a digit"
        ))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reference: the name of a document of the same provider, or `PROVIDER/NAME`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// The provider; `None` means the provider of the document that has the reference.
    pub provider: Option<Name>,
    /// The name.
    pub name: Name,
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.split_once('/') {
            Some((provider, name)) => Self { provider: Some(provider.parse()?), name: name.parse()? },
            None => Self { provider: None, name: text.parse()? },
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.provider {
            Some(provider) => write!(f, "{provider}/{}", self.name),
            None => self.name.fmt(f),
        }
    }
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

text_scalar!(Name, "a string (a name)");
text_scalar!(Reference, "a string (a name, or PROVIDER/NAME)");
