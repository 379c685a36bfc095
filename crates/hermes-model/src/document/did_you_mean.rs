//! "Did you mean": the known name that is closest to a misspelt one.

/// The known name with the fewest edits to `wrong`, if there are few for its length.
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = wrong.to_ascii_lowercase().replace('_', "-");
    let allowed = (lower.chars().count() / 3).clamp(1, 3);
    known
        .into_iter()
        .map(|name| (edits(&lower, &name.to_ascii_lowercase()), name))
        .filter(|(edits, _)| *edits <= allowed)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, name)| name)
}

/// Returns ` (did you mean "X"?)`, or an empty string.
pub fn did_you_mean<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(wrong, known).map(|name| format!(" (did you mean {name:?}?)")).unwrap_or_default()
}

/// Number of insertions, deletions, replacements and transpositions (optimal string alignment). A name over 64
/// characters is not a misspelling.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(65).collect(), b.chars().take(65).collect());
    if a.len() > 64 || b.len() > 64 || a.len().abs_diff(b.len()) > 3 {
        return usize::MAX;
    }
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let cost = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (above[j] + 1).min(row[j - 1] + 1).min(above[j - 1] + cost);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspellings_find_the_nearest_name() {
        let known = ["upstream", "terminate", "relay", "respond", "redirect", "match", "name", "set-headers"];
        for (wrong, right) in [
            ("upsteam", Some("upstream")),
            ("Upstream", Some("upstream")),
            ("set_headers", Some("set-headers")),
            ("mtach", Some("match")),
            ("terminates", Some("terminate")),
            ("nmae", Some("name")),
            ("zebra", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(wrong, known), right, "{wrong}");
        }
        assert_eq!(nearest(&"a".repeat(100_000), known), None);
    }
}
