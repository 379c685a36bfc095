//! Thousands of connections through a splitter that is killed between: nothing of them stays.
//!
//! In: a client that opens and closes connections at random, and a splitter that is killed and started again. Out: every
//! byte that arrives is the right one, and at the end no socket, held SYN, rule or route is left. Never: a pause whose
//! length decides the result.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hermes_testkit::Result;
use hermes_testkit::limits::raise_open_files;
use hermes_testkit::overlay::EFFECT_TIMEOUT;
use hermes_testkit::poll::until;
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Barrier, Semaphore};
use tokio::task::JoinSet;

use super::{PORT, Path, SERVER, on_a_path};

/// All connections; those open at once in the first phase; the most that are opening or come and go at the same time.
const CONNECTIONS: usize = 10_000;
const AT_ONCE: usize = 4000;
const CHURNING: usize = 500;
/// The time after which a connection counts as broken whose packets nobody answers after a kill.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);

const SPLIT: &str = "
workers: 2
access-log: /dev/null
limits: {held-syns: 5000, connections: 9000}
listeners:
- {name: pep, protocol: transparent, capture: ['0.0.0.0/0'], ports: [8000]}
routes:
- {name: split, match: {kind: tcp}, terminate: {tcp: original, source: client}, timeout: {connect: 10s}}
";

/// How connections went. Those that a kill has ended are `broken`.
#[derive(Default)]
struct Progress {
    whole: AtomicUsize,
    broken: AtomicUsize,
}

impl Progress {
    fn ended(&self) -> usize {
        self.whole.load(Ordering::Relaxed) + self.broken.load(Ordering::Relaxed)
    }
}

/// Sends bytes and reads their echo. The server has named its client before.
async fn echo(stream: &mut TcpStream, seed: usize) -> io::Result<()> {
    let own = format!("{}\n", stream.local_addr()?);
    let sent: Vec<u8> = (0..1 + seed % 3000).map(|at| u8::try_from((at * 7 + seed) % 251).unwrap()).collect();
    stream.write_all(&sent).await?;
    let mut heard = vec![0; own.len() + sent.len()];
    stream.read_exact(&mut heard).await?;
    assert_eq!(heard, [own.as_bytes(), &sent].concat(), "other bytes than those of connection {seed}");
    Ok(())
}

/// Opens a connection and closes it in one of several ways.
async fn come_and_go(to: SocketAddr, seed: usize) -> io::Result<()> {
    let mut stream = TcpStream::connect(to).await?;
    match seed % 5 {
        // Gone at once.
        0 => {}
        // With a reset, while the echo is on its way.
        1 => {
            stream.write_all(&[1; 5000]).await?;
            stream.set_zero_linger()?;
        }
        2 => echo(&mut stream, seed).await?,
        // Half closed, and read to the end.
        3 => {
            echo(&mut stream, seed).await?;
            stream.shutdown().await?;
            let rest = stream.read_to_end(&mut Vec::new()).await?;
            assert_eq!(rest, 0);
        }
        // Silent for a while.
        _ => {
            echo(&mut stream, seed).await?;
            let silence = tokio::time::timeout(Duration::from_millis(seed as u64 % 700), stream.read_u8()).await;
            if let Ok(unexpected) = silence {
                return Err(unexpected.err().unwrap_or_else(|| io::Error::other("a byte that nobody sent")));
            }
        }
    }
    Ok(())
}

/// Runs the client in its namespace, on a thread of its own.
fn client(path: &Path, progress: &Arc<Progress>, all_open: Arc<Barrier>) -> JoinHandle<Result<()>> {
    let progress = progress.clone();
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let to: SocketAddr = (SERVER, PORT).into();
            let mut tasks = JoinSet::new();
            // First, all at once. Nothing may fail.
            let opening = Arc::new(Semaphore::new(CHURNING));
            for seed in 0..AT_ONCE {
                let (progress, all_open, opening) = (progress.clone(), all_open.clone(), opening.clone());
                tasks.spawn(async move {
                    let permit = opening.acquire().await.unwrap();
                    let mut stream = TcpStream::connect(to).await.unwrap();
                    echo(&mut stream, seed).await.unwrap();
                    drop(permit);
                    all_open.wait().await;
                    all_open.wait().await;
                    drop(stream);
                    progress.whole.fetch_add(1, Ordering::Relaxed);
                });
            }
            while tasks.join_next().await.transpose().unwrap().is_some() {}
            // Then they come and go, whatever happens to the splitter.
            let churning = Arc::new(Semaphore::new(CHURNING));
            for seed in AT_ONCE..CONNECTIONS {
                let permit = churning.clone().acquire_owned().await.unwrap();
                let progress = progress.clone();
                tasks.spawn(async move {
                    let went = tokio::time::timeout(CONNECTION_TIMEOUT, come_and_go(to, seed)).await;
                    let count = if matches!(went, Ok(Ok(()))) { &progress.whole } else { &progress.broken };
                    count.fetch_add(1, Ordering::Relaxed);
                    drop(permit);
                });
            }
            while tasks.join_next().await.transpose().unwrap().is_some() {}
        });
    };
    path.client.spawn_thread(work).unwrap()
}

impl Path {
    /// Open TCP sockets on the router, without those in TIME-WAIT.
    async fn sockets(&self) -> usize {
        let all = self.router.output(&["ss", "-Htan", "state", "connected", "exclude", "time-wait"]).await.unwrap();
        all.lines().count()
    }

    /// Packets in all queues of NFQUEUE on the router.
    async fn held(&self) -> u64 {
        let queues = self.router.output(&["cat", "/proc/net/netfilter/nfnetlink_queue"]).await.unwrap();
        queues.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum()
    }
}

#[test]
fn nothing_of_ten_thousand_connections_stays() {
    on_a_path("transparent::many_connections", async |path, overlay| {
        raise_open_files().unwrap();
        let start = || overlay.node("pep").document(SPLIT).within(&path.router).start();
        let _origin = path.echo((SERVER, PORT).into()).await;
        let mut node = start().await.unwrap();
        let descriptors = node.descriptors().unwrap();
        let progress = Arc::new(Progress::default());
        let all_open = Arc::new(Barrier::new(AT_ONCE + 1));
        let clients = client(&path, &progress, all_open.clone());
        tokio::time::timeout(EFFECT_TIMEOUT, all_open.wait()).await.expect("not all connections opened");
        let active = node.metric("hermes_sessions_open", "").await.unwrap();
        // A repeated SYN begins none.
        assert_eq!(active, AT_ONCE as f64, "{AT_ONCE} connections");
        all_open.wait().await;
        for (ended, signal) in [(5000, Signal::SIGKILL), (6500, Signal::SIGKILL), (8000, Signal::SIGTERM)] {
            until("connections come and go", || async { progress.ended() >= ended }).await;
            node.signal(signal).unwrap();
            node.ended().await;
            node = start().await.unwrap();
        }
        until("all connections end", || async { clients.is_finished() }).await;
        clients.join().unwrap().unwrap();
        let (whole, broken) = (progress.whole.load(Ordering::Relaxed), progress.broken.load(Ordering::Relaxed));
        assert_eq!(whole + broken, CONNECTIONS);
        // A kill breaks those that are open.
        assert!((1..=3 * CHURNING).contains(&broken), "{broken} connections broke");
        node.quiet().await;
        until("no socket is left", || async { path.sockets().await == 0 }).await;
        until("no SYN is held", || async { path.held().await == 0 }).await;
        until("the descriptors are closed", || async { node.descriptors().unwrap() <= descriptors + 8 }).await;
        node.signal(Signal::SIGTERM).unwrap();
        node.ended().await;
        assert_eq!(path.rules().await, "");
    });
}
