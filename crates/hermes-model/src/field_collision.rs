//! Field names that origins cannot tell apart.
//!
//! CGI, WSGI and similar interfaces turn field names into variables: letters become upper case, digits stay, and every
//! other character becomes `_` (RFC 3875, section 4.1.18). So `x_user` from an untrusted client overrides `x-user` from
//! a listener.
//!
//! In: field names. Out: whether two of them become the same variable.
//! Never: a collision of two equal names, which are the same field.

use http::{HeaderMap, HeaderName};
use smallvec::SmallVec;

/// Removes fields whose names collide with `name` but are not equal to it.
pub fn remove_colliding(headers: &mut HeaderMap, name: &HeaderName) {
    remove_where(headers, |other| other != name && is_alike(other.as_str(), name.as_str()));
}

/// Removes fields whose names are equal to `name` or collide with it.
pub fn remove_named(headers: &mut HeaderMap, name: &HeaderName) {
    remove_where(headers, |other| is_alike(other.as_str(), name.as_str()));
}

/// True if `name` begins with `prefix`, or with a text that collides with it.
#[inline]
pub fn begins_alike(name: &str, prefix: &str) -> bool {
    let (name, prefix) = (name.as_bytes(), prefix.as_bytes());
    // Most names differ in the first byte: cheaper than a loop.
    name.first() == prefix.first()
        && name.get(..prefix.len()).is_some_and(|beginning| is_alike_bytes(beginning, prefix))
}

/// Removes the fields whose names `is_unwanted` selects; allocates only if there are many.
pub fn remove_where(headers: &mut HeaderMap, is_unwanted: impl Fn(&HeaderName) -> bool) {
    // Collisions are rare, and a search is cheaper than a list.
    if !headers.keys().any(&is_unwanted) {
        return;
    }
    let unwanted: SmallVec<[HeaderName; 4]> = headers.keys().filter(|name| is_unwanted(name)).cloned().collect();
    for name in unwanted {
        headers.remove(name);
    }
}

/// True if an origin may take one name for the other. Names are in lower case, as the crate `http` has them.
pub fn is_alike(a: &str, b: &str) -> bool {
    is_alike_bytes(a.as_bytes(), b.as_bytes())
}

fn is_alike_bytes(a: &[u8], b: &[u8]) -> bool {
    let is_other = |byte: &u8| !byte.is_ascii_alphanumeric();
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || (is_other(a) && is_other(b)))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn names_of_one_variable_collide() {
        for (a, b, alike) in [
            ("x_user", "x-user", true),
            ("x.user", "x-user", true),
            ("x-user", "x_user", true),
            ("x-user-id", "x_user-id", true),
            ("xuser", "x-user", false),
            ("x_user", "x-users", false),
            ("x_usea", "x-user", false),
        ] {
            assert_eq!(is_alike(a, b), alike, "{a} {b}");
        }
        assert!(begins_alike("hermes_user", "hermes-") && begins_alike("hermes-user", "hermes-"));
        assert!(!begins_alike("hermesuser", "hermes-") && !begins_alike("hermes", "hermes-"));
    }

    #[test]
    fn the_name_itself_stays() {
        let mut headers = HeaderMap::new();
        for name in ["x-user", "x_user", "x.user", "x-users"] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("1"));
        }
        remove_colliding(&mut headers, &HeaderName::from_static("x-user"));
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["x-user", "x-users"]);
    }
}
