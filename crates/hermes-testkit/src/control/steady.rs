//! A client that continues after failures: requests on a persistent connection, regularly replaced by a new one.
//!
//! In: an address and a request. Out: the status and headers of every response, and a description of every failure. If
//! a kept connection closes before the first byte of a response, the request is retried once on a new connection, as
//! browsers do. Never: more than one request at a time.

use std::io;
use std::net::SocketAddr;

use crate::dialog::{Dialog, Head};
use tokio::net::TcpStream;

/// Requests on one connection before it is replaced.
const KEPT: usize = 8;

/// A client of one service, with one persistent connection.
pub struct Steady {
    to: SocketAddr,
    authority: &'static str,
    kept: Option<(Dialog<TcpStream>, usize)>,
}

impl Steady {
    /// A client that asks for `authority` at an address.
    pub fn new(to: SocketAddr, authority: &'static str) -> Self {
        Self { to, authority, kept: None }
    }

    /// Sends one request.
    ///
    /// # Errors
    /// The status is not 200; the error describes the response.
    pub async fn ask(&mut self) -> io::Result<Head> {
        let (mut dialog, count) = match self.kept.take() {
            Some((dialog, count)) if count < KEPT => (dialog, count),
            _ => (Dialog::connect(self.to).await?, 0),
        };
        let request = format!("GET / HTTP/1.1\r\nhost: {}\r\n\r\n", self.authority);
        let asked = async {
            dialog.send(&request).await?;
            dialog.head().await
        };
        let head = match asked.await {
            Err(_) if count > 0 => {
                (dialog, _) = (Dialog::connect(self.to).await?, 0);
                dialog.send(&request).await?;
                dialog.head().await?
            }
            other => other?,
        };
        let content = dialog.body(&head).await?;
        if head.status() != 200 {
            let why = head.header("proxy-status").unwrap_or_default();
            return Err(io::Error::other(format!("{} ({why}): {}", head.first, content.text())));
        }
        if head.header("connection").is_none_or(|value| !value.eq_ignore_ascii_case("close")) {
            self.kept = Some((dialog, count + 1));
        }
        Ok(head)
    }
}
