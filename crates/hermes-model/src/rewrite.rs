//! Rewrites: changes of a route to requests and responses.
//!
//! In: the head of a request and its attributes, or the header of a response. Out: the changed head, validated again.
//! Never: a partial change. After an error the head is unchanged.

mod path;
mod template;

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::authority::Authority;
use crate::field_collision::{remove_colliding, remove_named};

pub use path::PathRewrite;
pub use template::{Placeholder, Template, TemplateValues};

/// Changes to a request and its response.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rewrite {
    /// Authority for the next hop.
    pub authority: Option<Template>,
    /// Path for the next hop; the query is kept.
    pub path: Option<PathRewrite>,
    /// Changes to the query.
    pub query: QueryRewrite,
    /// Changes to the request header.
    pub headers: HeaderRewrite,
    /// Changes to the response header.
    pub response: HeaderRewrite,
}

/// Changes to a query, parsed as `name=value` pairs joined by `&`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueryRewrite {
    /// Replaces the first pair of the name and removes the others; appends a pair if the name is absent. Placeholders
    /// are expanded, and illegal characters are escaped.
    pub set: Vec<(String, Template)>,
    /// Removes every pair of the name.
    pub remove: Vec<String>,
}

/// Changes to header fields, in this order: remove, set, add.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeaderRewrite {
    /// Replaces all lines of the field by one.
    pub set: Vec<(HeaderName, Template)>,
    /// Adds a line.
    pub add: Vec<(HeaderName, Template)>,
    /// Removes all lines of the field.
    pub remove: Vec<HeaderName>,
}

/// The parts of a request that a rewrite changes, as the next hop will receive them.
#[derive(Debug)]
pub struct Head<'a> {
    /// Target of the request.
    pub authority: &'a mut Authority,
    /// Path and query.
    pub path: &'a mut PathAndQuery,
    /// Header fields, without `Host`.
    pub headers: &'a mut HeaderMap,
}

/// An invalid result: a value of the request does not fit the template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RewriteError {
    /// The new authority is invalid.
    #[error("invalid rewritten authority {value:?}: {source}")]
    Authority {
        /// The result.
        value: String,
        /// The error in it.
        source: crate::authority::AuthorityError,
    },
    /// The new path or query is invalid.
    #[error("invalid rewritten path")]
    Path(String),
    /// The new field value is invalid.
    #[error("invalid value of rewritten header {0}")]
    Header(HeaderName),
    /// The `Location` is invalid.
    #[error("invalid redirect location")]
    Location(String),
}

impl HeaderRewrite {
    /// Removes trailer fields that the rewrite of the header sets or removes, and fields that an origin cannot tell
    /// from these. Trailers arrive after the header and would bypass the rewrite.
    pub fn strip_trailers(&self, trailers: &mut HeaderMap) {
        let set = self.set.iter().map(|(name, _)| name);
        set.chain(&self.remove).for_each(|name| remove_named(trailers, name));
    }
}

impl Rewrite {
    /// True if requests pass unchanged.
    pub fn leaves_request(&self) -> bool {
        self.authority.is_none() && self.path.is_none() && self.query.is_empty() && self.headers.is_empty()
    }

    /// Rewrites the head of a request. `vars` are its attributes before any change.
    ///
    /// # Errors
    /// The first part with an invalid result; `head` is unchanged.
    pub fn request(&self, head: Head<'_>, vars: &TemplateValues<'_>) -> Result<(), RewriteError> {
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

    /// Rewrites the header of a response.
    ///
    /// # Errors
    /// The first field with an invalid value; `headers` are unchanged.
    pub fn response(&self, headers: &mut HeaderMap, vars: &TemplateValues<'_>) -> Result<(), RewriteError> {
        self.response.apply(headers, vars)
    }

    fn path_and_query(
        &self,
        old: &PathAndQuery,
        vars: &TemplateValues<'_>,
    ) -> Result<Option<PathAndQuery>, RewriteError> {
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
        // The crate `http` accepts characters that are illegal in a URI (`"`, `{`); the node does not send them.
        let legal = text.starts_with(['/', '*']) && text.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        match PathAndQuery::try_from(text.as_str()) {
            Ok(new) if legal => Ok(Some(new)),
            _ => Err(RewriteError::Path(text)),
        }
    }
}

fn authority(template: &Template, old: &Authority, vars: &TemplateValues<'_>) -> Result<Authority, RewriteError> {
    let value = template.render(vars);
    Authority::parse(&value, old.default_port()).map_err(|source| RewriteError::Authority { value, source })
}

impl QueryRewrite {
    /// True if queries pass unchanged.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.remove.is_empty()
    }

    /// The new query; `None` if it is empty. Names are compared after decoding, so that `%74oken` is removed along with
    /// `token`.
    fn apply(&self, old: Option<&str>, vars: &TemplateValues<'_>) -> Option<String> {
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

    fn pair(&self, at: usize, vars: &TemplateValues<'_>) -> String {
        let (name, value) = &self.set[at];
        format!("{}={}", template::encode_component(name), template::encode_component(&value.render(vars)))
    }
}

impl HeaderRewrite {
    /// True if the header passes unchanged.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.add.is_empty() && self.remove.is_empty()
    }

    fn apply(&self, headers: &mut HeaderMap, vars: &TemplateValues<'_>) -> Result<(), RewriteError> {
        // Render all values first, so that an error changes nothing.
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
    vars: &TemplateValues<'_>,
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
