//! A forward proxy for programs that know nothing of overlays: real curl, in each of its ways.

use std::process::{Output, Stdio};

use bytes::Bytes;
use hermes_testkit::{
    listener_client::ListenerClient,
    origin::{self, Origin, scripted},
    overlay::Node,
    raw_http1::SILENCE,
    skip::skip,
};
use tokio::process::Command;

use crate::http::lab::overlay;

/// Runs curl; `None` where there is none.
async fn curl(test: &str, args: &[&str]) -> Option<Output> {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "30"]).args(args).stdin(Stdio::null()).kill_on_drop(true);
    // Whatever this machine's own proxy is, it is not the one under test.
    for name in
        ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
    {
        command.env_remove(name);
    }
    match tokio::time::timeout(SILENCE * 2, command.output()).await.expect("curl hangs") {
        Ok(output) => Some(output),
        Err(error) => {
            skip(test, &format!("curl does not run: {error}"));
            None
        }
    }
}

fn text(output: &Output, args: &[&str]) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "curl {args:?}: {err}");
    out.into_owned()
}

fn web(text: &'static str) -> Origin {
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    origin::http::serve(listener, origin::http::Version::H1, Bytes::from_static(text.as_bytes())).unwrap()
}

/// A proxy on loopback for whatever its user names, this machine included, and for the name VIDEO.
async fn proxy(overlay: &hermes_testkit::overlay::Overlay, video: &Origin) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: video, match: {kind: http, authority: VIDEO}, upstream: video}
- {name: video-tunnel, match: {kind: tcp, authority: 'VIDEO:80'}, terminate: {tcp: '$VIDEO'}}
- {name: web, match: {kind: http}, terminate: {http: authority, reach: any}}
- {name: tunnels, match: {kind: tcp}, terminate: {tcp: authority, reach: any}}
upstreams:
- {name: video, protocol: h1, endpoints: ['$VIDEO']}
";
    overlay.node("laptop").document(document).with("VIDEO", video.address()).start().await.unwrap()
}

#[tokio::test]
async fn curl_asks_for_names_and_addresses() {
    let (video, site) = (web("video"), web("site"));
    let overlay = overlay();
    let node = proxy(&overlay, &video).await;
    let proxy = format!("http://{}", node.address("in"));
    let site = format!("http://{}/page", site.address());
    for (args, wanted) in [
        // Absolute form.
        (vec!["-x", &proxy, "http://VIDEO/file"], "video"),
        (vec!["-x", &proxy, "http://video:80/file"], "video"),
        (vec!["-x", &proxy, &site], "site"),
        (vec!["-x", &proxy, "--http1.0", &site], "site"),
        // CONNECT.
        (vec!["-p", "-x", &proxy, "http://VIDEO/file"], "video"),
        (vec!["-p", "-x", &proxy, &site], "site"),
    ] {
        let Some(output) = curl("curl_asks_for_names_and_addresses", &args).await else { return };
        assert_eq!(text(&output, &args), wanted, "curl {args:?}");
    }
    // As a server of its own, by both versions.
    let direct = format!("{proxy}/file");
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        let args = [version, "-H", "host: VIDEO", "-w", " %{http_version}", &direct];
        let Some(output) = curl("curl_asks_for_names_and_addresses", &args).await else { return };
        let wanted = if version == "--http1.1" { "video 1.1" } else { "video 2" };
        assert_eq!(text(&output, &args), wanted, "curl {args:?}");
    }
}

#[tokio::test]
async fn curl_uploads_and_receives_errors() {
    let video = web("video");
    let overlay = overlay();
    let node = proxy(&overlay, &video).await;
    let proxy = format!("http://{}", node.address("in"));
    let file = overlay.dir().join("upload");
    let bytes = hermes_testkit::pattern::Pattern::new(1).bytes(3_000_000);
    std::fs::write(&file, &bytes).unwrap();
    let data = format!("@{}", file.display());
    // curl sends Expect: 100-continue by itself with a body of this size.
    let args = ["-x", &proxy, "--data-binary", &data, "http://VIDEO/upload"];
    let Some(output) = curl("curl_uploads", &args).await else { return };
    let got: serde_json::Value = serde_json::from_str(&text(&output, &args)).unwrap();
    let mut digest = hermes_testkit::pattern::Digest::default();
    digest.update(&bytes);
    assert_eq!(got, serde_json::json!({"bytes": bytes.len(), "digest": digest.hex()}));

    // A port where nobody listens.
    let closed = hermes_testkit::port::reserve("127.0.0.1");
    let nobody = format!("http://{closed}/");
    let args = ["-x", &proxy, "-o", "/dev/null", "-D", "-", &nobody];
    let head = text(&curl("curl_uploads", &args).await.unwrap(), &args);
    assert!(head.starts_with("HTTP/1.1 502") && head.contains("connection_refused"), "{head}");
}

/// An absolute URI overrides `Host` (RFC 9112, 3.2.2), and the origin gets origin form with its own name.
#[tokio::test]
async fn absolute_form_becomes_origin_form() {
    let (sender, mut receiver) = crate::http::lab::seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(http1.head().await?);
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let node = proxy(&overlay, &origin).await;
    let mut http1 = ListenerClient::plain(node.address("in")).h1().await.unwrap();
    http1.send("GET http://VIDEO/a?b=c HTTP/1.1\r\nhost: elsewhere.test\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    let head = crate::http::lab::next(&mut receiver).await;
    assert_eq!((head.target(), head.header("host").as_deref()), ("/a?b=c", Some("VIDEO")));
}
