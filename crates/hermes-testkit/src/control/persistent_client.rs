//! A client that continues after failures: requests on a persistent connection, regularly replaced by a new one.
//!
//! In: an address and a request. Out: the status and headers of every response, and a description of every failure. If
//! a kept connection closes before the first byte of a response, the request is retried once on a new connection, as
//! browsers do. Never: more than one request at a time.

use std::io;
use std::net::SocketAddr;

use crate::raw_http1::{Head, RawHttp1};
use tokio::net::TcpStream;

/// Requests on one connection before it is replaced.
const KEPT: usize = 8;

/// A client of one service, with one persistent connection.
pub struct PersistentClient {
    to: SocketAddr,
    authority: &'static str,
    kept: Option<(RawHttp1<TcpStream>, usize)>,
}

impl PersistentClient {
    /// A client that asks for `authority` at an address.
    pub fn new(to: SocketAddr, authority: &'static str) -> Self {
        Self { to, authority, kept: None }
    }

    /// Sends one request.
    ///
    /// # Errors
    /// The status is not 200; the error describes the response.
    pub async fn ask(&mut self) -> io::Result<Head> {
        let (mut http1, count) = match self.kept.take() {
            Some((http1, count)) if count < KEPT => (http1, count),
            _ => (RawHttp1::connect(self.to).await?, 0),
        };
        let request = format!("GET / HTTP/1.1\r\nhost: {}\r\n\r\n", self.authority);
        let requests = async {
            http1.send(&request).await?;
            http1.head().await
        };
        let head = match requests.await {
            Err(_) if count > 0 => {
                (http1, _) = (RawHttp1::connect(self.to).await?, 0);
                http1.send(&request).await?;
                http1.head().await?
            }
            other => other?,
        };
        let content = http1.body(&head).await?;
        if head.status() != 200 {
            let why = head.header("proxy-status").unwrap_or_default();
            return Err(io::Error::other(format!("{} ({why}): {}", head.first, content.text())));
        }
        if head.header("connection").is_none_or(|value| !value.eq_ignore_ascii_case("close")) {
            self.kept = Some((http1, count + 1));
        }
        Ok(head)
    }
}
