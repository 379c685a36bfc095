//! Limits: the bound of every buffer, queue, table and wait of a node.
//!
//! In: the `limits` section of a document. Out: `Limits`, every value within its sane range.
//! Never: an absent or infinite limit. Whoever wants more writes a number.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::scalar::{Period, Size};

/// A limit as the reference lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRow {
    /// Its key in the document.
    pub name: &'static str,
    /// The default, as it is written in a document.
    pub default: String,
    /// The least value.
    pub least: String,
    /// The greatest value.
    pub most: String,
}

/// How a limit is written, compared and stored.
trait Measure: Copy + PartialOrd {
    /// The scalar of the document.
    type Written: Copy;
    fn read(written: Self::Written) -> Self;
    fn show(self) -> String;
}

impl Measure for usize {
    type Written = usize;
    fn read(written: usize) -> usize {
        written
    }
    fn show(self) -> String {
        self.to_string()
    }
}

impl Measure for u32 {
    type Written = u32;
    fn read(written: u32) -> u32 {
        written
    }
    fn show(self) -> String {
        self.to_string()
    }
}

/// A number of bytes that fits an HTTP/2 window.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Bytes(u32);

impl Measure for Bytes {
    type Written = Size;
    fn read(written: Size) -> Bytes {
        Bytes(u32::try_from(written.0).unwrap_or(u32::MAX))
    }
    fn show(self) -> String {
        Size(u64::from(self.0)).to_string()
    }
}

impl Measure for Duration {
    type Written = Period;
    fn read(written: Period) -> Duration {
        written.0
    }
    fn show(self) -> String {
        Period(self).to_string()
    }
}

/// The payload of a UDP datagram.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Datagram(Bytes);

impl Measure for Datagram {
    type Written = Size;
    fn read(written: Size) -> Self {
        Self(Bytes::read(written))
    }
    fn show(self) -> String {
        self.0.show()
    }
}

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// The largest HTTP/2 window (RFC 9113, 6.9.1).
const WINDOW_MAX: u32 = (1 << 31) - 1;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// One definition gives the typed limits, their section in the document, their check and the
/// table that the reference is tested against.
macro_rules! limits {
    ($($(#[$doc:meta])* $field:ident / $name:literal : $kind:ty as $measure:ty $(, $convert:expr)? ;
       $default:expr, $least:expr, $most:expr;)*) => {
        /// Every limit of a node. `Limits::default()` is safe for a machine of 2 GiB.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $field: $kind,)*
        }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($field: limits!(@convert $default $(, $convert)?),)* }
            }
        }

        /// The `limits` section: what is absent keeps its default.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct LimitsSection {
            $($(#[$doc])* #[serde(default, skip_serializing_if = "Option::is_none")]
            $field: Option<<$measure as Measure>::Written>,)*
        }

        impl LimitsSection {
            /// Checks every range; `report` gets the limit's name and a sentence for each that is
            /// out of it, and the default stands in.
            pub fn build(&self, report: &mut dyn FnMut(&'static str, String)) -> Limits {
                Limits { $($field: {
                    let default: $measure = $default;
                    let value = match self.$field {
                        None => default,
                        Some(written) => {
                            let value = <$measure as Measure>::read(written);
                            let (least, most): ($measure, $measure) = ($least, $most);
                            if value < least || value > most {
                                report($name, out_of_range(value, least, most, default));
                            }
                            value
                        }
                    };
                    limits!(@convert value $(, $convert)?)
                },)* }
            }
        }

        impl Limits {
            /// Every limit with its default and range, in the order of the reference.
            pub fn table() -> Vec<LimitRow> {
                vec![$({
                    let (default, least, most): ($measure, $measure, $measure) = ($default, $least, $most);
                    LimitRow { name: $name, default: default.show(), least: least.show(), most: most.show() }
                },)*]
            }
        }
    };
    (@convert $value:expr) => { $value };
    (@convert $value:expr, $convert:expr) => { $convert($value) };
}

fn out_of_range<T: Measure>(value: T, least: T, most: T, default: T) -> String {
    format!("{} is out of range; write {} to {} (default {})", value.show(), least.show(), most.show(), default.show())
}

fn window(bytes: Bytes) -> u32 {
    bytes.0
}

fn buffer(bytes: Bytes) -> usize {
    // A usize has at least 32 bits wherever this runs.
    bytes.0 as usize
}

fn datagram(size: Datagram) -> u16 {
    // Within its range it has 16 bits.
    u16::try_from(size.0.0).unwrap_or(u16::MAX)
}

const fn payload(bytes: u32) -> Datagram {
    Datagram(Bytes(bytes))
}

limits! {
    /// Client connections of the whole node, over all listeners. No more than half of the descriptors.
    connections / "connections": usize as usize; 8000, 1, 10_000_000;
    /// Bytes of a request's or a response's headers, field names and values together. The table of a head
    /// holds 24,576 names and panics at one more. HTTP/2 counts 32 bytes for each name beside its own, so
    /// that in half a mebibyte there are no 16,384.
    header_bytes / "header-bytes": usize as Bytes, buffer; Bytes(64 * KIB), Bytes(4 * KIB), Bytes(512 * KIB);
    /// Header lines of a request or a response.
    header_count / "header-count": usize as usize; 100, 8, 10_000;
    /// Concurrent HTTP/2 or HTTP/3 streams of one client connection.
    streams / "streams": u32 as u32; 1024, 1, 1_000_000;
    /// Bytes of one worker that came over HTTP/2 or HTTP/3 and lie unread, since their readers take none. Beyond
    /// it the sessions end that have read nothing for the longest, those of who holds most first.
    unread / "unread": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(1024 * MIB);
    /// Bytes of one worker that requests in flight hold beside bodies: heads, by their decoded bytes, and the cost of a
    /// stream. Beyond it the worker ends sessions of the client that holds most, the longest idle first.
    request_memory / "request-memory": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(1024 * MIB);
    /// HTTP/2 window of a stream, for believed peers.
    stream_window / "stream-window": u32 as Bytes, window; Bytes(4 * MIB), Bytes(65_535), Bytes(WINDOW_MAX);
    /// HTTP/2 window of a connection, for believed peers; as much wider as `unread` bytes lie on it.
    connection_window / "connection-window": u32 as Bytes, window; Bytes(16 * MIB), Bytes(65_535), Bytes(WINDOW_MAX);
    /// HTTP/2 window of a stream, for anonymous clients.
    anonymous_stream_window / "anonymous-stream-window": u32 as Bytes, window; Bytes(256 * KIB), Bytes(16 * KIB), Bytes(WINDOW_MAX);
    /// HTTP/2 window of a connection, for anonymous clients.
    anonymous_connection_window / "anonymous-connection-window": u32 as Bytes, window; Bytes(MIB), Bytes(65_535), Bytes(WINDOW_MAX);
    /// Streams that a client reset before we took them up; one more ends its connection with
    /// GOAWAY ENHANCE_YOUR_CALM (rapid reset, CVE-2023-44487). Of believed peers as many as `streams`.
    resets / "resets": usize as usize; 20, 1, 100_000;
    /// Streams of a connection that we reset because of the peer's errors, frames for those included;
    /// one more ends it likewise. Of believed peers 65,536 at least.
    error_resets / "error-resets": usize as usize; 1024, 1, 100_000;
    /// Requests that a client broke off before their answer began. One more, where they are the most of
    /// all on its HTTP/2 connection, ends that likewise; connections of believed peers are left out.
    cancels / "cancels": usize as usize; 500, 1, 100_000;
    /// For a request's headers to arrive whole; over HTTP/2 `keep-alive` bounds that.
    header_timeout / "header-timeout": Duration as Duration; secs(10), ms(100), secs(600);
    /// For a client's TLS handshake.
    tls_timeout / "tls-timeout": Duration as Duration; secs(10), ms(100), secs(600);
    /// QUIC handshakes under way on one worker, beyond which a client has to show first that it has the address
    /// that it sends from (Retry), at the price of a round trip.
    handshakes / "handshakes": usize as usize; 64, 1, 100_000;
    /// Silence after which a QUIC connection is over: its peer is gone. The shorter time of both sides holds.
    quic_idle / "quic-idle": Duration as Duration; secs(60), secs(3), secs(600);
    /// Silence after which a QUIC connection says that it is there, since a tunnel may be silent for longer. Below
    /// what peers take for the end (30 s with most of them), and what NATs do.
    quic_keep_alive / "quic-keep-alive": Duration as Duration; secs(12), ms(500), secs(300);
    /// Bytes of UDP payload that QUIC takes for granted at first; no path of QUIC has less than 1,200.
    quic_initial_mtu / "quic-initial-mtu": u16 as Datagram, datagram; payload(1200), payload(1200), payload(6500);
    /// Bytes of UDP payload that QUIC tries at most, and takes. Each of a worker's QUIC sockets has 2,048 times as
    /// much to read into. Ten leave at once, in the 64 KiB that the kernel takes.
    quic_largest_mtu / "quic-largest-mtu": u16 as Datagram, datagram; payload(1452), payload(1200), payload(6500);
    /// Bytes that the kernel keeps for a UDP socket, in each direction, so that bursts outlive a scheduling delay.
    /// It grants no more than net.core.rmem_max and wmem_max, but to a process with CAP_NET_ADMIN.
    udp_buffer / "udp-buffer": usize as Bytes, buffer; Bytes(4 * MIB), Bytes(64 * KIB), Bytes(256 * MIB);
    /// A client connection without a session under way is closed after this.
    keep_alive / "keep-alive": Duration as Duration; secs(75), ms(100), secs(86_400);
    /// Tunnels of the whole node: `tcp`, `udp`, and WebSockets and other upgrades.
    tunnels / "tunnels": usize as usize; 20_000, 1, 10_000_000;
    /// Flows of one `udp` or `socks5` listener.
    udp_flows / "udp-flows": usize as usize; 4096, 1, 10_000_000;
    /// Questions of one `dns` listener that wait for another server's answer.
    dns_questions / "dns-questions": usize as usize; 1024, 1, 1_000_000;
    /// Names that have an address of a `dns` listener's; the least recently used go first.
    dns_names / "dns-names": usize as usize; 16_384, 1, 1_000_000;
    /// Sessions for names of one prefix that a `tun` listener captures; the one that is silent for longest goes first.
    name_sessions / "name-sessions": usize as usize; 1024, 1, 1_000_000;
    /// Bytes of datagrams that wait for a slow reader, in each direction of a flow; the oldest go first.
    datagram_queue / "datagram-queue": usize as Bytes, buffer; Bytes(MIB), Bytes(64 * KIB), Bytes(256 * MIB);
    /// Bytes of a request's body that are kept so that it may be sent again.
    request_body_buffer / "request-body-buffer": usize as Bytes, buffer; Bytes(64 * KIB), Bytes(0), Bytes(64 * MIB);
    /// Connections to one endpoint, of one worker; those that tunnels have for themselves (`h1`, `tcp`) too.
    upstream_connections / "upstream-connections": usize as usize; 1024, 1, 1_000_000;
    /// Sessions of one worker that wait for a connection to an upstream.
    upstream_pending / "upstream-pending": usize as usize; 4096, 1, 10_000_000;
    /// An upstream connection without a session is closed after this.
    upstream_idle / "upstream-idle": Duration as Duration; secs(60), ms(100), secs(86_400);
    /// Connections of one worker, to all upstreams and origins together, that stand without a session.
    upstream_idle_connections / "upstream-idle-connections": usize as usize; 1024, 1, 1_000_000;
    /// Requests under way below which retries need no budget: a lone request may always be retried.
    retry_floor / "retry-floor": u32 as u32; 3, 0, 10_000;
    /// Requests of one worker that wait for another try (`retrieve`).
    retrievals / "retrievals": usize as usize; 4096, 1, 1_000_000;
    /// Exchanges in custody, of each route; and of those that arrive for routes without `custody`, together.
    custody_exchanges / "custody-exchanges": usize as usize; 10_000, 1, 1_000_000;
    /// Bytes in memory of exchanges in custody that arrive for routes without `custody`, together.
    custody_memory / "custody-memory": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(2048 * MIB);
    /// Bytes on disk of those, where the node has `state`.
    custody_disk / "custody-disk": usize as Bytes, buffer; Bytes(1024 * MIB), Bytes(MIB), Bytes(2048 * MIB);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_within_its_range() {
        let mut problems = Vec::new();
        let row = |name: &str| Limits::table().into_iter().find(|row| row.name == name).map(|row| row.default);
        let section = LimitsSection {
            connections: Some(8000),
            stream_window: Some(Size(4 << 20)),
            header_timeout: Some(Period(secs(10))),
            ..LimitsSection::default()
        };
        let limits = section.build(&mut |name, sentence| problems.push((name, sentence)));
        assert_eq!(limits, Limits::default());
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(row("datagram-queue").as_deref(), Some("1MiB"));
        assert_eq!(row("keep-alive").as_deref(), Some("75s"));
    }

    #[test]
    fn a_value_out_of_range_is_reported_with_the_range() {
        let section = LimitsSection {
            connections: Some(0),
            stream_window: Some(Size(1 << 40)),
            keep_alive: Some(Period(Duration::ZERO)),
            ..LimitsSection::default()
        };
        let mut problems = Vec::new();
        section.build(&mut |name, sentence| problems.push(format!("{name}: {sentence}")));
        assert_eq!(
            problems,
            [
                "connections: 0 is out of range; write 1 to 10000000 (default 8000)",
                "stream-window: 4294967295B is out of range; write 65535B to 2147483647B (default 4MiB)",
                "keep-alive: 0s is out of range; write 100ms to 24h (default 75s)",
            ]
        );
    }
}
