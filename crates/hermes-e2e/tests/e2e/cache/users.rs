//! What is one user's is nobody else's.

use crate::cache::lab::{Scripted, Step, ask_at, head, node, overlay, response};

/// Tells whom it answers, by a field that it does not name.
fn telling(fields: &'static str) -> Scripted {
    Scripted::new(move |_, number| vec![Step::Send(response(200, fields, format!("{number}").as_bytes()))])
}

#[tokio::test]
async fn a_shared_cache_keeps_nothing_private() {
    for (fields, requests) in [
        ("cache-control: private, max-age=600", &[][..]),
        ("cache-control: max-age=600\nset-cookie: session=1", &[]),
        ("cache-control: max-age=600", &["authorization: Basic YTpi"]),
        ("cache-control: no-store, max-age=600", &[]),
        ("cache-control: max-age=600\nvary: *", &[]),
    ] {
        let origin = telling(fields);
        let overlay = overlay();
        let node = node(&overlay, "", origin.origin.address()).await;
        for (number, listener) in ["alice", "bob", "in", "alice"].into_iter().enumerate() {
            let got = ask_at(&node, listener, "GET", "/x", requests).await;
            assert_eq!(got.text(), number.to_string(), "{fields}: {}", got.says());
        }
    }
}

#[tokio::test]
async fn a_request_during_a_private_response_gets_one_of_its_own() {
    let held = std::sync::Arc::new(tokio::sync::Notify::new());
    let hold = held.clone();
    let mut origin = Scripted::new(move |_, number| {
        let mut steps = Vec::new();
        if number == 0 {
            steps.push(Step::Await(hold.clone()));
        }
        steps.push(Step::Send(response(200, "cache-control: private, max-age=600", format!("{number}").as_bytes())));
        steps
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let alice = ask_at(&node, "alice", "GET", "/x", &[]);
    let bob = async {
        origin.next().await;
        let bob = ask_at(&node, "bob", "GET", "/x", &[]);
        let release = async {
            tokio::task::yield_now().await;
            held.notify_one();
        };
        tokio::join!(bob, release).0
    };
    let (alice, bob) = tokio::join!(alice, bob);
    assert_eq!((alice.text().as_str(), bob.text().as_str()), ("0", "1"), "{} | {}", alice.says(), bob.says());
}

#[tokio::test]
async fn a_private_cache_is_partitioned_by_user() {
    let mut origin = telling("cache-control: private, max-age=600\nset-cookie: a=b");
    let overlay = overlay();
    let node = node(&overlay, "shared: false", origin.origin.address()).await;
    let text = async |listener| ask_at(&node, listener, "GET", "/x", &[]).await.text();
    assert_eq!((text("alice").await.as_str(), text("bob").await.as_str()), ("0", "1"));
    assert_eq!((text("alice").await.as_str(), text("bob").await.as_str()), ("0", "1"));
    // Who has no name is one of many.
    assert_eq!((text("in").await.as_str(), text("in").await.as_str()), ("2", "3"));
    assert_eq!(origin.seen().len(), 4);
}

/// A 304, and an answer to HEAD, say more than what is kept: to who asked, and to nobody else.
#[tokio::test]
async fn fields_of_a_revalidation_reach_only_its_user() {
    for added in ["set-cookie: sid=$N\ncache-control: max-age=600", "x-for: $N\ncache-control: private, max-age=600"] {
        for again in ["GET", "HEAD"] {
            let mut origin = Scripted::new(move |request, number| {
                let fields = format!("etag: \"one\"\n{}", added.replace("$N", &number.to_string()));
                let is_conditional = request.header("if-none-match").is_some();
                let bytes = match number {
                    0 => response(200, "etag: \"one\"\ncache-control: max-age=0", b"kept"),
                    _ if is_conditional => {
                        format!("HTTP/1.1 304 Same\r\n{}\r\n\r\n", fields.replace('\n', "\r\n")).into()
                    }
                    _ if request.method() == "HEAD" => head(200, &fields, 4),
                    _ => response(200, &fields, b"kept"),
                };
                vec![Step::Send(bytes)]
            });
            let overlay = overlay();
            let node = node(&overlay, "", origin.origin.address()).await;
            ask_at(&node, "alice", "GET", "/x", &[]).await;
            ask_at(&node, "alice", again, "/x", &["cache-control: no-cache"]).await;
            let bob = ask_at(&node, "bob", "GET", "/x", &[]).await;
            let of_alice = ["set-cookie", "x-for"].map(|name| bob.head.header(name)).into_iter().flatten();
            let of_alice: Vec<_> = of_alice.filter(|value| value.ends_with('1')).collect();
            assert!(of_alice.is_empty(), "{added}, {again}: {of_alice:?}, {}", bob.says());
            assert_eq!(bob.text(), "kept");
            assert_eq!(origin.seen().len(), 3, "{added}, {again}: {}", bob.says());
        }
    }
}
