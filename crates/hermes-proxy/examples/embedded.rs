//! A program with a node within it: it starts the node, asks for a name of the overlay through it, and ends it.
//!
//! In: nothing. Out: what the name answered, on standard output. `tests/embedded.rs` runs it.

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;

use hermes_proxy::embed::Embedded;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// All of a node's document may stand here: upstreams with certificates, devices, policies.
fn document(service: SocketAddr) -> String {
    format!(
        "
node: program
access-log: off
workers: 1
drain: 1s
listeners:
- {{name: own, bind: '127.0.0.1:0', protocol: http, set-headers: {{hermes-user: alice}}}}
routes:
- {{name: greeting, match: {{authority: GREETING, user: alice}}, upstream: service}}
upstreams:
- {{name: service, protocol: h1, endpoints: ['{service}'], overlay: false}}
"
    )
}

#[tokio::main(flavor = "current_thread")]
#[allow(dead_code, reason = "the test calls `run` instead")]
async fn main() -> Result<(), Box<dyn Error>> {
    println!("{}", run().await?);
    Ok(())
}

/// Returns what the service behind the name said.
pub(crate) async fn run() -> Result<String, Box<dyn Error>> {
    let service = TcpListener::bind("127.0.0.1:0").await?;
    let node = Embedded::run(&document(service.local_addr()?), Path::new(".")).await?;
    let own = node.address("own").ok_or("the listener has no address")?;
    let (served, answer) = tokio::join!(serve_one(&service), ask(own, "GREETING"));
    served?;
    let broken_off = node.drain().await;
    assert_eq!(broken_off, 0);
    answer
}

/// A service that answers one request.
async fn serve_one(service: &TcpListener) -> Result<(), Box<dyn Error>> {
    let (mut tcp, _) = service.accept().await?;
    let mut request = vec![0; 16 << 10];
    let length = tcp.read(&mut request).await?;
    assert!(request[..length].starts_with(b"GET /hello HTTP/1.1\r\n"));
    tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello").await?;
    Ok(())
}

/// Asks for `/hello` of a name, by the node as a proxy.
async fn ask(node: SocketAddr, name: &str) -> Result<String, Box<dyn Error>> {
    let mut tcp = TcpStream::connect(node).await?;
    let request = format!("GET http://{name}/hello HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n");
    tcp.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    tcp.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("the answer has no end")?;
    if head.starts_with("HTTP/1.1 200 ") { Ok(body.to_owned()) } else { Err(head.to_owned().into()) }
}
