//! The chat: two shells at two nodes.
//!
//! In: the nodes. Out: the lines that each shell printed. The shells run `hermes subscribe` and `hermes publish`.

use std::net::SocketAddr;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::process::Command;

use super::nodes::Tree;

/// The lines of the chat, each with its node.
const SAID: [(&str, &str); 3] = [("hall", "Is anybody in the yard?"), ("yard", "Yes, two of us"), ("hall", "Come in")];
/// The limit for a program of the chat.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The lines that each shell got.
#[derive(Debug, Serialize)]
pub(super) struct Chat {
    pub(super) said: Vec<String>,
    pub(super) hall: Vec<String>,
    pub(super) yard: Vec<String>,
}

impl Chat {
    /// Whether each shell has each line once, in the order of the chat.
    pub(super) fn is_whole(&self) -> bool {
        self.hall == self.said && self.yard == self.said
    }
}

fn hermes(verb: &str, at: SocketAddr, more: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("the path of this program")?);
    command.args([verb, &Tree::channel("lobby"), "--proxy", &format!("http://{at}")]).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    Ok(command)
}

async fn ended(program: impl Future<Output = std::io::Result<Output>>) -> anyhow::Result<Vec<String>> {
    let output = tokio::time::timeout(TIMEOUT, program).await.context("a shell got nothing")??;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a shell ended with {}: {words}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Runs the chat.
///
/// # Errors
/// A shell fails, or gets nothing.
pub(super) async fn play(tree: &Tree) -> anyhow::Result<Chat> {
    let count = SAID.len().to_string();
    let listen = |at| anyhow::Ok(hermes("subscribe", at, &["-n", &count])?.spawn()?.wait_with_output());
    let (hall, yard) = (listen(tree.hall())?, listen(tree.yard())?);
    let speak = async {
        let known = async {
            while tree.metric(1, "hermes_relay_subscriptions").await? < 1.0
                || tree.metric(2, "hermes_relay_subscriptions").await? < 1.0
            {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(TIMEOUT, known).await.context("the shells do not subscribe")??;
        for (node, text) in SAID {
            let at = if node == "hall" { tree.hall() } else { tree.yard() };
            ended(hermes("publish", at, &["--data", &format!("{node}: {text}")])?.spawn()?.wait_with_output()).await?;
        }
        Ok(())
    };
    let (hall, yard, ()) = tokio::try_join!(ended(hall), ended(yard), speak)?;
    let said = SAID.iter().map(|(node, text)| format!("{node}: {text}")).collect();
    Ok(Chat { said, hall, yard })
}
