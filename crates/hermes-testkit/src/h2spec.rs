//! h2spec, the conformance suite of HTTP/2: a client that violates each rule of RFC 7540 and RFC 7541 in turn.
//!
//! In: a listener that speaks HTTP/2. Out: the result of each case. The program is third-party software:
//! `scripts/setup.sh` builds it into the target directory.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use tokio::process::Command;

use crate::{Error, Result, tool};

/// Timeout of a case in seconds. A case that fails without a response takes this long.
const CASE: &str = "5";

/// A case and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The section, such as `http2/4.2`.
    pub section: String,
    /// The description of the case.
    pub case: String,
    /// The expected and the actual response; `None` if the case passed.
    pub failure: Option<String>,
}

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Suite<'a> {
    /// The listener.
    pub address: SocketAddr,
    /// TLS with ALPN; otherwise HTTP/2 by prior knowledge.
    pub tls: bool,
    /// The path of the requests.
    pub path: &'a str,
    /// Further arguments: one section, or lengths.
    pub args: &'a [&'a str],
}

/// Finds h2spec: `HERMES_H2SPEC`, then `tools/h2spec` in the target directory, then the path.
///
/// # Errors
/// The program is not installed; the message contains the remedy.
pub fn find(target: &Path) -> Result<PathBuf> {
    tool::find("h2spec", "HERMES_H2SPEC", target)
}

/// Runs it, strict cases included, and reads its report from `dir`.
///
/// # Errors
/// The program cannot be run, or writes no report.
pub async fn run(program: &Path, suite: &Suite<'_>, dir: &Path) -> Result<Vec<Verdict>> {
    let report = dir.join(format!("h2spec-{}-{}.xml", suite.address.port(), suite.path.replace('/', "-")));
    let mut command = Command::new(program);
    command.args(["--strict", "--timeout", CASE, "--path", suite.path, "--host", &suite.address.ip().to_string()]);
    command.args(["--port", &suite.address.port().to_string(), "--junit-report"]).arg(&report);
    if suite.tls {
        command.args(["--tls", "--insecure"]);
    }
    command.args(suite.args).stdin(Stdio::null()).kill_on_drop(true);
    // The exit status only shows whether all cases passed.
    let output = command.output().await.map_err(Error::io(format!("running {}", program.display())))?;
    let text = fs::read_to_string(&report).map_err(|_| Error::Command {
        command: format!("{command:?}"),
        output: String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
    })?;
    Ok(verdicts(&text))
}

/// Reads the report, which is XML of one fixed shape. A skipped case counts as failed.
fn verdicts(report: &str) -> Vec<Verdict> {
    let cases = report.split("<testcase ").skip(1);
    let read = |text: &str| {
        let (attributes, rest) = text.split_once('>')?;
        let inner = rest.split_once("</testcase>").map_or("", |(inner, _)| inner).trim();
        Some(Verdict {
            section: attribute(attributes, "package")?,
            case: attribute(attributes, "classname")?,
            failure: (!inner.is_empty()).then(|| unescaped(inner)),
        })
    };
    cases.filter_map(read).collect()
}

fn attribute(text: &str, name: &str) -> Option<String> {
    let (_, value) = text.split_once(&format!("{name}=\""))?;
    value.split('"').next().map(unescaped)
}

fn unescaped(text: &str) -> String {
    let named = text.replace("&#34;", "\"").replace("&quot;", "\"").replace("&#39;", "'").replace("&#xA;", "\n");
    named.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read() {
        let report = "<testsuites>\n<testsuite name=\"3.5\" tests=\"2\">\n\
            <testcase package=\"http2/3.5\" classname=\"Omits &#34;:path&#34;\" time=\"0.0010\"></testcase>\n\
            <testcase package=\"http2/4.2\" classname=\"Too long\" time=\"2.0\">\n  <error>GOAWAY\n</error>\n</testcase>\n\
            </testsuite></testsuites>";
        let [first, second] = verdicts(report).try_into().unwrap_or_else(|other| panic!("{other:?}"));
        let passed = Verdict { section: "http2/3.5".into(), case: "Omits \":path\"".into(), failure: None };
        assert_eq!(first, passed);
        assert_eq!((second.section.as_str(), second.case.as_str()), ("http2/4.2", "Too long"));
        assert!(second.failure.is_some_and(|text| text.contains("GOAWAY")));
    }
}
