//! A relay between a QUIC client and a server: it records datagrams, drops them, and replays them.
//!
//! In: a server's address. Out: an address for one client. Recorded datagrams can be sent again from any socket, any
//! number of times. Datagrams are not modified. TCP on the same port can be relayed, too, to test the fallback from
//! QUIC.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
};

use crate::origin;

/// The directions that pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Both directions.
    Both,
    /// From the client to the server; the server's datagrams are dropped.
    Up,
    /// A single datagram of the client, and then only those of the server.
    OneUp,
    /// From the server to the client.
    Down,
    /// No direction.
    Nothing,
}

#[derive(Debug)]
struct State {
    direction: Direction,
    recorded: Vec<Vec<u8>>,
}

/// A relay that runs until it is dropped.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    source: SocketAddr,
    to: SocketAddr,
    state: Arc<Mutex<State>>,
    tasks: JoinSet<()>,
}

impl Relay {
    /// A relay before this server.
    ///
    /// # Errors
    /// No socket can be opened.
    pub async fn before(to: SocketAddr) -> io::Result<Self> {
        Self::at(UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?, to).await
    }

    /// A relay before this server that also relays TCP on the same port. For QUIC, only `lets` passes.
    ///
    /// # Errors
    /// No sockets can be opened.
    pub async fn beside_tcp(to: SocketAddr, direction: Direction) -> io::Result<Self> {
        let (listener, near) = origin::twins(SocketAddr::from(([127, 0, 0, 1], 0))).map_err(io::Error::other)?;
        let mut relay = Self::at(UdpSocket::from_std(near)?, to).await?;
        relay.direction(direction);
        relay.tasks.spawn(carry_tcp(listener, to));
        Ok(relay)
    }

    async fn at(near: UdpSocket, to: SocketAddr) -> io::Result<Self> {
        let far = UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        far.connect(to).await?;
        let (address, source) = (near.local_addr()?, far.local_addr()?);
        let state = Arc::new(Mutex::new(State { direction: Direction::Both, recorded: Vec::new() }));
        let mut tasks = JoinSet::new();
        tasks.spawn(carry(near, far, Arc::clone(&state)));
        Ok(Self { address, source, to, state, tasks })
    }

    /// The relay's address for its client.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The client's address as the server sees it, over QUIC.
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// Changes the directions that pass.
    pub fn direction(&self, direction: Direction) {
        locked(&self.state).direction = direction;
    }

    /// Returns the client's datagrams since the last call.
    pub fn recorded(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut locked(&self.state).recorded)
    }

    /// Replays the datagrams from a new socket.
    ///
    /// # Errors
    /// No socket can be opened.
    pub async fn replay(&self, recorded: &[Vec<u8>]) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        for datagram in recorded {
            socket.send_to(datagram, self.to).await?;
        }
        Ok(socket)
    }
}

fn locked(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn carry_tcp(listener: TcpListener, to: SocketAddr) {
    let mut connections = JoinSet::new();
    while let Ok((mut near, _)) = listener.accept().await {
        connections.spawn(async move {
            if let Ok(mut far) = TcpStream::connect(to).await {
                // Both ends notice the end of the stream.
                let _ = copy_bidirectional(&mut near, &mut far).await;
            }
        });
    }
}

async fn carry(near: UdpSocket, far: UdpSocket, state: Arc<Mutex<State>>) {
    let mut client = None;
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            received = near.recv_from(&mut up) => {
                // An empty datagram is not QUIC: a node sends it to detect an unreachable port.
                let Ok((length @ 1.., from)) = received else { continue };
                client = Some(from);
                let direction = {
                    let mut state = locked(&state);
                    state.recorded.push(up[..length].to_vec());
                    let now = state.direction;
                    if now == Direction::OneUp {
                        state.direction = Direction::Down;
                    }
                    now
                };
                if matches!(direction, Direction::Both | Direction::Up | Direction::OneUp) {
                    let _ = far.send(&up[..length]).await;
                }
            }
            received = far.recv(&mut down) => {
                let (Ok(length), Some(client)) = (received, client) else { continue };
                if matches!(locked(&state).direction, Direction::Both | Direction::OneUp | Direction::Down) {
                    let _ = near.send_to(&down[..length], client).await;
                }
            }
        }
    }
}
