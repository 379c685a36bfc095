//! Tables of rewrites: a section of a document, a request, and the result for the next hop.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::*;
use crate::facts::Facts;
use crate::snapshot::{Action, Redirect};
use crate::test_fixtures::{get, snapshot};

fn rewrite(section: &str) -> Rewrite {
    let text = format!(
        "{{node: edge, routes: [{{name: r, rewrite: {section}, upstream: u}}], upstreams: [{{name: u, protocol: h1, endpoints: ['a:1']}}]}}"
    );
    snapshot(&text).routes[0].rewrite.clone().unwrap()
}

/// `authority path headers` for the next hop, or the error.
fn rewritten(section: &str, facts: &Facts) -> String {
    let vars = TemplateValues { facts, node: "edge" };
    let (mut authority, mut path, mut headers) = (facts.authority.clone(), facts.path.clone(), facts.headers.clone());
    let head = Head { authority: &mut authority, path: &mut path, headers: &mut headers };
    match rewrite(section).request(head, &vars) {
        Ok(()) => {
            let mut lines: Vec<String> =
                headers.iter().map(|(name, value)| format!(" {name}={}", value.to_str().unwrap())).collect();
            lines.sort();
            format!("{authority} {path}{}", lines.concat())
        }
        Err(error) => {
            assert_eq!((&authority, &path, &headers), (&facts.authority, &facts.path, &facts.headers), "half applied");
            error.to_string()
        }
    }
}

#[test]
fn requests_are_rewritten() {
    let alice = || get("VIDEO:8080", "/v1/a%20b?x=1&y=2").of("alice").header("accept", "*/*");
    let table: &[(&str, Facts, &str)] = &[
        ("{authority: NEW}", alice(), "new /v1/a%20b?x=1&y=2 accept=*/*"),
        ("{authority: '{user}.{host}:{port}'}", alice(), "alice.video:8080 /v1/a%20b?x=1&y=2 accept=*/*"),
        ("{path: {from: /v1/, to: /v2/}}", alice(), "video:8080 /v2/a%20b?x=1&y=2 accept=*/*"),
        ("{path: {from: /v1, to: /v2}}", alice(), "video:8080 /v2/a%20b?x=1&y=2 accept=*/*"),
        ("{path: {from: /v1, to: /v2}}", get("x", "/v1"), "x /v2"),
        ("{path: {from: /v1, to: /v2}}", get("x", "/v10/a"), "x /v10/a"),
        ("{path: {from: /v1/, to: /}}", get("x", "/%761/a"), "x /a"),
        ("{path: {from: /v1/, to: /v2/}}", get("x", "/v1"), "x /v1"),
        (
            "{path: {pattern: '/users/{id}/files/{rest*}', to: '/u/{id}/{rest}'}}",
            get("x", "/users/7/files/a/b%2Fc?q"),
            "x /u/7/a/b%2Fc?q",
        ),
        (
            "{path: {pattern: '/users/{id}/files/{rest*}', to: '/u/{id}/{rest}'}}",
            get("x", "/users/7/files/"),
            "x /u/7/",
        ),
        (
            "{path: {pattern: '/users/{id}/files/{rest*}', to: '/u/{id}/{rest}'}}",
            get("x", "/users//files/a"),
            "x /users//files/a",
        ),
        ("{path: {pattern: '/{a}/{b}', to: '/{b}/{a}/{b}'}}", get("x", "/1/2"), "x /2/1/2"),
        ("{path: {pattern: '/{a}/{b}', to: '/{b}'}}", get("x", "/1/2/3"), "x /1/2/3"),
        ("{path: {from: /a/, to: /b/}}", get("x", "/a/%2%65%2%65/admin"), "x /b/%252e%252e/admin"),
        ("{path: {pattern: '/{a}', to: '/b/{a}'}}", get("x", "/6%1%61"), "x /b/6%251a"),
        ("{query: {set: {x: '9', z: '{user}'}, remove: [y]}}", alice(), "video:8080 /v1/a%20b?x=9&z=alice accept=*/*"),
        ("{query: {remove: [x, y]}}", alice(), "video:8080 /v1/a%20b accept=*/*"),
        ("{query: {remove: token}}", get("x", "/?%74oken=1&tok+en=2&a"), "x /?tok+en=2&a"),
        ("{query: {set: {q: 'a&b=c d#'}}}", get("x", "/"), "x /?q=a%26b%3Dc%20d%23"),
        ("{query: {set: {a: '1'}}}", get("x", "/?a=2&a=3&b=4"), "x /?a=1&b=4"),
        (
            "{set-headers: {x-user: '{user}', accept: none}, add-headers: {x-n: ['1', '2']}}",
            alice(),
            "video:8080 /v1/a%20b?x=1&y=2 accept=none x-n=1 x-n=2 x-user=alice",
        ),
        ("{remove-headers: [Accept]}", alice(), "video:8080 /v1/a%20b?x=1&y=2"),
        (
            "{set-headers: {x: '{{{method} {scheme}://{authority}{path}?{query} {path-and-query} {node}}}'}}",
            alice(),
            "video:8080 /v1/a%20b?x=1&y=2 accept=*/* \
             x={GET http://video:8080/v1/a%20b?x=1&y=2 /v1/a%20b?x=1&y=2 edge}",
        ),
        ("{set-headers: {x: '[{user}]'}}", get("[::1]", "/"), "[::1] / x=[]"),
        ("{authority: '{user}'}", get("x", "/"), "invalid rewritten authority \"\": empty host"),
        (
            "{authority: '{user}'}",
            get("x", "/").of("a/b"),
            "invalid rewritten authority \"a/b\": illegal character '/' in a host",
        ),
        (
            "{path: {from: /a/, to: /b/}, authority: '{query}', set-headers: {x: y}}",
            get("x", "/a/?u@h"),
            "invalid rewritten authority \"u@h\": remove the user information (USER@) before the host",
        ),
        ("{set-headers: {x: '{user}'}}", get("x", "/").of("a\nb"), "invalid value of rewritten header x"),
        ("{set-headers: {x: '{user}'}}", get("x", "/").of("a\r\nset-cookie: b"), "invalid value of rewritten header x"),
    ];
    for (section, facts, wanted) in table {
        assert_eq!(rewritten(section, facts), *wanted, "{section} on {}{}", facts.authority, facts.path);
    }
}

#[test]
fn responses_are_rewritten() {
    let facts = get("x", "/").of("alice");
    let section =
        "{response: {set-headers: {x-for: '{user}'}, add-headers: {vary: hermes-user}, remove-headers: [server]}}";
    let mut headers = HeaderMap::new();
    headers.insert("server", HeaderValue::from_static("nginx"));
    headers.insert("vary", HeaderValue::from_static("accept"));
    let rewrite = rewrite(section);
    assert!(rewrite.leaves_request());
    rewrite.response(&mut headers, &TemplateValues { facts: &facts, node: "edge" }).unwrap();
    let lines: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(lines, [("vary", "accept"), ("vary", "hermes-user"), ("x-for", "alice")]);
}

fn location(template: &str, facts: &Facts) -> String {
    let text = format!("{{node: edge, routes: [{{name: r, redirect: {{location: '{template}'}}}}]}}");
    let snapshot = snapshot(&text);
    let Action::Redirect(Redirect { location, .. }) = &snapshot.routes[0].action else { panic!("no redirect") };
    match location.render_location(&TemplateValues { facts, node: "edge" }) {
        Ok(value) => value.to_str().unwrap().to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn locations_are_uris_and_no_open_redirects() {
    for (template, facts, wanted) in [
        ("http://NEW{path}", get("OLD", "/a?b"), "http://NEW/a"),
        ("https://{host}{path-and-query}", get("OLD:80", "/a?b"), "https://old/a?b"),
        ("https://{host}:8443/", get("[::1]", "/"), "https://[::1]:8443/"),
        ("/u/{user}/", get("x", "/").of("a/b?c@d"), "/u/a%2Fb%3Fc%40d/"),
        ("{path}", get("x", "//evil.example/"), "invalid redirect location"),
        ("//cdn.example{path}", get("x", "/a"), "//cdn.example/a"),
        ("{query}", get("x", "/"), "invalid redirect location"),
        ("/{query}", get("x", "/?a|b"), "invalid redirect location"),
    ] {
        assert_eq!(location(template, &facts), wanted, "{template}");
    }
}

#[test]
fn templates_name_what_is_wrong_with_them() {
    for (text, wanted) in [
        ("{a", "unclosed {; write a literal brace as {{"),
        ("a}", "unbalanced }; write a literal brace as }}"),
        ("{}", "unknown placeholder {}; expected one of {path}"),
        ("{User}", "unknown placeholder {User}; expected one of {path}"),
    ] {
        let error = Template::parse(text).unwrap_err();
        assert!(error.starts_with(wanted), "{text}: {error}");
    }
    let user: Arc<str> = Arc::from("{host}");
    let facts = Facts { user: Some(user), ..get("x", "/") };
    // Expanded values are not expanded again.
    assert_eq!(Template::parse("{user}").unwrap().render(&TemplateValues { facts: &facts, node: "n" }), "{host}");
}
