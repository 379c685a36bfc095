//! Clients that arrive at random (Poisson) and do not wait for each other: the delay that users see while workers are busy.
//!
//! In: a rate, the requests of each client, the work that they ask for, and a seed. Out: the latency of each request that began in the
//! measured time; that of a client's first one has the connect in it. It counts from the moment at which the client acts: the timers
//! of the load have a resolution of a millisecond, and what they are late is no delay of the proxy. Each client has a source address
//! of its own in 127.0.0.0/8, since addresses are hashed onto workers. The same seed makes the same clients, so that contenders can be
//! compared. Never: a client that is left out because others are slow.

use std::{
    cell::Cell,
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
    time::{Duration, Instant},
};

use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use tokio::{
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};

use super::{
    Load, Outcome,
    exchange::RESPONSE_TIMEOUT,
    keepalive::Span,
    outcome::{Failure, Recorder},
    response::Connection,
};
use crate::Result;

/// The plan that all clients share.
struct Plan {
    requests: usize,
    pause: Duration,
    work: Vec<(Vec<u8>, u32)>,
    delayed: Duration,
    /// Delayed responses.
    late: Cell<u64>,
    /// Responses within the measured time.
    in_time: Cell<u64>,
}

pub(super) async fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Arrivals { addresses, rate, requests, pause, work, delayed, seed, warmup, window } = load else {
        unreachable!("dispatched by kind");
    };
    let plan = Rc::new(Plan {
        requests: *requests,
        pause: Duration::from_millis(*pause),
        work: work.iter().map(|(work, weight)| (request(work), *weight)).collect(),
        delayed: Duration::from_millis(*delayed),
        late: Cell::new(0),
        in_time: Cell::new(0),
    });
    let span = Span::after(*warmup, *window);
    let mut tasks = JoinSet::new();
    let (arriving, addresses, between) = ((plan.clone(), span.clone()), addresses.clone(), 1.0 / rate);
    let mut random = SmallRng::seed_from_u64(*seed);
    tasks.spawn_local(async move {
        let (plan, span) = arriving;
        let mut clients = JoinSet::new();
        let mut arrival = Instant::now();
        for address in addresses.iter().cycle() {
            arrival += random_time(&mut random, between);
            if arrival >= span.end {
                break;
            }
            // Drawn before the client acts: what it draws later does not depend on how fast others are.
            let mut of_client = SmallRng::from_rng(&mut random);
            tokio::time::sleep_until(arrival.into()).await;
            let (plan, span, address) = (plan.clone(), span.clone(), *address);
            clients.spawn_local(async move {
                let mut recorder = Recorder::default();
                if let Err(failure) = plan.serve(address, &span, &mut of_client, &mut recorder).await {
                    recorder.failure(&failure);
                }
                recorder
            });
        }
        let mut all = Recorder::default();
        let last = span.end + RESPONSE_TIMEOUT;
        while let Ok(Some(client)) = tokio::time::timeout_at(last.into(), clients.join_next()).await {
            match client {
                Ok(recorder) => all.absorb(recorder),
                Err(_) => all.failure(&Failure::Malformed("a client's task broke")),
            }
        }
        (0..clients.len()).for_each(|_| all.failure(&Failure::Timeout));
        all
    });
    let mut outcome = span.measure(tasks, watch).await;
    outcome.delayed = plan.late.get();
    outcome.in_time = Some(plan.in_time.get());
    Ok(outcome)
}

impl Plan {
    /// Runs one client, until its last response. Requests that would begin after the measured time are left out.
    async fn serve(
        &self,
        address: SocketAddr,
        span: &Span,
        random: &mut SmallRng,
        recorder: &mut Recorder,
    ) -> std::result::Result<(), Failure> {
        let mut begun = Instant::now();
        let mut connection = connect(address, random).await?;
        for number in 0..self.requests {
            if number > 0 {
                tokio::time::sleep(random_time(random, self.pause.as_secs_f64())).await;
                begun = Instant::now();
            }
            if begun >= span.end {
                break;
            }
            connection.get(self.any_request(random), RESPONSE).await?;
            let latency = begun.elapsed();
            if span.begin <= begun {
                recorder.success(latency);
                self.late.set(self.late.get() + u64::from(latency > self.delayed));
                self.in_time.set(self.in_time.get() + u64::from(span.measuring()));
            }
        }
        Ok(())
    }

    fn any_request(&self, random: &mut SmallRng) -> &[u8] {
        let total: u32 = self.work.iter().map(|(_, weight)| weight).sum();
        let mut left = random.random_range(0..total.max(1));
        let chosen = self.work.iter().find(|(_, weight)| {
            let is_it = left < *weight;
            left = left.saturating_sub(*weight);
            is_it
        });
        chosen.map_or(b"", |(request, _)| request)
    }
}

/// Connects from an address of its own in 127.0.0.0/8.
pub(super) async fn connect(
    address: SocketAddr,
    random: &mut SmallRng,
) -> std::result::Result<Connection<TcpStream>, Failure> {
    let socket = TcpSocket::new_v4()?;
    let source = Ipv4Addr::from_bits(Ipv4Addr::LOCALHOST.to_bits() + random.random_range(1..1 << 23));
    socket.bind((source, 0).into())?;
    let stream = socket.connect(address).await.map_err(|error| Failure::Connect(error.kind()))?;
    stream.set_nodelay(true)?;
    Ok(Connection::new(stream))
}

/// A request for work of a worker (`crate::work`).
pub(super) fn request(work: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nhost: bench\r\nx-work: {work}\r\n\r\n").into_bytes()
}

/// The response of all contenders.
pub(super) const RESPONSE: &[u8] = b"ok\n";

/// A time between two events that are independent of each other, with this mean in seconds.
fn random_time(random: &mut SmallRng, mean: f64) -> Duration {
    let uniform: f64 = random.random_range(f64::EPSILON..1.0);
    Duration::from_secs_f64(-uniform.ln() * mean)
}
