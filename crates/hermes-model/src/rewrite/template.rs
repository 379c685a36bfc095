//! Templates: text with placeholders for attributes of the request.

use std::fmt;

use super::RewriteError;
use crate::facts::Facts;
use http::HeaderValue;

/// Values for placeholders.
#[derive(Clone, Copy, Debug)]
pub struct TemplateValues<'a> {
    /// Attributes of the session.
    pub facts: &'a Facts,
    /// Name of this node.
    pub node: &'a str,
}

/// A placeholder: a name in braces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// `{path}`: the path as received, without the query.
    Path,
    /// `{query}`: the query without `?`; empty if there is no query.
    Query,
    /// `{path-and-query}`: path and query as received.
    PathAndQuery,
    /// `{authority}`: host and port as received.
    Authority,
    /// `{host}`: the host; IPv6 in brackets.
    Host,
    /// `{port}`: the port, explicit or the scheme's default; otherwise empty.
    Port,
    /// `{user}`: the user, empty for an anonymous session; escaped in a `Location`.
    User,
    /// `{scheme}`: `https` if an absent port means 443, else `http`.
    Scheme,
    /// `{method}`
    Method,
    /// `{node}`: this node's name.
    Node,
    /// `{client-address}`: the client's IP address, without a port.
    ClientAddress,
}

impl Placeholder {
    /// Every placeholder with its name.
    pub const ALL: [(&'static str, Placeholder); 11] = [
        ("path", Placeholder::Path),
        ("query", Placeholder::Query),
        ("path-and-query", Placeholder::PathAndQuery),
        ("authority", Placeholder::Authority),
        ("host", Placeholder::Host),
        ("port", Placeholder::Port),
        ("user", Placeholder::User),
        ("scheme", Placeholder::Scheme),
        ("method", Placeholder::Method),
        ("node", Placeholder::Node),
        ("client-address", Placeholder::ClientAddress),
    ];
}

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Text(Box<str>),
    Placeholder(Placeholder),
}

/// Text with placeholders. A doubled brace is a literal one.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    text: Box<str>,
    pieces: Vec<Piece>,
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// The first brace that is unbalanced or encloses an unknown name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(tail) = rest.strip_prefix(brace) {
                literal.push_str(brace);
                rest = tail;
            } else if brace == "}" {
                return Err("unbalanced }; write a literal brace as }}".to_owned());
            } else {
                let (name, tail) =
                    rest.split_once('}').ok_or_else(|| "unclosed {; write a literal brace as {{".to_owned())?;
                if !literal.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut literal).into()));
                }
                pieces.push(Piece::Placeholder(placeholder(name)?));
                rest = tail;
            }
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Text(literal.into()));
        }
        Ok(Self { text: text.into(), pieces })
    }

    /// Expands the placeholders.
    pub fn render(&self, vars: &TemplateValues<'_>) -> String {
        self.render_with(vars, str::to_owned)
    }

    /// Expands the placeholders of a `Location`: the user is escaped, and the result must be a URI reference without
    /// spaces and control characters.
    ///
    /// # Errors
    /// [`RewriteError::Location`] if the result is not a URI reference.
    pub fn render_location(&self, vars: &TemplateValues<'_>) -> Result<HeaderValue, RewriteError> {
        let text = self.render_with(vars, encode_component);
        let legal = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&b));
        // A path such as `//evil.example` would be read as an authority: an open redirect.
        let relative_to_elsewhere = text.starts_with("//") && !self.text.starts_with("//");
        match HeaderValue::try_from(text.as_str()) {
            Ok(value) if legal && !relative_to_elsewhere => Ok(value),
            _ => Err(RewriteError::Location(text)),
        }
    }

    fn render_with(&self, vars: &TemplateValues<'_>, user: fn(&str) -> String) -> String {
        let mut out = String::with_capacity(self.text.len() + 64);
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out.push_str(text),
                Piece::Placeholder(Placeholder::User) => {
                    out.push_str(&user(vars.facts.user.as_deref().unwrap_or_default()));
                }
                Piece::Placeholder(placeholder) => placeholder.write(&mut out, vars),
            }
        }
        out
    }

    /// The literal text between placeholders, to be validated with the document.
    pub(crate) fn literals(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Text(text) => Some(&**text),
            Piece::Placeholder(_) => None,
        })
    }

    /// True if there are no placeholders.
    pub fn is_literal(&self) -> bool {
        !self.pieces.iter().any(|piece| matches!(piece, Piece::Placeholder(_)))
    }
}

impl Placeholder {
    fn write(self, out: &mut String, vars: &TemplateValues<'_>) {
        let facts = vars.facts;
        match self {
            Placeholder::Path => out.push_str(facts.path.path()),
            Placeholder::Query => out.push_str(facts.path.query().unwrap_or_default()),
            Placeholder::PathAndQuery => out.push_str(facts.path.as_str()),
            Placeholder::Authority => out.push_str(&facts.authority.to_string()),
            Placeholder::Host => out.push_str(&facts.authority.uri_host()),
            Placeholder::Port => {
                out.push_str(&facts.authority.port().map(|port| port.to_string()).unwrap_or_default());
            }
            Placeholder::User => out.push_str(facts.user.as_deref().unwrap_or_default()),
            Placeholder::Scheme => out.push_str(facts.scheme()),
            Placeholder::Method => out.push_str(facts.method.as_str()),
            Placeholder::Node => out.push_str(vars.node),
            Placeholder::ClientAddress => out.push_str(&facts.client_address().to_string()),
        }
    }
}

fn placeholder(name: &str) -> Result<Placeholder, String> {
    Placeholder::ALL.iter().find(|(known, _)| *known == name).map(|(_, placeholder)| *placeholder).ok_or_else(|| {
        let names: Vec<String> = Placeholder::ALL.iter().map(|(known, _)| format!("{{{known}}}")).collect();
        format!("unknown placeholder {{{name}}}; expected one of {}; write a literal brace as {{{{", names.join(" "))
    })
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Template::parse(text)
    }
}
crate::scalar::text_scalar!(Template, "a string");

/// Escapes all bytes that are not unreserved.
pub(super) fn encode_component(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if crate::path::is_unreserved(byte) {
            out.push(char::from(byte));
        } else {
            out.extend(crate::path::escape(byte).map(char::from));
        }
    }
    out
}

/// Decodes `+` and percent escapes, as in form encoding.
pub(super) fn decode_component(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        match (first, crate::path::escaped_byte(tail)) {
            (b'%', Some(byte)) => {
                out.push(byte);
                rest = &tail[2..];
            }
            (b'+', _) => out.push(b' '),
            (byte, _) => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
