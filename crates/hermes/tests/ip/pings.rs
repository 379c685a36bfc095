//! Pings while something is done in their midst, and what is told where one is lost.
//!
//! In: a row of nodes, the address of its far machine, and what is to be done. Out: whether all came back; if not, which
//! are missing, and what the nodes and the kernel have dropped.

use crate::line::Line;

/// One a hundredth of a second: what is done comes in their midst.
const PINGS: &str = "200";

/// Pings without a pause while something is done in their midst. What they say is for [`all_came`].
pub(crate) async fn pinging<T>(line: &Line, far: &str, done: impl Future<Output = T>) -> (String, T) {
    let ping = ["ping", "-D", "-n", "-i", "0.01", "-c", PINGS, "-W", "3", far];
    let (said, done) = tokio::join!(line.near().output(&ping), done);
    (said.unwrap_or_else(|error| error.to_string()), done)
}

pub(crate) async fn all_came(line: &Line, said: &str, what: &str) {
    if !said.contains(" 0% packet loss") {
        // The last one before each that is missing, with its time.
        let number = |line: &str| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse::<u32>().ok();
        let mut came: Vec<(u32, &str)> = said.lines().filter_map(|line| Some((number(line)?, line))).collect();
        came.sort_unstable();
        let gaps = came.windows(2).filter(|pair| pair[0].0 + 1 != pair[1].0).map(|pair| pair[0].1);
        let gaps: Vec<&str> = came.first().into_iter().chain(came.last()).map(|(_, line)| *line).chain(gaps).collect();
        let end = said.lines().rev().take(3).collect::<Vec<_>>();
        panic!(
            "{what}: {end:?}\nthe first, the last, those before one that is missing: {gaps:#?}\n{}",
            line.dropped().await
        );
    }
}
