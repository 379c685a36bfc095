//! Informational responses: hints on the way to the final one.

use std::io;

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::{self, Exchange, joined},
    origin::{Origin, scripted},
};
use http::Response;

use crate::http::lab::{before, in_front, overlay};

/// 103 twice, with a field that must not pass, then 200.
fn hinting(version: &str) -> Origin {
    if version == "h1" {
        return scripted::h1(|mut http1| async move {
            http1.head().await?;
            for hint in ["</a.css>", "</b.css>"] {
                http1.send(format!("HTTP/1.1 103 Early Hints\r\nlink: {hint}\r\nhermes-user: eve\r\n\r\n")).await?;
            }
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone").await
        })
        .unwrap();
    }
    scripted::h2(|exchange: Exchange| async move {
        let mut respond = exchange.respond;
        for hint in ["</a.css>", "</b.css>"] {
            let response = Response::builder().status(103).header("link", hint).header("hermes-user", "eve").body(());
            respond.send_informational(response.map_err(io::Error::other)?).map_err(io::Error::other)?;
        }
        let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
        multiplex::send_all(&mut stream, Bytes::from_static(b"done"), true).await
    })
    .unwrap()
}

#[tokio::test]
async fn early_hints_reach_an_h2_client() {
    for version in ["h1", "h2"] {
        let origin = hinting(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let answer = ListenerClient::plain(node.address("in")).h2().await.unwrap().get("http://WEB/").await.unwrap();
        let hints: Vec<_> =
            answer.interim.iter().map(|(status, fields)| (*status, joined(fields, "link").unwrap())).collect();
        assert_eq!(hints, [(103, "</a.css>".to_owned()), (103, "</b.css>".to_owned())], "{version}");
        assert!(answer.interim.iter().all(|(_, fields)| !fields.contains_key("hermes-user")), "{version}: {answer:?}");
        assert_eq!((answer.status, answer.text().as_str()), (200, "done"), "{version}");
    }
}

/// A named deviation: hyper's h1 server cannot send 103. RFC 9110, 15.2 allows a proxy to drop what it did not ask for
/// only towards clients that understand no 1xx; here the client loses a hint and nothing else.
#[tokio::test]
async fn an_h1_client_gets_the_final_response_alone() {
    for version in ["h1", "h2"] {
        let origin = hinting(version);
        let overlay = overlay();
        let node = before(&overlay, version, origin.address()).await;
        let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
        http1.send("GET / HTTP/1.1\r\nhost: WEB\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (200, "done"), "{version}");
    }
}

/// A node between passes them on, as RFC 9110 asks of every proxy.
#[tokio::test]
async fn early_hints_pass_through_a_chain() {
    let origin = hinting("h1");
    let overlay = overlay();
    let far = before(&overlay, "h1", origin.address()).await;
    let near = in_front(&overlay, "h2", &far).await;
    let answer = ListenerClient::plain(near.address("in")).h2().await.unwrap().get("http://WEB/").await.unwrap();
    assert_eq!((answer.interim.len(), answer.status), (2, 200), "{answer:?}");
}
