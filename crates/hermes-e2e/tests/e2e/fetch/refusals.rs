//! What no further try would change: said at once, with the next step.

use hermes_testkit::ca::{Authority, Subject};
use hermes_testkit::origin::{self as origins, http};
use hermes_testkit::tls;

use crate::fetch::lab::{Reply, events, fetch, files, origin, stderr};

#[tokio::test]
async fn an_answer_that_will_not_change_is_asked_for_once() {
    for (status, next) in
        [(404, "look at the URL"), (401, "--header 'authorization"), (403, "hermes explain"), (410, "URL")]
    {
        let (origin, seen) = origin(move |_, _| Reply::status(status));
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("object");
        let url = format!("http://{}/", origin.address());
        let output = fetch([&url, "-o", file.to_str().unwrap()]).await;
        assert_eq!((output.status.code(), seen.count()), (Some(1), 1), "{status}");
        let text = stderr(&output);
        let last = text.lines().last().unwrap();
        assert!(last.starts_with(&format!("hermes: {status}")) && last.contains(next), "{text}");
    }
}

#[tokio::test]
async fn a_certificate_of_an_unknown_ca_is_refused_and_one_of_a_known_one_taken() {
    let authority = Authority::new("web").unwrap();
    let identity = authority.issue(&Subject::server("localhost")).unwrap();
    let listener = origins::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let config = tls::server(&identity, None, &["http/1.1"]).unwrap();
    let origin = http::serve_tls(listener, config, "by TLS".into()).unwrap();
    let room = tempfile::tempdir().unwrap();
    let files = identity.write(room.path(), "origin").unwrap();
    let other = Authority::new("other").unwrap().issue(&Subject::server("x")).unwrap();
    let other = other.write(tempfile::tempdir_in(room.path()).unwrap().keep().as_path(), "other").unwrap();
    let file = room.path().join("object");
    let port = origin.address().port();
    for (host, ca, refused) in
        [("localhost", &other.ca, true), ("127.0.0.1", &files.ca, true), ("localhost", &files.ca, false)]
    {
        let url = format!("https://{host}:{port}/");
        let (status, events) = events(&url, &file, &["--ca", ca.to_str().unwrap()]).await;
        let end = events.last().unwrap();
        assert_eq!(status, i32::from(refused), "{host}: {events:?}");
        if refused {
            assert!(end["error"].as_str().unwrap().contains("cannot verify the certificate"), "{end}");
            assert_eq!(end["attempts"], 1);
        }
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"by TLS");
}

#[tokio::test]
async fn a_redirection_is_followed_and_no_password_given_to_strangers() {
    let (there, seen_there) = origin(|_, head| Reply::of(b"moved here", "\"a\"", head));
    let to = format!("http://{}/b", there.address());
    let (here, seen_here) = origin(move |_, head| match head.target() {
        "/a" => Reply::status(302).with("location", "c/../x"),
        "/x" => Reply::status(308).with("location", &to),
        _ => Reply::status(302).with("location", "/loop"),
    });
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let url = format!("http://{}/a", here.address());
    let secret = ["authorization: Basic secret", "cookie: a=b", "x-api-key: secret", "host: HERE", "accept: text/tea"];
    let secret: Vec<&str> = secret.iter().flat_map(|header| ["--header", header]).collect();
    let (status, events_) = events(&url, &file, &secret).await;
    assert_eq!(status, 0, "{events_:?}");
    assert_eq!(std::fs::read(&file).unwrap(), b"moved here");
    assert!(seen_here.fields("authorization").iter().all(Option::is_some));
    for name in ["authorization", "cookie", "x-api-key"] {
        assert_eq!(seen_there.fields(name), [None], "{name}");
        assert!(seen_here.fields(name).iter().all(Option::is_some), "{name}");
    }
    assert_eq!(seen_there.fields("host"), [Some(there.address().to_string())]);
    assert_eq!(seen_here.fields("host"), [Some("HERE".to_owned()), Some("HERE".to_owned())]);
    assert_eq!(seen_there.fields("accept"), [Some("text/tea".to_owned())]);
    let before = seen_here.count();
    let (status, events_) = events(&format!("http://{}/loop", here.address()), &file, &[]).await;
    assert_eq!((status, seen_here.count() - before), (1, 11), "{events_:?}");
}

#[tokio::test]
async fn usage_errors_exit_with_status_2() {
    for args in [
        &["FILES/a"][..],
        &["http://h/"],
        &["http://h/a", "--header", "range: bytes=0-"],
        &["http://h/a", "--digest", "md5=:AAAA:"],
        &["http://h/a", "--deadline", "soon"],
        &["http://h/a", "--proxy", "h:1"],
        &["http://u:p@h/a"],
    ] {
        let output = fetch(args).await;
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
}

#[tokio::test]
async fn an_unwritable_file_is_reported_before_any_request() {
    let (origin, seen) = origin(|_, head| Reply::of(b"x", "\"a\"", head));
    let room = tempfile::tempdir().unwrap();
    let url = format!("http://{}/x", origin.address());
    let output = fetch([&url, "-o", room.path().to_str().unwrap()]).await;
    assert!(stderr(&output).contains("is a directory"), "{}", stderr(&output));
    let output = fetch([&url, "-o", "/nowhere/at/all"]).await;
    assert!(stderr(&output).contains("/nowhere/at/all.part cannot be written"), "{}", stderr(&output));
    assert_eq!((output.status.code(), seen.count()), (Some(1), 0));
    assert!(files(room.path()).is_empty());
    // A device is no file to be put in another's place.
    let output = fetch([&url, "-o", "/dev/null"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!std::path::Path::new("/dev/null.part").exists());
}

/// Another user of the machine may know what will be fetched.
#[tokio::test]
async fn symbolic_links_are_not_followed_for_writing() {
    let (origin, seen) = origin(|_, head| Reply::of(b"new", "\"a\"", head));
    let room = tempfile::tempdir().unwrap();
    let (target, victim) = (room.path().join("object"), room.path().join("victim"));
    std::fs::write(&victim, "old").unwrap();
    std::os::unix::fs::symlink(&victim, room.path().join("object.part")).unwrap();
    let url = format!("http://{}/x", origin.address());
    let output = fetch([&url, "-o", target.to_str().unwrap()]).await;
    assert!(stderr(&output).contains("it is a symbolic link; remove it"), "{}", stderr(&output));
    assert_eq!((output.status.code(), seen.count()), (Some(1), 0));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "old");
}

/// What people are told where they see no bar.
#[tokio::test]
async fn fetch_without_a_progress_bar_prints_the_essentials() {
    let (origin, _) = origin(|_, head| Reply::of(b"x", "\"a\"", head));
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("object");
    let file = file.to_str().unwrap();
    let url = format!("http://{}/x", origin.address());
    let text = stderr(&fetch([&url, "-o", file]).await);
    assert!(!text.contains("verifies") && text.ends_with(", not verified: the origin offers no digest\n"), "{text}");
    let digest = "sha-256=2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
    let text = stderr(&fetch([&url, "-o", file, "--digest", digest]).await);
    assert!(text.contains("verifying the stored part") && text.ends_with(", verified\n"), "{text}");
    let nobody = hermes_testkit::port::reserve("127.0.0.1");
    let output = fetch([&format!("http://{nobody}/x"), "-q", "-o", file, "--deadline", "1s"]).await;
    let text = stderr(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(3), 1), "{text}");
    assert!(text.contains("cannot be connected: Connection refused"), "{text}");
    let text = stderr(&fetch(["http://h/"]).await);
    assert!(text.contains("names no file") && text.contains("Usage: hermes fetch"), "{text}");
    let text = stderr(&fetch(["http://h/a", "--proxy", "socks5://127.0.0.1:1080"]).await);
    assert!(text.contains("write http://HOST:PORT"), "{text}");
}
