//! Positions: the line and column of a path such as `routes[3].match.network`.
//!
//! In: the text of a YAML stream, and the paths of problems. Out: the position of each path in the text.
//! Never: work for a valid document. It parses the text a second time, only to report problems.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::read::stream_options;
use super::report::Problem;

/// A position in a text, starting at 1:1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line number.
    pub line: u64,
    /// Column, in characters.
    pub column: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl Position {
    fn of<T>(spanned: &Spanned<T>) -> Option<Self> {
        let at = spanned.referenced;
        (at.line() > 0).then(|| Self { line: at.line(), column: at.column() })
    }
}

/// A problem, with its position in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Position, or `None` if the problem concerns the whole document or its message contains the line.
    pub position: Option<Position>,
    /// The problem.
    pub problem: Problem,
}

impl fmt::Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Position { line, column }) = self.position {
            write!(f, "line {line}, column {column}: ")?;
        }
        self.problem.fmt(f)
    }
}

/// Adds positions in the text to the problems of a document.
pub fn locate(text: &str, problems: Vec<Problem>) -> Vec<Located> {
    let has_path = problems.iter().any(|problem| !problem.path.is_empty());
    let positions = if has_path { Positions::read(text) } else { Positions::default() };
    let position = |path: &str| if path.is_empty() { None } else { positions.find(0, path) };
    problems.into_iter().map(|problem| Located { position: position(&problem.path), problem }).collect()
}

/// The top-level keys of each document of a stream, up to the first syntax error.
pub fn top_keys(text: &str) -> impl Iterator<Item = Vec<String>> {
    let mut bytes = text.as_bytes();
    let read: Vec<_> = serde_saphyr::read_with_options(&mut bytes, stream_options())
        .map_while(Result::ok)
        .map(|Keys(keys)| keys)
        .collect();
    read.into_iter()
}

/// The keys of a section, without their values.
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Node::deserialize(deserializer).map(|node| match node {
            Node::Section(entries) => Self(entries.into_iter().map(|(key, _)| key.value).collect()),
            _ => Self(Vec::new()),
        })
    }
}

/// The positions of all values of a YAML stream.
#[derive(Debug, Default)]
pub struct Positions(Vec<Spanned<Node>>);

/// A YAML value: only its structure and short texts.
#[derive(Debug)]
enum Node {
    Nothing,
    Leaf,
    Text(String),
    List(Vec<Spanned<Node>>),
    Section(Vec<(Spanned<String>, Spanned<Node>)>),
}

impl Positions {
    /// Reads a stream. There are no positions in a text that is not YAML.
    pub fn read(text: &str) -> Self {
        let read: Vec<Spanned<Node>> =
            serde_saphyr::from_multiple_with_options(text, stream_options()).unwrap_or_default();
        Self(read.into_iter().filter(|document| !matches!(document.value, Node::Nothing)).collect())
    }

    /// The number of documents, not counting empty ones.
    pub fn documents(&self) -> usize {
        self.0.len()
    }

    /// The string at a top-level key of a document.
    pub fn text(&self, document: usize, key: &str) -> Option<&str> {
        let Node::Section(entries) = &self.0.get(document)?.value else { return None };
        match entries.iter().find(|(name, _)| name.value == key) {
            Some((_, Spanned { value: Node::Text(text), .. })) => Some(text),
            _ => None,
        }
    }

    /// The position of a path in a document: that of its last key, or of the section where the key is missing.
    pub fn find(&self, document: usize, path: &str) -> Option<Position> {
        let document = self.0.get(document)?;
        let (mut position, mut node, mut rest) = (Position::of(document), &document.value, path);
        while !rest.is_empty() {
            let Some((at, next, behind)) = step(node, rest) else { break };
            (position, node, rest) = (at.or(position), next, behind);
        }
        position
    }
}

/// A step along a path: its position, the value there, and the remaining path.
fn step<'n, 'p>(node: &'n Node, path: &'p str) -> Option<(Option<Position>, &'n Node, &'p str)> {
    match node {
        Node::List(items) => {
            let (index, rest) = path.strip_prefix('[')?.split_once(']')?;
            let item = items.get(index.parse::<usize>().ok()?)?;
            Some((Position::of(item), &item.value, rest.strip_prefix('.').unwrap_or(rest)))
        }
        Node::Section(entries) => {
            // A key may contain dots: the longest matching key counts.
            let fits = |key: &str| {
                let rest = path.strip_prefix(key)?;
                if rest.is_empty() || rest.starts_with('[') { Some(rest) } else { rest.strip_prefix('.') }
            };
            let found = entries.iter().filter_map(|(key, value)| Some((key, value, fits(&key.value)?)));
            let (key, value, rest) = found.min_by_key(|(.., rest)| rest.len())?;
            Some((Position::of(key).or_else(|| Position::of(value)), &value.value, rest))
        }
        Node::Nothing | Node::Leaf | Node::Text(_) => None,
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Nothing)
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Node, E> {
        // Callers only look up names and kinds.
        Ok(if text.len() <= 255 { Node::Text(text.to_owned()) } else { Node::Leaf })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Section(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::{Position, Positions};

    const STREAM: &str = "# a comment\n---\nkind: Node\nname: edge\nroutes:\n- name: a\n  match: {path: /a, headers: {x.y: z}}\n- match:\n    network: 10.0.0.0/8\n---\n\n---\n{\"name\":\"b\",\"kind\":\"User\"}\n";

    #[test]
    fn a_path_has_the_position_of_its_last_key() {
        let positions = Positions::read(STREAM);
        assert_eq!(positions.documents(), 2);
        let at = |document, path: &str| positions.find(document, path).map(|Position { line, column }| (line, column));
        assert_eq!(at(0, "routes[1].match.network"), Some((9, 5)));
        assert_eq!(at(0, "routes[0].match.headers.x.y"), Some((7, 31)));
        assert_eq!(at(0, "routes[0].match.path"), Some((7, 11)));
        assert_eq!(at(0, "name"), Some((4, 1)));
        // A missing key has the position of the section that lacks it.
        assert_eq!(at(0, "routes[1].name"), Some((8, 3)));
        assert_eq!(at(0, "routes[7].name"), Some((5, 1)));
        assert_eq!(at(0, ""), Some((3, 1)));
        assert_eq!(at(1, "kind"), Some((13, 13)));
        assert_eq!(at(2, "kind"), None);
        assert_eq!((positions.text(0, "name"), positions.text(1, "kind")), (Some("edge"), Some("User")));
        assert_eq!(Positions::read("{").documents(), 0);
    }
}
