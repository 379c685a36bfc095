//! Limits: bounds of all buffers, queues, tables and waits of a node.
//!
//! In: the `limits` section of a document. Out: `Limits`, every value within its range.
//! Never: an absent or infinite limit.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::scalar::{ByteSize, HumanDuration};

/// A limit, as listed in the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRow {
    /// Key in the document.
    pub name: &'static str,
    /// Default, as written in a document.
    pub default: String,
    /// Minimum.
    pub min: String,
    /// Maximum.
    pub max: String,
}

/// Type of a limit: its document form, comparison and display.
trait Measure: Copy + PartialOrd {
    /// Scalar type in the document.
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

/// A number of bytes up to the maximum HTTP/2 window.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Bytes(u32);

impl Measure for Bytes {
    type Written = ByteSize;
    fn read(written: ByteSize) -> Bytes {
        Bytes(u32::try_from(written.0).unwrap_or(u32::MAX))
    }
    fn show(self) -> String {
        ByteSize(u64::from(self.0)).to_string()
    }
}

impl Measure for Duration {
    type Written = HumanDuration;
    fn read(written: HumanDuration) -> Duration {
        written.0
    }
    fn show(self) -> String {
        HumanDuration(self).to_string()
    }
}

/// Size of the payload of a UDP datagram.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Datagram(Bytes);

impl Measure for Datagram {
    type Written = ByteSize;
    fn read(written: ByteSize) -> Self {
        Self(Bytes::read(written))
    }
    fn show(self) -> String {
        self.0.show()
    }
}

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// Maximum HTTP/2 window (RFC 9113, 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Generates from one definition: the typed limits, their section of the document, their check, and the table that the
/// reference is tested against.
macro_rules! limits {
    ($($(#[$doc:meta])* $field:ident / $name:literal : $kind:ty as $measure:ty $(, $convert:expr)? ;
       $default:expr, $min:expr, $max:expr;)*) => {
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

        /// The `limits` section; an absent limit has its default.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct LimitsSection {
            $($(#[$doc])* #[serde(default, skip_serializing_if = "Option::is_none")]
            $field: Option<<$measure as Measure>::Written>,)*
        }

        impl LimitsSection {
            /// Checks every range. `report` gets the name and a message of each limit that is out of range.
            pub fn build(&self, report: &mut dyn FnMut(&'static str, String)) -> Limits {
                Limits { $($field: {
                    let default: $measure = $default;
                    let value = match self.$field {
                        None => default,
                        Some(written) => {
                            let value = <$measure as Measure>::read(written);
                            let (min, max): ($measure, $measure) = ($min, $max);
                            if value < min || value > max {
                                report($name, out_of_range(value, min, max, default));
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
                    let (default, min, max): ($measure, $measure, $measure) = ($default, $min, $max);
                    LimitRow { name: $name, default: default.show(), min: min.show(), max: max.show() }
                },)*]
            }
        }
    };
    (@convert $value:expr) => { $value };
    (@convert $value:expr, $convert:expr) => { $convert($value) };
}

fn out_of_range<T: Measure>(value: T, min: T, max: T, default: T) -> String {
    format!("{} is out of range; must be {} to {} (default {})", value.show(), min.show(), max.show(), default.show())
}

fn window(bytes: Bytes) -> u32 {
    bytes.0
}

fn buffer(bytes: Bytes) -> usize {
    // A usize has at least 32 bits on all supported platforms.
    bytes.0 as usize
}

fn datagram(size: Datagram) -> u16 {
    // The range of the limit ensures that 16 bits suffice.
    u16::try_from(size.0.0).unwrap_or(u16::MAX)
}

const fn payload(bytes: u32) -> Datagram {
    Datagram(Bytes(bytes))
}

limits! {
    /// Client connections of the whole node, over all listeners. Uses at most half of the file descriptors.
    connections / "connections": usize as usize; 8000, 1, 10_000_000;
    /// Bytes of the header of a request or response, names and values together. The crate `http` panics beyond 24,576
    /// fields. HTTP/2 counts 32 extra bytes per field, so the maximum of 512 KiB allows fewer than 16,384.
    header_bytes / "header-bytes": usize as Bytes, buffer; Bytes(64 * KIB), Bytes(4 * KIB), Bytes(512 * KIB);
    /// Field lines of a request or a response.
    header_count / "header-count": usize as usize; 100, 8, 10_000;
    /// Concurrent HTTP/2 or HTTP/3 streams of one client connection.
    streams / "streams": u32 as u32; 1024, 1, 1_000_000;
    /// Bytes received over HTTP/2 or HTTP/3 on one worker that no reader has consumed. Above it, the worker closes
    /// sessions that have not read for the longest time, of the client with most bytes first.
    receive_buffer / "receive-buffer": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(1024 * MIB);
    /// Bytes that requests in flight on one worker hold besides bodies: decoded heads and a cost per stream. Above it,
    /// the worker closes sessions of the client that holds most, the longest idle first.
    request_memory / "request-memory": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(1024 * MIB);
    /// HTTP/2 stream window of trusted peers.
    stream_window / "stream-window": u32 as Bytes, window; Bytes(4 * MIB), Bytes(65_535), Bytes(MAX_WINDOW);
    /// HTTP/2 connection window of trusted peers; grows by unread bytes of the connection.
    connection_window / "connection-window": u32 as Bytes, window; Bytes(16 * MIB), Bytes(65_535), Bytes(MAX_WINDOW);
    /// HTTP/2 stream window of anonymous clients.
    anonymous_stream_window / "anonymous-stream-window": u32 as Bytes, window; Bytes(256 * KIB), Bytes(16 * KIB), Bytes(MAX_WINDOW);
    /// HTTP/2 connection window of anonymous clients.
    anonymous_connection_window / "anonymous-connection-window": u32 as Bytes, window; Bytes(MIB), Bytes(65_535), Bytes(MAX_WINDOW);
    /// Streams that a client resets before the node accepts them. One more closes its connection with GOAWAY
    /// ENHANCE_YOUR_CALM (rapid reset, CVE-2023-44487). Trusted peers may reset as many as `streams`.
    resets / "resets": usize as usize; 20, 1, 100_000;
    /// Streams of a connection that the node resets because of the peer's errors, including frames for such streams.
    /// One more closes it likewise. Trusted peers have at least 65,536.
    error_resets / "error-resets": usize as usize; 1024, 1, 100_000;
    /// Requests that a client cancels before their response begins. If they are the majority of its HTTP/2 connection,
    /// one more closes it likewise. Trusted peers are exempt.
    cancels / "cancels": usize as usize; 500, 1, 100_000;
    /// Time for a complete request header; over HTTP/2 `keep-alive` bounds it.
    header_timeout / "header-timeout": Duration as Duration; secs(10), ms(100), secs(600);
    /// Time for a client's TLS handshake.
    tls_timeout / "tls-timeout": Duration as Duration; secs(10), ms(100), secs(600);
    /// QUIC handshakes in progress on one worker. Above it, a client must first prove its source address (Retry), which
    /// costs a round trip.
    handshakes / "handshakes": usize as usize; 64, 1, 100_000;
    /// Idle timeout of a QUIC connection; the shorter one of both peers applies.
    quic_idle / "quic-idle": Duration as Duration; secs(60), secs(3), secs(600);
    /// Interval of QUIC keep-alives, since tunnels may be idle for longer. Shorter than the idle timeouts of most peers
    /// (30 s) and of NATs.
    quic_keep_alive / "quic-keep-alive": Duration as Duration; secs(12), ms(500), secs(300);
    /// Initial UDP payload size of QUIC in bytes; every QUIC path supports 1,200.
    quic_initial_mtu / "quic-initial-mtu": u16 as Datagram, datagram; payload(1200), payload(1200), payload(6500);
    /// Maximum UDP payload size of QUIC in bytes, to send and to receive. Each QUIC socket of a worker has a receive
    /// buffer of 2,048 times this size. Ten datagrams leave at once, within the kernel's 64 KiB.
    quic_max_mtu / "quic-max-mtu": u16 as Datagram, datagram; payload(1452), payload(1200), payload(6500);
    /// Kernel buffer of a UDP socket in bytes, for each direction, so that bursts outlive a scheduling delay. Without
    /// CAP_NET_ADMIN, the kernel grants at most net.core.rmem_max and wmem_max.
    udp_buffer / "udp-buffer": usize as Bytes, buffer; Bytes(4 * MIB), Bytes(64 * KIB), Bytes(256 * MIB);
    /// Idle time after which a client connection without a session is closed.
    keep_alive / "keep-alive": Duration as Duration; secs(75), ms(100), secs(86_400);
    /// Tunnels of the whole node: `tcp`, `udp`, WebSockets and other upgrades.
    tunnels / "tunnels": usize as usize; 20_000, 1, 10_000_000;
    /// Flows of one `udp` or `socks5` listener.
    udp_flows / "udp-flows": usize as usize; 4096, 1, 10_000_000;
    /// SYNs that one `transparent` listener holds until their far connection stands. Others pass, and their connections
    /// are not split.
    held_syns / "held-syns": usize as usize; 4096, 1, 1_000_000;
    /// Queries of one `dns` listener that await an upstream resolver.
    dns_questions / "dns-questions": usize as usize; 1024, 1, 1_000_000;
    /// Names with a virtual address of a `dns` listener; the least recently used is evicted first.
    dns_names / "dns-names": usize as usize; 16_384, 1, 1_000_000;
    /// Sessions for names in one captured prefix of a `tun` listener; the longest idle is evicted first.
    name_sessions / "name-sessions": usize as usize; 1024, 1, 1_000_000;
    /// Bytes of datagrams queued for a slow reader, in each direction of a flow; the oldest are dropped first.
    datagram_queue / "datagram-queue": usize as Bytes, buffer; Bytes(MIB), Bytes(64 * KIB), Bytes(256 * MIB);
    /// Bytes of a request body that are buffered for a retry.
    request_body_buffer / "request-body-buffer": usize as Bytes, buffer; Bytes(64 * KIB), Bytes(0), Bytes(64 * MIB);
    /// Connections of one worker to one endpoint, including those that carry one tunnel each (`h1`, `tcp`).
    upstream_connections / "upstream-connections": usize as usize; 1024, 1, 1_000_000;
    /// Sessions of one worker that wait for an upstream connection.
    upstream_pending / "upstream-pending": usize as usize; 4096, 1, 10_000_000;
    /// Idle time after which an upstream connection without a session is closed.
    upstream_idle / "upstream-idle": Duration as Duration; secs(60), ms(100), secs(86_400);
    /// Idle connections of one worker, to all upstreams and origins together.
    upstream_idle_connections / "upstream-idle-connections": usize as usize; 1024, 1, 1_000_000;
    /// Requests in flight below which retries need no budget, so that a single request can always be retried.
    min_retry_concurrency / "min-retry-concurrency": u32 as u32; 3, 0, 10_000;
    /// Requests of one worker that wait for another attempt (`resume`).
    resume_pending / "resume-pending": usize as usize; 4096, 1, 1_000_000;
    /// Exchanges in custody per route; and in total for exchanges that arrive for routes without `custody`.
    custody_exchanges / "custody-exchanges": usize as usize; 10_000, 1, 1_000_000;
    /// Bytes in memory for exchanges in custody that arrive for routes without `custody`, in total.
    custody_memory / "custody-memory": usize as Bytes, buffer; Bytes(64 * MIB), Bytes(MIB), Bytes(2048 * MIB);
    /// Bytes on disk for the same exchanges, if the node has `state`.
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
            stream_window: Some(ByteSize(4 << 20)),
            header_timeout: Some(HumanDuration(secs(10))),
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
            stream_window: Some(ByteSize(1 << 40)),
            keep_alive: Some(HumanDuration(Duration::ZERO)),
            ..LimitsSection::default()
        };
        let mut problems = Vec::new();
        section.build(&mut |name, sentence| problems.push(format!("{name}: {sentence}")));
        assert_eq!(
            problems,
            [
                "connections: 0 is out of range; must be 1 to 10000000 (default 8000)",
                "stream-window: 4294967295B is out of range; must be 65535B to 2147483647B (default 4MiB)",
                "keep-alive: 0s is out of range; must be 100ms to 24h (default 75s)",
            ]
        );
    }
}
