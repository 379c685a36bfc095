//! Eight intermittent links in a row; each is up a tenth of the time and loses, duplicates and reorders packets.
//!
//! Transfers with enough time arrive complete, once, and reach their origin once. Others fail with a reason.
//! `HERMES_SEED` repeats a run, with the same times of the links.

use hermes_testkit::binary::hermes;
use std::time::Duration;

use hermes_testkit::{
    link::Conditions,
    origin::{
        http::BYTES_SEED,
        ledger::{Entry, Ledger},
    },
    pattern::{Digest, Pattern},
    skip::needs_root,
    unstable::{Chain, HopSettings, SHORT_DEADLINE, limit, seldom},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const LINKS: usize = 8;
/// For so long one is up in the mean.
const UP: Duration = Duration::from_millis(200);
/// What the client waits for an answer that comes late: what custody says is there before. A deadline is 5 minutes.
const TRANSFER_TIMEOUT_SECONDS: &str = "360";

/// What a client asks, with a body of so many bytes.
#[derive(Debug, Clone)]
struct Transfer {
    number: u64,
    method: &'static str,
    path: String,
    size: usize,
}

/// What it is told.
#[derive(Debug)]
struct CurlResult {
    status: u16,
    /// `Proxy-Status`, of all nodes.
    why: String,
    body: Vec<u8>,
    /// The answer broke off, so says curl.
    broke: Option<String>,
    /// When that was, since the links' epoch.
    at: Duration,
}

impl std::fmt::Display for CurlResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { status, why, body, broke, at } = self;
        write!(f, "{status} {why} {} bytes {broke:?} at {at:?}", body.len())
    }
}

impl Transfer {
    fn pattern(&self) -> Pattern {
        Pattern::new(self.number)
    }

    /// As the origin sees it.
    fn what(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    /// Of the body that it sends.
    fn digest(&self) -> String {
        let mut digest = Digest::default();
        digest.update(&self.pattern().bytes(self.size));
        digest.hex()
    }

    /// Whether this is the answer, and all of it.
    fn is_answered_by(&self, result: &CurlResult) -> bool {
        if result.status != 200 || result.broke.is_some() {
            return false;
        }
        if self.method == "GET" {
            let wanted = self.path.rsplit('/').next().and_then(|size| size.split('?').next()?.parse().ok());
            return wanted == Some(result.body.len()) && Pattern::new(BYTES_SEED).mismatch(0, &result.body).is_none();
        }
        serde_json::from_slice::<Value>(&result.body).ok() == Some(json!({"bytes": self.size, "digest": self.digest()}))
    }
}

/// Several of each kind, and of each size. Nobody asks the same twice.
fn asks(under: &str, gets: &[usize], puts: &[usize], posts: &[usize]) -> Vec<Transfer> {
    let kinds = [("GET", gets), ("PUT", puts), ("POST", posts)];
    let all = kinds.iter().flat_map(|(method, sizes)| sizes.iter().map(move |size| (*method, *size)));
    let all = all.enumerate().map(|(number, (method, size))| {
        let (path, size) = match method {
            "GET" => (format!("{under}/bytes/{size}?{number}"), 0),
            _ => (format!("{under}/order/{number}"), size),
        };
        Transfer { number: number as u64, method, path, size }
    });
    all.collect()
}

/// Asks by curl, a process each, all at once.
async fn ask_all(chain: &Chain, all: &[Transfer]) -> Vec<(Transfer, CurlResult)> {
    let mut requests = JoinSet::new();
    for transfer in all.iter().cloned() {
        let file = |kind: &str| chain.dir().join(format!("{}-{kind}", transfer.what().replace(['/', ' ', '?'], "_")));
        let [sent, head, body] = ["sent", "head", "body"].map(file);
        std::fs::write(&sent, transfer.pattern().bytes(transfer.size)).unwrap();
        let (namespace, url) = (chain.namespaces[0].clone(), format!("{}{}", chain.apps(), transfer.path));
        requests.spawn(async move {
            let data = format!("@{}", sent.display());
            let [into, head_into] = [&body, &head].map(|path| path.display().to_string());
            let mut words = vec![
                "curl",
                "-sS",
                "--max-time",
                TRANSFER_TIMEOUT_SECONDS,
                "-o",
                &into,
                "-D",
                &head_into,
                "-X",
                transfer.method,
            ];
            if transfer.method != "GET" {
                words.extend(["-H", "content-type: application/octet-stream", "--data-binary", &data]);
            }
            words.push(&url);
            let broke = namespace.output(&words).await.err().map(|error| error.to_string());
            let head = std::fs::read_to_string(&head).unwrap_or_default();
            let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
            let why = head.lines().filter(|line| line.to_ascii_lowercase().starts_with("proxy-status:")).collect();
            let body = std::fs::read(&body).unwrap_or_default();
            (transfer, CurlResult { status, why, body, broke, at: Duration::ZERO })
        });
    }
    let mut all = Vec::new();
    while let Some(answered) = requests.join_next().await {
        let (transfer, result) = answered.unwrap();
        all.push((transfer, CurlResult { at: chain.elapsed(), ..result }));
    }
    all
}

async fn what_has_time_arrives(test: &str, protocol: &'static str) {
    if !needs_root(test) {
        return;
    }
    let seed = std::env::var("HERMES_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random::<u32>);
    println!("{test}: HERMES_SEED={seed}");
    let times = seldom(UP, u64::from(seed));
    let conditions =
        |link| Conditions { loss: 0.01, late: 0.05, late_by: Duration::from_millis(20), twice: 0.02, ..times(link) };
    let (ledger, between) = (Ledger::default(), HopSettings::custody_or_soon(protocol));
    let serve = |listener| ledger.serve(listener);
    let chain = Chain::before(hermes().as_ref(), LINKS, between, conditions, serve).await.unwrap();
    let began = chain.elapsed();
    let links: Vec<_> = (0..LINKS).map(conditions).collect();
    let earliest = began + Duration::from_secs_f64(limit(&links, 0, began, Duration::ZERO));
    let late = asks("", &[0, 1, 4_000, 46_080, 100_000, 150_000], &[1, 46_080, 100_000], &[5_000; 6]);
    let soon = asks("/soon", &[1, 46_080], &[46_080], &[5_000; 3]);
    let (late, soon) = tokio::join!(ask_all(&chain, &late), ask_all(&chain, &soon));
    println!(
        "{test}: began at {began:?}, nothing can be back before {earliest:?}, all is over at {:?}",
        chain.elapsed()
    );
    for (transfer, result) in &late {
        assert!(transfer.is_answered_by(result), "{} {result}\n{}", transfer.what(), chain.logs());
    }
    for (transfer, result) in &soon {
        // Where it was on its way to the client already, all that can be said is that it is not whole.
        let has_failed =
            result.status == 504 && !result.why.is_empty() || result.status == 200 && result.broke.is_some();
        assert!(transfer.is_answered_by(result) || has_failed, "{} {result}", transfer.what());
    }
    if earliest > began + 2 * SHORT_DEADLINE {
        assert!(
            soon.iter().all(|(_, result)| result.status == 504),
            "what has {SHORT_DEADLINE:?} cannot be back, nor wait for longer"
        );
    }
    for (transfer, result) in late.iter().chain(&soon) {
        let (what, requests) = (transfer.what(), ledger.of(&transfer.what()));
        let is_answered = transfer.is_answered_by(result);
        assert!(
            !is_answered || result.at + Duration::from_millis(50) > earliest,
            "{what} {result}: no link was up by then"
        );
        assert!(requests.len() <= 1 && (!is_answered || requests.len() == 1), "{what} {result}: {requests:?}");
        // Whatever the client was told.
        let (size, digest) = (transfer.size as u64, Some(transfer.digest()));
        let is_right = |entry: &Entry| entry.bytes <= size && (entry.digest.is_none() || entry.digest == digest);
        assert!(requests.iter().all(is_right), "{what}: {requests:?}");
    }
}

#[tokio::test]
async fn eight_intermittent_links_deliver_within_the_deadline_or_report_a_reason() {
    what_has_time_arrives("eight_intermittent_links_deliver_within_the_deadline_or_report_a_reason", "h2").await;
}

#[tokio::test]
async fn so_they_do_over_quic() {
    what_has_time_arrives("eight::so_they_do_over_quic", "h3").await;
}
