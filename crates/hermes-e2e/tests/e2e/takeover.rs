//! A new process takes the listeners of a running one over, and nobody who talks to them notices.
//!
//! Real processes that hand real sockets over, under load, several times in a row. Old processes finish what they
//! carry and end with status 0; whatever goes wrong with a successor leaves the running process as it was.

use hermes_ndn::packet::Interest;
use hermes_testkit::binary::hermes;
use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
};

use hermes_testkit::{
    generation_log::GenerationLog,
    origin::{self, Origin, datagram::UdpEcho, stream},
    overlay::{Draft, EFFECT_TIMEOUT, Node, Overlay},
    poll::until,
    process::Program,
    raw_http1::RawHttp1,
    skip::needs_root,
    traffic::{Traffic, TunnelTarget},
};
use nix::sys::signal::Signal;
use tokio::net::TcpStream;

const DOCUMENT: &str = "
access-log: off
workers: $WORKERS
drain: 2s
listeners:
- {name: apps, bind: '$APPS', protocol: http}
- {name: db, bind: '$DB', protocol: tcp, authority: 'DB:3306'}
- {name: video, bind: '$VIDEO', protocol: udp, authority: 'VIDEO:5004'}
- {name: ndn, unix: $FACE, protocol: ndn, namespaces: {ORG: /org}}
routes:
- {name: app, match: {authority: APP}, upstream: web}
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: video, match: {kind: udp}, terminate: {udp: '$UDP'}, timeout: {idle: 3s}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// One node's successive processes, and what they lead to.
struct ProcessSequence {
    overlay: Overlay,
    apps: SocketAddr,
    db: SocketAddr,
    video: SocketAddr,
    admin: SocketAddr,
    socket: PathBuf,
    face: PathBuf,
    web: Origin,
    echo: Origin,
    udp: UdpEcho,
}

impl ProcessSequence {
    /// On an address of its own: all its ports are fixed, as those of a service are.
    async fn new(host: [u8; 4]) -> Self {
        Self::of(Path::new(hermes()), host).await
    }

    async fn of(hermes: &Path, host: [u8; 4]) -> Self {
        let overlay = Overlay::new(hermes).unwrap();
        let web = GenerationLog::default().origin(loopback(), "web").await.unwrap();
        let echo = stream::echo(origin::listen(loopback()).unwrap()).unwrap();
        let udp = UdpEcho::start(loopback(), "").unwrap();
        let host = std::net::Ipv4Addr::from(host);
        let [apps, db, video, admin] = [(); 4].map(|()| hermes_testkit::port::reserve(host));
        let socket = overlay.dir().join("takeover.sock");
        let face = overlay.dir().join("face.sock");
        Self { overlay, apps, db, video, admin, socket, face, web, echo, udp }
    }

    fn draft(&self, process: &str, workers: usize) -> Draft<'_> {
        let draft = self.overlay.node("edge").called(process).admin(self.admin).document(DOCUMENT);
        let draft = draft.with("APPS", self.apps).with("DB", self.db).with("VIDEO", self.video);
        let draft = draft.with("WEB", self.web.address()).with("ECHO", self.echo.address());
        let draft = draft.with("UDP", self.udp.address()).with("WORKERS", workers).with("FACE", self.face.display());
        draft.args(&["--takeover", self.socket.to_str().unwrap()])
    }

    async fn start(&self, process: &str, workers: usize) -> Node {
        self.draft(process, workers).start().await.unwrap()
    }

    fn exchanges(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for _ in 0..2 {
            traffic.one_shot(self.apps, "APP", "/one-shot");
            traffic.keep_alive(self.apps, "APP", "/keep-alive");
            traffic.h2(self.apps, "app", "/h2");
            traffic.uploads(self.apps, "APP", "/upload");
        }
        traffic
    }

    fn lasting(&self, seed: u64) -> Traffic {
        let mut traffic = Traffic::default();
        traffic.tunnel(TunnelTarget::Bare(self.db), seed);
        traffic.tunnel(TunnelTarget::Connect(self.apps, "DB:3306".to_owned()), seed + 1);
        traffic.flow(self.video, seed + 2);
        traffic.flow(self.video, seed + 3);
        traffic
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_takeovers_in_a_row_under_load_lose_nothing() {
    let dynasty = ProcessSequence::new([127, 0, 34, 1]).await;
    let mut reigning = dynasty.start("edge-0", 2).await;
    let traffic = dynasty.exchanges();
    let mut lasting = vec![dynasty.lasting(0)];
    let mut retired = Vec::new();
    for number in 1..=10u64 {
        traffic.progress(1).await;
        // As many, fewer and more workers than the predecessor.
        let workers = [2, 1, 3, 1, 2][number as usize % 5];
        let successor = dynasty.start(&format!("edge-{number}"), workers).await;
        until("the old process parts", || async { reigning.log().contains("another process has the listeners") }).await;
        retired.push(std::mem::replace(&mut reigning, successor));
        if number % 3 == 0 {
            lasting.push(dynasty.lasting(100 * number));
        }
        for tunnels in &lasting {
            tunnels.progress(1).await;
        }
        // An Interest outside of all namespaces comes back.
        let mut face = UnixStream::connect(&dynasty.face).unwrap();
        face.set_read_timeout(Some(EFFECT_TIMEOUT)).unwrap();
        face.write_all(&Interest::new("/other".parse().unwrap()).encode()).unwrap();
        // `read_exact` repeats a read that a signal has interrupted; `read` fails.
        face.read_exact(&mut [0; 8]).unwrap();
    }
    traffic.progress(2).await;
    let report = traffic.finish().await;
    print!("{report}");
    report.assert_whole(10);
    let flows = 2 * lasting.len();
    for tunnels in lasting {
        let report = tunnels.finish().await;
        print!("{report}");
        report.assert_whole(5);
    }
    assert_eq!(dynasty.udp.sources(), flows, "each flow is one session to its end");
    for old in retired {
        let log = old.log();
        assert!(old.ended().await.success(), "{log}");
    }
    assert_eq!(reigning.generation().await.unwrap(), 1);
    reigning.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_that_fails_leaves_the_running_process_serving() {
    let dynasty = ProcessSequence::new([127, 0, 34, 2]).await;
    let mut reigning = dynasty.start("edge-0", 2).await;
    let traffic = dynasty.exchanges();
    let lasting = dynasty.lasting(7);
    traffic.progress(2).await;

    let refused = dynasty.draft("edge-refused", 2).document("listeners: [{name: x}]").launch().unwrap();
    assert_eq!(refused.ended().await.code(), Some(1));
    traffic.progress(2).await;

    // It gets all sockets, and then cannot have its admin address.
    let taken = hermes_testkit::port::reserve("127.0.34.2");
    let holder = std::net::TcpListener::bind(taken).unwrap();
    let hindered = dynasty.draft("edge-hindered", 2).admin(taken).launch().unwrap();
    assert_eq!(hindered.ended().await.code(), Some(1));
    drop(holder);
    traffic.progress(2).await;

    // It gets all sockets and dies.
    let path = dynasty.socket.clone();
    tokio::task::spawn_blocking(move || die_with_the_sockets(&path)).await.unwrap();
    traffic.progress(2).await;

    // It says something else.
    let mut stranger = UnixStream::connect(&dynasty.socket).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    assert_eq!(stranger.read(&mut [0; 64]).unwrap_or(0), 0, "a stranger gets no socket");
    traffic.progress(2).await;

    reigning.assert_sound();
    let successor = dynasty.start("edge-1", 2).await;
    traffic.progress(2).await;
    let report = traffic.finish().await;
    report.assert_whole(5);
    lasting.finish().await.assert_whole(5);
    assert!(reigning.ended().await.success());
    drop(successor);
}

/// The process that it takes over from is told to end meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_hands_over_refuses_to_end() {
    let dynasty = ProcessSequence::new([127, 0, 34, 8]).await;
    let reigning = dynasty.start("edge-0", 1).await;
    // A successor up to the moment at which it is ready.
    let mut successor = UnixStream::connect(&dynasty.socket).unwrap();
    successor.write_all(b"hermes takeover 1").unwrap();
    hermes_net::fd_passing::receive(&successor).unwrap();
    reigning.signal(Signal::SIGTERM).unwrap();
    let mut rest = Vec::new();
    successor.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"no");
    assert!(reigning.ended().await.success());
}

/// Nothing counts as taken before the running process has let go of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_successor_ends_and_logs_the_reason() {
    let dynasty = ProcessSequence::new([127, 0, 34, 9]).await;
    for (word, message) in
        [(&b"no"[..], "it timed out, or was stopped meanwhile"), (b"", "it closed the connection without a response")]
    {
        // A process that hands nothing over.
        let running = UnixListener::bind(&dynasty.socket).unwrap();
        let successor = dynasty.draft("edge-1", 1).launch().unwrap();
        let refused = tokio::task::spawn_blocking(move || {
            let (mut link, _) = running.accept().unwrap();
            link.read_exact(&mut [0; b"hermes takeover 1".len()]).unwrap();
            link.write_all(&[0; 4]).unwrap();
            let mut ready = [0; 5];
            link.read_exact(&mut ready).unwrap();
            assert_eq!(&ready, b"ready");
            link.write_all(word).unwrap();
        });
        successor.says(message).await;
        assert!(!successor.log().contains("running node="), "{}", successor.log());
        assert_eq!(successor.ended().await.code(), Some(1));
        refused.await.unwrap();
        // The place where successors call is not its own.
        assert!(UnixStream::connect(&dynasty.socket).is_err());
        std::fs::remove_file(&dynasty.socket).unwrap();
    }
}

/// It would take all over, and end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_that_ends_before_it_is_ready_takes_no_listeners() {
    let dynasty = ProcessSequence::new([127, 0, 34, 11]).await;
    let running = UnixListener::bind(&dynasty.socket).unwrap();
    let successor = dynasty.draft("edge-1", 1).launch().unwrap();
    let (called, mut link) = tokio::task::spawn_blocking(move || {
        let (mut link, _) = running.accept().unwrap();
        link.read_exact(&mut [0; b"hermes takeover 1".len()]).unwrap();
        (running, link)
    })
    .await
    .unwrap();
    // While it waits for what is handed over, which is nothing then.
    successor.signal(Signal::SIGTERM).unwrap();
    link.write_all(&[0; 4]).unwrap();
    successor.says("SIGTERM before the takeover").await;
    assert_eq!(successor.ended().await.code(), Some(1));
    let mut rest = Vec::new();
    link.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"", "it was never ready");
    // Who is called is whom it would have taken over from.
    called.set_nonblocking(true).unwrap();
    let _caller = UnixStream::connect(&dynasty.socket).unwrap();
    assert!(called.accept().is_ok());
}

/// A process that dies in the midst of it leaves nobody else who could go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_continues_if_the_running_process_dies() {
    let dynasty = ProcessSequence::new([127, 0, 34, 10]).await;
    // It hands nothing over, and ends once it hears that its successor is ready.
    let dying = "import socket, sys\n\
                 running = socket.socket(socket.AF_UNIX); running.bind(sys.argv[1]); running.listen()\n\
                 print('listening', flush=True)\n\
                 link, _ = running.accept()\n\
                 link.recv(17, socket.MSG_WAITALL); link.sendall(bytes(4)); link.recv(5, socket.MSG_WAITALL)";
    let mut running = Program::new("running", "python3", dynasty.socket.parent().unwrap())
        .args(["-c", dying])
        .args([&dynasty.socket])
        .start()
        .unwrap();
    running.wait_first_line(EFFECT_TIMEOUT).unwrap();
    let successor = dynasty.draft("edge-1", 1).launch().unwrap();
    successor.says("the running process died before it handed over").await;
    successor.says("running node=").await;
    assert!(running.end(EFFECT_TIMEOUT).unwrap().success());
    successor.signal(Signal::SIGTERM).unwrap();
    assert!(successor.ended().await.success());
}

/// A process that was started without the socket has what its successor needs.
#[tokio::test]
async fn a_successor_without_a_predecessor_names_the_remedy() {
    let dynasty = ProcessSequence::new([127, 0, 34, 7]).await;
    let elsewhere = dynasty.overlay.dir().join("elsewhere.sock");
    let reigning = dynasty.draft("edge-0", 1).args(&["--takeover", elsewhere.to_str().unwrap()]).start().await.unwrap();
    let hindered = dynasty.draft("edge-1", 1).launch().unwrap();
    hindered.says("no process listens there").await;
    let output = hindered.log();
    assert_eq!(hindered.ended().await.code(), Some(1));
    let message = format!("--takeover {}: no process listens there", dynasty.socket.display());
    assert!(output.contains(&message) && output.contains("Stop it first"), "{output}");
    assert!(output.contains("Address already in use"), "{output}");
    drop(reigning);
    // Nobody is in the way: the first of a row says nothing of it.
    assert!(!dynasty.start("edge-2", 1).await.log().contains("no process listens"));
}

/// A successor up to the moment at which it would serve.
fn die_with_the_sockets(path: &Path) {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(b"hermes takeover 1").unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    assert_ne!(length, [0; 4], "no socket came");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_successor_delays_nothing() {
    let dynasty = ProcessSequence::new([127, 0, 34, 3]).await;
    let mut reigning = dynasty.start("edge-0", 1).await;
    let silent = UnixStream::connect(&dynasty.socket).unwrap();
    // Its document is followed, and a true successor is heard, while somebody says nothing.
    let before = reigning.generation().await.unwrap();
    let text = std::fs::read_to_string(reigning.config()).unwrap();
    std::fs::write(reigning.config(), text.replace("drain: 2s", "drain: 3s")).unwrap();
    until("it follows its document", || async { reigning.generation().await.unwrap() > before }).await;
    reigning.assert_sound();
    let successor = dynasty.start("edge-1", 1).await;
    assert!(reigning.ended().await.success());
    // And one that only waits for its end does not keep it from ending.
    let another = UnixStream::connect(&dynasty.socket).unwrap();
    successor.signal(Signal::SIGTERM).unwrap();
    assert!(successor.ended().await.success());
    drop((silent, another));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_taken_over_still_obeys_signals() {
    let dynasty = ProcessSequence::new([127, 0, 34, 4]).await;
    let old = dynasty.start("edge-0", 1).await;
    let lasting = dynasty.lasting(3);
    lasting.progress(2).await;
    let successor = dynasty.start("edge-1", 1).await;
    until("the old process parts", || async { old.log().contains("another process has the listeners") }).await;
    lasting.progress(2).await;
    old.signal(Signal::SIGTERM).unwrap();
    assert!(old.ended().await.success(), "it drains for two seconds, not for an hour");
    // Who is told to finish before it has heard of the end counts no failure.
    let failed = || ["tcp tunnel", "connect tunnel"].map(|kind| lasting.report().done[kind].failed);
    until("its tunnels end with it", || async { failed() == [1, 1] }).await;
    lasting.finish().await;
    drop(successor);
}

/// An open tunnel to the echo.
async fn open(dynasty: &ProcessSequence, authority: Option<&str>) -> RawHttp1<TcpStream> {
    let mut http1 = RawHttp1::connect(if authority.is_some() { dynasty.apps } else { dynasty.db }).await.unwrap();
    if let Some(authority) = authority {
        http1.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
    }
    http1
}

async fn echoes(tunnel: &mut RawHttp1<TcpStream>) {
    tunnel.send("there and back").await.unwrap();
    assert_eq!(tunnel.exactly(14).await.unwrap(), b"there and back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_taken_over_still_follows_its_document() {
    let dynasty = ProcessSequence::new([127, 0, 34, 6]).await;
    let old = dynasty.start("edge-0", 1).await;
    let (mut forbidden, mut allowed) = (open(&dynasty, None).await, open(&dynasty, Some("OTHER:1")).await);
    echoes(&mut forbidden).await;
    echoes(&mut allowed).await;
    let mut successor = dynasty.start("edge-1", 1).await;
    until("the old process parts", || async { old.log().contains("another process has the listeners") }).await;

    // Trust is taken back, and the document names new places to listen at.
    let new = hermes_testkit::port::reserve("127.0.34.6");
    let text = std::fs::read_to_string(old.config()).unwrap();
    let text =
        text.replace("routes:\n", "routes:\n- {name: no, match: {authority: 'DB:3306'}, respond: {status: 403}}\n");
    let text = text.replace("listeners:\n", &format!("listeners:\n- {{name: new, bind: '{new}', protocol: http}}\n"));
    let moved = hermes_testkit::port::reserve("127.0.34.6");
    let text = text.replace(&dynasty.admin.to_string(), &moved.to_string());
    std::fs::write(old.config(), &text).unwrap();
    until("it follows its document", || async { old.log().contains("applied generation=2") }).await;
    let ended = forbidden.to_end().await;
    assert!(!ended.is_err_and(|error| error.kind() == std::io::ErrorKind::TimedOut), "a forbidden tunnel goes on");
    echoes(&mut allowed).await;
    for place in [new, moved] {
        assert!(TcpStream::connect(place).await.is_err(), "it listens at {place}");
    }
    // Its successor has a document of its own, and every connection.
    for _ in 0..10 {
        echoes(&mut open(&dynasty, None).await).await;
    }
    old.signal(Signal::SIGHUP).unwrap();
    until("SIGHUP reloads", || async { old.log().contains("applied generation=3") }).await;
    echoes(&mut allowed).await;
    drop(allowed);
    assert!(old.ended().await.success());
    successor.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_listeners_of_another_user_are_neither_given_nor_taken() {
    if !needs_root("the_listeners_of_another_user_are_neither_given_nor_taken") {
        return;
    }
    // Another user may not be let in to where it was built.
    let room = tempfile::tempdir().unwrap();
    open_to_all(room.path());
    let copy = room.path().join("hermes");
    std::fs::copy(hermes(), &copy).unwrap();
    let dynasty = ProcessSequence::of(&copy, [127, 0, 34, 5]).await;
    open_to_all(dynasty.overlay.dir());
    let mut reigning = dynasty.start("edge-0", 1).await;
    let traffic = dynasty.exchanges();
    traffic.progress(1).await;
    let nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let foreign = dynasty.draft("edge-foreign", 1).by_way_of(&nobody).launch().unwrap();
    assert!(says(foreign, "Permission denied").await, "the socket is for its owner alone");

    // Even where somebody opened the socket for all, only the owner's processes are heard.
    open_to_all(&dynasty.socket);
    let foreign = dynasty.draft("edge-stranger", 1).by_way_of(&nobody).launch().unwrap();
    assert!(says(foreign, "belongs to another user").await);
    let mut caller = UnixStream::connect(&dynasty.socket).unwrap();
    caller.write_all(b"hermes takeover 1").unwrap();
    let mut length = [0; 4];
    caller.read_exact(&mut length).unwrap();
    drop(caller);
    traffic.progress(1).await;
    traffic.finish().await.assert_whole(2);
    reigning.assert_sound();
}

/// It ends with status 1 and this among its last words.
async fn says(process: Node, words: &str) -> bool {
    let log = process.stderr();
    let status = process.ended().await;
    let output = std::fs::read_to_string(log).unwrap();
    assert_eq!(status.code(), Some(1), "{output}");
    output.contains(words)
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
}
