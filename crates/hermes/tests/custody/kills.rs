//! Nodes that are killed while they answer for what is under way.

use std::time::Duration;

use hermes_testkit::{origin::http::BYTES_SEED, pattern::Pattern};

use crate::lab::{Chain, as_root, in_turns};

const COUNT: usize = 100;
const SIZE: usize = 45 << 10;

/// Kills this node amid a hundred transfers over links in turns.
async fn after_a_kill_all_arrive(test: &str, number: usize) {
    if !as_root(test) {
        return;
    }
    let mut chain = Chain::start(3, in_turns(3)).await;
    let apps = chain.nodes[0].address("apps");
    let into = chain.overlay.dir().join("into");
    std::fs::create_dir(&into).unwrap();
    let url = format!("http://{apps}/bytes/{SIZE}?[1-{COUNT}]");
    let file = format!("{}/#1", into.display());
    let words =
        ["curl", "-sS", "-Z", "--parallel-immediate", "--parallel-max", "100", "-o", &file, "-w", "%{http_code} "];
    let words = [&words[..], &["--max-time", "120", &url]].concat();
    let namespace = chain.namespaces[0].clone();
    let transfers = namespace.output(&words);
    let kills = async {
        // Amid the first climb, and amid what comes down.
        for pause in [2500, 3200] {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            chain.kill(number, Duration::from_millis(300)).await;
        }
    };
    let (said, ()) = tokio::join!(transfers, kills);
    let said = said.unwrap();
    let log = chain.nodes[number].log();
    assert!(chain.resumed > 0, "nothing was under way at n{number} when it was killed\n{log}");
    let statuses: Vec<_> = said.split_whitespace().collect();
    assert_eq!(statuses, vec!["200"; COUNT], "{}", chain.logs());
    for number in 1..=COUNT {
        let bytes = std::fs::read(into.join(number.to_string())).unwrap();
        assert!(
            bytes.len() == SIZE && Pattern::new(BYTES_SEED).mismatch(0, &bytes).is_none(),
            "{number}: {}",
            bytes.len()
        );
    }
}

#[tokio::test]
async fn a_middle_node_that_is_killed_loses_nothing() {
    after_a_kill_all_arrive("a_middle_node_that_is_killed_loses_nothing", 1).await;
}

#[tokio::test]
async fn the_one_behind_it_neither() {
    after_a_kill_all_arrive("the_one_behind_it_neither", 2).await;
}

#[tokio::test]
async fn nor_does_the_last() {
    after_a_kill_all_arrive("nor_does_the_last", 3).await;
}
