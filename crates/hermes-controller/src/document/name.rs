//! Names of documents, and references to them.
//!
//! In: text. Out: a name that may stand in a file's name, a URI and a header; a reference that may say whose it is.
//! Never: the name of a host: services are known to applications by their authorities, which follow other rules.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use hermes_model::document::scalar::text_scalar;

/// The longest name: as long as a label of DNS.
const MAX_NAME: usize = 63;

/// A document's name: 1 to 63 letters, digits, `-`, `_` and `.`, the first a letter or a digit.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// What comes before any name.
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
            "{shown:?} is no name; write 1 to {MAX_NAME} letters, digits, hyphens, underscores and dots, \
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

/// A document of the same provider by its name, or another's as `PROVIDER/NAME`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// Whose. `None`: the same provider's as the one who names it.
    pub provider: Option<Name>,
    /// Its name.
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
