//! Test helpers for namespaces with devices: threads inside, a relay between two queues, and a link to an outside
//! world.
//!
//! In: namespaces, queues. Out: the result of a closure that runs meanwhile, and the relayed traffic. Never: a real
//! network.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::ErrorKind;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hermes_net::tun::{IdleQueue, Queue, QueueResult, ReceiveBuffer};
use hermes_testkit::netns::Namespace;

/// Timeout of every wait.
pub(crate) const IO_TIMEOUT: Duration = Duration::from_secs(20);

/// Lets one test run at a time: `hermes_net` finds the devices of its process by their interface index, which devices of
/// several namespaces share.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs something on a thread inside a namespace.
pub(crate) fn inside<T: Send>(namespace: &Namespace, what: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            namespace.enter().unwrap();
            what()
        });
        thread.join().unwrap()
    })
}

/// The traffic of one direction.
#[derive(Debug, Default)]
pub(crate) struct DirectionCounters {
    pub(crate) received: Cell<QueueResult>,
    pub(crate) sent: Cell<QueueResult>,
    pub(crate) longest: Cell<usize>,
}

fn add(sum: &Cell<QueueResult>, moved: QueueResult) {
    let mut now = sum.get();
    now.packets += moved.packets;
    now.refused += moved.refused;
    now.calls += moved.calls;
    sum.set(now);
}

/// Relays all packets from one queue into the other.
async fn carry(from: &Queue, into: &Queue, counters: &DirectionCounters) {
    let mut buffer = ReceiveBuffer::default();
    let packets: RefCell<Vec<Bytes>> = RefCell::default();
    loop {
        let mut each = |packet: Bytes| {
            counters.longest.set(counters.longest.get().max(packet.len()));
            packets.borrow_mut().push(packet);
        };
        let moved = poll_fn(|cx| from.poll_receive(cx, &mut buffer, &mut each)).await.unwrap();
        add(&counters.received, moved);
        let packets = packets.take();
        let mut left = &packets[..];
        while !left.is_empty() {
            match into.try_send(left) {
                Ok(moved) => {
                    left = &left[moved.taken()..];
                    add(&counters.sent, moved);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    poll_fn(|cx| into.poll_send_ready(cx)).await.unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Relays between two queues while `what` runs; returns its result and the traffic from the first to the second.
pub(crate) fn joined<T>(one: IdleQueue, other: IdleQueue, what: impl FnOnce() -> T) -> (T, DirectionCounters) {
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let thread = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (one, other) = (one.start().unwrap(), other.start().unwrap());
            let (there, back) = (DirectionCounters::default(), DirectionCounters::default());
            tokio::select! {
                _ = ended => {}
                () = carry(&one, &other, &there) => {}
                () = carry(&other, &one, &back) => {}
            }
            there
        })
    });
    let result = what();
    drop(end);
    (result, thread.join().unwrap())
}

/// Addresses of the outside world, beyond the uplink.
pub(crate) const WORLD: [&str; 2] = ["198.51.100.1", "2001:db8:100::1"];
/// The uplink's own addresses: ours, and the world's.
pub(crate) const UPLINK: [[&str; 2]; 2] = [["10.80.0.1", "10.80.0.2"], ["fd80::1", "fd80::2"]];

/// Gives a namespace a link `uplink` to another, and a route to the world's addresses there.
pub(crate) fn connect(here: &Namespace, world: &Namespace) {
    here.ip(&["link", "add", "uplink", "type", "veth", "peer", "name", "downlink", "netns", world.name()]).unwrap();
    for ([own, other], (length, whole)) in UPLINK.into_iter().zip([("/24", "/32"), ("/64", "/128")]) {
        let nodad: &[&str] = if own.contains(':') { &["nodad"] } else { &[] };
        here.ip(&[&["addr", "add", &format!("{own}{length}"), "dev", "uplink"], nodad].concat()).unwrap();
        world.ip(&[&["addr", "add", &format!("{other}{length}"), "dev", "downlink"], nodad].concat()).unwrap();
        let far = WORLD[usize::from(own.contains(':'))];
        world.ip(&[&["addr", "add", &format!("{far}{whole}"), "dev", "lo"], nodad].concat()).unwrap();
    }
    here.ip(&["link", "set", "uplink", "up"]).unwrap();
    world.ip(&["link", "set", "downlink", "up"]).unwrap();
    for [_, gateway] in UPLINK {
        let family = if gateway.contains(':') { "-6" } else { "-4" };
        here.ip(&[family, "route", "add", "default", "via", gateway]).unwrap();
    }
}

/// The output of a program inside a namespace.
pub(crate) fn output(namespace: &Namespace, program: &str) -> String {
    let output = Command::new("ip").args(["netns", "exec", namespace.name(), "sh", "-c", program]).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The policy routing rules of Hermes.
pub(crate) fn rules(namespace: &Namespace) -> Vec<String> {
    let all = output(namespace, "ip -4 rule; ip -6 rule");
    all.lines().filter(|line| line.contains("proto 72")).map(str::to_owned).collect()
}

/// Waits until packets to our address are accepted: for IPv6, the kernel adds the address first and its route later.
pub(crate) fn is_local(namespace: &Namespace, address: &str) {
    let started = Instant::now();
    while !output(namespace, &format!("ip route get {address}")).contains("local") {
        assert!(started.elapsed() < IO_TIMEOUT, "{address} does not become local");
    }
}
