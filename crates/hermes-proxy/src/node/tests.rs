//! A worker that breaks: its listeners go on, and the connections that waited for it are served.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use hermes_model::check;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Node;
use super::worker_loop::Command;

const DOCUMENT: &str = "
node: n
access-log: off
workers: 2
dispatch: roundrobin
listeners:
- {name: own, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {body: ok}}
";

async fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    answer
}

#[tokio::test]
async fn a_worker_that_breaks_begins_anew_with_its_listeners() {
    let checked = check(DOCUMENT, Path::new(".")).unwrap();
    let mut node = Node::start(Arc::new(checked.snapshot), Vec::new()).await.unwrap();
    let to: SocketAddr = node.addresses()[0].address.socket().unwrap();
    for round in 1..4 {
        for worker in &node.workers {
            worker.commands.send(Command::Break).await.unwrap();
        }
        while node.shared.lost_workers().len() < 2 {
            node.something_lost().await;
        }
        // They wait in the queue of a socket that nobody reads.
        let mut waiting = Vec::new();
        for _ in 0..8 {
            waiting.push(TcpStream::connect(to).await.unwrap());
        }
        node.restore().await.unwrap();
        assert!(node.shared.lost_workers().is_empty());
        for mut stream in waiting {
            assert!(ask(&mut stream).await.ends_with("ok"), "round {round}");
        }
        assert_eq!(node.shared.metrics.worker_breaks.get(), 2 * round);
    }
    assert_eq!(node.end().await, 0);
}
