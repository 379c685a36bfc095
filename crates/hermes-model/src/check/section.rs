//! Sections of documents other than the node's, parsed with the same error handling.
//!
//! In: a YAML stream. Out: a section per document. Callers take single values out and deserialise the rest; every
//! invalid value is reported with its path.
//! Never: knowledge of specific documents. Callers define the keys.

use serde::de::DeserializeOwned;

use super::read::{Entries, fit, stream};
use super::report::{MAX_PROBLEMS, Problem, Report};
use super::tree::Tree;

/// A document of a stream, without the values taken so far.
#[derive(Debug)]
pub struct Section(Entries);

/// Parses a YAML stream into the sections of its documents, in order. Empty documents are skipped.
///
/// # Errors
/// The text is not YAML, too large, or a document is not a mapping.
pub fn sections(text: &str) -> Result<Vec<Section>, Problem> {
    let whole = |message: String| Problem { path: String::new(), message };
    let mut sections = Vec::new();
    for (at, tree) in stream(text)?.into_iter().enumerate() {
        match tree {
            Tree::Section(entries) => sections.push(Section(entries)),
            Tree::Nothing => {}
            _ => return Err(whole(format!("invalid document {}: expected a mapping; begin with `kind:`", at + 1))),
        }
    }
    Ok(sections)
}

impl Section {
    /// Takes a string out; `None` if the key is missing.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn take_text(&mut self, key: &str) -> Result<Option<String>, Problem> {
        let Some(at) = self.0.iter().position(|(name, _)| name == key) else { return Ok(None) };
        match self.0.remove(at).1 {
            Tree::Text(text) => Ok(Some(text)),
            _ => {
                let message = "invalid value: expected a string; quote it if it is one".to_owned();
                Err(Problem { path: key.to_owned(), message })
            }
        }
    }

    /// Deserialises the remaining values. `None` if a required value is missing.
    pub fn read<T: DeserializeOwned>(self, problems: &mut Vec<Problem>) -> Option<T> {
        let mut report = Report::default();
        let read = fit(Tree::Section(self.0), "", &mut report);
        let room = MAX_PROBLEMS.saturating_sub(problems.len());
        problems.extend(report.into_problems().into_iter().take(room));
        read
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde::Deserialize;

    use super::sections;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Sample {
        #[serde(default)]
        links: Vec<String>,
        #[serde(default)]
        size: u32,
    }

    #[test]
    fn a_stream_is_read_document_by_document() {
        let mut all = sections("kind: A\nlinks: [x]\n---\n\n---\nkind: B\nsiez: 3\nsize: much\n").unwrap();
        assert_eq!(all.len(), 2);
        let mut problems = Vec::new();
        let mut second = all.pop().unwrap();
        assert_eq!(second.take_text("kind").unwrap().unwrap(), "B");
        assert_eq!(second.read::<Sample>(&mut problems), Some(Sample { links: vec![], size: 0 }));
        let said: Vec<_> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].starts_with("siez: ") && said[0].contains("did you mean \"size\"?"), "{said:?}");
        let mut first = all.pop().unwrap();
        assert!(first.take_text("links").is_err() && first.take_text("nothing").unwrap().is_none());
    }

    #[test]
    fn other_documents_are_reported_with_their_number() {
        assert!(sections("kind: A\n---\n[1]\n").unwrap_err().message.contains("document 2"));
        assert!(sections("{").unwrap_err().message.contains("invalid YAML"));
        assert!(sections("").unwrap().is_empty());
    }
}
