//! Unauthorized clients of the controller: without a certificate, with a node's or a foreign one, with too much data;
//! and removed nodes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use hermes_testkit::ca::{Authority, Subject};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::rustls;

use hermes_testkit::control::{ControllerFixture, until};

/// What curl gets: the status, or how it ended.
fn curl(fixture: &ControllerFixture, identity: Option<(&Path, &Path)>, args: &[&str], path: &str) -> Result<u16, i32> {
    let mut command = Command::new("curl");
    command.args(["--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--cacert"]);
    command.arg(fixture.directory.path().join("ca.pem"));
    if let Some((cert, key)) = identity {
        command.arg("--cert").arg(cert).arg("--key").arg(key);
    }
    let output = command.args(args).arg(format!("https://{}{path}", fixture.socket(9400))).output().unwrap();
    let status = String::from_utf8(output.stdout).unwrap();
    if output.status.success() { Ok(status.parse().unwrap()) } else { Err(output.status.code().unwrap()) }
}

/// The operator's certificate and key, as files; and the authority's beside them.
fn operator(fixture: &ControllerFixture) -> (PathBuf, PathBuf) {
    let directory = fixture.directory.path();
    let text = std::fs::read_to_string(directory.join("controller/operator.json")).unwrap();
    let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (key, file) in [("authorities", "ca.pem"), ("certificate", "operator.pem"), ("key", "operator.key")] {
        std::fs::write(directory.join(file), parsed[key].as_str().unwrap()).unwrap();
    }
    (directory.join("operator.pem"), directory.join("operator.key"))
}

#[tokio::test]
async fn unauthorized_clients_learn_nothing() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    until("it has enrolled", || fixture.log("laptop").contains("under control")).await;
    let (cert, key) = operator(&fixture);
    let root = Some((&*cert, &*key));
    assert_eq!(curl(&fixture, root, &[], "/v1/documents"), Ok(200));
    let directory = fixture.directory.path();
    let laptop = (directory.join("laptop/node.pem"), directory.join("laptop/node.key"));
    let laptop = Some((&*laptop.0, &*laptop.1));
    for path in ["/v1/documents", "/v1/documents/Node/server", "/v1/nodes"] {
        assert_eq!(curl(&fixture, None, &[], path), Ok(401), "{path}");
        assert_eq!(curl(&fixture, laptop, &[], path), Ok(401), "{path}: a node is no operator");
    }
    for path in ["/v1/apply", "/v1/tokens"] {
        let body = ["--data", "kind: User", "--header", "content-type: application/json"];
        assert_ne!(curl(&fixture, None, &body, path), Ok(200), "{path}");
        assert_ne!(curl(&fixture, laptop, &body, path), Ok(200), "{path}");
    }
    // One of another authority does not even come so far.
    let foreign = Authority::new("test")
        .unwrap()
        .issue(&Subject { node: Some("server".to_owned()), ..Subject::default() })
        .unwrap();
    let (cert, key) = (directory.join("foreign.pem"), directory.join("foreign.key"));
    std::fs::write(&cert, foreign.cert_pem).unwrap();
    std::fs::write(&key, foreign.key_pem).unwrap();
    assert!(curl(&fixture, Some((&*cert, &*key)), &[], "/v1/documents").is_err());
    let audit = hermes_testkit::control::audit(&directory.join("controller"));
    for words in [
        "\"what\":\"apply\",\"by\":\"operator/root\"",
        "\"about\":\"spiffe://test/node/laptop\",\"refused\"",
        "\"by\":\"node/laptop\"",
    ] {
        assert!(audit.contains(words), "{words} is not in {audit}");
    }
    let secret = fixture.token("server");
    let audit = hermes_testkit::control::audit(&directory.join("controller"));
    let parts: Vec<_> = secret.split('.').collect();
    assert!(audit.contains(parts[1]) && !audit.contains(parts[2]), "the id is there, and not the secret");
    assert_eq!(fixture.hermes_ok(&["get", "users"], "").matches("\"kind\":\"User\"").count(), 1, "nothing was changed");
}

#[tokio::test]
async fn oversized_and_empty_requests_are_rejected() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let (cert, key) = operator(&fixture);
    let root = Some((&*cert, &*key));
    let large = fixture.directory.path().join("large");
    std::fs::write(&large, vec![b'#'; 100 << 20]).unwrap();
    let large = format!("@{}", large.display());
    // It may be told before all of it is sent, or while it is.
    let refused = curl(&fixture, root, &["--data-binary", &large], "/v1/apply");
    assert!(matches!(refused, Ok(413) | Err(55 | 56 | 92)), "{refused:?}");
    for (path, args) in [
        ("/v1/documents/Node", &[][..]),
        ("/v1/documents/Node/..%2f..%2fetc", &[]),
        ("/v1/documents?kind=Nothing", &[]),
        ("/v1/documents?kin=Node", &[]),
        ("/v1/apply?since=yesterday", &["--data", "kind: User"]),
        ("/v1/tokens", &["--data", "{}", "--header", "content-type: application/json"]),
    ] {
        let status = curl(&fixture, root, args, path).unwrap();
        assert!((400..500).contains(&status), "{path}: {status}");
    }
    assert_eq!(curl(&fixture, root, &[], "/v2/documents"), Ok(404));
    assert_eq!(curl(&fixture, root, &[], "/v1/documents"), Ok(200), "it goes on");
}

#[tokio::test]
async fn a_removed_node_serves_no_client_and_cannot_return() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    let output = fixture.refused(&["node", "remove", "server"], "");
    assert!(output.contains("Service/APP: at[0].node: unknown node server"), "{output}");
    fixture.hermes_ok(&["delete", "Service/APP"], "");
    let alone = fixture.documents(7001).replace(", links: server", "");
    let alone: String = alone.split("---\n").filter(|one| !one.contains("Service")).collect::<Vec<_>>().join("---\n");
    fixture.hermes_ok(&["apply", "-f", "-"], &alone);
    fixture.hermes_ok(&["node", "remove", "server"], "");
    until("it listens no more", || std::net::TcpStream::connect(fixture.socket(9443)).is_err()).await;
    // Its certificate is worth nothing, to the node of this name that comes later too.
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    until("it is told", || fixture.log("server").contains("this node was removed")).await;
    hermes_testkit::control::sigkill(server);
    let _server = fixture.node("server", None);
    until("it is told again", || fixture.log("server").contains("this node was removed")).await;
    assert!(fixture.get("APP").is_none_or(|(status, _)| status != 200));
}

/// Operators' connections that ask for much and read nothing of it, or take their time to ask, end by themselves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes two minutes"]
async fn a_client_that_does_not_read_is_not_waited_for() {
    let fixture = ControllerFixture::new().await;
    let users = |number: usize| format!("---\n{{kind: User, name: {}-{number}}}\n", "u".repeat(50));
    let all = fixture.documents(7001) + &(0..10_000).map(users).collect::<String>();
    fixture.hermes_ok(&["apply", "-f", "-"], &all);
    let (cert, key) = operator(&fixture);
    let ca = std::fs::read(fixture.directory.path().join("ca.pem")).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&ca).map(Result::unwrap));
    let chain = CertificateDer::pem_file_iter(cert).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(key).unwrap();
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config.with_client_auth_cert(chain, key).unwrap()));
    let mut open = Vec::new();
    let requests = [
        "GET /v1/documents HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/apply HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nk",
    ];
    for text in requests {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let tcp = socket.connect(fixture.socket(9400)).await.unwrap();
        let port = tcp.local_addr().unwrap().port();
        let mut one = connector.connect(fixture.address.to_string().try_into().unwrap(), tcp).await.unwrap();
        one.write_all(text.as_bytes()).await.unwrap();
        open.push((port, one));
    }
    let is_served = |port: u16| {
        let filter = format!("sport = :9400 and dport = :{port}");
        let output = Command::new("ss").args(["-Htn", &filter]).output().unwrap();
        !output.stdout.is_empty()
    };
    assert!(open.iter().all(|(port, _)| is_served(*port)));
    let ended = async {
        while open.iter().any(|(port, _)| is_served(*port)) {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(240), ended).await.expect("they end");
    assert!(fixture.hermes_ok(&["get", "services"], "").contains("APP"));
}

/// TLS connections that say nothing, and ones that ask for a certificate byte by byte, are closed; who asks is served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_connections_are_closed_and_exclude_no_client() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    operator(&fixture);
    let ca = std::fs::read(fixture.directory.path().join("ca.pem")).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&ca).map(Result::unwrap));
    let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut idle = Vec::new();
    for _ in 0..1000 {
        let tcp = tokio::net::TcpStream::connect(fixture.socket(9400)).await.unwrap();
        let name = fixture.address.to_string().try_into().unwrap();
        idle.push(connector.connect(name, tcp).await.unwrap());
    }
    assert!(fixture.hermes_ok(&["get"], "").contains("laptop"));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    until("a node enrols meanwhile", || fixture.log("laptop").contains("under control")).await;
    let closed = async {
        for mut one in idle {
            // The end of it, in whatever way.
            let ended = one.read(&mut [0; 1024]).await;
            assert!(!matches!(ended, Ok(1..)), "there was nothing to be said");
        }
    };
    tokio::time::timeout(Duration::from_secs(60), closed).await.expect("they are closed");
    assert!(fixture.hermes_ok(&["get"], "").contains("laptop"));
}

/// Tokens that were used, are no tokens or are expired, and nodes with a key that is another node's: each is named in the audit.
#[tokio::test]
async fn the_audit_log_names_rejected_clients() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let audit = || hermes_testkit::control::audit(&fixture.state("controller"));
    let token = fixture.token("laptop");
    let mut laptop = fixture.node("laptop", Some(&token));
    until("it has enrolled", || fixture.log("laptop").contains("under control")).await;
    let mut again = fixture.node("replayed", Some(&token));
    until("a used token is refused", || again.exited().unwrap().is_some()).await;
    let id = token.split('.').nth(1).unwrap();
    let used = format!("\"about\":\"token {id}\",\"refused\":\"this token is used");
    assert!(audit().contains(&used), "{}", audit());
    let short = fixture.hermes_ok(&["token", "create", "--node", "server", "--life", "1s"], "").trim().to_owned();
    // The life of a token is measured by the clock alone, and its end is announced nowhere.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let mut late = fixture.node("late", Some(&short));
    until("an expired token is refused", || late.exited().unwrap().is_some()).await;
    let id = short.split('.').nth(1).unwrap();
    assert!(audit().lines().any(|line| line.contains(id) && line.contains("refused")), "{}", audit());
    // Nothing of what is secret is there, nor on the log.
    for secret in [token.split('.').nth(2).unwrap(), short.split('.').nth(2).unwrap(), "PRIVATE KEY"] {
        assert!(!audit().contains(secret) && !fixture.log("controller").contains(secret));
    }
    // Another machine with the certificate of before: the node enrolled anew since, with another key.
    let (before, after) = (fixture.state("laptop"), fixture.state("moved"));
    std::fs::rename(&before, &after).unwrap();
    std::fs::remove_file(after.join("document.json")).unwrap();
    let _ = laptop.exited();
    hermes_testkit::control::sigkill(laptop);
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    until("it has enrolled anew", || fixture.state("laptop/document.json").exists()).await;
    let _moved = fixture.node("moved", None);
    until("who has the old key is told", || fixture.log("moved").contains("this node was removed")).await;
    until("and named", || audit().contains("\"what\":\"follow\",\"by\":\"node/laptop\"")).await;
}

/// Certificates that are over, and another authority's: refused in the handshake, and named in the audit.
#[tokio::test]
async fn expired_and_foreign_certificates_are_rejected_and_audited() {
    let fixture = ControllerFixture::new().await;
    let brief = fixture.documents(7001).replace("name: test\n", "name: test\ncertificate-lifetime: 6s\n");
    fixture.hermes_ok(&["apply", "-f", "-"], &brief);
    let laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    until("it has enrolled", || fixture.log("laptop").contains("under control")).await;
    hermes_testkit::control::sigkill(laptop);
    operator(&fixture);
    let directory = fixture.directory.path();
    let (cert, key) = (directory.join("laptop/node.pem"), directory.join("laptop/node.key"));
    let requests = || curl(&fixture, Some((&*cert, &*key)), &[], "/v1/nodes");
    assert_eq!(requests(), Ok(401), "while it lives it is a node's, and no operator's");
    until("it is over", || requests().is_err()).await;
    // Each time: of those of one second there are fifty lines at most, and it has asked often until now.
    let audit = || hermes_testkit::control::audit(&directory.join("controller"));
    let refused = |why: &str| {
        let is_it = |line: &str| line.contains("\"what\":\"connect\"") && line.contains("127.") && line.contains(why);
        audit().lines().any(is_it)
    };
    until("that is in the audit", || requests().is_err() && refused("certificate expired")).await;
    let authority = Authority::new("test").unwrap();
    let other = tempfile::tempdir().unwrap();
    let files = authority.issue(&Subject::node("laptop")).unwrap().write(other.path(), "foreign").unwrap();
    let foreign = || curl(&fixture, Some((&*files.cert, &*files.key)), &[], "/v1/nodes");
    until("that is in the audit", || foreign().is_err() && refused("UnknownIssuer")).await;
    // The node itself says what is to be done.
    let _laptop = fixture.node("laptop", None);
    until("it says so", || fixture.log("laptop").contains("start the node again with --token")).await;
}
