//! What is given again, what is asked for again, and what stands in.

use hermes_testkit::listener_client::ListenerClient;
use http::Request;

use crate::cache::lab::{DOCUMENT, Scripted, Step, ask, body, get, node, overlay, response};

fn always(fields: &'static str) -> Scripted {
    Scripted::new(move |_, number| vec![Step::Send(response(200, fields, format!("{number}").as_bytes()))])
}

#[tokio::test]
async fn the_second_client_costs_nothing() {
    let mut origin = always("cache-control: max-age=600\netag: \"a\"");
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let first = get(&node, "/x").await;
    assert_eq!((first.text().as_str(), first.status()), ("0", 200));
    assert!(first.says().starts_with("edge; fwd=uri-miss; fwd-status=200; stored; ttl="), "{}", first.says());
    let second = get(&node, "/x").await;
    assert_eq!((second.text().as_str(), second.head.header("content-length").as_deref()), ("0", Some("1")));
    assert!(second.is_hit() && second.head.header("age").is_some(), "{second:?}");
    let head = ask(&node, "HEAD", "/x", &[]).await;
    assert!(head.is_hit(), "{head:?}");
    assert_eq!(head.head.header("content-length").as_deref(), Some("1"));
    let met = ask(&node, "GET", "/x", &["if-none-match: \"b\", \"a\""]).await;
    assert_eq!((met.status(), met.data.len(), met.head.header("etag").as_deref()), (304, 0, Some("\"a\"")));
    assert!(met.is_hit());
    // Another target, and what nobody may be given.
    assert_eq!(get(&node, "/x?y").await.text(), "1");
    assert_eq!(ask(&node, "GET", "/x", &["cache-control: no-store"]).await.text(), "0");
    assert_eq!(ask(&node, "GET", "/none", &["cache-control: only-if-cached"]).await.status(), 504);
    assert_eq!(origin.seen().len(), 2);
    assert_eq!(node.metric("hermes_cache_requests_total", "route=\"all\",outcome=\"hit\"").await.unwrap(), 4.0);
}

#[tokio::test]
async fn a_stale_response_is_revalidated() {
    let mut origin = Scripted::new(|request, _| {
        let fields = "cache-control: max-age=0\netag: \"a\"\nx-seen: again";
        vec![Step::Send(match request.header("if-none-match") {
            Some(tag) if tag == "\"a\"" => {
                format!("HTTP/1.1 304 Same\r\n{}\r\n\r\n", fields.replace('\n', "\r\n")).into()
            }
            _ => response(200, "cache-control: max-age=0\netag: \"a\"\nx-kept: yes", b"body"),
        })]
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    get(&node, "/x").await;
    let again = get(&node, "/x").await;
    assert_eq!((again.status(), again.text().as_str()), (200, "body"));
    assert!(again.says().starts_with("edge; fwd=stale; fwd-status=304"), "{}", again.says());
    // The fields of both, as they are now.
    assert_eq!(again.head.header("x-kept").as_deref(), Some("yes"));
    assert_eq!(again.head.header("x-seen").as_deref(), Some("again"));
    // The client's own condition is not the origin's.
    let met = ask(&node, "GET", "/x", &["if-none-match: \"a\""]).await;
    assert_eq!(met.status(), 304);
    let other = ask(&node, "GET", "/x", &["if-none-match: \"other\""]).await;
    assert_eq!((other.status(), other.text().as_str()), (200, "body"));
    let tags: Vec<_> = origin.seen().iter().map(|head| head.header("if-none-match")).collect();
    let requests = Some("\"a\"".to_owned());
    assert_eq!(tags, [None, requests.clone(), requests.clone(), requests]);
}

#[tokio::test]
async fn a_stale_response_replaces_a_failed_one() {
    for (fields, stands_in_for_silence, stands_in_for_500) in [
        ("cache-control: max-age=0\netag: \"a\"", true, false),
        ("cache-control: max-age=0, stale-if-error=60\netag: \"a\"", true, true),
        ("cache-control: max-age=0, must-revalidate, stale-if-error=60\netag: \"a\"", false, false),
        ("cache-control: s-maxage=0, stale-if-error=60\netag: \"a\"", false, false),
    ] {
        let origin = Scripted::new(move |request, number| match (number, request.target()) {
            (0 | 1, _) => vec![Step::Send(response(200, fields, b"kept"))],
            (_, "/breaks") => vec![Step::Close],
            _ => vec![Step::Send(response(500, "", b"failed"))],
        });
        let overlay = overlay();
        let node = node(&overlay, "", origin.origin.address()).await;
        get(&node, "/breaks").await;
        get(&node, "/500").await;
        let broken = get(&node, "/breaks").await;
        assert_eq!(broken.text() == "kept", stands_in_for_silence, "{fields}: {broken:?}");
        assert_eq!(broken.status(), if stands_in_for_silence { 200 } else { 502 });
        let failed = get(&node, "/500").await;
        assert_eq!(failed.text(), if stands_in_for_500 { "kept" } else { "failed" }, "{fields}: {failed:?}");
        drop(origin);
        // Nobody listens there any more.
        assert_eq!(get(&node, "/breaks").await.text() == "kept", stands_in_for_silence, "{fields}");
    }
}

#[tokio::test]
async fn a_stale_response_replaces_a_silent_origin_before_the_session_timeout() {
    let origin = Scripted::new(|_, number| match number {
        0 => vec![Step::Send(response(200, "cache-control: max-age=0\netag: \"a\"", b"kept"))],
        _ => vec![Step::Await(std::sync::Arc::default())],
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    get(&node, "/x").await;
    let kept = get(&node, "/x").await;
    assert_eq!(kept.text(), "kept");
    assert!(kept.says().ends_with("detail=stale-if-error"), "{}", kept.says());
}

#[tokio::test]
async fn an_unsafe_request_invalidates_the_cached_response() {
    let origin = Scripted::new(|request, number| {
        let fields = match request.method() {
            "GET" => "cache-control: max-age=600",
            "POST" => "location: /y\ncontent-location: http://WEB/z",
            _ => "location: http://OTHER/x",
        };
        let status = if request.method() == "DELETE" { 500 } else { 200 };
        vec![Step::Send(response(status, fields, format!("{number}").as_bytes()))]
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    for (path, number) in [("/x", "0"), ("/y", "1"), ("/z", "2"), ("/other", "3")] {
        assert_eq!(get(&node, path).await.text(), number);
    }
    // It failed: nothing has changed.
    ask(&node, "DELETE", "/x", &[]).await;
    assert_eq!(get(&node, "/x").await.text(), "0");
    let posted = ask(&node, "POST", "/x", &["content-length: 0"]).await;
    assert!(posted.says().ends_with("fwd=method"), "{}", posted.says());
    for (path, number) in [("/x", "6"), ("/y", "7"), ("/z", "8"), ("/other", "3")] {
        assert_eq!(get(&node, path).await.text(), number, "{path}");
    }
}

#[tokio::test]
async fn headers_outside_vary_do_not_change_what_is_cached() {
    let mut origin = Scripted::new(|request, _| {
        let host = request.header("x-forwarded-host").unwrap_or_default();
        vec![Step::Send(response(200, "cache-control: max-age=600\nvary: accept-language", host.as_bytes()))]
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    get(&node, "/x").await;
    // Not interpreted here, and no key: what it does at an origin that does not name it, is the origin's.
    let evil =
        ask(&node, "GET", "/x", &["x-forwarded-host: evil", "x-original-url: /other", "x-http-method-override: PUT"])
            .await;
    // The first node says itself what was asked for.
    assert!(evil.is_hit() && evil.data != b"evil"[..]);
    let german = ask(&node, "GET", "/x", &["accept-language: de"]).await;
    assert!(german.says().contains("fwd=vary-miss"), "{}", german.says());
    assert!(ask(&node, "GET", "/x", &["accept-language: DE"]).await.is_hit());
    assert!(get(&node, "/x").await.is_hit());
    assert_eq!(origin.seen().len(), 2);
}

#[tokio::test]
async fn clients_of_http_2_get_the_same() {
    let whole = body(400_000);
    let sent = whole.clone();
    let mut origin =
        Scripted::new(move |_, _| vec![Step::Send(response(200, "cache-control: max-age=600\netag: \"a\"", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let mut client = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    for round in 0..3 {
        let request = Request::get("http://WEB/x").body(()).unwrap();
        let answer = client.ask(request, b"").await.unwrap();
        assert!(answer.status == 200 && answer.data == whole, "round {round}");
        let output = answer.header("cache-status").unwrap();
        assert_eq!(output.starts_with("edge; hit"), round > 0, "{output}");
    }
    let request = Request::get("http://WEB/x").header("range", "bytes=399990-").body(()).unwrap();
    let part = client.ask(request, b"").await.unwrap();
    assert_eq!((part.status, &part.data[..]), (206, &whole[399_990..]));
    let request = Request::get("http://WEB/x").header("if-none-match", "\"a\"").body(()).unwrap();
    assert_eq!(client.ask(request, b"").await.unwrap().status, 304);
    assert!(get(&node, "/x").await.data == whole);
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test]
async fn a_reload_keeps_cached_responses_unless_the_cache_changes() {
    let mut origin = always("cache-control: max-age=600");
    let overlay = overlay();
    let mut node = node(&overlay, "disk: 0B", origin.origin.address()).await;
    get(&node, "/x").await;
    for (cache, is_kept) in [("disk: 0B", true), ("disk: 0B, memory: 2MiB", false)] {
        let document = format!("{DOCUMENT}# {is_kept}\n");
        let state = overlay.dir().join("state").display().to_string();
        let origin = origin.origin.address().to_string();
        let values = [("CACHE", cache.to_owned()), ("STATE", state), ("ORIGIN", origin)];
        node.reload(&document, &values).await.unwrap();
        assert_eq!(get(&node, "/x").await.is_hit(), is_kept, "{cache}");
    }
    assert_eq!(origin.seen().len(), 2);
}
