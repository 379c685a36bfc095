//! An application of a DIF that is no node of Hermes: a server or a client of RINA.
//!
//! In: a UDP address, the name of a DIF and its key. Out: flows that it echoes, or a flow that it requests. Never: a
//! node, so that tests and benchmarks see what a node sends to others.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_rina::{Config, Dif, Event, FlowId, FlowRequest, Read, Reason};
use tokio::net::UdpSocket;
use tokio::time::Instant;

use crate::error::{Error, Result};

/// Bytes of the longest datagram.
const MAX_DATAGRAM: usize = 65_536;

/// An IPC process with its socket.
pub struct RinaApplication {
    dif: Dif,
    socket: UdpSocket,
    address: SocketAddr,
    started: Instant,
    buffer: BytesMut,
}

/// A request that is being read, or the rest of its response.
#[derive(Default)]
struct Exchange {
    request: Vec<u8>,
    head: Bytes,
    zeros: u64,
}

impl RinaApplication {
    /// Binds a socket. `key` is that of the DIF; empty if it has none.
    ///
    /// # Errors
    /// The address is in use, or the name is invalid.
    pub async fn bind(address: SocketAddr, dif: &str, key: &[u8]) -> Result<Self> {
        let mut config = Config::new(dif);
        config.key = (!key.is_empty()).then(|| key.to_vec());
        config.mtu = hermes_rina::MAX_MTU;
        let socket = UdpSocket::bind(address).await.map_err(Error::io("bind an application of a DIF"))?;
        let address = socket.local_addr().map_err(Error::io("find the address of an application of a DIF"))?;
        let started = Instant::now();
        // Unpredictable enough for a test: a port and a process.
        let mut seed = [7; 32];
        seed.iter_mut().zip(std::process::id().to_be_bytes()).for_each(|(to, from)| *to = from);
        let dif = Dif::new(config, &seed).map_err(|error| Error::io("name a DIF")(std::io::Error::other(error)))?;
        Ok(Self { dif, socket, address, started, buffer: BytesMut::new() })
    }

    /// Its own address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    async fn next_event(&mut self) -> Event {
        loop {
            if let Some(event) = self.dif.poll_event() {
                return event;
            }
            let mut out = BytesMut::new();
            while let Some(transmit) = self.dif.poll_transmit(self.now(), &mut out, 1) {
                // A datagram that the kernel does not take is lost, as on the way.
                let _ = self.socket.send_to(&out, transmit.peer).await;
                out.clear();
            }
            let wait = self.dif.next_timeout().map_or(Duration::from_secs(1), |at| at.saturating_sub(self.now()));
            self.buffer.reserve(MAX_DATAGRAM);
            let received = tokio::time::timeout(wait, self.socket.recv_buf_from(&mut self.buffer)).await;
            let now = self.now();
            match received {
                Ok(Ok((_, peer))) => self.dif.handle_datagram(now, peer, self.buffer.split().freeze()),
                // The kernel reports that an earlier datagram was refused: the neighbour does not run.
                Ok(Err(_)) => {}
                Err(_) => self.dif.handle_timeout(now),
            }
        }
    }

    /// Accepts every flow for this application and echoes its bytes; refuses others. Never returns.
    pub async fn echo(mut self, application: &str) {
        let mut unsent: HashMap<FlowId, Bytes> = HashMap::new();
        loop {
            let event = self.next_event().await;
            let now = self.now();
            match event {
                // A request may have expired meanwhile.
                Event::FlowRequested { flow, request, .. } if request.destination.process == application => {
                    let _ = self.dif.accept(now, flow);
                }
                Event::FlowRequested { flow, .. } => {
                    let _ = self.dif.refuse(now, flow, Reason::NotFound);
                }
                Event::Readable { flow } | Event::Writable { flow } => {
                    let mut bytes = unsent.remove(&flow).unwrap_or_default();
                    self.pass_on(flow, &mut bytes);
                    if !bytes.is_empty() {
                        unsent.insert(flow, bytes);
                    }
                }
                Event::Closed { flow, .. } => drop(unsent.remove(&flow)),
                _ => {}
            }
        }
    }

    /// Accepts every flow for this application and answers its requests, each of which ends with an empty line. `answer`
    /// returns the head of a response and the number of zeros after it. Never returns.
    pub async fn respond(mut self, application: &str, answer: impl Fn(&str) -> (String, u64)) {
        let zeros = Bytes::from(vec![0; 256 << 10]);
        let mut exchanges: HashMap<FlowId, Exchange> = HashMap::new();
        loop {
            let event = self.next_event().await;
            let now = self.now();
            match event {
                Event::FlowRequested { flow, request, .. } if request.destination.process == application => {
                    let _ = self.dif.accept(now, flow);
                    exchanges.insert(flow, Exchange::default());
                }
                Event::FlowRequested { flow, .. } => {
                    let _ = self.dif.refuse(now, flow, Reason::NotFound);
                }
                Event::Readable { flow } | Event::Writable { flow } => {
                    let Some(exchange) = exchanges.get_mut(&flow) else { continue };
                    loop {
                        if exchange.head.is_empty() && exchange.zeros > 0 {
                            let part = exchange.zeros.min(zeros.len() as u64);
                            exchange.head = zeros.slice(..usize::try_from(part).unwrap_or_default());
                            exchange.zeros -= part;
                        }
                        if !exchange.head.is_empty() {
                            if self.dif.write(now, flow, &mut exchange.head).is_err() || !exchange.head.is_empty() {
                                break;
                            }
                            continue;
                        }
                        match self.dif.read(now, flow, MAX_DATAGRAM) {
                            Ok(Read::Bytes(read)) => exchange.request.extend_from_slice(&read),
                            Ok(Read::End) => {
                                let _ = self.dif.finish(now, flow);
                                break;
                            }
                            Ok(Read::Blocked) | Err(_) => break,
                        }
                        if exchange.request.ends_with(b"\r\n\r\n") {
                            let (head, zeros) = answer(&String::from_utf8_lossy(&exchange.request));
                            (exchange.head, exchange.zeros) = (head.into(), zeros);
                            exchange.request.clear();
                        }
                    }
                }
                Event::Closed { flow, .. } => drop(exchanges.remove(&flow)),
                _ => {}
            }
        }
    }

    /// Writes what was read, until the flow takes or has no more.
    fn pass_on(&mut self, flow: FlowId, bytes: &mut Bytes) {
        let now = self.now();
        loop {
            if !bytes.is_empty() && (self.dif.write(now, flow, bytes).is_err() || !bytes.is_empty()) {
                return;
            }
            match self.dif.read(now, flow, MAX_DATAGRAM) {
                Ok(Read::Bytes(read)) => *bytes = read,
                Ok(Read::End) => {
                    let _ = self.dif.finish(now, flow);
                    return;
                }
                Ok(Read::Blocked) | Err(_) => return,
            }
        }
    }

    /// Requests a flow, sends `bytes`, ends its direction, and returns what comes back.
    ///
    /// # Errors
    /// The reason why the flow was refused or aborted; [`Reason::TooMany`] if it could not be requested.
    pub async fn exchange(
        &mut self,
        neighbour: SocketAddr,
        request: FlowRequest,
        mut bytes: Bytes,
    ) -> std::result::Result<Vec<u8>, Reason> {
        let now = self.now();
        let flow = self.dif.allocate(now, neighbour, request).map_err(|_| Reason::TooMany)?;
        let mut received = Vec::new();
        loop {
            if !bytes.is_empty() && self.dif.write(self.now(), flow, &mut bytes).is_ok() && bytes.is_empty() {
                let _ = self.dif.finish(self.now(), flow);
            }
            loop {
                match self.dif.read(self.now(), flow, MAX_DATAGRAM) {
                    Ok(Read::Bytes(read)) => received.extend_from_slice(&read),
                    Ok(Read::End) => return Ok(received),
                    Ok(Read::Blocked) | Err(_) => break,
                }
            }
            match self.next_event().await {
                Event::AllocationFailed { reason, .. } | Event::Closed { reason: Some(reason), .. } => {
                    return Err(reason);
                }
                _ => {}
            }
        }
    }
}
