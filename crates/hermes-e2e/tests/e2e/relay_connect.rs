//! `hermes connect`: byte streams between two clients that reach nothing but their relays.
//!
//! In: relays, TCP servers, ssh, and callers that are hostile. Out: streams that arrive whole, or a reset and its reason.

use std::net::SocketAddr;
use std::process::{Output, Stdio};
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::origin::{self, Origin, stream};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{Subscriber, curl, publish};
use hermes_testkit::skip::skip;
use hermes_testkit::sshd::Sshd;
use hermes_testkit::{poll, port};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

const TIMEOUT: Duration = Duration::from_secs(60);

const RELAY: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}]
routes: [{name: all, relay: {}}]
";

const BELOW: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: all, relay: {upstream: next}}]
upstreams: [{name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}]
";

async fn relay(overlay: &Overlay, name: &str) -> Node {
    overlay.node(name).document(RELAY).start().await.unwrap()
}

fn url(node: &Node, path: &str) -> String {
    format!("http://{}{path}", node.address("web"))
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(hermes());
    command.arg("connect").args(arguments).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

/// A listener that forwards to this server. It listens when this returns.
async fn serve(server: SocketAddr, arguments: &[&str]) -> Subscriber {
    let server = server.to_string();
    let mut listener = Subscriber::run(&mut command(&[arguments, &["--serve", &server, "--json"]].concat()));
    assert_eq!(listener.json().await["serve"], server);
    listener
}

/// A caller at a local port.
async fn bind(arguments: &[&str]) -> (Subscriber, SocketAddr) {
    let mut caller = Subscriber::run(&mut command(&[arguments, &["--bind", "127.0.0.1:0", "--json"]].concat()));
    let address = caller.json().await["bind"].as_str().unwrap().parse().unwrap();
    (caller, address)
}

/// Runs a caller with this standard input.
async fn pipe(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = command(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    // A caller that fails does not read to the end.
    let write = async move { stdin.write_all(&input).await.is_ok() };
    let both = async { tokio::join!(write, child.wait_with_output()).1 };
    tokio::time::timeout(TIMEOUT, both).await.expect("an end in time").unwrap()
}

fn echo() -> Origin {
    stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap()
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

#[tokio::test]
async fn connections_cross_two_relays() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = relay(&overlay, "root").await;
    let below = overlay.node("below").document(BELOW).with("NEXT", root.address("web")).start().await.unwrap();
    let server = echo();
    // Both ends name the channel alike, and each reaches the relay at its own node.
    let (at_root, at_below) = (url(&root, ""), url(&below, ""));
    let mut listener = serve(server.address(), &["http://meet/echo", "--proxy", &at_root]).await;
    let (mut caller, address) = bind(&["http://meet/echo", "--proxy", &at_below]).await;
    let text = noise(3 << 20);
    let exchange = async |length: usize| {
        let (mut input, mut output) = TcpStream::connect(address).await.unwrap().into_split();
        let write = async {
            output.write_all(&text[..length]).await.unwrap();
            output.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let both = async { tokio::join!(write, input.read_to_end(&mut received)).1 };
        tokio::time::timeout(TIMEOUT, both).await.expect("an end in time").unwrap();
        assert!(received == text[..length], "{} of {length} bytes", received.len());
    };
    tokio::join!(exchange(0), exchange(1), exchange(70_000), exchange(text.len()));
    for end in [&mut caller, &mut listener] {
        let mut sums = [0; 2];
        for _ in 0..4 {
            let line = end.json().await;
            sums = [sums[0] + line["sent"].as_u64().unwrap(), sums[1] + line["received"].as_u64().unwrap()];
        }
        assert_eq!(sums, [70_001 + (3 << 20); 2]);
    }
}

#[tokio::test]
async fn ssh_logs_in_over_a_channel() {
    if !Sshd::is_installed() {
        return skip("ssh_logs_in_over_a_channel", "openssh-server is not installed");
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay, "relay").await;
    let address = port::reserve("127.0.0.1");
    let _sshd = Sshd::start(overlay.dir(), address, None).unwrap();
    poll::until("sshd listens", async || TcpStream::connect(address).await.is_ok()).await;
    let channel = url(&node, "/shell");
    let _listener = serve(address, &[&channel]).await;
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(overlay.dir().join("ssh.conf")).arg("-o");
    ssh.arg(format!("ProxyCommand={} connect {channel}", hermes()));
    ssh.args(["root@somewhere", "wc -c; echo done"]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = ssh.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let write = async move { stdin.write_all(&noise(1_000_000)).await.unwrap() };
    let both = async { tokio::join!(write, child.wait_with_output()).1 };
    let output = tokio::time::timeout(TIMEOUT, both).await.expect("an end in time").unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1000000\ndone\n");
}

#[tokio::test]
async fn nobody_reads_the_calls_of_a_self_certifying_channel() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay, "relay").await;
    let key = overlay.dir().join("key");
    let made = Command::new(hermes()).arg("key").arg(&key).arg("--json").output().await.unwrap();
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    let path = format!("{}shell", made["to"].as_str().unwrap());
    let (server, channel) = (echo(), url(&node, &path));
    let _listener = serve(server.address(), &[&channel, "--key", key.to_str().unwrap()]).await;
    let output = pipe(&[&channel], b"hello").await;
    assert_eq!((&*output.stdout, output.status.success()), (&b"hello"[..], true));
    // The records of the node show the channels of both ends. Nobody else may subscribe to them.
    poll::until("the node has records of all", async || node.records().len() >= 6).await;
    let records = node.records();
    let paths = records.iter().filter_map(|record| record["path"].as_str()).filter(|path| path.starts_with("/pk/"));
    let paths: std::collections::BTreeSet<_> = paths.collect();
    assert_eq!(paths.len(), 3, "{paths:?}");
    for path in paths {
        let (status, _, _) = curl(&node, path, &["--header", "hermes-subscribe: true"]).await;
        assert_eq!(status, 403, "{path}");
    }
}

#[tokio::test]
async fn a_connection_uses_several_relays_and_survives_the_loss_of_one() {
    let overlay = Overlay::new(hermes()).unwrap();
    let [meeting, first, second] =
        [relay(&overlay, "meeting").await, relay(&overlay, "first").await, relay(&overlay, "second").await];
    let server = echo();
    let (channel, bases) = (url(&meeting, "/echo"), [url(&first, "/a"), url(&second, "/b")]);
    let receive = ["--receive", &bases[0], "--receive", &bases[1], &channel];
    let _listener = serve(server.address(), &receive).await;
    for arguments in [&[][..], &["--redundant"]] {
        let before = [first.metric("hermes_relay_publications_total", "").await.unwrap(), 0.0];
        let output = pipe(&[&receive, arguments].concat(), &noise(2 << 20)).await;
        assert!(output.stdout == noise(2 << 20), "{} bytes", output.stdout.len());
        for node in [&first, &second] {
            assert!(node.metric("hermes_relay_publications_total", "").await.unwrap() > before[0], "{}", node.name());
        }
    }
    let (_caller, address) = bind(&receive).await;
    let mut tcp = TcpStream::connect(address).await.unwrap();
    let mut round = async |text: &[u8]| {
        tcp.write_all(text).await.unwrap();
        let mut received = vec![0; text.len()];
        tokio::time::timeout(TIMEOUT, tcp.read_exact(&mut received)).await.expect("an echo in time").unwrap();
        assert!(received == text);
    };
    round(&noise(500_000)).await;
    second.end(Duration::ZERO).unwrap();
    round(&noise(500_000)).await;
}

#[tokio::test]
async fn only_who_has_the_secret_connects() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay, "relay").await;
    let secret = overlay.dir().join("secret");
    std::fs::write(&secret, "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=").unwrap();
    let (server, channel, secret) = (echo(), url(&node, "/echo"), secret.to_str().unwrap());
    let _listener = serve(server.address(), &[&channel, "--secret", secret]).await;
    let reading = ["--header", "hermes-subscribe: true", "--header", "accept: text/event-stream"];
    let mut eavesdropper = Subscriber::new(&node, "/echo", &reading, 2).await;
    let output = pipe(&[&channel, "--secret", secret], b"hello").await;
    assert_eq!((&*output.stdout, output.status.success()), (&b"hello"[..], true));
    // A call in the clear is none.
    let arguments = [&*channel];
    assert!(tokio::time::timeout(Duration::from_secs(2), pipe(&arguments, b"hello")).await.is_err());
    let first = eavesdropper.lines(3).await;
    assert!(!first.iter().any(|line| line.contains("hello") || line.contains("receive")), "{first:?}");
}

#[tokio::test]
async fn failures_have_a_reason_and_reset_the_application() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay, "relay").await;
    let failed = |output: &Output, reason: &str| {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(reason), "{text}");
    };
    let channel = url(&node, "/echo");
    failed(&pipe(&[&channel], b"hello").await, "nobody listens at this URL");
    let refused = port::reserve("127.0.0.1");
    failed(&pipe(&[&format!("http://{refused}/echo")], b"hello").await, "cannot connect to 127.0.0.1");
    let (_listener, channel) = (serve(refused, &[&channel]).await, channel);
    failed(&pipe(&[&channel], b"hello").await, "the listener cannot reach its server");

    // A listener that is told to end tells its callers. Its server and their clients see a reset.
    let channel = url(&node, "/held");
    let server = echo();
    let mut listening = command(&[&channel, "--serve", &server.address().to_string()]);
    let mut listener = listening.stdout(Stdio::null()).spawn().unwrap();
    node.metric_is("hermes_relay_subscriptions", "", 2.0).await;
    let (mut caller, address) = bind(&[&channel]).await;
    let mut tcp = TcpStream::connect(address).await.unwrap();
    tcp.write_all(b"hello").await.unwrap();
    tcp.read_exact(&mut [0; 5]).await.unwrap();
    kill(Pid::from_raw(listener.id().unwrap().cast_signed()), Signal::SIGTERM).unwrap();
    let ended = tokio::time::timeout(TIMEOUT, tcp.read(&mut [0; 5])).await.expect("a reset in time");
    assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(caller.json().await["error"], "the other end ended the connection: stopped");
    assert!(listener.wait().await.unwrap().success());
}

#[tokio::test]
async fn a_listener_publishes_at_no_third_party() {
    let overlay = Overlay::new(hermes()).unwrap();
    let [node, third] = [relay(&overlay, "relay").await, relay(&overlay, "third").await];
    let (server, channel) = (echo(), url(&node, "/echo"));
    let mut listener = serve(server.address(), &[&channel]).await;
    let id = "0123456789abcdef0123456789abcdef";
    for (at, what) in [
        (url(&third, &format!("/echo/{id}")), "another relay"),
        (url(&node, &format!("/other/{id}")), "another channel"),
        (url(&node, &format!("/echo/../other/{id}")), "another channel by a dot segment"),
        ("gopher://localhost/echo".to_owned(), "another scheme"),
    ] {
        let id = &format!("{:032x}", at.len());
        let text = format!(
            "{{\"from\":\"{id}\",\"receive\":[\"{at}\"],\"offset\":0,\"acknowledged\":{{\"before\":0,\"limit\":9}}}}\nhello"
        );
        let (status, _, _) = publish(&node, "/echo", &text, &["--header", "hermes-deliver: one"]).await;
        assert_eq!(status, 204);
        let error = listener.json().await["error"].as_str().unwrap().to_owned();
        assert!(error.contains("which is not allowed here"), "{what}: {error}");
    }
    assert_eq!(third.metric("hermes_relay_publications_total", "").await.unwrap(), 0.0);
    // The listener ignores publications that are not calls.
    for text in ["", "{}", "{}\n", "{\"from\":\"x\"}\n", "\u{7f}\n\n\n"] {
        publish(&node, "/echo", text, &["--header", "hermes-deliver: one"]).await;
    }
    let output = pipe(&[&channel], b"hello").await;
    assert_eq!(&*output.stdout, b"hello");
}
