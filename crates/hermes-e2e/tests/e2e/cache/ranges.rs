//! Parts: of what is whole, of what is not, and what is missing of it. curl judges what a client makes of them.

use std::process::Stdio;

use hermes_testkit::overlay::Node;

use crate::cache::lab::{Scripted, Step, ask, body, by_range, get, head, node, overlay, response, try_ask};

async fn curl(node: &Node, range: &str) -> (String, Vec<u8>) {
    let url = format!("http://{}/x", node.address("in"));
    let text = tokio::process::Command::new("curl")
        .args(["-sS", "--max-time", "20", "-H", "host: WEB", "-r", range, "-D", "/dev/stderr", &url])
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    (String::from_utf8_lossy(&text.stderr).into_owned(), text.stdout)
}

#[tokio::test]
async fn ranges_are_served_from_a_complete_response() {
    let whole = body(200_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |request, _| vec![Step::Send(by_range(request, "\"a\"", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    assert_eq!(get(&node, "/x").await.data, whole);
    for (range, expected) in [
        ("0-0", 0..1),
        ("5-9", 5..10),
        ("65530-65600", 65_530..65_601),
        ("199990-", 199_990..200_000),
        ("-7", 199_993..200_000),
        ("10-20,21-30", 10..31),
    ] {
        let (output, data) = curl(&node, range).await;
        assert!(output.starts_with("HTTP/1.1 206"), "{range}: {output}");
        let place = format!("content-range: bytes {}-{}/200000", expected.start, expected.end - 1);
        assert!(output.contains(&place), "{range}: {output}");
        assert!(data == whole[expected], "{range}");
    }
    let (output, data) = curl(&node, "0-1,100-101").await;
    assert!(output.starts_with("HTTP/1.1 200") && data == whole, "{output}");
    let (output, _) = curl(&node, "200000-").await;
    assert!(output.starts_with("HTTP/1.1 416") && output.contains("content-range: bytes */200000"), "{output}");
    let other = ask(&node, "GET", "/x", &["range: bytes=0-1", "if-range: \"b\""]).await;
    assert_eq!((other.status(), other.data.len()), (200, whole.len()));
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test]
async fn only_missing_ranges_are_requested() {
    let whole = body(300_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |request, _| vec![Step::Send(by_range(request, "\"a\"", &sent))]);
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    let requests = |seen: Vec<hermes_testkit::raw_http1::Head>| -> Vec<_> {
        seen.iter().map(|head| (head.header("range"), head.header("if-range"))).collect()
    };
    let tag = Some("\"a\"".to_owned());
    for (range, status, expected, wanted) in [
        (Some("bytes=100000-149999"), 206, 100_000..150_000, Some("bytes=100000-149999")),
        // Kept already.
        (Some("bytes=120000-129999"), 206, 120_000..130_000, None),
        (Some("bytes=140000-199999"), 206, 140_000..200_000, Some("bytes=150000-199999")),
        (Some("bytes=50000-120000"), 206, 50_000..120_001, Some("bytes=50000-99999")),
        (Some("bytes=250000-"), 206, 250_000..300_000, Some("bytes=250000-")),
        (Some("bytes=-100000"), 206, 200_000..300_000, Some("bytes=200000-249999")),
        (None, 200, 0..300_000, Some("bytes=0-49999")),
        (None, 200, 0..300_000, None),
    ] {
        let fields: Vec<String> = range.iter().map(|range| format!("range: {range}")).collect();
        let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
        let got = ask(&node, "GET", "/x", &fields).await;
        assert_eq!(got.status(), status, "{range:?}: {:?}", got.head);
        assert!(got.data == whole[expected], "{range:?}");
        let requests = requests(origin.seen());
        match wanted {
            None => assert!(requests.is_empty() && got.is_hit(), "{range:?}: {requests:?} {}", got.says()),
            Some(wanted) => {
                assert_eq!(requests.len(), 1);
                assert_eq!(requests[0].0.as_deref(), Some(wanted), "{range:?}");
                // The first one is the client's own.
                assert!(requests[0].1.is_none() || requests[0].1 == tag);
            }
        }
    }
}

#[tokio::test]
async fn an_interrupted_response_is_completed() {
    let whole = body(100_000);
    let sent = whole.clone();
    let mut origin = Scripted::new(move |request, number| {
        if number > 0 {
            return vec![Step::Send(by_range(request, "\"a\"", &sent))];
        }
        let mut bytes = head(200, "cache-control: max-age=600\netag: \"a\"", sent.len());
        bytes.extend_from_slice(&sent[..60_000]);
        vec![Step::Send(bytes), Step::Close]
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    assert!(try_ask(&node, "in", "GET", "/x", &[]).await.is_err(), "a part was taken for the whole");
    node.metric_reaches("hermes_cache_bytes", "route=\"all\",tier=\"memory\"", 60_000.0).await;
    let got = get(&node, "/x").await;
    assert!(got.status() == 200 && got.data == whole, "{:?}", got.head);
    assert!(got.says().starts_with("edge; fwd=partial; fwd-status=206; stored"), "{}", got.says());
    let seen = origin.seen();
    assert_eq!(seen[1].header("if-range").as_deref(), Some("\"a\""));
    let from: usize =
        seen[1].header("range").unwrap().trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap();
    assert!((1..=60_000).contains(&from), "it asked for what it had: {from}");
    assert!(get(&node, "/x").await.is_hit());
}

#[tokio::test]
async fn parts_of_two_are_never_put_together() {
    let (old, new) = (body(1000), body(2000)[1000..].to_vec());
    let (first, second) = (old.clone(), new.clone());
    let origin = Scripted::new(move |request, number| {
        let (tag, body) = if number == 0 { ("\"old\"", &first) } else { ("\"new\"", &second) };
        vec![Step::Send(by_range(request, tag, body))]
    });
    let overlay = overlay();
    let node = node(&overlay, "", origin.origin.address()).await;
    assert!(ask(&node, "GET", "/x", &["range: bytes=0-499"]).await.data == old[..500]);
    let whole = get(&node, "/x").await;
    assert!(whole.status() == 200 && whole.data == new, "{:?}", whole.head);
    assert!(ask(&node, "GET", "/x", &["range: bytes=0-499"]).await.data == new[..500]);

    // One that does as if it were the same: another part than was asked for.
    let sent = old.clone();
    let origin = Scripted::new(move |request, number| {
        let lie = "cache-control: max-age=600\netag: \"other\"\ncontent-range: bytes 500-999/1000";
        vec![Step::Send(match number {
            1 => response(206, lie, &sent[..500]),
            _ => by_range(request, "\"a\"", &sent),
        })]
    });
    let node = crate::cache::lab::node(&overlay, "disk: 0B", origin.origin.address()).await;
    ask(&node, "GET", "/x", &["range: bytes=0-499"]).await;
    assert!(get(&node, "/x").await.data == old);
}

/// Who may not have its answer kept takes nothing from those who may.
#[tokio::test]
async fn uncacheable_responses_discard_no_stored_range() {
    let whole = body(100_000);
    for (mine, added, requests) in [
        ("authorization: Basic YTpi", "", 2),
        ("cache-control: no-store", "", 2),
        // That it is for one alone is seen when it is there: then it is asked for as that one asked.
        ("x-of: me", "set-cookie: a=b\n", 3),
    ] {
        let sent = whole.clone();
        let mut origin = Scripted::new(move |request, _| {
            let mut bytes = by_range(request, "\"a\"", &sent);
            if request.header("x-of").is_some() {
                let at = bytes.windows(2).position(|pair| pair == b"\r\n").unwrap() + 2;
                bytes.splice(at..at, added.replace('\n', "\r\n").into_bytes());
            }
            vec![Step::Send(bytes)]
        });
        let overlay = overlay();
        let node = node(&overlay, "", origin.origin.address()).await;
        ask(&node, "GET", "/x", &["range: bytes=0-49999"]).await;
        let got = ask(&node, "GET", "/x", &["range: bytes=40000-69999", mine]).await;
        assert!(got.status() == 206 && got.data == whole[40_000..70_000], "{mine}: {:?}", got.head);
        let got = ask(&node, "GET", "/x", &["range: bytes=10000-19999"]).await;
        assert!(got.is_hit() && got.data == whole[10_000..20_000], "{mine}: {}", got.says());
        assert_eq!(origin.seen().len(), requests, "{mine}");
    }
}
