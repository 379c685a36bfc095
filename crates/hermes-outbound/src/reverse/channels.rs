//! Messages between the workers of a node about reverse connections.
//!
//! In: a connection that is assigned to another worker, or a query for a node that is connected to another worker. Out:
//! a message to that worker. Passing a connection never waits for a busy worker.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use hermes_model::facts::Trust;
use hermes_model::snapshot::Listener;
use http::StatusCode;
use tokio::sync::{mpsc, oneshot};

use super::{ConnectionSlot, ReversePeer, ReverseTransport};

/// A message to another worker.
pub enum Message {
    /// The receiving worker should serve this reverse connection, which another worker has accepted.
    Adopt(Box<AcceptedUplink>),
    /// The receiving worker should perform this health check over its reverse connection.
    Query(Box<Query>),
}

/// An accepted reverse connection, with the data that the worker to which it is assigned needs.
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

/// The message channels of all workers, indexed by the number of the worker.
#[derive(Default)]
pub struct Channels(OnceLock<Vec<mpsc::WeakSender<Message>>>);

impl Channels {
    /// Sets the channels of the workers.
    pub fn set(&self, workers: Vec<mpsc::WeakSender<Message>>) {
        // A node calls this once.
        let _ = self.0.set(workers);
    }

    fn of(&self, worker: usize) -> Option<mpsc::Sender<Message>> {
        self.0.get()?.get(worker)?.upgrade()
    }

    /// Passes a connection to the worker to which it is assigned. Returns false if that worker has ended or its channel
    /// is full.
    pub fn pass_on(&self, worker: usize, accepted: AcceptedUplink) -> bool {
        self.of(worker).is_some_and(|other| other.try_send(Message::Adopt(Box::new(accepted))).is_ok())
    }

    /// Sends a GET request to a node over its newest reverse connection, and returns the status.
    ///
    /// # Errors
    /// The node is not connected, or no response arrived. The error is the reason, for the log.
    pub async fn query(&self, reverse_peer: &Arc<ReversePeer>, path: &str) -> Result<StatusCode, String> {
        let gone = || "the connection is closed".to_owned();
        let worker = reverse_peer.latest().and_then(|worker| self.of(worker)).ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let query = Query { reverse_peer: reverse_peer.clone(), path: path.to_owned(), reply };
        worker.send(Message::Query(Box::new(query))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
