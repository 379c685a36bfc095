//! Workers that stay on a core of their own.
//!
//! In: nodes with as many workers as cores, and others. Out: the cores on which their threads may run.

use std::collections::HashSet;
use std::fs;
use std::process::Command;
use std::thread::available_parallelism;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};

const DOCUMENT: &str = "
role: $ROLE
workers: $WORKERS
dispatch: $DISPATCH
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {status: 200}}
";

async fn start(overlay: &Overlay, role: &str, workers: &str, dispatch: &str) -> Node {
    let draft = overlay.node(role).document(DOCUMENT).with("ROLE", role).with("WORKERS", workers);
    draft.with("DISPATCH", dispatch).start().await.unwrap()
}

/// The cores of each worker, as the kernel writes them.
fn cores(node: &Node) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", node.pid())).unwrap();
    let dirs = tasks.map(|task| task.unwrap().path());
    let workers = dirs.filter(|dir| fs::read_to_string(dir.join("comm")).unwrap().starts_with("worker-"));
    let of = |dir: std::path::PathBuf| {
        let status = fs::read_to_string(dir.join("status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    workers.map(of).collect()
}

#[tokio::test]
async fn each_worker_of_a_router_stays_on_a_core_of_its_own() {
    let overlay = Overlay::new(hermes()).unwrap();
    let count = available_parallelism().unwrap().get();
    let allowed = Command::new("nproc").env_clear().output().unwrap();
    if String::from_utf8(allowed.stdout).unwrap().trim() != count.to_string() {
        // With a quota of time, there are fewer workers than cores.
        return;
    }
    let router = start(&overlay, "standalone", "auto", "reuseport").await;
    let each = cores(&router);
    assert_eq!(each.len(), count);
    assert!(each.iter().all(|cores| cores.parse::<usize>().is_ok()), "one core each: {each:?}");
    assert_eq!(each.iter().collect::<HashSet<_>>().len(), count, "{each:?}");
}

#[tokio::test]
async fn workers_share_cores_where_other_programs_run_or_there_are_too_few() {
    if available_parallelism().unwrap().get() == 1 {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let are_free = |node: &Node| cores(node).iter().all(|cores| cores.parse::<usize>().is_err());
    assert!(are_free(&start(&overlay, "dependent", "auto", "reuseport").await));
    assert!(are_free(&start(&overlay, "standalone", "auto", "{pin: false}").await));
    let few = start(&overlay, "standalone", "1", "{pin: true}").await;
    assert!(are_free(&few));
    assert!(few.log().contains("needs as many workers as cores"), "{}", few.log());
}
