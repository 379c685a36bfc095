//! A UDP origin that sends its name and records the sources of datagrams.
//!
//! In: datagrams. Out: the same datagrams behind the origin's label; the set of their sources. Two sources for one
//! flow are two sessions that should have been one.

use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{net::UdpSocket, task::JoinSet};

use super::bind_udp;
use crate::{Error, Result};

/// Runs until it is dropped.
#[derive(Debug)]
pub struct UdpEcho {
    address: SocketAddr,
    sources: Arc<Mutex<HashSet<SocketAddr>>>,
    _task: JoinSet<()>,
}

impl UdpEcho {
    /// Sends everything back behind `label`.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(bind: SocketAddr, label: &str) -> Result<Self> {
        let socket = UdpSocket::from_std(bind_udp(bind)?).map_err(Error::io("UDP origin"))?;
        let address = socket.local_addr().map_err(Error::io("UDP origin"))?;
        let sources = Arc::new(Mutex::new(HashSet::new()));
        let (seen, label) = (sources.clone(), label.as_bytes().to_owned());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut room = vec![0; 65_536];
            room[..label.len()].copy_from_slice(&label);
            loop {
                let Ok((length, source)) = socket.recv_from(&mut room[label.len()..]).await else { continue };
                if let Ok(mut seen) = seen.lock() {
                    seen.insert(source);
                }
                // A datagram that does not fit is lost, as in a network, and the client counts it.
                let _ = socket.send_to(&room[..label.len() + length], source).await;
            }
        });
        Ok(Self { address, sources, _task: task })
    }

    /// The address of the origin.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of sources.
    pub fn sources(&self) -> usize {
        self.sources.lock().map(|sources| sources.len()).unwrap_or_default()
    }
}
