//! The resolver's sockets: tokio sockets with the packet mark of [`socket_mark`].
//!
//! In: addresses of DNS servers. Out: sockets to them, and the timers and tasks of tokio. Never: a query.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use hickory_resolver::net::runtime::{
    RuntimeProvider, TokioHandle, TokioRuntimeProvider, TokioTime, iocompat::AsyncIoTokioAsStd,
};
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};

use crate::socket_mark;

/// The timeout of a TCP connection to a DNS server if the resolver sets none.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The resolver's access to the tokio runtime of its worker.
#[derive(Clone, Default)]
pub(super) struct MarkedRuntime(TokioRuntimeProvider);

type Opening<T> = Pin<Box<dyn Send + Future<Output = io::Result<T>>>>;

impl RuntimeProvider for MarkedRuntime {
    type Handle = TokioHandle;
    type Timer = TokioTime;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<TcpStream>;

    fn create_handle(&self) -> Self::Handle {
        self.0.create_handle()
    }

    fn connect_tcp(&self, server: SocketAddr, bind: Option<SocketAddr>, wait: Option<Duration>) -> Opening<Self::Tcp> {
        Box::pin(async move {
            let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket_mark::apply(SockRef::from(&socket));
            if let Some(address) = bind {
                socket.bind(address)?;
            }
            socket.set_nodelay(true)?;
            let connected = tokio::time::timeout(wait.unwrap_or(CONNECT_TIMEOUT), socket.connect(server)).await;
            Ok(AsyncIoTokioAsStd(connected.map_err(io::Error::from)??))
        })
    }

    fn bind_udp(&self, local: SocketAddr, server: SocketAddr) -> Opening<Self::Udp> {
        let opening = self.0.bind_udp(local, server);
        Box::pin(async move {
            let socket = opening.await?;
            socket_mark::apply(SockRef::from(&socket));
            Ok(socket)
        })
    }
}
