//! Origins that record when they first see a change, by the number in a request's `x-generation`.
//!
//! In: requests over HTTP/1.1, each with the number of the document that routed it. Out: the time at which each number
//! was first seen, and the origin; for the client, the origin's label, or the digest of its upload. Numbers only grow,
//! as those of documents do.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{
    Error, Result,
    origin::Origin,
    pattern::Digest,
    raw_http1::{Head, RawHttp1},
};

/// The header that a test's document sets to its own number.
pub const GENERATION: &str = "x-generation";

/// The requests that several origins have seen.
#[derive(Debug, Clone)]
pub struct GenerationLog {
    seen: watch::Sender<BTreeMap<u64, FirstRequest>>,
}

/// The first request of a generation.
#[derive(Debug, Clone)]
pub struct FirstRequest {
    /// The time.
    pub at: Instant,
    /// The label of the origin.
    pub origin: String,
    /// The whole request head.
    pub head: Head,
}

impl Default for GenerationLog {
    fn default() -> Self {
        Self { seen: watch::Sender::new(BTreeMap::new()) }
    }
}

impl GenerationLog {
    /// Starts an origin on this address.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn origin(&self, bind: SocketAddr, label: &str) -> Result<Origin> {
        let listener = TcpListener::bind(bind).await.map_err(Error::io(format!("binding {bind}")))?;
        let (generations, label) = (self.clone(), label.to_owned());
        Origin::accepting(listener, move |stream| {
            let (generations, label) = (generations.clone(), label.clone());
            async move {
                // A client that disconnects between two requests ends the connection.
                let _ = generations.serve(stream, &label).await;
            }
        })
    }

    /// The first sighting of this generation, or of a later one that replaced it.
    ///
    /// # Panics
    /// No sighting within `patience`.
    pub async fn of(&self, generation: u64, timeout: Duration) -> FirstRequest {
        let mut seen = self.seen.subscribe();
        let found = tokio::time::timeout(timeout, seen.wait_for(|seen| seen.range(generation..).next().is_some()));
        let newest = self.seen.borrow().keys().next_back().copied();
        match found.await {
            Ok(Ok(seen)) => seen.range(generation..).next().map(|(_, first_request)| first_request.clone()),
            _ => None,
        }
        .unwrap_or_else(|| panic!("generation {generation} was not seen within {timeout:?}; newest: {newest:?}"))
    }

    async fn serve(&self, stream: TcpStream, label: &str) -> std::io::Result<()> {
        let mut http1 = RawHttp1::new(stream);
        loop {
            let head = http1.head().await?;
            self.note(&head, label);
            let body = http1.body(&head).await?;
            let answer = match head.target().starts_with("/upload") {
                true => {
                    let mut digest = Digest::default();
                    digest.update(&body.data);
                    format!("{{\"bytes\":{},\"digest\":\"{}\"}}\n", body.data.len(), digest.hex())
                }
                false => format!("{label} {}\n", head.header(GENERATION).unwrap_or_default()),
            };
            let length = answer.len();
            http1
                .send(format!("HTTP/1.1 200 OK\r\nx-origin: {label}\r\ncontent-length: {length}\r\n\r\n{answer}"))
                .await?;
        }
    }

    fn note(&self, head: &Head, label: &str) {
        let Some(number) = head.header(GENERATION).and_then(|text| text.parse().ok()) else { return };
        self.seen.send_if_modified(|seen| {
            let is_new = !seen.contains_key(&number);
            if is_new {
                seen.insert(number, FirstRequest { at: Instant::now(), origin: label.to_owned(), head: head.clone() });
            }
            is_new
        });
    }
}
