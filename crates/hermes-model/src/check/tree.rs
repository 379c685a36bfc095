//! The tree of a document: values in order, before their types are known.
//!
//! In: the output of the YAML parser. Out: a tree from which values can be removed.
//! Never: a changed value. An invalid element leaves a gap, so that the others keep their positions.

mod reader;

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

pub(super) use reader::{Fault, FieldError, read};

/// A step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// A value of a document.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tree {
    /// No value after the colon or the dash.
    Nothing,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    Section(Vec<(String, Tree)>),
    /// A removed element; it keeps its position, so that the others keep theirs.
    Removed,
}

impl Tree {
    /// The value of a key in a section.
    pub(super) fn get(&self, key: &str) -> Option<&Tree> {
        match self {
            Tree::Section(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The string, if the value is one.
    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Tree::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Removes the value at a path; `None` if the path is empty or does not exist.
    pub(super) fn remove(&mut self, path: &[Step]) -> Option<()> {
        let (last, parents) = path.split_last()?;
        let parent = parents.iter().try_fold(self, Tree::step)?;
        match (last, parent) {
            (Step::Key(key), Tree::Section(entries)) => {
                let at = entries.iter().position(|(name, _)| name == key)?;
                entries.remove(at);
            }
            (Step::Index(at), Tree::List(items)) => *items.get_mut(*at)? = Tree::Removed,
            _ => return None,
        }
        Some(())
    }

    fn step(&mut self, step: &Step) -> Option<&mut Tree> {
        match (self, step) {
            (Tree::Section(entries), Step::Key(key)) => {
                entries.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
            }
            (Tree::List(items), Step::Index(at)) => items.get_mut(*at),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Tree, E> {
        Ok(Tree::Nothing)
    }

    fn visit_none<E: de::Error>(self) -> Result<Tree, E> {
        Ok(Tree::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Tree, D::Error> {
        Tree::deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Unsigned(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Tree, E> {
        Ok(u64::try_from(value).map_or(Tree::Signed(value), Tree::Unsigned))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Tree, E> {
        Ok(Tree::Float(value))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Tree, E> {
        Ok(Tree::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Tree::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Tree::Section(entries))
    }
}
