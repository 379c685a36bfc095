//! Patterns of paths: `/hello`, `/files/*`, `/users/*/photos`, `/users/*/photos/*`.

use std::fmt;

use crate::path::{canonical, has_dot_segment, has_whole_escapes};

/// What a path must be. Compared with a path in its one spelling, without the query.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPattern {
    /// The literal pieces between the `*` in the middle; at least one. A `*` between two of
    /// them stands for one whole segment that is not empty.
    pieces: Vec<Box<str>>,
    /// Ends with `*`: anything may follow the last piece.
    open: bool,
}

impl PathPattern {
    /// Reads a path in which `*` stands at the end (anything) or as a whole segment (one segment).
    ///
    /// # Errors
    /// A sentence that says what is wrong and what may be written.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| Err(format!("{text:?} is no path pattern: {why}"));
        if text == "*" {
            return Ok(Self { pieces: vec![Box::from("")], open: true });
        }
        if !text.starts_with('/') {
            return wrong("it does not begin with /; write /hello, /files/* or /users/*/photos");
        }
        if let Some(bad) = text.chars().find(|c| c.is_control() || c.is_whitespace() || "?#".contains(*c)) {
            return wrong(&format!(
                "{bad:?} does not belong in a path; write a blank as %20, and leave the query out: it is not matched"
            ));
        }
        let (body, open) = match text.strip_suffix('*') {
            Some(body) => (body, true),
            None => (text, false),
        };
        if !has_whole_escapes(body) {
            return wrong("requests with a % that begins no escape are refused before they are matched; write %25");
        }
        // Cut first, so that %2A is a star and no wildcard.
        let pieces: Vec<Box<str>> = body.split('*').map(|piece| Box::from(canonical(piece))).collect();
        if pieces.iter().any(|piece| has_dot_segment(piece)) {
            return wrong(
                "requests with . or .. segments are refused before they are matched; write the resolved path",
            );
        }
        if pieces.iter().any(|piece| piece.contains("//") || piece.contains("%2F") || piece.contains("%5C")) {
            return wrong("empty segments and escaped slashes cannot be matched; write the path with single slashes");
        }
        let whole_segments = pieces.windows(2).all(|pair| pair[0].ends_with('/') && pair[1].starts_with('/'));
        if whole_segments {
            Ok(Self { pieces, open })
        } else {
            wrong("a * in the middle must be a whole segment; write /users/*/photos, or put the * at the end")
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

    /// The whole path, where the pattern is one.
    pub fn exact(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [only] if !self.open => Some(only),
            _ => None,
        }
    }

    /// The pattern segment by segment. `None` is the pattern that matches anything, a path or none.
    pub(crate) fn skeleton(&self) -> Option<Skeleton> {
        let last = self.pieces.len().checked_sub(1)?;
        let mut segments = Vec::new();
        for (at, piece) in self.pieces.iter().enumerate() {
            // A piece begins with the slash after a wildcard, and ends with the one before the next.
            let body = piece.strip_prefix('/')?;
            if at < last {
                let body = body.strip_suffix('/');
                segments.extend(body.into_iter().flat_map(|body| body.split('/')).map(|text| Some(Box::from(text))));
                segments.push(None);
            } else {
                segments.extend(body.split('/').map(|text| Some(Box::from(text))));
            }
        }
        let begins = if self.open { segments.pop().flatten() } else { None };
        Some(Skeleton { segments, begins })
    }

    /// What every matching path begins with, up to and with its last `/`; `/` or nothing where
    /// the pattern has no literal segment.
    pub fn literal_prefix(&self) -> &str {
        let first = self.pieces.first().map_or("", |piece| &**piece);
        first.rfind('/').map_or("", |slash| &first[..=slash])
    }

    /// True where everything that `other` matches is matched by this one as well; may be false
    /// where two wildcards meet in a way that is not looked into.
    pub fn covers(&self, other: &Self) -> bool {
        match (self.pieces.as_slice(), other.exact()) {
            (_, Some(path)) => self.matches(path),
            ([prefix], None) if self.open => other.pieces.first().is_some_and(|piece| piece.starts_with(&**prefix)),
            _ => self == other,
        }
    }
}

/// A pattern as segments, for an index of patterns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Skeleton {
    /// Literal segments; `None` is any one segment that is not empty.
    pub(crate) segments: Vec<Option<Box<str>>>,
    /// For an open pattern: the prefix of the segment after those, perhaps empty. `None`: no segment follows.
    pub(crate) begins: Option<Box<str>>,
}

impl Skeleton {
    /// True if the pattern distinguishes paths at all.
    pub(crate) fn is_selective(&self) -> bool {
        !self.segments.is_empty() || self.begins.as_deref() != Some("")
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, piece) in self.pieces.iter().enumerate() {
            // A star in a piece was written as %2A; bare it would be read as a wildcard.
            let star = if at > 0 { "*" } else { "" };
            write!(f, "{star}{}", piece.replace('*', "%2A"))?;
        }
        if self.open { f.write_str("*") } else { Ok(()) }
    }
}
