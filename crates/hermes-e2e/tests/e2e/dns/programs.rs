//! Programs that know only DNS, as they are: the system's resolver, dig, and curl that resolves by itself.

use std::process::Stdio;

use hermes_testkit::{
    dns::resolving_by,
    overlay::{Node, Overlay},
    raw_http1::SILENCE,
    skip::{needs_root, skip},
};
use tokio::process::Command;

use crate::dns::lab::{NODE, overlay};

/// A program in a world whose `resolv.conf` names the node.
async fn run(overlay: &Overlay, test: &str, program: &[&str]) -> Option<String> {
    if std::process::Command::new(program[0]).arg("--help").output().is_err() {
        skip(test, &format!("{} is not installed", program[0]));
        return None;
    }
    let mut words = resolving_by("127.0.0.79".parse().unwrap(), overlay.dir()).unwrap();
    words.extend(program.iter().map(|word| (*word).to_owned()));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(SILENCE, command.output()).await.expect("it hangs").unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program:?}: {out}{err}");
    Some(out.into_owned())
}

/// The node at the port of DNS.
async fn node(overlay: &Overlay) -> (Node, hermes_testkit::origin::services::Services) {
    let services = hermes_testkit::origin::services::Services::start().unwrap();
    let document = NODE.replace("'127.0.0.1:0'\n  protocol: dns", "'127.0.0.79:53'\n  protocol: dns");
    let draft = overlay.node("node").document(&document).with("LIMITS", "").with("FORWARD", "'127.0.0.1:1'");
    (services.fill(draft).start().await.unwrap(), services)
}

#[tokio::test]
async fn programs_that_resolve_by_themselves_reach_names_of_the_overlay() {
    let test = "programs_that_resolve_by_themselves_reach_names_of_the_overlay";
    if needs_root(test) {
        return;
    }
    let overlay = overlay();
    let (node, _services) = node(&overlay).await;
    let Some(hosts) = run(&overlay, test, &["getent", "ahosts", "VIDEO"]).await else { return };
    assert!(hosts.contains("198.18.") && hosts.contains("fd00:6865:726d:"), "{hosts}");
    let address = hosts.split_whitespace().find(|word| word.starts_with("198.18.")).unwrap().to_owned();
    let Some(named) = run(&overlay, test, &["getent", "hosts", &address]).await else { return };
    assert!(named.to_lowercase().contains("video"), "{named}");
    // curl asks DNS, and hands the proxy an address: the overlay gets the name.
    let socks = node.address("socks").to_string();
    let curl = ["curl", "-sS", "--max-time", "20", "--socks5", &*socks, "http://VIDEO/"];
    let Some(text) = run(&overlay, test, &curl).await else { return };
    assert_eq!(text, "web");
    let record = node.record(|record| record["listener"] == "socks").await;
    assert_eq!((&record["authority"], &record["route"]), (&"video:80".into(), &"video".into()), "{record}");
    let Some(dug) = run(&overlay, test, &["dig", "+short", "VIDEO.", "A"]).await else { return };
    assert_eq!(dug.trim(), address);
    let Some(dug) = run(&overlay, test, &["dig", "+tcp", "-x", &address]).await else { return };
    assert!(dug.contains("video.") && dug.contains("NOERROR"), "{dug}");
}
