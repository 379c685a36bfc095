//! The troubleshooting page quotes messages that the program prints.
//!
//! In: the first quoted column of each table row, and the source of all crates. Out: each part of a message that no source
//! contains. Placeholders (capital letters, numbers, `...`) divide a message into parts.

use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// All source text, with strings that continue on the next line joined.
fn source() -> String {
    let mut text = String::new();
    let mut open = vec![root().join("crates")];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("messages.rs") {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut lines = text.split("\\\n");
    let mut joined = lines.next().unwrap_or_default().to_owned();
    lines.for_each(|line| joined.push_str(line.trim_start()));
    joined
}

fn is_placeholder(word: &str) -> bool {
    let bare = word.trim_matches(|char: char| !char.is_alphanumeric());
    word.contains("...")
        || bare.starts_with(|char: char| char.is_ascii_digit())
        || !bare.is_empty() && bare.chars().all(|char| char.is_ascii_uppercase() || char == '_')
}

/// The parts of a message between its placeholders, of two words or more.
fn parts(message: &str) -> Vec<String> {
    let words: Vec<&str> = message.split(' ').collect();
    let parts = words.split(|word| is_placeholder(word)).filter(|part| part.len() > 1);
    parts.map(|part| part.join(" ").trim_matches([';', ':', ',', '(', ')']).to_owned()).collect()
}

#[test]
fn the_troubleshooting_page_quotes_messages_that_exist() {
    let page = std::fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let source = source();
    let mut missing = Vec::new();
    let mut quoted = 0;
    for (number, line) in page.lines().enumerate().filter(|(_, line)| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let message = cells.iter().take(2).find_map(|cell| {
            let text = cell.strip_prefix("``").and_then(|rest| rest.strip_suffix("``"));
            text.or_else(|| cell.strip_prefix('`')?.strip_suffix('`'))
        });
        // A connection timeout names what is missing by a variable.
        let Some(message) = message.filter(|message| !message.contains("did not accept a connection")) else {
            continue;
        };
        quoted += 1;
        for part in parts(message) {
            if !source.contains(&part) {
                missing.push(format!("line {}: {part}", number + 1));
            }
        }
    }
    assert!(quoted > 50, "the page quotes only {quoted} messages");
    assert!(missing.is_empty(), "docs/troubleshooting.md quotes messages that no source has:\n{}", missing.join("\n"));
}
