//! Sections of other documents than a node's, read with the same care.
//!
//! In: a YAML stream of one document or many. Out: a section each, from which values are taken, and what is left is read as
//! a type; every value that does not fit is said, with its place.
//! Never: a document of its own. What keys mean is for whoever asks.

use serde::de::DeserializeOwned;

use super::read::{Entries, fit, stream};
use super::report::{MAX_PROBLEMS, Problem, Report};
use super::tree::Tree;

/// One document of a stream, or what is left of it.
#[derive(Debug)]
pub struct Section(Entries);

/// Reads a YAML stream: the sections of its documents, in their order. Empty ones are left out.
///
/// # Errors
/// It is no YAML, too large, or a document is no section of keys.
pub fn sections(text: &str) -> Result<Vec<Section>, Problem> {
    let whole = |message: String| Problem { path: String::new(), message };
    let mut sections = Vec::new();
    for (at, tree) in stream(text)?.into_iter().enumerate() {
        match tree {
            Tree::Section(entries) => sections.push(Section(entries)),
            Tree::Nothing => {}
            _ => return Err(whole(format!("document {} is no section of keys; begin with `kind:`", at + 1))),
        }
    }
    Ok(sections)
}

impl Section {
    /// Takes a text out. `None` where there is none.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn take_text(&mut self, key: &str) -> Result<Option<String>, Problem> {
        let Some(at) = self.0.iter().position(|(name, _)| name == key) else { return Ok(None) };
        match self.0.remove(at).1 {
            Tree::Text(text) => Ok(Some(text)),
            _ => {
                let message = "this is no text; quote it if it is meant as one".to_owned();
                Err(Problem { path: key.to_owned(), message })
            }
        }
    }

    /// Reads what is left. `None`: something is missing without which nothing can be said.
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
        assert!(said[0].starts_with("siez: ") && said[0].contains("did you mean size?"), "{said:?}");
        let mut first = all.pop().unwrap();
        assert!(first.take_text("links").is_err() && first.take_text("nothing").unwrap().is_none());
    }

    #[test]
    fn what_is_no_section_is_said_with_its_number() {
        assert!(sections("kind: A\n---\n[1]\n").unwrap_err().message.contains("document 2"));
        assert!(sections("{").unwrap_err().message.contains("no YAML"));
        assert!(sections("").unwrap().is_empty());
    }
}
