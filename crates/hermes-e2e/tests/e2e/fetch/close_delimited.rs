//! Responses that end with their connection: a truncated one is not complete, if that can be detected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hermes_testkit::ca::{Authority, Subject};
use hermes_testkit::origin::scripted;
use hermes_testkit::raw_http1::RawHttp1;
use hermes_testkit::tls;
use tokio::io::AsyncWriteExt as _;

use crate::fetch::lab::events;

/// Without a length the connection's end is the content's: whether it was a cut can be asked, by a range; and TLS says it.
#[tokio::test]
async fn an_ambiguous_end_is_not_complete() {
    let whole: Vec<u8> = (0..50_000_u32).map(|at| (at * 7) as u8).collect();
    for cut in [20_000, 50_000] {
        let requests = Arc::new(AtomicUsize::new(0));
        let (sent, count) = (whole.clone(), requests.clone());
        let origin = scripted::h1(move |mut http1| {
            let (sent, count) = (sent.clone(), count.clone());
            async move {
                let head = http1.head().await?;
                count.fetch_add(1, Ordering::SeqCst);
                let first = head.header("range").and_then(|range| range[6..].trim_end_matches('-').parse::<usize>().ok());
                let total = sent.len();
                match first {
                    None => {
                        http1.send("HTTP/1.1 200 OK\r\netag: \"a\"\r\nconnection: close\r\n\r\n").await?;
                        http1.send(&sent[..cut]).await?;
                    }
                    Some(first) if first == total => {
                        let head = format!("HTTP/1.1 416 No\r\ncontent-range: bytes */{total}\r\ncontent-length: 0\r\n\r\n");
                        http1.send(head).await?;
                    }
                    Some(first) => {
                        let (last, length) = (total - 1, total - first);
                        let head = format!("HTTP/1.1 206 Part\r\netag: \"a\"\r\ncontent-length: {length}\r\ncontent-range: bytes {first}-{last}/{total}\r\n\r\n");
                        http1.send(head).await?;
                        http1.send(&sent[first..]).await?;
                    }
                }
                http1.finish().await
            }
        })
        .unwrap();
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let (status, events) = events(&format!("http://{}/x", origin.address()), &file, &[]).await;
        assert_eq!(status, 0, "{events:?}");
        assert!(std::fs::read(&file).unwrap() == whole, "{cut}");
        assert_eq!(requests.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test]
async fn a_cut_within_tls_is_no_end() {
    let authority = Authority::new("web").unwrap();
    let identity = authority.issue(&Subject::server("localhost")).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(tls::server(&identity, None, &["http/1.1"]).unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    let origin = scripted::h1(move |http1| {
        let (acceptor, count) = (acceptor.clone(), count.clone());
        async move {
            let (tcp, _) = http1.into_parts();
            let mut http1 = RawHttp1::new(acceptor.accept(tcp).await?);
            http1.head().await?;
            http1.send("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nthe first half").await?;
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                // Without the alert that says that it was all.
                let (mut tls, _) = http1.into_parts();
                return tls.get_mut().0.shutdown().await;
            }
            http1.send(" and the second").await?;
            http1.finish().await
        }
    })
    .unwrap();
    let room = tempfile::tempdir().unwrap();
    let (file, files) = (room.path().join("object"), identity.write(room.path(), "origin").unwrap());
    let url = format!("https://localhost:{}/x", origin.address().port());
    let (status, events) = events(&url, &file, &["--ca", files.ca.to_str().unwrap()]).await;
    assert_eq!(status, 0, "{events:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "the first half and the second");
}
