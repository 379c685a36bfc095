//! curl as a subscriber and publisher of relays.
//!
//! In: a node with a listener `web`, and arguments of curl. Out: the lines of a subscription, and responses.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::overlay::Node;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A subscriber: a running curl, or another program.
pub struct Subscriber {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Subscriber {
    /// Subscribes at the listener `web`, without waiting for the response.
    ///
    /// # Panics
    /// curl cannot be started.
    pub fn start(node: &Node, path: &str, arguments: &[&str]) -> Self {
        let url = format!("http://{}{path}", node.address("web"));
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--no-buffer", "--max-time", "60"]).args(arguments).arg(url);
        Self::run(&mut curl)
    }

    /// A subscriber that is another program.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn run(program: &mut Command) -> Self {
        let mut child = program.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("the program starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    /// Subscribes, and waits until the node counts `count` subscriptions.
    ///
    /// # Panics
    /// curl cannot be started.
    pub async fn new(node: &Node, path: &str, arguments: &[&str], count: u64) -> Self {
        let subscriber = Self::start(node, path, arguments);
        node.metric_is("hermes_relay_subscriptions", "", count as f64).await;
        subscriber
    }

    /// The next line that is not empty.
    ///
    /// # Panics
    /// The stream ends, or nothing arrives in time.
    pub async fn line(&mut self) -> String {
        loop {
            let line =
                tokio::time::timeout(TIMEOUT, self.lines.next_line()).await.expect("a line in time").expect("text");
            let line = line.expect("the stream has ended");
            if !line.trim().is_empty() {
                return line.trim_end().to_owned();
            }
        }
    }

    /// The next lines that are not empty.
    ///
    /// # Panics
    /// See [`Self::line`].
    pub async fn lines(&mut self, count: usize) -> Vec<String> {
        let mut lines = Vec::new();
        for _ in 0..count {
            lines.push(self.line().await);
        }
        lines
    }

    /// The next line of `application/x-ndjson`.
    ///
    /// # Panics
    /// It is no JSON. See [`Self::line`].
    pub async fn json(&mut self) -> serde_json::Value {
        serde_json::from_str(&self.line().await).expect("JSON")
    }

    /// Reads to the end, and returns curl's exit status and the last lines.
    ///
    /// # Panics
    /// The stream does not end in time.
    pub async fn end(mut self) -> (i32, Vec<String>) {
        let mut rest = Vec::new();
        while let Some(line) =
            tokio::time::timeout(TIMEOUT, self.lines.next_line()).await.expect("an end in time").expect("text")
        {
            rest.push(line.trim_end().to_owned());
        }
        let status = self.child.wait().await.expect("a status");
        (status.code().expect("no signal"), rest)
    }
}

/// Runs curl at the listener `web`, and returns the status, the head in lower case and the body.
///
/// # Panics
/// curl cannot be started.
pub async fn curl(node: &Node, path: &str, arguments: &[&str]) -> (u16, String, String) {
    let url = format!("http://{}{path}", node.address("web"));
    let output =
        Command::new("curl").args(["--silent", "--include", "--max-time", "60"]).args(arguments).arg(url).output();
    let text = String::from_utf8_lossy(&output.await.expect("curl").stdout).into_owned();
    // An interim response may come first.
    let text = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
    (status, head.to_ascii_lowercase(), body.to_owned())
}

/// Publishes text at the listener `web`. See [`curl`].
///
/// # Panics
/// curl cannot be started.
pub async fn publish(node: &Node, path: &str, text: &str, arguments: &[&str]) -> (u16, String, String) {
    let all =
        [&["--request", "PUT", "--header", "content-type: text/plain", "--data-binary", text], arguments].concat();
    curl(node, path, &all).await
}

/// A field of a head of [`curl`].
pub fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The arguments of curl that ask for a subscription.
pub const SUBSCRIBE: [&str; 2] = ["--header", "hermes-subscribe: true"];
