//! Messages between the workers of a node about reverse connections.
//!
//! In: a connection that belongs to another worker, or a query for a node that is connected to another worker. Out: the
//! message, on that worker. Never: a wait for a worker that is busy with accepted connections.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use hermes_model::facts::Trust;
use hermes_model::snapshot::Listener;
use http::StatusCode;
use tokio::sync::{mpsc, oneshot};

use super::{ConnectionSlot, ReversePeer, ReverseTransport};

/// A message to another worker.
pub enum Message {
    /// Takes over a reverse connection that another worker accepted.
    Adopt(Box<AcceptedUplink>),
    /// Queries a node through its reverse connection on this worker.
    Query(Box<Query>),
}

/// An accepted reverse connection, to be passed to the worker that serves it.
pub struct AcceptedUplink {
    pub carrier: ReverseTransport,
    pub source: SocketAddr,
    pub trust: Trust,
    pub listener: Arc<Listener>,
    pub slot: ConnectionSlot,
}

/// A health check of a node through its reverse connection.
pub struct Query {
    pub reverse_peer: Arc<ReversePeer>,
    pub path: String,
    pub reply: oneshot::Sender<Result<StatusCode, String>>,
}

/// The message channels of all workers, by number.
#[derive(Default)]
pub struct Channels(OnceLock<Vec<mpsc::WeakSender<Message>>>);

impl Channels {
    /// Sets the channels of the workers.
    pub fn set(&self, workers: Vec<mpsc::WeakSender<Message>>) {
        // Set once in a node.
        let _ = self.0.set(workers);
    }

    fn of(&self, worker: usize) -> Option<mpsc::Sender<Message>> {
        self.0.get()?.get(worker)?.upgrade()
    }

    /// Passes a connection to its worker; false if that worker is gone or busy.
    pub fn pass_on(&self, worker: usize, accepted: AcceptedUplink) -> bool {
        self.of(worker).is_some_and(|other| other.try_send(Message::Adopt(Box::new(accepted))).is_ok())
    }

    /// Sends a GET to a node through its reverse connection.
    ///
    /// # Errors
    /// The reason why there is no response.
    pub async fn query(&self, reverse_peer: &Arc<ReversePeer>, path: &str) -> Result<StatusCode, String> {
        let gone = || "the connection is closed".to_owned();
        let worker = reverse_peer.latest().and_then(|worker| self.of(worker)).ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let query = Query { reverse_peer: reverse_peer.clone(), path: path.to_owned(), reply };
        worker.send(Message::Query(Box::new(query))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
