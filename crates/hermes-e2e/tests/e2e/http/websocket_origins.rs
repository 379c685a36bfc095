//! WebSockets to origins that the request names, and to origins with HTTP/2 but without RFC 8441, such as nginx.

use std::time::Duration;

use hermes_testkit::{
    ca::{Authority, Subject},
    listener_client::ListenerClient,
    origin::{Origin, scripted},
    overlay::Overlay,
    process::{Port, Program, Running},
    skip::skip,
    tls,
};

use crate::http::lab::{next, overlay};
use crate::http::upgrades::{by_h1, by_h2, opened_by_h1, opened_by_h2, websocket};

/// nginx over TLS, with HTTP/2, in front of this origin; `None` if it is not installed.
fn nginx(test: &str, overlay: &Overlay, authority: &Authority, origin: &Origin) -> Option<(Running, u16)> {
    let files = authority.issue(&Subject::server("origin.test")).unwrap().write(overlay.dir(), "nginx").unwrap();
    let port = hermes_testkit::port::reserve("127.0.0.1").port();
    let dir = overlay.dir().display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {dir}/nginx-{name};\n"))
        .concat();
    let config = format!(
        "daemon off;\nmaster_process off;\npid {dir}/nginx.pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n\
         {temporary}server {{\nlisten 127.0.0.1:{port} ssl http2;\nssl_certificate {};\nssl_certificate_key {};\n\
         location / {{\nproxy_pass http://{};\nproxy_http_version 1.1;\nproxy_set_header Upgrade $http_upgrade;\n\
         proxy_set_header Connection upgrade;\n}}\n}}\n}}\n",
        files.cert.display(),
        files.key.display(),
        origin.address()
    );
    let file = overlay.dir().join("nginx.conf");
    std::fs::write(&file, config).unwrap();
    let program = Program::new("nginx", "nginx", overlay.dir());
    let file = file.to_string_lossy().into_owned();
    let started = program.args(["-p", &overlay.dir().to_string_lossy(), "-e", "stderr", "-c", &file]).start();
    let Ok(mut running) = started else {
        skip(test, "nginx does not run; see scripts/setup.sh");
        return None;
    };
    running.wait_listening(&[Port::Tcp(port)], Duration::from_secs(20)).unwrap();
    Some((running, port))
}

#[tokio::test]
async fn an_origin_of_http2_without_extended_connect_is_asked_by_http1() {
    let test = "an_origin_of_http2_without_extended_connect_is_asked_by_http1";
    let (overlay, web) = (overlay(), Authority::new("web").unwrap());
    let (origin, mut receiver) = websocket("h1");
    let Some((_nginx, port)) = nginx(test, &overlay, &web, &origin) else { return };
    let ca = overlay.dir().join("web-ca.pem");
    std::fs::write(&ca, web.pem()).unwrap();
    for protocol in ["auto", "h2", "h3"] {
        let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: $PROTOCOL, tls: {ca: $CA, server-name: origin.test}, endpoints: ['127.0.0.1:$PORT']}
";
        let node =
            overlay.node("edge").called(&format!("edge-{protocol}")).document(document).with("PROTOCOL", protocol);
        let node = node.with("CA", ca.display()).with("PORT", port).start().await.unwrap();
        let client = ListenerClient::plain(node.address("in"));
        // nginx closes both directions when one ends, so the test does not half-close before the echo.
        for mut tunnel in [opened_by_h1(&client).await, opened_by_h2(&client).await] {
            tunnel.writer.send("hello").await.unwrap();
            assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"hello", "{protocol}");
        }
        for _ in 0..2 {
            assert_eq!(next(&mut receiver).await.protocol, "websocket", "{protocol}");
        }
        // Ordinary requests still use HTTP/2; nginx forwards them.
        let mut http1 = client.h1().await.unwrap();
        http1.send("GET /refuse HTTP/1.1\r\nhost: CHAT\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 403, "{protocol}");
        next(&mut receiver).await;
    }
}

/// Through a forward proxy, without and with TLS, and through a route for one origin.
#[tokio::test]
async fn a_terminating_route_opens_websockets() {
    let (overlay, web) = (overlay(), Authority::new("web").unwrap());
    let (origin, mut receiver) = websocket("h1");
    let ca = overlay.dir().join("web-ca.pem");
    std::fs::write(&ca, web.pem()).unwrap();
    // TLS in front of the same origin, byte for byte.
    let identity = web.issue(&Subject::server("secure.test").with_address([127, 0, 0, 1].into())).unwrap();
    let target = origin.address();
    let secure = scripted::h1_by_tls(
        tls::server(&identity, None, &["http/1.1"]).unwrap(),
        |_| {},
        move |http1| async move {
            let (mut near, _) = http1.into_parts();
            let mut far = tokio::net::TcpStream::connect(target).await?;
            tokio::io::copy_bidirectional(&mut near, &mut far).await.map(drop)
        },
    );
    let secure = secure.unwrap();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: fixed, match: {kind: http, authority: CHAT}, terminate: {http: '$ORIGIN'}}
- {name: web, match: {kind: http}, terminate: {http: authority, reach: any, tls: {ca: $CA}}}
";
    let node = overlay.node("gate").document(document).with("ORIGIN", origin.address()).with("CA", ca.display());
    let node = node.start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    by_h1(&client).await;
    by_h2(&client).await;
    for _ in 0..2 {
        assert_eq!(next(&mut receiver).await.protocol, "websocket");
    }
    for url in [format!("http://{}", origin.address()), format!("https://{}", secure.address())] {
        let mut http1 = client.h1().await.unwrap();
        let fields = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n";
        let key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
        http1.send(format!("GET {url}/chat HTTP/1.1\r\nhost: x\r\n{fields}{key}\r\nhello")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 101, "{url}: {head:?}");
        assert_eq!(http1.exactly(5).await.unwrap(), b"hello", "{url}");
        next(&mut receiver).await;
        // A refusal is an answer.
        let mut http1 = client.h1().await.unwrap();
        http1.send(format!("GET {url}/refuse HTTP/1.1\r\nhost: x\r\n{fields}{key}\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!((head.status(), http1.body(&head).await.unwrap().text().as_str()), (403, "no"), "{url}");
        next(&mut receiver).await;
    }
    node.quiet().await;
}
