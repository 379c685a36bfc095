//! OpenMetrics 1.0 text, read strictly: whatever the specification forbids is an error here.

use std::collections::{BTreeMap, BTreeSet};

/// A metric family.
#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) help: String,
    pub(crate) unit: Option<String>,
    pub(crate) samples: Vec<Sample>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

/// Reads a whole exposition.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in body.lines() {
        let wrong = |why: &str| format!("{why}: {line:?}");
        if line.is_empty() || line.ends_with(' ') || line == "# EOF" {
            return Err(wrong("no such line belongs here"));
        }
        if let Some(meta) = line.strip_prefix("# ") {
            let mut words = meta.splitn(3, ' ');
            let (word, name, rest) = (words.next(), words.next(), words.next());
            let (Some(word), Some(name), Some(rest)) = (word, name, rest) else { return Err(wrong("half a line")) };
            if name != current {
                if families.contains_key(name) {
                    return Err(wrong("a family in two places"));
                }
                name.clone_into(&mut current);
            }
            let family = families.entry(name.to_owned()).or_default();
            if !family.samples.is_empty() {
                return Err(wrong("samples before their metadata"));
            }
            let old = match word {
                "TYPE" => std::mem::replace(&mut family.kind, rest.to_owned()),
                "HELP" => std::mem::replace(&mut family.help, rest.to_owned()),
                "UNIT" => family.unit.replace(rest.to_owned()).unwrap_or_default(),
                _ => return Err(wrong("no metadata")),
            };
            if !old.is_empty() {
                return Err(wrong("said twice"));
            }
            continue;
        }
        let sample = sample(line).map_err(|why| wrong(&why))?;
        let family = families.get_mut(&current).ok_or_else(|| wrong("a sample without a family"))?;
        if !belongs(&sample.name, &current, &family.kind) {
            return Err(wrong(&format!("no sample of {} {current}", family.kind)));
        }
        if family.samples.iter().any(|other| other.name == sample.name && other.labels == sample.labels) {
            return Err(wrong("the same sample twice"));
        }
        family.samples.push(sample);
    }
    for (name, family) in &families {
        complete(name, family).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(families)
}

fn belongs(sample: &str, family: &str, kind: &str) -> bool {
    let suffixes: &[&str] = match kind {
        "counter" => &["_total", "_created"],
        "gauge" | "unknown" => &[""],
        "histogram" => &["_bucket", "_count", "_sum", "_created"],
        _ => &[],
    };
    sample.strip_prefix(family).is_some_and(|suffix| suffixes.contains(&suffix))
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let name = &line[..end];
    if !is_name(name, true) {
        return Err("no metric name".to_owned());
    }
    let (labels, rest) = match line[end..].strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (BTreeMap::new(), &line[end..]),
    };
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let value: f64 = value.parse().map_err(|_| "no number (a time or exemplar is not expected here)")?;
    Ok(Sample { name: name.to_owned(), labels, value })
}

fn labels(mut rest: &str) -> Result<(BTreeMap<String, String>, &str), String> {
    let mut labels = BTreeMap::new();
    loop {
        let (name, after) = rest.split_once("=\"").ok_or("no label")?;
        if !is_name(name, false) {
            return Err(format!("{name:?} is no label name"));
        }
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next().ok_or("a label without an end")? {
                (at, '"') => break at,
                (_, '\\') => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, escaped @ ('"' | '\\'))) => value.push(escaped),
                    _ => return Err("no such escape".to_owned()),
                },
                (_, character) => value.push(character),
            }
        };
        if labels.insert(name.to_owned(), value).is_some() {
            return Err(format!("label {name} twice"));
        }
        rest = &after[end + 1..];
        match (rest.strip_prefix('}'), rest.strip_prefix(',')) {
            (Some(rest), _) => return Ok((labels, rest)),
            (_, Some(next)) => rest = next,
            _ => return Err("labels without an end".to_owned()),
        }
    }
}

fn is_name(name: &str, colons: bool) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colons && c == ':');
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

fn complete(name: &str, family: &Family) -> Result<(), String> {
    if family.kind.is_empty() || family.help.trim().is_empty() {
        return Err("without TYPE or HELP".to_owned());
    }
    if let Some(unit) = &family.unit
        && !name.ends_with(&format!("_{unit}"))
    {
        return Err(format!("its name does not end with its unit {unit}"));
    }
    if family.samples.iter().any(|sample| family.kind != "gauge" && (sample.value < 0.0 || sample.value.is_nan())) {
        return Err("less than nothing was counted".to_owned());
    }
    if family.kind == "histogram" { histogram(name, family) } else { Ok(()) }
}

/// Buckets grow, and the last is as large as the count.
fn histogram(name: &str, family: &Family) -> Result<(), String> {
    let without_le = |sample: &Sample| {
        let mut labels = sample.labels.clone();
        labels.remove("le");
        labels
    };
    let sets: BTreeSet<_> = family.samples.iter().map(without_le).collect();
    for set in sets {
        let of = |suffix: &'static str| family.samples.iter().filter(move |s| s.name == format!("{name}{suffix}"));
        let mut bound = f64::NEG_INFINITY;
        let mut value = 0.0;
        for bucket in of("_bucket").filter(|sample| without_le(sample) == set) {
            let le = bucket.labels.get("le").ok_or("a bucket without a bound")?;
            let le = if le == "+Inf" { f64::INFINITY } else { le.parse::<f64>().map_err(|error| error.to_string())? };
            if le <= bound || bucket.value < value {
                return Err(format!("buckets that do not grow at {le} of {set:?}"));
            }
            (bound, value) = (le, bucket.value);
        }
        let count = of("_count").find(|sample| sample.labels == set).ok_or("no _count")?;
        let sum = of("_sum").find(|sample| sample.labels == set).ok_or("no _sum")?;
        if bound != f64::INFINITY || count.value != value || sum.value < 0.0 {
            return Err(format!("buckets, count and sum of {set:?} do not agree"));
        }
    }
    Ok(())
}

#[test]
fn the_parser_finds_forbidden_metrics() {
    let good = "# HELP a_seconds How long.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\n\
                a_seconds_sum{x=\"1\"} 2.5\na_seconds_count{x=\"1\"} 2\n\
                a_seconds_bucket{le=\"1.0\",x=\"1\"} 1\na_seconds_bucket{le=\"+Inf\",x=\"1\"} 2\n\
                # HELP b It's \"b\".\n# TYPE b counter\nb_total 7\n# EOF\n";
    assert_eq!(parse(good).map(|families| families.len()), Ok(2));
    for (from, to) in [
        ("# EOF\n", ""),
        ("b_total 7", "b 7"),
        ("b_total 7", "b_total -7"),
        ("b_total 7", "b_total 7\nb_total 7"),
        ("b_total 7", "b_total seven"),
        ("# HELP b It's \"b\".\n", ""),
        ("# TYPE b counter\n", ""),
        ("bucket{le=\"1.0\",x=\"1\"} 1", "bucket{le=\"1.0\",x=\"1\"} 3"),
        ("_count{x=\"1\"} 2", "_count{x=\"1\"} 3"),
        ("x=\"1\"} 2.5", "x=\"1} 2.5"),
        ("# UNIT a_seconds seconds", "# UNIT a_seconds bytes"),
        ("# HELP b", "# HELP a_seconds again\n# HELP b"),
    ] {
        assert!(parse(&good.replacen(from, to, 1)).is_err(), "{from} as {to} is taken");
    }
}
