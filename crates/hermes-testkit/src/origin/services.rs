//! The three services that most tests of one node lead to: a web server, a TCP echo and a UDP echo.
//!
//! In: a draft of a node. Out: the draft with `$WEB`, `$ECHO` and `$UDP` filled in.

use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;

use super::{Origin, datagram::UdpEcho, http, listen, stream};
use crate::{Result, overlay::Draft};

/// All three, on loopback. They end with it.
#[derive(Debug)]
pub struct Services {
    /// HTTP/1.1; answers with `web`.
    pub web: Origin,
    /// TCP.
    pub echo: Origin,
    /// UDP.
    pub udp: UdpEcho,
}

impl Services {
    /// # Errors
    /// No port is left.
    pub fn start() -> Result<Self> {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Ok(Self {
            web: http::serve(listen(loopback)?, http::Version::H1, Bytes::from_static(b"web"))?,
            echo: stream::echo(listen(loopback)?)?,
            udp: UdpEcho::start(loopback, "")?,
        })
    }

    /// Fills in their addresses.
    pub fn fill<'a>(&self, draft: Draft<'a>) -> Draft<'a> {
        draft.with("WEB", self.web.address()).with("ECHO", self.echo.address()).with("UDP", self.udp.address())
    }
}
