//! Rewrites of a path: a prefix for a prefix, or a pattern with names for its segments.

use crate::path::{decode_unreserved, has_whole_escapes};

/// How a path is changed. A path that does not fit is left as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathRewrite {
    /// `{from: /v1/, to: /v2/}`: the beginning is replaced, at a segment's boundary.
    Prefix {
        /// What the path must begin with.
        from: String,
        /// What stands there instead.
        to: String,
    },
    /// `{pattern: "/users/{id}/files/{rest*}", to: "/u/{id}/{rest}"}`
    Pattern {
        /// One entry a segment.
        segments: Vec<Segment>,
        /// Text and the names of captures.
        to: Vec<Part>,
    },
}

/// What one segment of the path must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// This text.
    Literal(String),
    /// Anything that is not empty, under this name.
    Name(String),
    /// All that is left, slashes included, under this name; may be empty. Only at the end.
    Rest(String),
}

/// A piece of the new path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// This text.
    Text(String),
    /// What the pattern's name at this position captured.
    Capture(usize),
}

impl PathRewrite {
    /// Reads the prefix form.
    ///
    /// # Errors
    /// A sentence about what is wrong.
    pub fn prefix(from: &str, to: &str) -> Result<Self, String> {
        check_path(from)?;
        check_path(to)?;
        if from.ends_with('/') == to.ends_with('/') {
            Ok(PathRewrite::Prefix { from: decode_unreserved(from).into_owned(), to: to.to_owned() })
        } else {
            Err(format!(
                "{from:?} and {to:?} must both end with /, or neither; otherwise segments would be glued together"
            ))
        }
    }

    /// Reads the pattern form.
    ///
    /// # Errors
    /// A sentence about what is wrong.
    pub fn pattern(pattern: &str, to: &str) -> Result<Self, String> {
        let body = pattern.strip_prefix('/').ok_or_else(|| format!("{pattern:?} does not begin with /"))?;
        let segments = body.split('/').map(segment).collect::<Result<Vec<_>, _>>()?;
        let rest = segments.iter().position(|s| matches!(s, Segment::Rest(_)));
        if rest.is_some_and(|at| at + 1 != segments.len()) {
            return Err(format!("{pattern:?} has a {{name*}} before its end; it takes all that is left"));
        }
        let names: Vec<&str> = segments.iter().filter_map(Segment::name).collect();
        if let Some(twice) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return Err(format!("{pattern:?} has the name {{{}}} twice", twice.1));
        }
        let to = parts(to, &names)?;
        Ok(PathRewrite::Pattern { segments, to })
    }

    /// The new path; `None` where the path does not fit.
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

/// What each name captured, in the pattern's order.
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
        return Err(format!("{text:?} names no capture; write {{name}} or, at the end, {{name*}}"));
    }
    Ok(if rest { Segment::Rest(name.to_owned()) } else { Segment::Name(name.to_owned()) })
}

fn parts(to: &str, names: &[&str]) -> Result<Vec<Part>, String> {
    if !to.starts_with('/') {
        return Err(format!("{to:?} does not begin with /"));
    }
    let mut parts = Vec::new();
    let mut rest = to;
    while let Some((text, tail)) = rest.split_once('{') {
        let (name, tail) = tail.split_once('}').ok_or_else(|| format!("{to:?} has a {{ that is not closed"))?;
        let at = names.iter().position(|known| *known == name).ok_or_else(|| {
            format!("{to:?} uses {{{name}}}, which the pattern does not name; it names {}", shown(names))
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
        return "nothing".to_owned();
    }
    names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join(", ")
}

fn check_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') { check_text(path) } else { Err(format!("{path:?} does not begin with /")) }
}

fn check_text(text: &str) -> Result<(), String> {
    match text.chars().find(|c| !c.is_ascii_graphic() || "?#\"<>\\^`{|}".contains(*c)) {
        Some(bad) => {
            Err(format!("{text:?} has {bad:?}, which does not belong in a path; write it as a percent escape"))
        }
        None if !has_whole_escapes(text) => Err(format!("{text:?} has a % that begins no escape; write %25")),
        None => Ok(()),
    }
}
