//! Patterns: parsing, formatting, errors and coverage.

#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn patterns_print_as_they_are_read() {
    for text in
        ["video", "db:3306", "*.example.com", "*.example.com:*", "*", "*:443", "*:*", "[2001:db8::1]:80", "10.0.0.1:*"]
    {
        assert_eq!(AuthorityPattern::parse(text).unwrap().to_string(), text);
    }
    assert_eq!(AuthorityPattern::parse("VIDEO.").unwrap().to_string(), "video");
    for text in ["/", "/a", "/a/*", "/a*", "/a/*/b", "/a/*/b/*", "*", "/*"] {
        assert_eq!(PathPattern::parse(text).unwrap().to_string(), text);
    }
    for text in ["/a%2Ab", "/a%2A", "/%2A/*/%2A%2A*"] {
        let pattern = PathPattern::parse(text).unwrap();
        assert_eq!(pattern.to_string(), text);
        assert_eq!(PathPattern::parse(&pattern.to_string()).unwrap(), pattern);
    }
    for text in ["*", "a*", "a", "a*b"] {
        assert_eq!(ValuePattern::parse(text).unwrap().to_string(), text);
    }
}

#[test]
fn illegal_authority_patterns_say_why() {
    for (text, why) in [
        ("", "empty host"),
        (":80", "empty host"),
        ("a:0", "port is not a number"),
        ("a:80:*", "two ports"),
        ("a:x", "port is not a number"),
        ("*a", "whole labels only"),
        ("a.*", "only allowed as the first label"),
        ("*.*.a", "only allowed as the first label"),
        ("*.", "empty host"),
        ("*.[::1]", "an IP address has no labels"),
        ("u@h", "user information"),
        ("a b", "illegal character ' '"),
        ("a/b", "illegal character '/'"),
        ("a..b", "empty label"),
        ("http://a", "remove the scheme"),
    ] {
        let error = AuthorityPattern::parse(text).unwrap_err();
        assert!(error.contains(why), "{text}: {error}");
    }
}

#[test]
fn illegal_path_patterns_say_why() {
    for (text, why) in [
        ("a", "must begin with /"),
        ("", "must begin with /"),
        ("/a?b", "illegal character '?'"),
        ("/a b", "illegal character ' '"),
        ("/a/../b", "dot segment"),
        ("/%2e%2e/b", "dot segment"),
        ("/a//b", "empty segment"),
        ("/a%2fb", "escaped slash"),
        ("/100%", "as %25"),
        ("/%2*", "as %25"),
        ("/a*/b", "whole segment"),
        ("/a/*b/c", "whole segment"),
        ("/a/**", "whole segment"),
    ] {
        let error = PathPattern::parse(text).unwrap_err();
        assert!(error.contains(why), "{text}: {error}");
    }
}

#[test]
fn paths_match() {
    for (pattern, path, wanted) in [
        ("/a", "/a", true),
        ("/a", "/a/", false),
        ("/a", "/A", false),
        ("/a*", "/a", true),
        ("/a*", "/ab/c", true),
        ("/a/*", "/a/", true),
        ("/a/*", "/a", false),
        ("/a/*/b", "/a/x/b", true),
        ("/a/*/b", "/a//b", false),
        ("/a/*/b", "/a/x/y/b", false),
        ("/a/*/b", "/a/x/bc", false),
        ("/a/*/b/*/c/*", "/a/1/b/2/c/3/4", true),
        ("/a/*/", "/a/x/", true),
        ("/a/*/", "/a/x", false),
        ("*", "*", true),
        ("*", "/anything", true),
        ("/*", "*", false),
        ("/caf\u{e9}", "/caf%C3%A9", true),
        ("/%61", "/a", true),
        ("/a%2A", "/a*", true),
        ("/a%2A", "/ab", false),
    ] {
        assert_eq!(PathPattern::parse(pattern).unwrap().matches(path), wanted, "{pattern} {path}");
    }
}

#[test]
fn wider_patterns_cover_narrower_ones() {
    let authority = |wide: &str, narrow: &str| {
        AuthorityPattern::parse(wide).unwrap().covers(&AuthorityPattern::parse(narrow).unwrap())
    };
    assert!(authority("*:*", "a:1") && authority("*", "a") && authority("a:*", "a") && authority("*.a", "*.b.a"));
    assert!(!authority("*", "a:1") && !authority("*.a", "a") && !authority("a", "*.a") && !authority("a:80", "a"));
    let path =
        |wide: &str, narrow: &str| PathPattern::parse(wide).unwrap().covers(&PathPattern::parse(narrow).unwrap());
    assert!(path("*", "/a") && path("/a/*", "/a/b/*") && path("/a/*/c", "/a/b/c") && path("/a/*", "/a/*/c"));
    assert!(!path("/a/*", "/a") && !path("/a/b", "/a/*") && !path("/a/*/c", "/a/*"));
    let value =
        |wide: &str, narrow: &str| ValuePattern::parse(wide).unwrap().covers(&ValuePattern::parse(narrow).unwrap());
    assert!(value("*", "a") && value("a*", "ab*") && value("a*", "abc") && value("a", "a"));
    assert!(!value("a", "a*") && !value("ab*", "a*") && !value("a", "*"));
}
