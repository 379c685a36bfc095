//! Hostile input: no document and no request causes a panic.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hermes_model::pattern::{AuthorityPattern, PathPattern, ValuePattern};
use hermes_model::rewrite::Template;
use hermes_model::trust::parse_spiffe;
use hermes_model::{Authority, check};
use proptest::prelude::*;

fn valid_documents() -> Vec<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/valid");
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let documents = paths.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    documents.map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// A valid document with a few characters replaced, doubled or removed.
fn mutated() -> impl Strategy<Value = String> {
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), 0..4u8, any::<char>()), 1..6);
    (proptest::sample::select(valid_documents()), edits).prop_map(|(text, edits)| {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, edit, new) in edits {
            let at = at.index(chars.len());
            match edit {
                0 => chars[at] = new,
                1 => chars.insert(at, chars[at]),
                2 => chars.insert(at, *[' ', '\n', ':', '-', '{', '[', '"', '*', '&', '0'].get(at % 10).unwrap()),
                _ => _ = chars.remove(at),
            }
        }
        chars.into_iter().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn damaged_documents_are_refused_or_read(text in mutated()) {
        if let Err(problems) = check(&text, Path::new("/")) {
            prop_assert!(!problems.is_empty());
            for problem in problems {
                prop_assert!(!problem.message.is_empty());
            }
        }
    }

    #[test]
    fn any_text_is_a_document_or_a_problem(text in "\\PC{0,200}") {
        prop_assert!(check(&text, Path::new("/")).map_or_else(|problems| !problems.is_empty(), |_| true));
    }

    #[test]
    fn any_text_is_a_pattern_or_a_sentence(text in "[a-zA-Z0-9*.:/%{}\\[\\]\\\\?;@é \u{0}-]{0,40}") {
        if let Ok(authority) = Authority::parse(&text, Some(80)) {
            // An accepted authority has one spelling, which parses to the same value.
            prop_assert_eq!(Authority::parse(&authority.to_string(), Some(80)), Ok(authority));
        }
        if let Ok(pattern) = AuthorityPattern::parse(&text) {
            prop_assert_eq!(AuthorityPattern::parse(&pattern.to_string()), Ok(pattern));
        }
        if let Ok(pattern) = PathPattern::parse(&text) {
            prop_assert_eq!(PathPattern::parse(&pattern.to_string()), Ok(pattern));
        }
        let _ = (ValuePattern::parse(&text), Template::parse(&text), parse_spiffe(&text));
    }
}

/// Time limit of a linear check, with a large margin for debug builds.
const LINEAR_CHECK_TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn large_and_deep_documents_cost_no_more_than_their_length() {
    let wide = format!("node: a\nroutes: [{}]\n", "{}, ".repeat(20_000));
    let deep = format!("node: a\nusers: {}x{}\n", "[".repeat(100_000), "]".repeat(100_000));
    let keys: String = (0..20_000).map(|n| format!("k{n}: 1\n")).collect();
    let same: String =
        (0..5_000).map(|n| format!("- {{name: r{n}, match: {{path: '/*'}}, respond: {{}}}}\n")).collect();
    for text in [
        wide,
        deep,
        format!("node: a\n{keys}"),
        format!("node: a\nroutes:\n{same}"),
        "[".repeat(1_000_000),
        "é".repeat(100_000),
    ] {
        let begun = Instant::now();
        let checked = check(&text, Path::new("/"));
        assert!(
            begun.elapsed() < LINEAR_CHECK_TIMEOUT,
            "{:?} for {}...",
            begun.elapsed(),
            text.chars().take(60).collect::<String>()
        );
        if let Err(problems) = checked {
            assert!(problems.len() <= 101, "{} problems", problems.len());
        }
    }
}
