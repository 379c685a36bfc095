//! A node within a program: the example as it stands, reloads, refusals, and an end.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use hermes_proxy::embed::Embedded;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

#[path = "../examples/embedded.rs"]
mod example;

#[tokio::test]
async fn the_example_gets_its_answer() {
    assert_eq!(example::run().await.unwrap(), "hello");
}

fn document(bind: &str, body: &str) -> String {
    format!(
        "node: n\nadmin: 127.0.0.1:1\naccess-log: off\nworkers: 1\nlisteners:\n\
         - {{name: own, bind: '{bind}', protocol: http}}\nroutes:\n- {{name: all, respond: {{body: {body}}}}}\n"
    )
}

async fn get(node: &Embedded) -> String {
    let mut tcp = TcpStream::connect(node.address("own").unwrap()).await.unwrap();
    tcp.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    tcp.read_to_string(&mut answer).await.unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[tokio::test]
async fn documents_are_applied_whole_or_refused_with_reasons() {
    let base = Path::new(".");
    let mut node = Embedded::run(&document("127.0.0.1:0", "one"), base).await.unwrap();
    assert!(node.warnings().iter().any(|warning| warning.starts_with("admin: ")), "{:?}", node.warnings());
    let before = node.address("own");
    assert_eq!(get(&node).await, "one");
    node.reload(&document("127.0.0.1:0", "two")).await.unwrap();
    assert_eq!((get(&node).await.as_str(), node.address("own")), ("two", before));

    let bad = document("127.0.0.1:0", "three").replace("respond", "respons");
    let refused = node.reload(&bad).await.unwrap_err();
    assert!(refused.reasons().iter().any(|reason| reason.starts_with("routes[0]")), "{refused}");
    // An address that no machine has (RFC 5737).
    let refused = node.reload(&document("192.0.2.1:1", "three")).await.unwrap_err();
    assert!(refused.to_string().contains("listeners[0].bind"), "{refused}");
    assert_eq!(get(&node).await, "two");

    let address = node.address("own").unwrap();
    assert_eq!(node.stop().await, 0);
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens there any more");
}
