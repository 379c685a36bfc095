//! Self-certifying channels: only the holder of a key publishes, or subscribes.
//!
//! In: keys and tokens of `hermes key` and of openssl, and requests that are unsigned, forged, old, repeated or meant for another
//! channel. Out: what reaches subscribers, also below a root, and the reason of each refusal.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use hermes_signature::{CONTENT_DIGEST, SignedRequest, SigningKey, content_digest, sign};
use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, curl, field, publish};
use http::{HeaderMap, Method};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::process::Command;

const ROOT: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}]
routes: [{name: all, relay: {history: {}}}]
";

const BELOW: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: all, relay: {upstream: next}}]
upstreams: [{name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}]
";

const HOST: [&str; 2] = ["--header", "host: keys.example"];

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
}

/// The arguments of curl that sign a request.
fn signed(
    key: &SigningKey,
    method: Method,
    path: &str,
    content: Option<&str>,
    created: u64,
    nonce: &str,
) -> Vec<String> {
    let mut headers = HeaderMap::new();
    if let Some(content) = content {
        headers.insert(CONTENT_DIGEST, content_digest(content.as_bytes()));
    }
    let request =
        SignedRequest { method: &method, authority: "keys.example", path, query: None, headers: &headers.clone() };
    headers.extend(sign(key, &request, created, nonce).unwrap());
    let fields = headers
        .iter()
        .flat_map(|(name, value)| ["--header".to_owned(), format!("{name}: {}", value.to_str().unwrap())]);
    HOST.iter().map(|text| (*text).to_owned()).chain(fields).collect()
}

async fn send(node: &Node, path: &str, text: &str, arguments: &[String]) -> (u16, String) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (status, head, body) = publish(node, path, text, &arguments).await;
    (status, if status == 204 { head } else { body })
}

#[tokio::test]
async fn only_the_holder_of_the_key_publishes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = overlay.node("root").document(ROOT).start().await.unwrap();
    let below = overlay.node("below").document(BELOW).with("NEXT", root.address("web")).start().await.unwrap();
    let (key, _) = SigningKey::generate().unwrap();
    let (other, _) = SigningKey::generate().unwrap();
    let path = format!("/pk/{}/from/news", key.public().name());
    let json = [&SUBSCRIBE[..], &HOST, &["--header", "accept: application/x-ndjson"]].concat();
    let mut reader = Subscriber::new(&below, &path, &json, 1).await;
    let mut parts = Subscriber::new(&root, &path, &[&SUBSCRIBE[..], &HOST].concat(), 2).await;
    for (number, node) in [&root, &below].into_iter().enumerate() {
        let good = signed(&key, Method::PUT, &path, Some("news"), now(), &format!("n{number}"));
        let (status, head) = send(node, &path, "news", &good).await;
        assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("2")), "{head}");
        assert_eq!(reader.json().await["data"], "news");
        let (status, reason) = send(node, &path, "news", &good).await;
        assert_eq!(status, 403);
        assert!(reason.contains("the signature has been used"), "{reason}");
    }
    let unsigned: Vec<String> = HOST.iter().map(|text| (*text).to_owned()).collect();
    let elsewhere = format!("/pk/{}/from/other", key.public().name());
    for (arguments, content, reason) in [
        (unsigned, "x", "the request has no signature"),
        (signed(&other, Method::PUT, &path, Some("x"), now(), "a"), "x", "only the holder of the key"),
        (signed(&key, Method::PUT, &elsewhere, Some("x"), now(), "b"), "x", "does not fit the request"),
        (signed(&key, Method::POST, &path, Some("x"), now(), "c"), "x", "does not fit the request"),
        (signed(&key, Method::PUT, &path, Some("x"), now(), "d"), "y", "content-digest does not fit"),
        (signed(&key, Method::PUT, &path, None, now(), "e"), "x", "content-digest does not fit"),
        (signed(&key, Method::PUT, &path, Some("x"), now() - 120, "f"), "x", "of another time"),
        (signed(&key, Method::PUT, &path, Some("x"), now() + 120, "g"), "x", "of another time"),
    ] {
        for node in [&root, &below] {
            let (status, said) = send(node, &path, content, &arguments).await;
            assert!(status == 403 && said.contains(reason), "{status} {said}, not {reason}");
        }
    }
    // Another spelling of the path is the same channel.
    let spelled = path.replacen("/pk/", "/%70k/", 1);
    assert_eq!(send(&root, &spelled, "x", &HOST.map(str::to_owned)).await.0, 403);
    assert_eq!(send(&root, "/pk/x/from/a", "x", &HOST.map(str::to_owned)).await.0, 400);
    // Subscribers get the signature, and may verify it themselves.
    let lines = parts.lines(6).await;
    assert!(lines.iter().any(|line| line.starts_with("signature-input: hermes=(\"@method\"")), "{lines:?}");
    assert_eq!(below.metric("hermes_relay_publications_total", "").await.unwrap(), 2.0);
}

#[tokio::test]
async fn only_the_holder_of_the_key_subscribes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = overlay.node("root").document(ROOT).start().await.unwrap();
    let below = overlay.node("below").document(BELOW).with("NEXT", root.address("web")).start().await.unwrap();
    let (key, _) = SigningKey::generate().unwrap();
    let (other, _) = SigningKey::generate().unwrap();
    let path = format!("/pk/{}/to/calls", key.public().name());
    let subscribe = |signing: Vec<String>| {
        let all = SUBSCRIBE.iter().chain(&["--header", "accept: application/x-ndjson"]).map(|text| (*text).to_owned());
        all.chain(signing).collect::<Vec<String>>()
    };
    for node in [&root, &below] {
        for signing in [
            HOST.map(str::to_owned).to_vec(),
            signed(&other, Method::GET, &path, None, now(), "a"),
            signed(&key, Method::GET, "/pk/other", None, now(), "b"),
            signed(&key, Method::GET, &path, None, now() - 120, "c"),
        ] {
            let arguments = subscribe(signing);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let (status, _, body) = curl(node, &path, &arguments).await;
            assert_eq!(status, 403, "{body}");
        }
        // Nor as one of several channels, or as a WebSocket.
        let channels = format!("hermes-channels: {path}");
        let several = [&SUBSCRIBE[..], &HOST, &["--header", &channels]].concat();
        assert_eq!(curl(node, "/a", &several).await.0, 400);
    }
    let arguments = subscribe(signed(&key, Method::GET, &path, None, now(), "good"));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut holder = Subscriber::new(&below, &path, &arguments, 1).await;
    // Anybody may call.
    let (status, head, _) = publish(&root, &path, "hello", &HOST).await;
    assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("1")), "{head}");
    assert_eq!(holder.json().await["data"], "hello");
    let (status, _, body) = curl(&below, &path, &arguments).await;
    assert!(status == 403 && body.contains("has been used"), "{status} {body}");
}

async fn key(file: &Path) -> serde_json::Value {
    let output = Command::new(hermes()).args(["key", "--json"]).arg(file).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn the_commands_sign_with_a_key_of_their_own_or_of_openssl() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = overlay.node("root").document(ROOT).start().await.unwrap();
    let (own, foreign) = (overlay.dir().join("own.pem"), overlay.dir().join("foreign.pem"));
    let made = Command::new("openssl").args(["genpkey", "-algorithm", "ed25519", "-out"]).arg(&foreign).status().await;
    assert!(made.unwrap().success());
    let (first, again) = (key(&own).await, key(&own).await);
    assert_eq!((&first["created"], &again["created"]), (&true.into(), &false.into()));
    assert_eq!(first["name"], again["name"]);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&own).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    for file in [&own, &foreign] {
        let of_key = key(file).await;
        let url = |path: &str| format!("http://{}{}x", root.address("web"), of_key[path].as_str().unwrap());
        let mut subscribing = Command::new(hermes());
        subscribing.args(["subscribe", &url("to"), "-n", "1", "--json", "--key"]).arg(file);
        let mut subscriber = Subscriber::run(&mut subscribing);
        root.metric_is("hermes_relay_subscriptions", "", 1.0).await;
        let called = Command::new(hermes()).args(["publish", &url("to"), "--data", "call"]).output().await.unwrap();
        assert!(called.status.success(), "{}", String::from_utf8_lossy(&called.stderr));
        assert_eq!(subscriber.json().await["data"], "call");
        let mut publisher = Command::new(hermes());
        publisher.args(["publish", &url("from"), "--lines", "--key"]).arg(file).stdin(Stdio::piped());
        let mut publisher = publisher.stdout(Stdio::piped()).spawn().unwrap();
        publisher.stdin.take().unwrap().write_all(b"one\none\n").await.unwrap();
        assert!(publisher.wait_with_output().await.unwrap().status.success(), "each has a nonce of its own");
        let refused = Command::new(hermes()).args(["publish", &url("from"), "--data", "x"]).output().await.unwrap();
        assert!(String::from_utf8_lossy(&refused.stderr).contains("the request has no signature"));
        root.metric_is("hermes_relay_subscriptions", "", 0.0).await;
    }
    std::fs::write(&own, "no key").unwrap();
    let output = Command::new(hermes()).arg("key").arg(&own).output().await.unwrap();
    assert!(!output.status.success());
    assert_eq!(std::fs::read_to_string(&own).unwrap(), "no key", "a file without a key is not changed");
}

/// A relay that forges: it answers a subscription with parts of its own.
async fn forge(listener: &TcpListener, part: String) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: multipart/mixed; boundary=b\r\nhermes-subscription: 0\r\n\
                hermes-timeout: 60\r\nhermes-event-id: 0000000000000001-0\r\n\r\n--b\r\n";
    stream.write_all(format!("{head}{part}\r\n--b\r\n").as_bytes()).await.unwrap();
    // Until the client has left.
    let _ = stream.read_u8().await;
}

#[tokio::test]
async fn a_subscriber_need_not_trust_the_relays() {
    let (key, _) = SigningKey::generate().unwrap();
    let path = format!("/pk/{}/from/news", key.public().name());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let url = format!("http://{authority}{path}");
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_DIGEST, content_digest(b"true"));
    let request = SignedRequest {
        method: &Method::POST,
        authority: &authority,
        path: &path,
        query: None,
        headers: &headers.clone(),
    };
    headers.extend(sign(&key, &request, now(), "n").unwrap());
    let fields: String =
        headers.iter().map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap())).collect();
    for (fields, content, is_genuine) in [(&*fields, "true", true), (&*fields, "fake", false), ("", "true", false)] {
        let part = format!("hermes-event-id: 0000000000000001-1\r\n{fields}content-length: 4\r\n\r\n{content}");
        let mut subscribing = Command::new(hermes());
        subscribing.args(["subscribe", &url, "-n", "1"]).kill_on_drop(true);
        let (output, ()) = tokio::join!(subscribing.output(), forge(&listener, part));
        let output = output.unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_genuine, "{words}");
        assert_eq!(output.stdout, if is_genuine { &b"true\n"[..] } else { b"" });
        assert!(is_genuine || words.contains("is not signed by the holder of the key"), "{words}");
    }
}

#[tokio::test]
async fn a_relay_does_not_see_what_clients_encrypt() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = overlay.node("root").document(ROOT).start().await.unwrap();
    let secret = |name: &str, text: &str| {
        let path = overlay.dir().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let [right, wrong, weak] = [
        secret("right", "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=\n"),
        secret("wrong", "AAAAEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="),
        secret("weak", "c2hvcnQ="),
    ];
    let url = format!("http://{}/secret", root.address("web"));
    let run = |verb: &str, arguments: &[&str]| {
        let mut command = Command::new(hermes());
        command.args([verb, &url, "--json"]).args(arguments).kill_on_drop(true);
        command
    };
    let mut readers = [&right, &wrong].map(|secret| Subscriber::run(&mut run("subscribe", &["--secret", secret])));
    let mut plain = Subscriber::run(&mut run("subscribe", &[]));
    root.metric_is("hermes_relay_subscriptions", "", 3.0).await;
    let published = run("publish", &["--secret", &right, "--data", "meet at noon"]).output().await.unwrap();
    assert!(published.status.success());
    assert_eq!(readers[0].json().await["data"], "meet at noon");
    assert_eq!(readers[1].json().await["unreadable"], true);
    let sealed = plain.json().await["base64"].as_str().unwrap().to_owned();
    // A salt, the size of the record, no name of a key, the record with its delimiter and tag.
    let bytes = base64::prelude::BASE64_STANDARD.decode(sealed).unwrap();
    assert_eq!((bytes.len(), &bytes[16..21]), (16 + 4 + 1 + 12 + 1 + 16, &[0, 0, 0, 29, 0][..]));
    publish(&root, "/secret", "in the clear", &[]).await;
    assert_eq!(readers[0].json().await["unreadable"], true);
    assert_eq!(plain.json().await["data"], "in the clear");
    let refused = run("publish", &["--secret", &weak, "--data", "x"]).output().await.unwrap();
    let reason = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && reason.contains("openssl rand -base64 32"), "{reason}");
}

const GRANTED: &str = "
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
- {name: nodes, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes: [{name: all, relay: {tokens: $KEY, max-timeout: 1h}}]
";

/// A token that openssl signs, as an application server would.
async fn token(dir: &Path, key: &str, claims: &serde_json::Value) -> String {
    let part = |bytes: &[u8]| base64::prelude::BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let signed = format!("{}.{}", part(br#"{"alg":"EdDSA","typ":"JWT"}"#), part(claims.to_string().as_bytes()));
    let text = dir.join("claims");
    std::fs::write(&text, &signed).unwrap();
    let mut openssl = Command::new("openssl");
    openssl.args(["pkeyutl", "-sign", "-rawin", "-inkey", key, "-in"]).arg(&text);
    format!("{signed}.{}", part(&openssl.output().await.unwrap().stdout))
}

#[tokio::test]
async fn a_token_lets_one_client_use_channels_for_a_time() {
    let overlay = Overlay::new(hermes()).unwrap();
    let key = overlay.dir().join("key").display().to_string();
    let run = async |arguments: &[&str]| {
        let output = Command::new(hermes()).arg("key").arg(&key).args(arguments).output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let public = run(&["--json"]).await["public"].as_str().unwrap().to_owned();
    let root = overlay.node("root").document(GRANTED).with("KEY", &public).start().await.unwrap();
    let authority = root.address("web").to_string();
    let claims = json!({
        "aud": authority, "sub": "address/127.0.0.1", "channels": ["/rooms/*"], "rights": ["subscribe", "publish"],
        "exp": now() + 600,
    });
    let changed = |name: &str, value: serde_json::Value| {
        let mut claims = claims.clone();
        claims[name] = value;
        claims
    };
    let publish_with = async |claims: &serde_json::Value, path: &str| {
        let token = token(overlay.dir(), &key, claims).await;
        let (status, _, body) = publish(&root, &format!("{path}?hermes-token={token}"), "hello", &[]).await;
        (status, body)
    };
    let (status, body) = publish_with(&claims, "/rooms/a").await;
    assert_eq!(status, 204, "{body}");
    for (what, claims, path, reason) in [
        ("another client", changed("sub", json!("address/192.0.2.1")), "/rooms/a", "not for address/127.0.0.1"),
        ("another authority", changed("aud", json!("relay.example")), "/rooms/a", "authority relay.example"),
        ("another channel", claims.clone(), "/other", "not for the channel /other"),
        ("another channel by an escape", claims.clone(), "/%72ooms", "not for the channel"),
        ("another right", changed("rights", json!(["subscribe"])), "/rooms/a", "the right to publish"),
        ("another time", changed("exp", json!(now() - 1)), "/rooms/a", "not valid now"),
        ("an endless time", changed("exp", json!(now() + 40 * 86_400)), "/rooms/a", "not valid now"),
        ("no client", changed("sub", json!(null)), "/rooms/a", "malformed token"),
    ] {
        let (status, body) = publish_with(&claims, path).await;
        assert!(status == 403 && body.contains(reason), "{what}: {status} {body}");
    }
    let (status, _, body) = publish(&root, "/rooms/a", "hello", &[]).await;
    assert!(status == 401 && body.contains("hermes-token"), "{status} {body}");
    let (other, _) = SigningKey::generate().unwrap();
    let grant: hermes_signature::Grant = serde_json::from_value(claims.clone()).unwrap();
    let forged = format!("/rooms/a?hermes-token={}", grant.sign(&other));
    assert_eq!(publish(&root, &forged, "hello", &[]).await.0, 403);

    // EventSource has it in the query or in a cookie, and gets a subscription that does not outlive it.
    let token = token(overlay.dir(), &key, &changed("exp", json!(now() + 100))).await;
    let cookie = format!("cookie: a=b; hermes-token={token}");
    let reading = ["--header", &cookie, "--header", "accept: text/event-stream"];
    let (status, head, _) = curl(&root, "/rooms/b?hermes-timeout=3600", &reading).await;
    let max: u64 = field(&head, "hermes-max-timeout").unwrap().parse().unwrap();
    assert!(status == 400 && (90..=100).contains(&max), "{status} {max}");
    let several = [&reading[..], &["--header", "hermes-channels: /other"]].concat();
    assert_eq!(curl(&root, "/rooms/b?hermes-timeout=60", &several).await.0, 403);
    let mut subscriber = Subscriber::start(&root, "/rooms/b?hermes-timeout=60", &reading);
    root.metric_is("hermes_relay_subscriptions", "", 1.0).await;

    // The command makes such URLs, and the clients take them.
    let url = format!("http://{authority}/rooms/b");
    let grant = ["--grant", &url, "--client", "address/127.0.0.1", "--rights", "publish", "--json"];
    let url = run(&grant).await["url"].as_str().unwrap().to_owned();
    let published = Command::new(hermes()).args(["publish", &url, "--data", "by a token"]).output().await.unwrap();
    assert!(published.status.success(), "{}", String::from_utf8_lossy(&published.stderr));
    loop {
        let line = subscriber.line().await;
        if line.starts_with("data") {
            assert_eq!(line, "data: by a token");
            break;
        }
    }
    let refused = Command::new(hermes()).args(["subscribe", &url]).output().await.unwrap();
    let reason = String::from_utf8_lossy(&refused.stderr);
    assert!(reason.contains("does not have the right to subscribe"), "{reason}");

    // A node below subscribes for its clients, whose tokens it checks itself. Publications have theirs.
    let below = overlay.node("below").document(&BELOW.replace("upstream: next}", "upstream: next, tokens: $KEY}"));
    let below = below.with("KEY", &public).with("NEXT", root.address("nodes")).start().await.unwrap();
    let host = format!("host: {authority}");
    let sub = [&reading[..], &["--header", &host]].concat();
    let mut at_below = Subscriber::start(&below, "/rooms/b?hermes-timeout=60", &sub);
    below.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    assert_eq!(publish(&below, "/rooms/b", "x", &["--header", &host]).await.0, 401);
    let query = url.split_once('?').unwrap().1;
    let published = publish(&below, &format!("/rooms/b?{query}"), "from below", &["--header", &host]).await;
    assert_eq!(published.0, 204, "{}", published.2);
    while at_below.line().await != "data: from below" {}
}

#[tokio::test]
async fn a_token_does_not_outlive_itself_or_its_channel() {
    let overlay = Overlay::new(hermes()).unwrap();
    let key = overlay.dir().join("key").display().to_string();
    let (signing, pem) = SigningKey::generate().unwrap();
    std::fs::write(&key, pem).unwrap();
    let document = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: all, relay: {tokens: $KEY, upstream: next}}]
upstreams: [{name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}]
";
    // The root knows no tokens. It must not do more for clients of the other relay than their tokens say.
    let root = overlay.node("root").document(ROOT).start().await.unwrap();
    let edge = overlay.node("edge").document(document).with("NEXT", root.address("web"));
    let mut edge = edge.with("KEY", signing.public()).start().await.unwrap();
    let authority = edge.address("web").to_string();
    let token = |channel: &str, seconds: u64| {
        let grant = hermes_signature::Grant {
            aud: authority.clone(),
            sub: "address/127.0.0.1".to_owned(),
            channels: vec![channel.to_owned()],
            rights: vec![hermes_signature::Right::Subscribe],
            exp: now() + seconds,
            nbf: None,
        };
        format!("{channel}?hermes-token={}", grant.sign(&signing))
    };
    let group = [&SUBSCRIBE[..], &["--header", "hermes-group: g"]].concat();
    for (fields, reason) in [
        (&[][..], "write a hermes-timeout"),
        (&["--header", "hermes-timeout: 3600"], "write a hermes-timeout"),
        (&["--header", "hermes-timeout: 9", "--header", "hermes-channels: /secret"], "leave it out"),
    ] {
        let (status, _, body) = curl(&edge, &token("/a", 60), &[&group, fields].concat()).await;
        assert!(status == 400 && body.contains(reason), "{status} {body}");
    }

    // A token for one channel does not extend a subscription to another one.
    let including = [&SUBSCRIBE[..], &["--include", "--header", "hermes-timeout: 30"]].concat();
    let mut subscriber = Subscriber::start(&edge, &token("/secret", 60), &including);
    let id = loop {
        if let Some(id) = subscriber.line().await.strip_prefix("hermes-subscription: ") {
            break id.to_owned();
        }
    };
    let subscription = format!("hermes-subscription: {id}");
    let refreshing = [&SUBSCRIBE[..], &["--header", &subscription]].concat();
    let (status, _, body) = curl(&edge, &token("/lobby", 600), &refreshing).await;
    assert!(status == 403 && body.contains("not for the channel"), "{status} {body}");
    assert_eq!(curl(&edge, &token("/secret", 600), &refreshing).await.0, 204);

    // A client refreshes as long as its token allows, and not only for half of its time.
    let url = format!("http://{authority}{}", token("/news", 12));
    let mut reader = Command::new(hermes());
    reader.args(["subscribe", &url]).stderr(Stdio::piped());
    let mut reader = Subscriber::run(&mut reader);
    edge.metric_is("hermes_relay_subscriptions", "", 2.0).await;
    tokio::time::sleep(Duration::from_millis(7500)).await;
    publish(&root, "/news", "late", &["--header", &format!("host: {authority}")]).await;
    assert_eq!(reader.line().await, "late");
    assert_eq!(reader.end().await.0, 1, "it ends with its token");

    // Nor does a subscription outlive the key of its token.
    let (other, _) = SigningKey::generate().unwrap();
    let values = [("KEY", other.public().to_string()), ("NEXT", root.address("web").to_string())];
    edge.reload(document, &values).await.unwrap();
    edge.metric_is("hermes_relay_subscriptions", "", 0.0).await;
}
