//! An origin that records requests and their bodies, so that duplicate requests and bytes are visible.
//!
//! In: HTTP/1.1. Out: for paths that end with `/bytes/N`, the payload of [`super::http`]; for all others, length and
//! digest of the request's body as JSON; a ledger. Bodies are streamed. Entries are kept for the test's duration, which
//! bounds them.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use super::{
    Origin,
    http::{Body, generated, length, whole},
};
use crate::{Result, pattern::Digest};

/// A request as the origin saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// `METHOD path?query`.
    pub what: String,
    /// Received bytes of the body so far.
    pub bytes: u64,
    /// The digest of the whole body; `None` if it is incomplete.
    pub digest: Option<String>,
}

/// All requests, in the order in which their heads arrived.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Mutex<Vec<Entry>>>);

impl Ledger {
    /// Starts an origin with this ledger.
    ///
    /// # Errors
    /// The listener has no address.
    pub fn serve(&self, listener: TcpListener) -> Result<Origin> {
        let ledger = self.clone();
        Origin::accepting(listener, move |stream| {
            let ledger = ledger.clone();
            async move {
                let service = service_fn(move |request| answer(request, ledger.clone()));
                // The client evaluates the result of a connection.
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            }
        })
    }

    /// The requests with this method, path and query so far.
    pub fn of(&self, what: &str) -> Vec<Entry> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|entry| entry.what == what).cloned().collect()
    }

    fn write(&self, what: String) -> usize {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Entry { what, bytes: 0, digest: None });
        all.len() - 1
    }

    fn received(&self, entry: usize, bytes: u64, digest: Option<String>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = &mut all[entry];
        entry.bytes += bytes;
        entry.digest = digest;
    }
}

async fn answer(request: Request<Incoming>, ledger: Ledger) -> std::result::Result<Response<Body>, Infallible> {
    let of_bytes = length(request.uri().path());
    let entry = ledger.write(format!("{} {}", request.method(), request.uri()));
    let (mut body, mut digest, mut bytes) = (request.into_body(), Digest::default(), 0);
    while let Some(frame) = body.frame().await {
        // The entry stays without a digest; nobody receives the response.
        let Ok(frame) = frame else { return Ok(Response::new(whole(Bytes::new()))) };
        if let Some(data) = frame.data_ref() {
            digest.update(data);
            bytes += data.len() as u64;
            ledger.received(entry, data.len() as u64, None);
        }
    }
    ledger.received(entry, 0, Some(digest.hex()));
    Ok(match of_bytes {
        Some(length) => generated(length),
        None => {
            let output = serde_json::json!({"bytes": bytes, "digest": digest.hex()}).to_string();
            Response::new(whole(Bytes::from(output)))
        }
    })
}
