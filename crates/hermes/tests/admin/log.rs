//! The program's own log, and whoever reads it and stalls.

use hermes_testkit::{dialog::Dialog, overlay::Overlay};

/// Passes stderr on until the node runs; then nobody reads it, for as long as the node lives.
const STALLS: &str = r#"exec 3>&2; exec "$@" 2> >(sed '/ running node=/q' >&3; exec tail --pid=$$ -f /dev/null)"#;

/// More than the queue takes (4,096) and the pipe.
const LINES: usize = 6_000;

#[tokio::test]
async fn traffic_goes_on_while_nobody_takes_the_log() {
    let overlay = Overlay::new(env!("CARGO_BIN_EXE_hermes")).unwrap();
    let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, respond: {body: here}}
";
    let draft = overlay.node("edge").document(document).by_way_of(&["bash", "-c", STALLS, "bash"]);
    let node = draft.args(&["--log", "debug"]).start().await.unwrap();
    // Each of these has a line of some hundred bytes: a pipe of 64 KiB and the queue are full before the last.
    for _ in 0..LINES {
        let mut dialog = Dialog::connect(node.address("in")).await.unwrap();
        dialog.send("no request\r\n\r\n").await.unwrap();
        assert_eq!(dialog.head().await.unwrap().status(), 400);
    }
    assert!(node.metric("hermes_log_lines_lost_total", "").await.unwrap() > 0.0);
}
