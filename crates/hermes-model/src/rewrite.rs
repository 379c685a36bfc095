//! Rewrites: what a route changes of a request on its way out, and of the response on its way back.
//!
//! In: the head of a request and its facts; or the headers of a response. Out: the same, changed,
//! every part validated again. Never: half applied. An error leaves the head as it was.

mod path;
mod template;

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::authority::Authority;
use crate::field_collision::{remove_colliding, remove_named};

pub use path::PathRewrite;
pub use template::{Placeholder, Template, Vars};

/// Changes to a request and to its response.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rewrite {
    /// The authority that the next hop sees.
    pub authority: Option<Template>,
    /// The path that the next hop sees; the query is kept.
    pub path: Option<PathRewrite>,
    /// Changes to the query.
    pub query: QueryRewrite,
    /// Changes to the request's headers.
    pub headers: HeaderRewrite,
    /// Changes to the response's headers.
    pub response: HeaderRewrite,
}

/// Changes to a query, read as `name=value` pairs joined by `&`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueryRewrite {
    /// Replaces the first pair of that name and removes the others; appended where there is none.
    /// Placeholders are filled in, and what does not belong in a query is escaped.
    pub set: Vec<(String, Template)>,
    /// Removes every pair of that name.
    pub remove: Vec<String>,
}

/// Changes to headers, in this order: remove, set, add.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeaderRewrite {
    /// Every line of the field goes, and one is written.
    pub set: Vec<(HeaderName, Template)>,
    /// One line more.
    pub add: Vec<(HeaderName, Template)>,
    /// Every line of the field goes.
    pub remove: Vec<HeaderName>,
}

/// The parts of a request that a rewrite changes, as the next hop will see them.
#[derive(Debug)]
pub struct Head<'a> {
    /// Whom it is for.
    pub authority: &'a mut Authority,
    /// Path and query.
    pub path: &'a mut PathAndQuery,
    /// Headers, without `Host`.
    pub headers: &'a mut HeaderMap,
}

/// A result that cannot be sent: what the request brought does not fit the template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RewriteError {
    /// The new authority is none.
    #[error("the rewritten authority {value:?} is illegal: {source}")]
    Authority {
        /// What came out.
        value: String,
        /// What is wrong with it.
        source: crate::authority::AuthorityError,
    },
    /// The new path or query is none.
    #[error("the rewritten path is illegal")]
    Path(String),
    /// The new value is none.
    #[error("the rewritten header {0} has an illegal value")]
    Header(HeaderName),
    /// The `Location` is none.
    #[error("the location is illegal")]
    Location(String),
}

impl HeaderRewrite {
    /// Removes trailer fields whose names the head's rewrite sets or removes, or that an origin cannot tell from these:
    /// trailers come after the head and would escape it.
    pub fn strip_trailers(&self, trailers: &mut HeaderMap) {
        let set = self.set.iter().map(|(name, _)| name);
        set.chain(&self.remove).for_each(|name| remove_named(trailers, name));
    }
}

impl Rewrite {
    /// True where requests pass as they are.
    pub fn leaves_request(&self) -> bool {
        self.authority.is_none() && self.path.is_none() && self.query.is_empty() && self.headers.is_empty()
    }

    /// Changes a request's head. `vars` are the facts, as they were before any change.
    ///
    /// # Errors
    /// The first part that would be illegal; `head` is then unchanged.
    pub fn request(&self, head: Head<'_>, vars: &Vars<'_>) -> Result<(), RewriteError> {
        let authority = match &self.authority {
            Some(template) => Some(authority(template, head.authority, vars)?),
            None => None,
        };
        let path = self.path_and_query(head.path, vars)?;
        self.headers.apply(head.headers, vars)?;
        let HeaderRewrite { set, remove, .. } = &self.headers;
        for name in set.iter().map(|(name, _)| name).chain(remove) {
            remove_colliding(head.headers, name);
        }
        if let Some(authority) = authority {
            *head.authority = authority;
        }
        if let Some(path) = path {
            *head.path = path;
        }
        Ok(())
    }

    /// Changes a response's headers.
    ///
    /// # Errors
    /// The first value that would be illegal; `headers` are then unchanged.
    pub fn response(&self, headers: &mut HeaderMap, vars: &Vars<'_>) -> Result<(), RewriteError> {
        self.response.apply(headers, vars)
    }

    fn path_and_query(&self, old: &PathAndQuery, vars: &Vars<'_>) -> Result<Option<PathAndQuery>, RewriteError> {
        let path = self.path.as_ref().and_then(|rewrite| rewrite.apply(old.path()));
        if path.is_none() && self.query.is_empty() {
            return Ok(None);
        }
        let query =
            if self.query.is_empty() { old.query().map(str::to_owned) } else { self.query.apply(old.query(), vars) };
        let mut text = path.unwrap_or_else(|| old.path().to_owned());
        if let Some(query) = query {
            text.push('?');
            text.push_str(&query);
        }
        // The crate takes characters that no URI has (`"`, `{`): those do not leave this node.
        let legal = text.starts_with(['/', '*']) && text.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        match PathAndQuery::try_from(text.as_str()) {
            Ok(new) if legal => Ok(Some(new)),
            _ => Err(RewriteError::Path(text)),
        }
    }
}

fn authority(template: &Template, old: &Authority, vars: &Vars<'_>) -> Result<Authority, RewriteError> {
    let value = template.render(vars);
    Authority::parse(&value, old.default_port()).map_err(|source| RewriteError::Authority { value, source })
}

impl QueryRewrite {
    /// True where queries pass as they are.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.remove.is_empty()
    }

    /// The new query; `None` is no query at all. Names compare after their escapes are decoded,
    /// so that `%74oken` does not survive the removal of `token`.
    fn apply(&self, old: Option<&str>, vars: &Vars<'_>) -> Option<String> {
        let mut written = vec![false; self.set.len()];
        let mut pairs: Vec<String> = Vec::new();
        for pair in old.unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
            let name = template::decode_component(pair.split('=').next().unwrap_or(""));
            if self.remove.contains(&name) {
                continue;
            }
            match self.set.iter().position(|(set, _)| *set == name) {
                Some(at) if written[at] => {}
                Some(at) => {
                    written[at] = true;
                    pairs.push(self.pair(at, vars));
                }
                None => pairs.push(pair.to_owned()),
            }
        }
        pairs.extend((0..self.set.len()).filter(|at| !written[*at]).map(|at| self.pair(at, vars)));
        (!pairs.is_empty()).then(|| pairs.join("&"))
    }

    fn pair(&self, at: usize, vars: &Vars<'_>) -> String {
        let (name, value) = &self.set[at];
        format!("{}={}", template::encode_component(name), template::encode_component(&value.render(vars)))
    }
}

impl HeaderRewrite {
    /// True where headers pass as they are.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.add.is_empty() && self.remove.is_empty()
    }

    fn apply(&self, headers: &mut HeaderMap, vars: &Vars<'_>) -> Result<(), RewriteError> {
        // Rendered first, so that an error changes nothing.
        let set = render_all(&self.set, vars)?;
        let add = render_all(&self.add, vars)?;
        for name in &self.remove {
            headers.remove(name);
        }
        for (name, value) in set {
            headers.insert(name, value);
        }
        for (name, value) in add {
            headers.append(name, value);
        }
        Ok(())
    }
}

fn render_all(
    templates: &[(HeaderName, Template)],
    vars: &Vars<'_>,
) -> Result<Vec<(HeaderName, HeaderValue)>, RewriteError> {
    templates
        .iter()
        .map(|(name, template)| match HeaderValue::try_from(template.render(vars)) {
            Ok(value) => Ok((name.clone(), value)),
            Err(_) => Err(RewriteError::Header(name.clone())),
        })
        .collect()
}

#[cfg(test)]
mod tests;
