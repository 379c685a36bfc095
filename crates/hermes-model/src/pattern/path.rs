//! Path patterns: `/hello`, `/files/*`, `/users/*/photos`, `/users/*/photos/*`.

use std::fmt;

use crate::path::{canonical, has_dot_segment, has_whole_escapes};

/// Pattern for the canonical spelling of a path, without the query.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPattern {
    /// Literal pieces between the inner `*`; at least one. An inner `*` matches one segment that is not empty.
    pieces: Vec<Box<str>>,
    /// The pattern ends with `*`: anything may follow the last piece.
    open: bool,
}

impl PathPattern {
    /// Parses a path with `*` at the end (anything) or as a whole segment (one segment).
    ///
    /// # Errors
    /// The message names the error and the accepted forms.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| Err(format!("invalid path pattern {text:?}: {why}"));
        if text == "*" {
            return Ok(Self { pieces: vec![Box::from("")], open: true });
        }
        if !text.starts_with('/') {
            return wrong("must begin with /, such as /hello, /files/* or /users/*/photos");
        }
        if let Some(bad) = text.chars().find(|c| c.is_control() || c.is_whitespace() || "?#".contains(*c)) {
            return wrong(&format!(
                "illegal character {bad:?}; escape a space as %20, and omit the query, which is not matched"
            ));
        }
        let (body, open) = match text.strip_suffix('*') {
            Some(body) => (body, true),
            None => (text, false),
        };
        if !has_whole_escapes(body) {
            return wrong(
                "incomplete escape; such requests are rejected before they are matched; write a literal % as %25",
            );
        }
        // Split before unescaping, so that `%2A` is a literal star.
        let pieces: Vec<Box<str>> = body.split('*').map(|piece| Box::from(canonical(piece))).collect();
        if pieces.iter().any(|piece| has_dot_segment(piece)) {
            return wrong("dot segment; such requests are rejected before they are matched; write the resolved path");
        }
        if pieces.iter().any(|piece| piece.contains("//") || piece.contains("%2F") || piece.contains("%5C")) {
            return wrong(
                "empty segment or escaped slash, which cannot be matched; write the path with single slashes",
            );
        }
        let whole_segments = pieces.windows(2).all(|pair| pair[0].ends_with('/') && pair[1].starts_with('/'));
        if whole_segments {
            Ok(Self { pieces, open })
        } else {
            wrong("an inner * must be a whole segment, as in /users/*/photos; otherwise put the * at the end")
        }
    }

    /// Tests a path.
    pub fn matches(&self, path: &str) -> bool {
        let Some((first, others)) = self.pieces.split_first() else { return false };
        let Some(mut rest) = path.strip_prefix(&**first) else { return false };
        for piece in others {
            let segment = rest.find('/').unwrap_or(rest.len());
            if segment == 0 {
                return false;
            }
            match rest[segment..].strip_prefix(&**piece) {
                Some(tail) => rest = tail,
                None => return false,
            }
        }
        self.open || rest.is_empty()
    }

    /// The exact path of a pattern without a wildcard.
    pub fn exact(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [only] if !self.open => Some(only),
            _ => None,
        }
    }

    /// The pattern segment by segment; `None` for the pattern that matches anything, even the absence of a path.
    pub(crate) fn segment_pattern(&self) -> Option<SegmentPattern> {
        let last = self.pieces.len().checked_sub(1)?;
        let mut segments = Vec::new();
        for (at, piece) in self.pieces.iter().enumerate() {
            // A piece begins with the slash after a wildcard and ends with the slash before the next one.
            let body = piece.strip_prefix('/')?;
            if at < last {
                let body = body.strip_suffix('/');
                segments.extend(body.into_iter().flat_map(|body| body.split('/')).map(|text| Some(Box::from(text))));
                segments.push(None);
            } else {
                segments.extend(body.split('/').map(|text| Some(Box::from(text))));
            }
        }
        let prefix = if self.open { segments.pop().flatten() } else { None };
        Some(SegmentPattern { segments, prefix })
    }

    /// Literal prefix of every matching path, up to its last `/`. `/` or empty if the pattern has no literal segment.
    pub fn literal_prefix(&self) -> &str {
        let first = self.pieces.first().map_or("", |piece| &**piece);
        first.rfind('/').map_or("", |slash| &first[..=slash])
    }

    /// True if this pattern covers everything that `other` matches. May return false for patterns with several
    /// wildcards.
    pub fn covers(&self, other: &Self) -> bool {
        match (self.pieces.as_slice(), other.exact()) {
            (_, Some(path)) => self.matches(path),
            ([prefix], None) if self.open => other.pieces.first().is_some_and(|piece| piece.starts_with(&**prefix)),
            _ => self == other,
        }
    }
}

/// A pattern as segments, for the route index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SegmentPattern {
    /// Literal segments; `None` is a wildcard for one segment that is not empty.
    pub(crate) segments: Vec<Option<Box<str>>>,
    /// Prefix of the following segment in an open pattern, possibly empty. `None`: no further segment.
    pub(crate) prefix: Option<Box<str>>,
}

impl SegmentPattern {
    /// True if the pattern distinguishes paths at all.
    pub(crate) fn is_selective(&self) -> bool {
        !self.segments.is_empty() || self.prefix.as_deref() != Some("")
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, piece) in self.pieces.iter().enumerate() {
            // A literal star was written as `%2A`; unescaped it would be a wildcard.
            let star = if at > 0 { "*" } else { "" };
            write!(f, "{star}{}", piece.replace('*', "%2A"))?;
        }
        if self.open { f.write_str("*") } else { Ok(()) }
    }
}
