//! Pings, with a report of the lost ones.
//!
//! In: source, destination and interval, and an action that runs meanwhile. Out: success if all returned; otherwise
//! the missing ones, and the drop counters of the nodes and the kernel.

use hermes_testkit::netns::Namespace;

use crate::ip::node_chain::NodeChain;

/// How long all of them may take, in seconds.
const PINGS_TIMEOUT_SECONDS: &str = "15";

/// What `ping` said of so many.
pub(crate) struct Pings {
    count: usize,
    text: String,
}

/// So many pings. Alone, `ping` waits for the last ones twice as long as the slowest before them took, which is no time
/// on a busy machine. With a limit it goes on until that many have come: of those, the first `count` are looked for.
pub(crate) async fn pings(from: &Namespace, arguments: &[&str], count: usize, far: &str) -> Pings {
    let number = count.to_string();
    let words = [&["ping", "-D", "-n", "-c", &number, "-w", PINGS_TIMEOUT_SECONDS], arguments, &[far]].concat();
    let text = from.output(&words).await.unwrap_or_else(|error| error.to_string());
    Pings { count, text }
}

/// A ping each hundredth of a second, while something is done in their midst.
pub(crate) async fn pinging<T>(chain: &NodeChain, far: &str, done: impl Future<Output = T>) -> (Pings, T) {
    tokio::join!(pings(chain.near(), &["-i", "0.01"], 200, far), done)
}

impl Pings {
    /// The line of each that came back, by its number.
    fn received(&self) -> Vec<(usize, &str)> {
        let number = |line: &str| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok();
        let echoes = self.text.lines().filter(|line| line.contains(" bytes from "));
        let mut received: Vec<(usize, &str)> = echoes.filter_map(|line| Some((number(line)?, line))).collect();
        received.sort_unstable();
        received
    }

    /// What to say where one is missing.
    pub(crate) fn lost(&self) -> Option<String> {
        let received = self.received();
        let missing: Vec<usize> = (1..=self.count)
            .filter(|number| received.binary_search_by_key(number, |(number, _)| *number).is_err())
            .collect();
        if missing.is_empty() {
            return None;
        }
        // With the time of the one before each.
        let gaps = received.windows(2).filter(|pair| pair[0].0 + 1 != pair[1].0).map(|pair| pair[0].1);
        let gaps: Vec<&str> =
            received.first().into_iter().chain(received.last()).map(|(_, line)| *line).chain(gaps).collect();
        let end = self.text.lines().rev().take(3).collect::<Vec<_>>();
        Some(format!("missing: {missing:?}; {end:?}\nthe first, the last, those before one that is missing: {gaps:#?}"))
    }

    pub(crate) async fn all_came(&self, chain: &NodeChain, what: &str) {
        if let Some(lost) = self.lost() {
            panic!("{what}: {lost}\n{}", chain.dropped().await);
        }
    }
}

#[test]
fn a_ping_that_is_missing_is_named() {
    let echo = |number: usize| format!("[1.5] 64 bytes from 10.0.0.1: icmp_seq={number} ttl=64 time=0.3 ms\n");
    let refused = "From 10.0.0.9 icmp_seq=2 Destination Host Unreachable\n";
    let pings = |text: String| Pings { count: 3, text };
    // Another one than the last may come when more were sent.
    assert!(pings([1, 3, 2].map(echo).concat()).lost().is_none());
    assert!(pings([1, 3, 4].map(echo).concat() + refused).lost().unwrap().contains("missing: [2]"));
    assert!(pings(String::new()).lost().unwrap().contains("missing: [1, 2, 3]"));
}
