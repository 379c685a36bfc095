//! Dials one of several addresses: Happy Eyeballs (RFC 8305).
//!
//! In: addresses that the caller resolved *and checked*; some may arrive later. Exactly these are dialled, and no name
//! is resolved again in between. Out: one connected, tuned socket, or whatever another kind of attempt returns.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// The recommended delay between attempts (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of attempts for one name. A name with hundreds of addresses is a mistake or an attack.
const MAX_ATTEMPTS: usize = 8;

/// Addresses to dial, and a future for those of the other address family, if DNS has not answered for it yet (RFC 8305,
/// section 3).
#[derive(Clone)]
pub struct Addresses {
    now: Vec<IpAddr>,
    late: Option<Shared<Late>>,
}

type Late = Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send>>;

impl From<Vec<IpAddr>> for Addresses {
    fn from(now: Vec<IpAddr>) -> Self {
        Self { now, late: None }
    }
}

impl Addresses {
    /// Returns these addresses, followed by those that `late` resolves to.
    pub fn followed_by(now: Vec<IpAddr>, late: impl Future<Output = Vec<IpAddr>> + Send + 'static) -> Self {
        let late: Late = Box::pin(late);
        Self { now, late: Some(late.shared()) }
    }

    /// The addresses that DNS had returned when this value was created.
    pub fn now(&self) -> &[IpAddr] {
        &self.now
    }

    /// Waits for the addresses of the other family. Empty if DNS had already answered for both families.
    pub async fn late(&self) -> Vec<IpAddr> {
        match &self.late {
            Some(late) => late.clone().await,
            None => Vec::new(),
        }
    }

    /// Applies `change` to the present addresses, and later to those of the other family.
    #[must_use]
    pub fn map(self, change: impl Fn(Vec<IpAddr>) -> Vec<IpAddr> + Send + 'static) -> Self {
        let now = change(self.now);
        match self.late {
            Some(late) => Self::followed_by(now, late.map(change)),
            None => now.into(),
        }
    }
}

/// Connects to the first address that answers. Families alternate, starting with that of the first address. A failed
/// attempt starts the next one immediately. A repeated address is tried again, unless an attempt at it has failed.
///
/// # Errors
/// The error of the last failed attempt, or `InvalidInput` if there is no address.
pub async fn connect(addresses: &Addresses, port: u16) -> io::Result<TcpStream> {
    connect_from(None, addresses, port).await
}

/// Connects like [`connect`], from this local address.
///
/// # Errors
/// The errors of [`connect`], and that the host does not have the local address.
pub async fn connect_from(source: Option<IpAddr>, addresses: &Addresses, port: u16) -> io::Result<TcpStream> {
    let bind = move |socket: &TcpSocket| source.map_or(Ok(()), |source| socket.bind(SocketAddr::new(source, 0)));
    first(addresses, |ip| connect_one(SocketAddr::new(ip, port), bind)).await
}

/// Connects like [`connect`], for a session: the socket must not use the file descriptors that are reserved for
/// incoming connections and the node itself.
///
/// # Errors
/// The errors of [`connect`] and [`host::spare`](crate::host::spare).
pub async fn connect_session(addresses: &Addresses, port: u16) -> io::Result<TcpStream> {
    first(addresses, |ip| connect_one(SocketAddr::new(ip, port), crate::host::spare)).await
}

/// Starts an attempt at every interval `times.0`, round robin over the addresses, until one succeeds. Each attempt
/// times out after `times.1`. Attempts overlap, because the round trip may be longer than the interval. Calls `failed`
/// with the error of each attempt that fails before its timeout.
pub async fn until_answered(
    addresses: &[IpAddr],
    port: u16,
    times: (Duration, Duration),
    failed: impl FnMut(&io::Error),
) -> TcpStream {
    let attempt = |ip| connect_one(SocketAddr::new(ip, port), crate::host::spare);
    until_one_is(addresses, times, attempt, failed).await
}

/// Works like [`until_answered`], for any kind of attempt: `every` is the interval, `patience` the timeout.
pub async fn until_one_is<T, F>(
    addresses: &[IpAddr],
    (every, patience): (Duration, Duration),
    mut attempt: impl FnMut(IpAddr) -> F,
    mut failed: impl FnMut(&io::Error),
) -> T
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    // Dropping the set ends the remaining attempts.
    let mut attempts = JoinSet::new();
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut turns = addresses.iter().copied().cycle();
    loop {
        tokio::select! {
            biased;
            Some(ended) = attempts.join_next(), if !attempts.is_empty() => match ended {
                Ok(Ok(Ok(answered))) => return answered,
                Ok(Ok(Err(error))) => failed(&error),
                // The attempt timed out.
                Ok(Err(_)) | Err(_) => {}
            },
            _ = tick.tick() => {
                if let Some(ip) = turns.next() {
                    attempts.spawn(tokio::time::timeout(patience, attempt(ip)));
                }
            }
        }
    }
}

/// Works like [`connect`], for any kind of attempt.
///
/// # Errors
/// The errors of [`connect`].
pub async fn first<T, F>(addresses: &Addresses, mut attempt: impl FnMut(IpAddr) -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    if let ([only], None) = (&addresses.now[..], &addresses.late) {
        return attempt(*only).await;
    }
    race(addresses, attempt).await
}

async fn connect_one(
    address: SocketAddr,
    may_have: impl FnOnce(&TcpSocket) -> io::Result<()>,
) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    may_have(&socket)?;
    crate::socket_mark::apply(SockRef::from(&socket));
    crate::tcp::tune(SockRef::from(&socket));
    socket.connect(address).await
}

async fn race<T, F>(addresses: &Addresses, mut attempt: impl FnMut(IpAddr) -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    // Dropping the set ends the attempts that lost.
    let mut attempts = JoinSet::new();
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, "no address to dial");
    let mut waiting = VecDeque::from(interleave(&addresses.now));
    let mut late = pin!(addresses.late());
    let mut are_all_known = addresses.late.is_none();
    // An address at which an attempt failed is not tried again, even if it is listed again.
    let mut failed = Vec::new();
    let mut begun = 0;
    let mut begin = |attempts: &mut JoinSet<_>, waiting: &mut VecDeque<IpAddr>, failed: &[IpAddr]| {
        waiting.retain(|ip| !failed.contains(ip));
        if let Some(ip) = waiting.pop_front().filter(|_| begun < MAX_ATTEMPTS) {
            begun += 1;
            let attempt = attempt(ip);
            attempts.spawn(async move { attempt.await.map_err(|error| (ip, error)) });
        }
    };
    begin(&mut attempts, &mut waiting, &failed);
    loop {
        if attempts.is_empty() && are_all_known {
            return Err(last);
        }
        tokio::select! {
            finished = attempts.join_next(), if !attempts.is_empty() => match finished {
                Some(Ok(Ok(connected))) => return Ok(connected),
                Some(Ok(Err((ip, error)))) => {
                    last = error;
                    failed.push(ip);
                    begin(&mut attempts, &mut waiting, &failed);
                }
                Some(Err(panicked)) => return Err(io::Error::other(panicked)),
                None => {}
            },
            found = &mut late, if !are_all_known => {
                are_all_known = true;
                // The other family comes next: all attempts so far used the first family.
                let known: Vec<IpAddr> = found.into_iter().chain(waiting.drain(..)).collect();
                waiting = interleave(&known).into();
                if attempts.is_empty() {
                    begin(&mut attempts, &mut waiting, &failed);
                }
            }
            () = tokio::time::sleep(ATTEMPT_DELAY), if !attempts.is_empty() => {
                begin(&mut attempts, &mut waiting, &failed);
            }
        }
    }
}

/// Orders the addresses so that the families alternate, beginning with that of the first address.
fn interleave(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let first_is_v6 = addresses.first().is_some_and(IpAddr::is_ipv6);
    let (mut leading, mut trailing) = (Vec::new(), Vec::new());
    for address in addresses {
        if address.is_ipv6() == first_is_v6 { leading.push(*address) } else { trailing.push(*address) }
    }
    let mut ordered = Vec::with_capacity(addresses.len());
    let mut trailing = trailing.into_iter();
    for address in leading {
        ordered.push(address);
        ordered.extend(trailing.next());
    }
    ordered.extend(trailing);
    ordered.truncate(MAX_ATTEMPTS);
    ordered
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn families_alternate() {
        let mixed = [ip("::1"), ip("::2"), ip("10.0.0.1"), ip("::3"), ip("10.0.0.2")];
        assert_eq!(interleave(&mixed), [ip("::1"), ip("10.0.0.1"), ip("::2"), ip("10.0.0.2"), ip("::3")]);
    }

    #[tokio::test]
    async fn a_refused_address_does_not_delay_the_next() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // The port of ::1 is closed.
        let stream = connect(&vec![ip("::1"), ip("127.0.0.1")].into(), port).await.unwrap();
        assert!(stream.peer_addr().unwrap().is_ipv4());
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_is_named_again_is_tried_again_where_it_says_nothing_alone() {
        for (answers, tried) in [(true, 1), (false, 3)] {
            let mut attempts = 0;
            let attempt = |_| {
                attempts += 1;
                async move {
                    if answers {
                        Err::<(), _>(io::ErrorKind::ConnectionRefused.into())
                    } else {
                        std::future::pending().await
                    }
                }
            };
            let _ = tokio::time::timeout(4 * ATTEMPT_DELAY, first(&vec![ip("::1"); 3].into(), attempt)).await;
            assert_eq!(attempts, tried);
        }
    }

    /// The addresses of the other family arrive after the first attempt has failed, or while it is pending.
    #[tokio::test(start_paused = true)]
    async fn addresses_that_come_late_are_dialled_too() {
        for answers in [true, false] {
            let late = async {
                tokio::time::sleep(2 * ATTEMPT_DELAY).await;
                vec![ip("10.0.0.1")]
            };
            let addresses = Addresses::followed_by(vec![ip("::1")], late);
            let attempt = |ip: IpAddr| async move {
                match ip {
                    IpAddr::V4(_) => Ok(ip),
                    IpAddr::V6(_) if answers => Err(io::ErrorKind::ConnectionRefused.into()),
                    IpAddr::V6(_) => std::future::pending().await,
                }
            };
            assert_eq!(first(&addresses, attempt).await.unwrap(), ip("10.0.0.1"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_that_never_come_hold_up_nobody() {
        let addresses = Addresses::followed_by(vec![ip("::1"), ip("::2")], std::future::pending());
        let attempt = |address: IpAddr| async move {
            if address == ip("::2") { Ok(()) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
        };
        first(&addresses, attempt).await.unwrap();
    }

    #[tokio::test]
    async fn no_address_is_an_error() {
        assert_eq!(connect(&Vec::new().into(), 1).await.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
