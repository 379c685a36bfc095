//! How a document comes, and what becomes of a bad one.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use hermes_testkit::{
    ca::{Authority, Identity, Subject},
    overlay::Node,
    poll::until,
    tls,
};
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::reload::{connect, echoes, get, loopback, overlay};

const HELLO: &str = "
access-log: off
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: hello, respond: {body: $WORD}}
";

async fn says(node: &Node, word: &str) {
    let apps = node.address("apps");
    until(word, || async { get(apps, "APP", "/").await.unwrap() == (200, word.to_owned()) }).await;
}

fn text(node: &Node, word: &str) -> String {
    format!("{}{}", node.prelude(), HELLO.replace("$WORD", word))
}

#[tokio::test]
async fn a_document_is_followed_however_it_is_replaced() {
    let overlay = overlay();
    let node = overlay.node("near").document(HELLO).with("WORD", "first").start().await.unwrap();
    says(&node, "first").await;
    node.replace(HELLO, &[("WORD", "renamed".to_owned())]).unwrap();
    says(&node, "renamed").await;
    fs::write(node.config(), text(&node, "written")).unwrap();
    says(&node, "written").await;
    fs::remove_file(node.config()).unwrap();
    until("a missing document is refused", || async { refusals(&node).await >= 1.0 }).await;
    says(&node, "written").await;
    fs::write(node.config(), text(&node, "back")).unwrap();
    says(&node, "back").await;
    let before = node.generation().await.unwrap();
    node.signal(Signal::SIGHUP).unwrap();
    until("SIGHUP reloads", || async { node.generation().await.unwrap() > before }).await;
    says(&node, "back").await;
}

/// Nobody writes into it: who opened it to read would wait for ever.
#[tokio::test]
async fn a_named_pipe_as_document_blocks_no_reload() {
    let overlay = overlay();
    let node = overlay.node("near").document(HELLO).with("WORD", "first").start().await.unwrap();
    let pipe = overlay.dir().join("pipe");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    fs::rename(&pipe, node.config()).unwrap();
    node.says("not a regular file").await;
    node.signal(Signal::SIGHUP).unwrap();
    until("it is refused again", || async { refusals(&node).await >= 2.0 }).await;
    says(&node, "first").await;
    node.replace(HELLO, &[("WORD", "second".to_owned())]).unwrap();
    says(&node, "second").await;
}

/// As a cluster mounts a configuration: the file leads through `..data`, which is turned in one step.
#[tokio::test]
async fn a_document_is_watched_through_symbolic_links() {
    let overlay = overlay();
    let node = overlay.node("near").document(HELLO).with("WORD", "first").start().await.unwrap();
    let mount = overlay.dir().join("mount");
    for (version, word) in [("..2026_1", "one"), ("..2026_2", "two"), ("..2026_3", "three")] {
        fs::create_dir_all(mount.join(version)).unwrap();
        fs::write(mount.join(version).join("near.yaml"), text(&node, word)).unwrap();
    }
    let turn = |version: &str| {
        symlink(version, mount.join("..data_tmp")).unwrap();
        fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
    };
    turn("..2026_1");
    let linked = overlay.dir().join("next.yaml");
    symlink(mount.join("..data/near.yaml"), &linked).unwrap();
    fs::rename(&linked, node.config()).unwrap();
    says(&node, "one").await;
    turn("..2026_2");
    says(&node, "two").await;
    turn("..2026_3");
    says(&node, "three").await;
    fs::write(mount.join("..2026_3/near.yaml"), text(&node, "written")).unwrap();
    says(&node, "written").await;
}

async fn refusals(node: &Node) -> f64 {
    node.metric("hermes_reloads_total", "result=\"refused\"").await.unwrap()
}

/// A document is applied whole: one whose admin endpoint cannot be had changes nothing else either.
#[tokio::test]
async fn a_document_whose_admin_endpoint_cannot_be_bound_is_refused_as_a_whole() {
    let overlay = overlay();
    let mut node = overlay.node("near").document(HELLO).with("WORD", "good").start().await.unwrap();
    let holder = std::net::TcpListener::bind(loopback()).unwrap();
    let taken = holder.local_addr().unwrap();
    let prelude = node.prelude().replace("127.0.0.1:0", &taken.to_string());
    let moved = |word: &str| format!("{prelude}{}", HELLO.replace("$WORD", word));
    let moved = [moved("bad"), moved("better")];
    assert!(moved[0].contains(&taken.to_string()), "{}", moved[0]);
    fs::write(node.config(), &moved[0]).unwrap();
    until("it is refused", || async { refusals(&node).await >= 1.0 }).await;
    node.says(&format!("admin: listening on {taken} over TCP: Address already in use")).await;
    node.says("Stop the process that uses the address").await;
    assert_eq!(get(node.address("apps"), "APP", "/").await.unwrap(), (200, "good".to_owned()));
    assert_eq!((node.generation().await.unwrap(), refusals(&node).await), (1, 1.0));

    drop(holder);
    fs::write(node.config(), &moved[1]).unwrap();
    says(&node, "better").await;
    until("it moves", || async { get(taken, "localhost", "/healthz").await.is_ok_and(|(status, _)| status == 200) })
        .await;
    until("the old place is closed", || async { get(node.admin(), "localhost", "/healthz").await.is_err() }).await;
    node.assert_sound();
}

#[tokio::test]
async fn a_bad_document_is_refused_with_its_reasons_and_changes_nothing() {
    let overlay = overlay();
    let node = overlay.node("near").document(HELLO).with("WORD", "good").start().await.unwrap();
    let holder = std::net::TcpListener::bind(loopback()).unwrap();
    let taken = holder.local_addr().unwrap();
    let mistakes = [
        ("routes: [{name: x, upstream: nowhere}]", "routes[0]"),
        ("listeners: [{name: apps, bind: 127.0.0.1:0, protocol: htp}]", "listeners[0].protocol"),
        ("listeners: [", "near.yaml"),
        (&format!("listeners: [{{name: apps, bind: '{taken}', protocol: http}}]"), "listeners[0].bind"),
        ("identity: {cert: no.pem, key: no.key, ca: no.ca}\nlisteners: []", "identity"),
    ];
    for (number, (mistake, place)) in mistakes.iter().enumerate() {
        let output = node.log().len();
        node.replace(&format!("{mistake}\n"), &[]).unwrap();
        until("it is refused", || async { refusals(&node).await > number as f64 }).await;
        until(place, || async { node.log()[output..].contains(place) }).await;
        assert_eq!(get(node.address("apps"), "APP", "/").await.unwrap(), (200, "good".to_owned()));
        assert_eq!(node.generation().await.unwrap(), 1);
    }
    assert_eq!(refusals(&node).await, mistakes.len() as f64, "each is refused once");
    node.replace(HELLO, &[("WORD", "better".to_owned())]).unwrap();
    says(&node, "better").await;
}

const SECURE: &str = "
access-log: off
listeners:
- {name: secure, bind: '127.0.0.1:0', protocol: http, tls: {client: none, cert: $CERT, key: $KEY}}
- {name: apps, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: echo, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: hello, respond: {body: $WORD}}
";

struct Shop {
    authority: Authority,
    cert: PathBuf,
    key: PathBuf,
}

impl Shop {
    fn new(dir: &Path) -> Self {
        let authority = Authority::new("strangers").unwrap();
        Self { authority, cert: dir.join("shop.pem"), key: dir.join("shop.key") }
    }

    fn issue(&self) -> Identity {
        self.authority.issue(&Subject::server("shop.example")).unwrap()
    }

    async fn visit(&self, to: std::net::SocketAddr) -> TlsStream<TcpStream> {
        let connector = TlsConnector::from(tls::client(self.authority.pem(), None, &["http/1.1"]).unwrap());
        let tcp = TcpStream::connect(to).await.unwrap();
        connector.connect(ServerName::try_from("shop.example").unwrap(), tcp).await.unwrap()
    }

    async fn shows(&self, to: std::net::SocketAddr, identity: &Identity) -> bool {
        let wanted = CertificateDer::from_pem_slice(identity.cert_pem.as_bytes()).unwrap();
        self.visit(to).await.get_ref().1.peer_certificates().unwrap()[0] == wanted
    }
}

async fn ask(stream: &mut TlsStream<TcpStream>) -> String {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: shop.example\r\n\r\n").await.unwrap();
    let mut room = vec![0; 4096];
    let length = stream.read(&mut room).await.unwrap();
    String::from_utf8_lossy(&room[..length]).into_owned()
}

#[tokio::test]
async fn a_renewed_certificate_is_used_without_a_dropped_connection() {
    let overlay = overlay();
    let shop = Shop::new(overlay.dir());
    let echo = hermes_testkit::origin::stream::echo(hermes_testkit::origin::listen(loopback()).unwrap()).unwrap();
    let old = shop.issue();
    fs::write(&shop.cert, &old.cert_pem).unwrap();
    fs::write(&shop.key, &old.key_pem).unwrap();
    let draft = overlay.node("near").document(SECURE).with("ECHO", echo.address()).with("WORD", "sold");
    let node = draft.with("CERT", shop.cert.display()).with("KEY", shop.key.display()).start().await.unwrap();
    let secure = node.address("secure");
    let mut customer = shop.visit(secure).await;
    assert!(ask(&mut customer).await.contains("sold"));
    let mut tunnel = connect(node.address("apps"), "ANY:1").await;
    assert!(echoes(&mut tunnel, b"before").await);
    for _ in 0..3 {
        // One file after the other: in between they do not fit each other, and nothing happens.
        let new = shop.issue();
        fs::write(&shop.key, &new.key_pem).unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(30)).await;
        fs::write(&shop.cert, &new.cert_pem).unwrap();
        until("the new certificate", || shop.shows(secure, &new)).await;
        assert!(ask(&mut customer).await.contains("sold"), "the old connection goes on");
        assert!(echoes(&mut tunnel, b"after").await);
    }
}

/// The document may come before the files that it names.
#[tokio::test]
async fn a_document_is_applied_once_its_files_exist() {
    let overlay = overlay();
    let shop = Shop::new(overlay.dir());
    let late = overlay.dir().join("late");
    fs::create_dir(&late).unwrap();
    let node = overlay.node("near").document(HELLO).with("WORD", "waiting").start().await.unwrap();
    let (cert, key) = (late.join("shop.pem"), late.join("shop.key"));
    let values = [
        ("CERT", cert.display().to_string()),
        ("KEY", key.display().to_string()),
        ("ECHO", "127.0.0.1:9".to_owned()),
        ("WORD", "open".to_owned()),
    ];
    node.replace(SECURE, &values).unwrap();
    until("it is refused", || async { refusals(&node).await >= 1.0 }).await;
    says(&node, "waiting").await;
    let identity = shop.issue();
    fs::write(&key, &identity.key_pem).unwrap();
    fs::write(&cert, &identity.cert_pem).unwrap();
    says(&node, "open").await;
}

/// Deployments may replace whole directories.
#[tokio::test]
async fn a_certificate_in_a_directory_that_is_replaced_is_used() {
    let overlay = overlay();
    let certs = overlay.dir().join("certs");
    fs::create_dir(&certs).unwrap();
    let mut shop = Shop::new(overlay.dir());
    (shop.cert, shop.key) = (certs.join("shop.pem"), certs.join("shop.key"));
    let write = |identity: &Identity, to: &Path| {
        fs::write(to.join("shop.pem"), &identity.cert_pem).unwrap();
        fs::write(to.join("shop.key"), &identity.key_pem).unwrap();
    };
    write(&shop.issue(), &certs);
    let draft = overlay.node("near").document(SECURE).with("ECHO", "127.0.0.1:9").with("WORD", "sold");
    let node = draft.with("CERT", shop.cert.display()).with("KEY", shop.key.display()).start().await.unwrap();
    let secure = node.address("secure");
    for _ in 0..2 {
        // The directory is removed and created again.
        let new = shop.issue();
        fs::remove_dir_all(&certs).unwrap();
        fs::create_dir(&certs).unwrap();
        write(&new, &certs);
        until("the new certificate", || shop.shows(secure, &new)).await;
        // The directory is moved away, and replaced by another one.
        let (new, next) = (shop.issue(), overlay.dir().join("next"));
        fs::create_dir(&next).unwrap();
        write(&new, &next);
        let away = overlay.dir().join("away");
        let _ = fs::remove_dir_all(&away);
        fs::rename(&certs, &away).unwrap();
        fs::rename(&next, &certs).unwrap();
        until("the new certificate", || shop.shows(secure, &new)).await;
    }
}
