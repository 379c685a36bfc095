//! The table: results for readers.
//!
//! In: result files. Out: Markdown. A cell is the median over rounds, followed by the range; a ratio is the median of
//! the ratios within rounds. Failures are always shown.

use std::fmt::Write as _;

use crate::{
    chain::{Case, Security},
    record::{Key, Results, Spread, Summary, reference},
};

/// A column of a table: heading, figure, divisor (for the unit), decimals. Figures in [`COMPARED`] have a ratio.
type Column = (&'static str, &'static str, f64, usize);

/// Figures whose ratio to Envoy is shown; the ratios of the others add no information.
const COMPARED: [&str; 10] = [
    "mean_us",
    "p50_us",
    "p99_us",
    "requests_per_s",
    "requests_per_cpu_s",
    "gbit_per_s",
    "gbit_per_cpu_s",
    "datagrams_per_s",
    "datagrams_per_cpu_s",
    "rss_mib",
];

const LATENCY: [Column; 4] = [
    ("mean µs", "mean_us", 1.0, 0),
    ("s.d.", "sd_us", 1.0, 0),
    ("p50 µs", "p50_us", 1.0, 0),
    ("p99 µs", "p99_us", 1.0, 0),
];
const THROUGHPUT: [Column; 5] = [
    ("requests/s", "requests_per_s", 1.0, 0),
    ("per CPU s", "requests_per_cpu_s", 1.0, 0),
    ("CPU ms per 1,000", "cpu_s_per_1000_requests", 1e-3, 1),
    ("mean µs", "mean_us", 1.0, 0),
    ("p99 µs", "p99_us", 1.0, 0),
];
const BULK: [Column; 3] = [
    ("Gbit/s", "gbit_per_s", 1.0, 2),
    ("Gbit per CPU s", "gbit_per_cpu_s", 1.0, 2),
    ("GB per CPU s", "gbyte_per_cpu_s", 1.0, 2),
];
const DATAGRAMS: [Column; 2] =
    [("datagrams/s", "datagrams_per_s", 1.0, 0), ("per CPU s", "datagrams_per_cpu_s", 1.0, 0)];
const ECHOES: [Column; 3] =
    [("p50 µs", "p50_us", 1.0, 0), ("p99 µs", "p99_us", 1.0, 0), ("added a hop µs", "added_us_per_hop", 1.0, 0)];
const SITE: [Column; 3] = [("mean ms", "mean_us", 1e3, 2), ("s.d.", "sd_us", 1e3, 2), ("p50 ms", "p50_us", 1e3, 2)];
const MEMORY: [Column; 4] = [
    ("RSS MiB", "rss_mib", 1.0, 1),
    ("PSS MiB", "pss_mib", 1.0, 1),
    ("empty MiB", "empty_rss_mib", 1.0, 1),
    ("KiB a client", "kib_per_client", 1.0, 1),
];

/// The whole report.
pub(crate) fn markdown(all: &[Results]) -> String {
    let mut text = String::from(
        "# Benchmark results\n\nWritten by `hermes-bench`; see [README](../README.md) for how to read it. Each figure \
         is the median over rounds, its range behind it; `× envoy` is the median of the ratios within rounds.\n",
    );
    for results in all {
        head(&mut text, results);
        match results.benchmark.as_str() {
            "figure10" => cases(&mut text, results, "single", "burst", &Security::BOTH),
            "delayed" => cases(&mut text, results, "delayed-single", "delayed-burst", &[Security::Plain]),
            "throughput" => throughput(&mut text, results),
            "tunnels" => tunnels(&mut text, results),
            "layer3" | "table7" => layer3(&mut text, results),
            _ => memory(&mut text, results),
        }
        noise(&mut text, results);
    }
    text
}

fn head(text: &mut String, results: &Results) {
    let title = match results.benchmark.as_str() {
        "figure10" => "Table IX and Figure 10: two proxies on loopback, fast server",
        "delayed" => "Figure 10 with 20 ms between the proxies and the Python server",
        "throughput" => "Keep-alive throughput",
        "tunnels" => "Tunnels in bulk",
        "layer3" => "Layer 3: IP through devices",
        "table7" => "Table VII: echoes to a far and to a near site",
        _ => "Resident memory of both proxies, 1,000 idle clients",
    };
    let machine = &results.machine;
    let versions: Vec<_> = results.versions.iter().filter(|(_, version)| *version != "-").collect();
    let versions: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let _ = write!(
        text,
        "\n## {title}\n\n{}, {} cores, Linux {}. {}. Took {:.0} s.\n",
        machine.cpu,
        machine.cores,
        machine.kernel,
        versions.join(", "),
        results.took
    );
}

fn cases(text: &mut String, results: &Results, single: &str, burst: &str, securities: &[Security]) {
    for security in securities {
        for case in Case::ALL {
            let key = Key { case: Some(case), security: Some(*security), ..Key::new(single) };
            let title = format!("{}, {}: one request at a time", case.title(), security.name());
            contenders(text, results, &title, &key, &LATENCY);
            concurrency(text, results, (case, *security), burst);
        }
    }
}

/// Renders a table with numbers of clients as rows and contenders as columns.
fn concurrency(text: &mut String, results: &Results, (case, security): (Case, Security), measure: &str) {
    let key = |clients| Key { case: Some(case), security: Some(security), clients, ..Key::new(measure) };
    let mut clients: Vec<_> =
        results.summary.iter().map(|s| &s.key).filter(|k| **k == key(k.clients)).filter_map(|k| k.clients).collect();
    clients.dedup();
    let names: Vec<_> = results
        .contenders()
        .into_iter()
        .filter(|name| results.find(&key(clients.first().copied()), name).is_some())
        .collect();
    if names.is_empty() {
        return;
    }
    let _ = write!(text, "\n### {}, {}: all at once, mean ms\n\n| clients |", case.title(), security.name());
    for name in &names {
        let _ = write!(text, " {name} | × envoy |");
    }
    let _ = write!(text, "\n|---|{}\n", "---:|---:|".repeat(names.len()));
    clients.sort_unstable();
    clients.dedup();
    for count in clients {
        let _ = write!(text, "| {count} |");
        for name in &names {
            let summary = results.find(&key(Some(count)), name);
            let column = ("", "mean_us", 1e3, 1);
            let _ = write!(
                text,
                " {} | {} |",
                cell(summary, &column),
                ratio(summary, &column, reference(&results.benchmark))
            );
        }
        text.push('\n');
    }
}

fn throughput(text: &mut String, results: &Results) {
    let titles = [
        ("one-hop-h1", None, "One hop, h1 (64 connections)"),
        ("one-hop-h2", None, "One hop, h2 (4 connections of 16 streams; h1 to the origin)"),
        ("two-hops", Some(Security::Plain), "Two hops, h2 between in the clear (nginx: h1 between)"),
        ("two-hops", Some(Security::Mtls), "Two hops, h2 over mutual TLS between"),
    ];
    for (measure, security, title) in titles {
        let found = results.summary.iter().map(|s| &s.key);
        let key = found.clone().find(|k| k.measure == measure && k.security == security).cloned();
        if let Some(key) = key {
            contenders(text, results, title, &key, &THROUGHPUT);
        }
    }
}

fn tunnels(text: &mut String, results: &Results) {
    let mut keys: Vec<_> = results.summary.iter().map(|s| s.key.clone()).collect();
    keys.dedup();
    for key in keys {
        let security = key.security.map_or("", Security::name);
        let version = if key.security == Some(Security::Quic) { "HTTP/3" } else { "HTTP/2" };
        let count = key.clients.unwrap_or_default();
        if key.measure == "bulk" {
            let title = format!("TCP over {version}, {security}, {count} connection(s)");
            contenders(text, results, &title, &key, &BULK);
        } else {
            let apart = if key.measure == "datagrams-apart" { ", proxies on one core" } else { "" };
            let title = format!("UDP over {version}, {security}, {count} flows of 1,200-byte datagrams{apart}");
            contenders(text, results, &title, &key, &DATAGRAMS);
        }
    }
}

fn layer3(text: &mut String, results: &Results) {
    let mut keys: Vec<_> = results.summary.iter().map(|s| s.key.clone()).collect();
    keys.dedup();
    for key in keys {
        let count = key.clients.unwrap_or_default();
        let (title, columns): (String, &[Column]) = match key.measure.as_str() {
            "ip-bulk" => (format!("One hop, TCP, {count} connection(s)"), &BULK),
            "ip-datagrams" => (format!("One hop, 64-byte datagrams, {count} flows"), &DATAGRAMS),
            "ip-echo" => (format!("Echoes over {count} hop(s)"), &ECHOES),
            "ip-echo-next" => (format!("Echoes over {count} hop(s), each after the one before"), &ECHOES),
            "ip-echo-awake" => (format!("Echoes over {count} hop(s), cores kept from halting"), &ECHOES),
            "table7-poland" => ("Poland (129.73 ms)".to_owned(), &SITE),
            _ => ("US (21.71 ms)".to_owned(), &SITE),
        };
        contenders(text, results, &title, &key, columns);
    }
}

fn memory(text: &mut String, results: &Results) {
    let mut keys: Vec<_> = results.summary.iter().map(|s| s.key.clone()).collect();
    keys.dedup();
    for key in keys {
        let what = if key.case == Some(Case::Tcp) { "TCP tunnels" } else { "HTTP/1.1 keep-alive connections" };
        let title = format!("{what}, {}", key.security.map_or("", Security::name));
        contenders(text, results, &title, &key, &MEMORY);
    }
}

/// Renders a table with contenders as rows and figures as columns, each with its ratio to Envoy.
fn contenders(text: &mut String, results: &Results, title: &str, key: &Key, columns: &[Column]) {
    let _ = write!(text, "\n### {title}\n\n| |");
    let mut rule = String::from("|---|");
    let other = reference(&results.benchmark);
    for column in columns {
        let ratio = if compared(column) { format!(" × {other} |") } else { String::new() };
        let _ = write!(text, " {} |{ratio}", column.0);
        rule.push_str(if compared(column) { "---:|---:|" } else { "---:|" });
    }
    let _ = write!(text, " failed |\n{rule}---:|\n");
    for name in results.contenders() {
        let Some(summary) = results.find(key, name) else { continue };
        let _ = write!(text, "| {name} |");
        for column in columns {
            let _ = write!(text, " {} |", cell(Some(summary), column));
            if compared(column) {
                let _ = write!(text, " {} |", ratio(Some(summary), column, other));
            }
        }
        let _ = writeln!(text, " {} |", summary.failed);
    }
}

fn compared(column: &Column) -> bool {
    COMPARED.contains(&column.1)
}

fn cell(summary: Option<&Summary>, (_, figure, divisor, decimals): &Column) -> String {
    let Some(summary) = summary else { return String::new() };
    let Some(spread) = summary.figures.get(*figure) else { return "–".into() };
    let show = |value: f64| grouped(value / divisor, *decimals);
    let Spread { median, min, max } = *spread;
    let failed = if summary.failed > 0 { format!(" **({} failed)**", summary.failed) } else { String::new() };
    format!("{} ({}–{}){failed}", show(median), show(min), show(max))
}

fn ratio(summary: Option<&Summary>, (_, figure, ..): &Column, other: &str) -> String {
    match summary {
        Some(summary) if summary.contender != other => {
            summary.to_reference.get(*figure).map_or_else(String::new, |spread| format!("{:.2}", spread.median))
        }
        _ => String::new(),
    }
}

/// Formats a number with a comma between thousands.
fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let (whole, fraction) = text.split_once('.').map_or((text.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut out = String::from(sign);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// Renders the CPU usage of load, origin and other processes, which shows whether the proxies limited the figures.
fn noise(text: &mut String, results: &Results) {
    let of = |pick: fn(&crate::record::Sample) -> f64| {
        let values: Vec<f64> = results.samples.iter().map(pick).collect();
        Spread::of(&values).map_or_else(String::new, |s| format!("{:.2} ({:.2}–{:.2})", s.median, s.min, s.max))
    };
    let _ = write!(
        text,
        "\nCores busy during measurements, median (range): load {}, origins {}, proxies {}, everybody else {}. \
         A fixed piece of work took {} ms just before each.\n",
        of(|s| s.cpu.load),
        of(|s| s.cpu.origin),
        of(|s| s.cpu.proxies),
        of(|s| s.cpu.foreign),
        of(|s| s.cpu.work_ms)
    );
}
