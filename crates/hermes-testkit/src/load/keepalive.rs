//! HTTP/1.1 on lasting connections: how many requests a path carries.
//!
//! In: the number of connections and the duration. Out: requests completed within the measured time, and their latency.
//! Closed loop: a connection sends the next request as soon as it has its response.

use std::{
    cell::Cell,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::{net::TcpStream, task::JoinSet};

use super::{
    Load, Outcome,
    exchange::{RESPONSE_TIMEOUT, get, payload},
    outcome::{Failure, Recorder},
    response::Connection,
    window::Window,
};
use crate::Result;

/// The measured time as every connection sees it.
#[derive(Clone)]
pub(super) struct Span {
    pub(super) begin: Instant,
    pub(super) end: Instant,
    /// True while the clocks run: an answer counts if it comes then. Planned times would not do, since on a busy
    /// machine the clocks are read late.
    measuring: Rc<Cell<bool>>,
}

pub(super) async fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::KeepAlive { address, authority, length, connections, warmup, window } = load else {
        unreachable!("dispatched by kind");
    };
    let shared = Rc::new((get(authority), payload(*length)));
    let span = Span::after(*warmup, *window);
    let mut tasks = JoinSet::new();
    for _ in 0..*connections {
        let (shared, span, address) = (Rc::clone(&shared), span.clone(), *address);
        tasks.spawn_local(async move {
            let mut recorder = Recorder::default();
            let talk = converse(address, &shared.0, &shared.1, &span, &mut recorder);
            match tokio::time::timeout_at((span.end + RESPONSE_TIMEOUT).into(), talk).await {
                Ok(Ok(())) => {}
                Ok(Err(failure)) => recorder.failure(&failure),
                Err(_) => recorder.failure(&Failure::Timeout),
            }
            recorder
        });
    }
    Ok(span.measure(tasks, watch).await)
}

/// Sends requests on one connection. A failure ends it and is counted; the missing connection lowers the rate.
async fn converse(
    address: std::net::SocketAddr,
    request: &[u8],
    payload: &[u8],
    span: &Span,
    recorder: &mut Recorder,
) -> std::result::Result<(), Failure> {
    let stream = TcpStream::connect(address).await.map_err(|e| Failure::Connect(e.kind()))?;
    stream.set_nodelay(true)?;
    let mut connection = Connection::new(stream);
    let mut requests = Instant::now();
    while requests < span.end {
        connection.get(request, payload).await?;
        let answered = Instant::now();
        if span.measuring() {
            recorder.success(answered - requests);
        }
        requests = answered;
    }
    Ok(())
}

impl Span {
    pub(super) fn after(warmup_ms: u64, window_ms: u64) -> Self {
        let begin = Instant::now() + Duration::from_millis(warmup_ms);
        let end = begin + Duration::from_millis(window_ms);
        Self { begin, end, measuring: Rc::new(Cell::new(false)) }
    }

    pub(super) fn measuring(&self) -> bool {
        self.measuring.get()
    }

    /// Reads clocks at both ends of the span while `tasks` run, then sums up what they recorded.
    pub(super) async fn measure(&self, mut tasks: JoinSet<Recorder>, watch: &[u32]) -> Outcome {
        tokio::time::sleep_until(self.begin.into()).await;
        let window = Window::open(watch);
        self.measuring.set(true);
        tokio::time::sleep_until(self.end.into()).await;
        self.measuring.set(false);
        let mut clocks = Outcome::default();
        window.close(&mut clocks);
        let mut all = Recorder::default();
        while let Some(finished) = tasks.join_next().await {
            match finished {
                Ok(recorder) => all.absorb(recorder),
                Err(_) => all.failure(&Failure::Malformed("a connection's task broke")),
            }
        }
        let Outcome { seconds, load_cpu, watched_cpu, machine_cpu, .. } = clocks;
        Outcome { seconds, load_cpu, watched_cpu, machine_cpu, ..all.outcome() }
    }
}
