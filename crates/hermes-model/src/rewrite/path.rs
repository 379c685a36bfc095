//! Path rewrites: replace a prefix, or match a pattern with named segments.

use crate::path::{decode_unreserved, has_whole_escapes};

/// Rewrite of a path. A path that does not match stays unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathRewrite {
    /// `{from: /v1/, to: /v2/}`: replaces a prefix at a segment boundary.
    Prefix {
        /// Prefix to replace.
        from: String,
        /// Replacement.
        to: String,
    },
    /// `{pattern: "/users/{id}/files/{rest*}", to: "/u/{id}/{rest}"}`
    Pattern {
        /// Segments of the pattern.
        segments: Vec<Segment>,
        /// Text and captures.
        to: Vec<Part>,
    },
}

/// Pattern for one segment of the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A literal segment.
    Literal(String),
    /// A named capture: any text that is not empty.
    Name(String),
    /// A named capture of the rest of the path, including slashes; may be empty. Only as the last segment.
    Rest(String),
}

/// A piece of the new path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Literal text.
    Text(String),
    /// The capture at this position of the pattern.
    Capture(usize),
}

impl PathRewrite {
    /// Parses the prefix form.
    ///
    /// # Errors
    /// The message names the error.
    pub fn prefix(from: &str, to: &str) -> Result<Self, String> {
        check_path(from)?;
        check_path(to)?;
        if from.ends_with('/') == to.ends_with('/') {
            Ok(PathRewrite::Prefix { from: decode_unreserved(from).into_owned(), to: to.to_owned() })
        } else {
            Err(format!(
                "either both of {from:?} and {to:?} must end with /, or neither; otherwise segments would be joined"
            ))
        }
    }

    /// Parses the pattern form.
    ///
    /// # Errors
    /// The message names the error.
    pub fn pattern(pattern: &str, to: &str) -> Result<Self, String> {
        let body = pattern.strip_prefix('/').ok_or_else(|| format!("invalid path {pattern:?}: must begin with /"))?;
        let segments = body.split('/').map(segment).collect::<Result<Vec<_>, _>>()?;
        let rest = segments.iter().position(|s| matches!(s, Segment::Rest(_)));
        if rest.is_some_and(|at| at + 1 != segments.len()) {
            return Err(format!(
                "invalid pattern {pattern:?}: {{name*}} matches the rest of the path and must come last"
            ));
        }
        let names: Vec<&str> = segments.iter().filter_map(Segment::name).collect();
        if let Some(twice) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return Err(format!("invalid pattern {pattern:?}: duplicate name {{{}}}", twice.1));
        }
        let to = parts(to, &names)?;
        Ok(PathRewrite::Pattern { segments, to })
    }

    /// The new path; `None` if the path does not match.
    pub fn apply(&self, path: &str) -> Option<String> {
        let path = decode_unreserved(path);
        match self {
            PathRewrite::Prefix { from, to } => {
                let rest = path.strip_prefix(from.as_str())?;
                let boundary = from.ends_with('/') || rest.is_empty() || rest.starts_with('/');
                boundary.then(|| format!("{to}{rest}"))
            }
            PathRewrite::Pattern { segments, to } => {
                let captures = capture(segments, path.strip_prefix('/')?)?;
                let piece = |part: &Part| match part {
                    Part::Text(text) => text.clone(),
                    Part::Capture(at) => captures.get(*at).copied().unwrap_or_default().to_owned(),
                };
                Some(to.iter().map(piece).collect())
            }
        }
    }
}

impl Segment {
    fn name(&self) -> Option<&str> {
        match self {
            Segment::Literal(_) => None,
            Segment::Name(name) | Segment::Rest(name) => Some(name),
        }
    }
}

/// The captures, in the order of the pattern.
fn capture<'p>(segments: &[Segment], path: &'p str) -> Option<Vec<&'p str>> {
    let mut captures = Vec::new();
    let mut rest = Some(path);
    for segment in segments {
        let text = rest?;
        let (head, tail) = match text.split_once('/') {
            Some((head, tail)) => (head, Some(tail)),
            None => (text, None),
        };
        match segment {
            Segment::Literal(literal) if literal == head => rest = tail,
            Segment::Name(_) if !head.is_empty() => {
                captures.push(head);
                rest = tail;
            }
            Segment::Rest(_) => {
                captures.push(text);
                rest = None;
            }
            _ => return None,
        }
    }
    rest.is_none().then_some(captures)
}

fn segment(text: &str) -> Result<Segment, String> {
    let Some(name) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) else {
        check_text(text)?;
        return Ok(Segment::Literal(decode_unreserved(text).into_owned()));
    };
    let (name, rest) = match name.strip_suffix('*') {
        Some(name) => (name, true),
        None => (name, false),
    };
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Err(format!("invalid capture {text:?}; use {{name}} or, at the end, {{name*}}"));
    }
    Ok(if rest { Segment::Rest(name.to_owned()) } else { Segment::Name(name.to_owned()) })
}

fn parts(to: &str, names: &[&str]) -> Result<Vec<Part>, String> {
    if !to.starts_with('/') {
        return Err(format!("invalid path {to:?}: must begin with /"));
    }
    let mut parts = Vec::new();
    let mut rest = to;
    while let Some((text, tail)) = rest.split_once('{') {
        let (name, tail) = tail.split_once('}').ok_or_else(|| format!("invalid path {to:?}: unclosed {{"))?;
        let at = names.iter().position(|known| *known == name).ok_or_else(|| {
            format!("invalid path {to:?}: unknown capture {{{name}}}; the pattern has {}", shown(names))
        })?;
        check_text(text)?;
        parts.push(Part::Text(text.to_owned()));
        parts.push(Part::Capture(at));
        rest = tail;
    }
    check_text(rest)?;
    parts.push(Part::Text(rest.to_owned()));
    Ok(parts)
}

fn shown(names: &[&str]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join(", ")
}

fn check_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') { check_text(path) } else { Err(format!("invalid path {path:?}: must begin with /")) }
}

fn check_text(text: &str) -> Result<(), String> {
    match text.chars().find(|c| !c.is_ascii_graphic() || "?#\"<>\\^`{|}".contains(*c)) {
        Some(bad) => Err(format!("invalid path {text:?}: illegal character {bad:?}; write it as a percent escape")),
        None if !has_whole_escapes(text) => {
            Err(format!("invalid path {text:?}: incomplete escape; write a literal % as %25"))
        }
        None => Ok(()),
    }
}
