//! The behaviour of every store: one suite, run against each.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_controller::store::{
    BaseState, Credentials, Etcd, LogRead, MAX_ENTRY, Revision, Sqlite, StatusEvent, Store, StoreError,
};
use hermes_net::tls::{CertifiedKey, Roots};
use tokio::task::JoinSet;

async fn all(store: &dyn Store, mut after: Revision) -> Vec<(Revision, Bytes)> {
    let mut all = Vec::new();
    loop {
        match store.read(after).await.unwrap() {
            LogRead::Entries(entries) if entries.is_empty() => return all,
            LogRead::Entries(entries) => all.extend(entries.into_iter().map(|entry| (entry.revision, entry.bytes))),
            LogRead::Gone | LogRead::Lost => panic!("revision {after} is gone"),
        }
        after = all.last().unwrap().0;
    }
}

async fn entries_come_back_in_their_order(store: &dyn Store) {
    assert_eq!((all(store, 0).await, store.base().await.unwrap()), (vec![], None));
    for after in 0..5 {
        assert_eq!(store.append(after, format!("entry {after}").into()).await.unwrap(), after + 1);
    }
    let read = all(store, 2).await;
    assert_eq!(read.iter().map(|(revision, _)| *revision).collect::<Vec<_>>(), [3, 4, 5]);
    assert_eq!(read[0].1, "entry 2");
}

async fn who_is_behind_hears_that(store: &dyn Store) {
    for wrong in [0, 4, 6] {
        let refused = store.append(wrong, "late".into()).await.unwrap_err();
        assert!(matches!(refused, StoreError::Behind(at) if at == wrong), "{refused}");
    }
    assert_eq!(all(store, 0).await.len(), 5, "what was refused is not there");
}

async fn of_several_at_once_one_is_next(store: Arc<dyn Store>) {
    let mut tasks = JoinSet::new();
    for who in 0..8u8 {
        let store = store.clone();
        tasks.spawn(async move {
            let (mut after, mut mine) = (5, Vec::new());
            while mine.len() < 10 {
                match store.append(after, vec![who, mine.len() as u8].into()).await {
                    Ok(revision) => {
                        mine.push(revision);
                        after = revision;
                    }
                    Err(StoreError::Behind(_)) => after = all(&*store, after).await.last().map_or(after, |last| last.0),
                    Err(other) => panic!("{other}"),
                }
            }
            mine
        });
    }
    let mut revisions: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    revisions.sort_unstable();
    assert_eq!(revisions, (6..=85).collect::<Vec<_>>());
    let read = all(&*store, 5).await;
    for who in 0..8 {
        let numbers: Vec<_> = read.iter().filter(|(_, bytes)| bytes[0] == who).map(|(_, bytes)| bytes[1]).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<u8>>(), "each one's are in the order in which it appended them");
    }
}

async fn who_waits_is_woken(store: Arc<dyn Store>) {
    let last = all(&*store, 0).await.last().unwrap().0;
    let mut waiting = JoinSet::new();
    waiting.spawn({
        let store = store.clone();
        async move { store.changed(last).await }
    });
    tokio::task::yield_now().await;
    store.append(last, "news".into()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), waiting.join_all()).await.unwrap().remove(0).unwrap();
    // Existing entries are not waited for.
    tokio::time::timeout(Duration::from_secs(10), store.changed(last)).await.unwrap().unwrap();
}

async fn a_large_entry_comes_back_whole(store: &dyn Store) {
    let last = all(store, 0).await.last().unwrap().0;
    let large: Bytes = (0..5_000_000u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    store.append(last, large.clone()).await.unwrap();
    store.append(last + 1, "small".into()).await.unwrap();
    let read = all(store, last).await;
    assert!(read[0].1 == large && read[1].1 == "small" && read.len() == 2);
    let refused = store.append(last + 2, vec![0; MAX_ENTRY + 1].into()).await.unwrap_err();
    assert!(matches!(refused, StoreError::TooLarge(_)), "{refused}");
}

async fn a_base_takes_the_place_of_what_was_before(store: &dyn Store) {
    let last = all(store, 0).await.last().unwrap().0;
    let base = |revision| BaseState { revision, state: format!("up to {revision}").into() };
    store.compact(base(last - 1)).await.unwrap();
    // An older base, or one of the future, changes nothing.
    for other in [3, last + 1] {
        store.compact(base(other)).await.unwrap();
    }
    assert_eq!(store.base().await.unwrap(), Some(base(last - 1)));
    assert_eq!(store.read(2).await.unwrap(), LogRead::Gone);
    assert_eq!(all(store, last - 1).await.len(), 1);
    // The base may replace the last entry; the next entry still gets the next revision.
    store.compact(base(last)).await.unwrap();
    assert_eq!(store.append(last, "next".into()).await.unwrap(), last + 1);
    assert_eq!(all(store, last).await.len(), 1);
}

/// An empty store begins with a base, and continues after it; a store with entries refuses.
async fn begins_with_a_base(empty: &dyn Store, full: &dyn Store) {
    let base = BaseState { revision: 41, state: vec![7; 3 << 20].into() };
    empty.begin(base.clone()).await.unwrap();
    assert_eq!(empty.base().await.unwrap(), Some(base.clone()));
    assert_eq!(empty.read(0).await.unwrap(), LogRead::Gone);
    assert_eq!(empty.append(41, "next".into()).await.unwrap(), 42);
    assert_eq!(all(empty, 41).await, [(42, "next".into())]);
    for store in [empty, full] {
        assert!(matches!(store.begin(base.clone()).await, Err(StoreError::NotEmpty)));
    }
}

async fn conforms(store: Arc<dyn Store>) {
    entries_come_back_in_their_order(&*store).await;
    who_is_behind_hears_that(&*store).await;
    of_several_at_once_one_is_next(store.clone()).await;
    who_waits_is_woken(store.clone()).await;
    a_large_entry_comes_back_whole(&*store).await;
    a_base_takes_the_place_of_what_was_before(&*store).await;
}

#[tokio::test]
async fn sqlite_does() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(directory.path()).unwrap());
    conforms(store.clone()).await;
    for file in std::fs::read_dir(directory.path()).unwrap() {
        let mode = file.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "nobody else reads the store");
    }
    let before = (store.base().await.unwrap(), all(&*store, 87 + 1).await);
    assert!(matches!(Sqlite::open(directory.path()), Err(StoreError::InUse(_))), "one controller has it");
    drop(store);
    let again = Sqlite::open(directory.path()).unwrap();
    let empty = tempfile::tempdir().unwrap();
    begins_with_a_base(&Sqlite::open(empty.path()).unwrap(), &again).await;
    assert_eq!((again.base().await.unwrap(), all(&again, 87 + 1).await), before);
}

/// A real etcd, on loopback ports of its own.
struct Server {
    _process: std::process::Child,
    _directory: tempfile::TempDir,
    client: u16,
}

impl Server {
    async fn start() -> Self {
        Self::start_as("http", &[]).await
    }

    /// Starts etcd, with TLS if it gets arguments for that.
    async fn start_as(scheme: &str, more: &[String]) -> Self {
        let free = || hermes_testkit::port::reserve("127.0.0.1").port();
        let (client, peer) = (free(), free());
        let directory = tempfile::tempdir().unwrap();
        let (client_url, peer_url) = (format!("{scheme}://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let process = std::process::Command::new("etcd")
            .args(["--name", "one", "--data-dir", directory.path().to_str().unwrap()])
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("one={peer_url}"), "--log-level", "error"])
            .args(more)
            .spawn()
            .expect("etcd: `scripts/setup.sh` installs it");
        let begun = std::time::Instant::now();
        while tokio::net::TcpStream::connect(("127.0.0.1", client)).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "etcd does not listen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { _process: process, _directory: directory, client }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self._process.kill();
        let _ = self._process.wait();
    }
}

/// A store without TLS.
fn etcd(url: &str) -> Etcd {
    Etcd::new(url, Credentials::default()).unwrap()
}

#[tokio::test]
async fn etcd_does() {
    let server = Server::start().await;
    let url = format!("etcd://127.0.0.1:{}/overlays/one", server.client);
    let store: Arc<dyn Store> = Arc::new(etcd(&url));
    conforms(store.clone()).await;
    let before = (store.base().await.unwrap(), all(&*store, 87 + 1).await);
    // Another controller has the same log; one with another prefix has none of it.
    let again = etcd(&url);
    assert_eq!((again.base().await.unwrap(), all(&again, 87 + 1).await), before);
    let other = etcd(&format!("etcd://127.0.0.1:{}", server.client));
    assert_eq!((other.base().await.unwrap(), all(&other, 0).await), (None, vec![]));
    what_one_says_others_hear(&url).await;
    let empty = etcd(&format!("etcd://127.0.0.1:{}/restored", server.client));
    begins_with_a_base(&empty, &*store).await;
    // The second member answers if the first one is unreachable.
    let two = etcd(&format!("etcd://127.0.0.1:1,127.0.0.1:{}/overlays/one", server.client));
    assert_eq!(two.base().await.unwrap(), before.0);
}

/// Waits until this status arrives.
async fn heard(
    events: &mut tokio::sync::mpsc::UnboundedReceiver<StatusEvent>,
    is_it: impl Fn(&StatusEvent) -> bool,
) -> StatusEvent {
    let waiting = async {
        loop {
            let heard = events.recv().await.unwrap();
            if is_it(&heard) {
                return heard;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting).await.unwrap()
}

async fn what_one_says_others_hear(url: &str) {
    let (one, two) = (etcd(url), Arc::new(etcd(url)));
    let output = |subject: &str, words: &'static str| (subject.to_owned(), Some(Bytes::from(words)));
    one.shared().unwrap().publish_status(vec![output("a", "1"), output("b", "1")]).await.unwrap();
    let (tell, mut events) = tokio::sync::mpsc::unbounded_channel();
    let mut hearing = JoinSet::new();
    hearing.spawn({
        let two = two.clone();
        async move { two.shared().unwrap().watch_status(&|heard| drop(tell.send(heard))).await }
    });
    let StatusEvent::Snapshot(all) = heard(&mut events, |_| true).await else { panic!("all of it comes first") };
    assert_eq!(all.iter().map(|word| word.subject.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    // The own status, and that of another overlay, are not reported.
    two.shared().unwrap().publish_status(vec![output("own", "1")]).await.unwrap();
    let many = (0..300).map(|number| output(&format!("many-{number}"), "1"));
    one.shared()
        .unwrap()
        .publish_status(many.chain([output("a", "2"), ("b".to_owned(), None)]).collect())
        .await
        .unwrap();
    let is_of = |heard: &StatusEvent, of: &str| matches!(heard, StatusEvent::Update(word) if word.subject == of);
    let StatusEvent::Update(word) = heard(&mut events, |heard| is_of(heard, "a") || is_of(heard, "own")).await else {
        panic!()
    };
    assert!(word.words.as_deref() == Some(b"2") && word.at > all[0].at && word.by == all[0].by);
    let StatusEvent::Update(word) = heard(&mut events, |heard| is_of(heard, "b")).await else { panic!() };
    assert_eq!(word.words, None);
    // The entries of a disconnected controller expire.
    drop(one);
    let StatusEvent::Update(word) = heard(&mut events, |heard| is_of(heard, "a")).await else { panic!() };
    assert_eq!((word.words, word.by), (None, all[0].by.clone()));
}

/// A CA for servers and their clients.
struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: rcgen::Issuer::new(params, key), pem }
    }

    fn roots(&self) -> Option<Roots> {
        Some(Roots::from_pem(self.pem.as_bytes()).unwrap())
    }

    /// Issues a certificate for this name or address, and writes it and its key to files.
    fn issue(&self, directory: &std::path::Path, file: &str, name: &str) -> [std::path::PathBuf; 2] {
        use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ServerAuth, ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = ["crt", "key"].map(|kind| directory.join(format!("{file}.{kind}")));
        std::fs::write(&files[0], certificate.pem()).unwrap();
        std::fs::write(&files[1], key.serialize_pem()).unwrap();
        files
    }
}

#[tokio::test]
async fn etcd_is_known_by_its_certificate_and_we_by_ours() {
    let (directory, authority, foreign) = (tempfile::tempdir().unwrap(), Authority::new(), Authority::new());
    let directory = directory.path();
    let ca = directory.join("ca.crt");
    std::fs::write(&ca, &authority.pem).unwrap();
    let server = authority.issue(directory, "server", "127.0.0.1");
    let mut args = vec!["--client-cert-auth".to_owned()];
    for (option, file) in [("trusted-ca-file", &ca), ("cert-file", &server[0]), ("key-file", &server[1])] {
        args.push(format!("--{option}={}", file.display()));
    }
    let server = Server::start_as("https", &args).await;
    let url = format!("etcds://127.0.0.1:{}", server.client);
    let own = |authority: &Authority| {
        let [cert, key] = authority.issue(directory, "client", "controller");
        Some(CertifiedKey::load(&cert, &key).unwrap())
    };
    let store = Etcd::new(&url, Credentials { roots: authority.roots(), own: own(&authority) }).unwrap();
    conforms(Arc::new(store)).await;
    let strangers = [
        ("who shows nothing", url.clone(), authority.roots(), None),
        ("who shows what another vouches for", url.clone(), authority.roots(), own(&foreign)),
        ("a server that another would have to vouch for", url.clone(), foreign.roots(), own(&authority)),
        ("a server of another name", url.replace("127.0.0.1", "localhost"), authority.roots(), own(&authority)),
        ("in the clear", url.replace("etcds", "etcd"), None, None),
    ];
    let mut asked = JoinSet::new();
    for (what, url, roots, own) in strangers {
        asked.spawn(async move { (what, Etcd::new(&url, Credentials { roots, own }).unwrap().base().await.is_err()) });
    }
    while let Some(asked) = asked.join_next().await {
        let (what, is_refused) = asked.unwrap();
        assert!(is_refused, "{what}");
    }
}

#[test]
fn certificates_are_of_no_use_in_the_clear() {
    let roots = Authority::new().roots();
    assert!(Etcd::new("etcd://127.0.0.1:2379", Credentials { roots, own: None }).is_err());
}

#[test]
fn what_is_no_address_of_etcd_is_refused() {
    for wrong in ["etcd://", "http://127.0.0.1:2379", "etcd://127.0.0.1", "etcd://a:1,b", "etcd://:1"] {
        assert!(Etcd::new(wrong, Credentials::default()).is_err(), "{wrong}");
    }
}

#[test]
fn what_is_no_store_is_refused_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("controller.db");
    std::fs::write(&file, "this is a letter, and a long one, of more than any header's length. ".repeat(20)).unwrap();
    let before = std::fs::read(&file).unwrap();
    assert!(matches!(Sqlite::open(directory.path()), Err(StoreError::Foreign(..))));
    assert_eq!(std::fs::read(&file).unwrap(), before);
}
