//! Authority patterns: `VIDEO`, `DB:3306`, `*.example.com`, `*:443`, `VIDEO:*`, `*:*`.

use std::fmt;
use std::sync::Arc;

use crate::authority::{Authority, AuthorityError};

/// Pattern for an authority.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AuthorityPattern {
    /// Pattern for the host.
    pub host: HostPattern,
    /// Pattern for the port.
    pub port: PortPattern,
}

/// Pattern for the host of an authority.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    /// `*`: any host.
    Any,
    /// `*.example.com`: one or more labels, followed by this suffix. Stored in lower case, with the leading dot.
    Suffix(Arc<str>),
    /// This host, in lower case; IPv6 without brackets.
    Exact(Arc<str>),
}

/// Pattern for the port of an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortPattern {
    /// No port in the pattern: the request has no port or the default of its scheme (for tunnels 80 or 443).
    Default,
    /// `:*`: any port, or no port.
    Any,
    /// This port, explicit or implied by the scheme.
    Exact(u16),
}

impl AuthorityPattern {
    /// Parses `HOST`, `HOST:PORT` or `HOST:*`; HOST is a name, an address, `*` or `*.NAME`.
    ///
    /// # Errors
    /// The message names the error and the accepted forms.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &dyn fmt::Display| {
            format!("invalid authority pattern {text:?}: {why}; use VIDEO, DB:3306, *.example.com:443, * or HOST:*")
        };
        let (rest, any_port) = match text.strip_suffix(":*") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (wildcard, name) = match rest.strip_prefix('*') {
            Some("") => return Ok(Self::any_host(any_port)),
            Some(tail) if tail.starts_with(':') => ("*", tail),
            Some(tail) if tail.starts_with('.') => ("*.", &tail[1..]),
            Some(_) => return Err(wrong(&"`*` replaces whole labels only")),
            None => ("", rest),
        };
        if name.ends_with(':') {
            return Err(wrong(&AuthorityError::Port));
        }
        if name.contains('*') {
            return Err(wrong(&"`*` is only allowed as the first label or as the port"));
        }
        // A bare `*:443` gets a dummy host, so that the same parser checks the port.
        let borrowed;
        let parsed = if wildcard == "*" {
            borrowed = format!("any{name}");
            Authority::parse(&borrowed, None)
        } else {
            Authority::parse(name, None)
        };
        let parsed = parsed.map_err(|error| wrong(&error))?;
        let port = match (any_port, parsed.explicit_port()) {
            (true, Some(_)) => return Err(wrong(&"two ports")),
            (true, None) => PortPattern::Any,
            (false, Some(port)) => PortPattern::Exact(port),
            (false, None) => PortPattern::Default,
        };
        let host = match wildcard {
            "*" => HostPattern::Any,
            "" => HostPattern::Exact(Arc::from(parsed.host())),
            _ if parsed.host().contains(':') => return Err(wrong(&"an IP address has no labels")),
            _ => HostPattern::Suffix(Arc::from(format!(".{}", parsed.host()))),
        };
        Ok(Self { host, port })
    }

    fn any_host(any_port: bool) -> Self {
        let port = if any_port { PortPattern::Any } else { PortPattern::Default };
        Self { host: HostPattern::Any, port }
    }

    /// Tests an authority.
    pub fn matches(&self, authority: &Authority) -> bool {
        self.port.matches(authority) && self.host.matches(authority.host())
    }

    /// True if this pattern covers everything that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        self.host.covers(&other.host) && (self.port == PortPattern::Any || self.port == other.port)
    }
}

impl HostPattern {
    /// Tests a host in lower case.
    pub fn matches(&self, host: &str) -> bool {
        match self {
            HostPattern::Any => true,
            HostPattern::Exact(exact) => host == &**exact,
            // The host must be longer than the suffix: at least one label precedes it.
            HostPattern::Suffix(suffix) => host.len() > suffix.len() && host.ends_with(&**suffix),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (HostPattern::Any, _) => true,
            (_, HostPattern::Exact(host)) => self.matches(host),
            (HostPattern::Suffix(suffix), HostPattern::Suffix(longer)) => longer.ends_with(&**suffix),
            _ => false,
        }
    }
}

impl PortPattern {
    /// Tests the port of an authority.
    pub fn matches(self, authority: &Authority) -> bool {
        match self {
            PortPattern::Default => authority.has_default_port(),
            PortPattern::Any => true,
            PortPattern::Exact(port) => authority.port() == Some(port),
        }
    }
}

impl fmt::Display for AuthorityPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            HostPattern::Any => f.write_str("*")?,
            HostPattern::Suffix(suffix) => write!(f, "*{suffix}")?,
            HostPattern::Exact(host) if host.contains(':') => write!(f, "[{host}]")?,
            HostPattern::Exact(host) => f.write_str(host)?,
        }
        match self.port {
            PortPattern::Default => Ok(()),
            PortPattern::Any => f.write_str(":*"),
            PortPattern::Exact(port) => write!(f, ":{port}"),
        }
    }
}
