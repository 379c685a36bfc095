//! The relay in a browser: an unmodified Chromium subscribes by EventSource, fetch and WebSocket, and publishes.
//!
//! In: a page that the node serves. Out: each publication of each kind at each subscriber of the page.

use std::process::Stdio;
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::Overlay;
use hermes_testkit::skip::skip;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

const RELAY: &str = r"
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes:
- {name: chat, match: {path: '/chat/*'}, relay: {}}
- name: page
  match: {path: /}
  respond:
    headers: {content-type: text/html}
    body: |
";

/// Counts what arrives on each way, and publishes the result when each has the publications of both.
const PAGE: &str = r#"<!doctype html><title>relay</title><pre id=log></pre><script>
const seen = {events: [], lines: [], socket: []};
const has_all = list => list.includes('by fetch') && list.includes('by socket');
let told = false;
function take(way, text) {
  seen[way].push(text);
  if (!told && Object.values(seen).every(has_all)) {
    told = true;
    fetch('/chat/result', {method: 'POST', body: JSON.stringify(seen)});
  }
}
const events = new EventSource('/chat/room');
events.onmessage = event => take('events', event.data);
const opened = new Promise(done => events.onopen = done);
async function read_lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split('\n');
    text = lines.pop();
    for (const line of lines.filter(line => line)) take('lines', JSON.parse(line).data);
  }
}
(async () => {
  const headers = {'hermes-subscribe': 'true', accept: 'application/x-ndjson'};
  const response = await fetch('/chat/room', {headers});
  read_lines(response);
  await opened;
  const socket = new WebSocket(`ws://${location.host}/chat/room`);
  socket.onmessage = async event => {
    const message = JSON.parse(event.data);
    if (message.subscription) {
      await fetch('/chat/room', {method: 'POST', body: 'by fetch', headers: {'content-type': 'text/plain'}});
      socket.send('by socket');
    } else if (message.data !== undefined) {
      take('socket', message.data);
    }
  };
})();
</script>"#;

#[tokio::test]
async fn a_browser_subscribes_and_publishes_in_three_ways() {
    let browser = Command::new("chromium").arg("--version").output().await;
    if !browser.is_ok_and(|output| output.status.success()) {
        return skip("relay::browser", "it needs chromium, which scripts/setup.sh installs");
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let indented: String = PAGE.lines().map(|line| format!("      {line}\n")).collect();
    let node = overlay.node("relay").document(&format!("{RELAY}{indented}")).start().await.unwrap();
    let mut subscriber = Command::new(hermes());
    subscriber.args(["subscribe", &format!("http://{}/chat/result", node.address("web")), "-n", "1"]);
    let mut subscriber = subscriber.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut result = BufReader::new(subscriber.stdout.take().unwrap()).lines();
    node.metric_reaches("hermes_relay_subscriptions", "", 1.0).await;
    let profile = tempfile::tempdir().unwrap();
    let mut command = Command::new("chromium");
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server"]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.args(["--remote-debugging-port=0", &format!("--user-data-dir={}", profile.path().display())]);
    command.arg(format!("http://{}/", node.address("web"))).stderr(Stdio::null()).stdout(Stdio::null());
    let mut browser = command.kill_on_drop(true).spawn().unwrap();
    let line = tokio::time::timeout(Duration::from_secs(60), result.next_line()).await;
    let line = line.expect("the page has not seen all publications in time").unwrap().unwrap();
    let seen: Value = serde_json::from_str(&line).unwrap();
    let both = json!(["by fetch", "by socket"]);
    assert_eq!(seen, json!({"events": both, "lines": both, "socket": both}));
    browser.kill().await.unwrap();
}
