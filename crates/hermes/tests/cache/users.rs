//! What is one user's is nobody else's.

use crate::lab::{Scripted, Step, ask_at, node, overlay, response};

/// Tells whom it answers, by a field that it does not name.
fn telling(fields: &'static str) -> Scripted {
    Scripted::new(move |_, number| vec![Step::Send(response(200, fields, format!("{number}").as_bytes()))])
}

#[tokio::test]
async fn a_shared_cache_keeps_nothing_private() {
    for (fields, asked) in [
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
            let got = ask_at(&node, listener, "GET", "/x", asked).await;
            assert_eq!(got.text(), number.to_string(), "{fields}: {}", got.says());
        }
    }
}

#[tokio::test]
async fn who_asks_while_a_private_answer_comes_gets_another_one() {
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
async fn a_private_cache_has_a_part_for_each_user() {
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
