//! A running test path: four machines in a row with their programs, and a client that downloads.
//!
//! In: a way, and the conditions of its links. Out: downloads by curl, compared byte by byte, and the bytes that each
//! link carried meanwhile. Dropping the value ends the programs first, then their network.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use hermes_lab::Conditions;

use super::Protocol;
use super::envoy;
use super::lab::{LINKS, Lab, NAME, NODES};
use super::nodes::{self, ADMIN, APPS, name};
use super::variant::Variant;
use crate::ca::{Authority, Proof};
use crate::client::Client;
use crate::content::content;
use crate::origins::ServerTls;
use crate::overlay::{READY, start_node, wait_ready};
use crate::program::{self, Program};

const OVERLAY: &str = "unstable";
/// The CA of the web server: nodes do not know it.
const SERVER_CA: &str = "server-ca";
/// The time curl may take to exit after its own limit.
const GRACE: Duration = Duration::from_secs(5);
/// The interval at which the links' byte counters are sampled.
const SAMPLE: Duration = Duration::from_millis(25);

/// The settings that all chains of a run share.
pub(super) struct Setting {
    /// The HTTP version between nodes of Hermes.
    pub(super) protocol: Protocol,
    /// Envoy's binary, or the reason why it is missing.
    pub(super) envoy: Result<PathBuf, String>,
    /// The directory of all files.
    pub(super) directory: PathBuf,
    server: ServerTls,
}

impl Setting {
    /// Makes certificates.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn new(protocol: Protocol, envoy: Option<PathBuf>, directory: &Path) -> anyhow::Result<Self> {
        // Envoy's documents contain absolute paths, since it runs in another directory.
        let directory = directory.canonicalize().with_context(|| directory.display().to_string())?;
        let overlay = Authority::new(&directory, "overlay-ca")?;
        for node in 0..NODES {
            let standalone = (1..NODES - 1).contains(&node);
            overlay.issue(&name(node), &Proof::Node { overlay: OVERLAY, users: &[], standalone })?;
        }
        let identity = Authority::new(&directory, SERVER_CA)?.issue(NAME, &Proof::Server)?;
        let key = hermes_net::tls::CertifiedKey::load(&identity.cert, &identity.key)?;
        let server = hermes_net::tls::server_config(&key, &hermes_net::tls::ClientCertificates::None, &[b"http/1.1"])?;
        let envoy = envoy.map_or_else(envoy::on_path, Ok).map_err(|error| format!("{error:#}"));
        Ok(Self { protocol, envoy, directory, server })
    }

    /// The reason why a way cannot run on this machine; `None` if it can.
    pub(super) fn lacks(&self, way: Variant) -> Option<String> {
        let envoy = self.envoy.as_ref().err().filter(|_| way.is_envoy()).cloned();
        let has_knob = way != Variant::EnvoyTuned || envoy::has_knob();
        let old = "this kernel has no net.ipv4.tcp_rto_max_ms: it came with Linux 6.15";
        envoy.or_else(|| (!has_knob).then(|| old.to_owned()))
    }
}

/// One download.
#[derive(Debug, Clone)]
pub(super) struct Download {
    /// The position in the links' cycle when the download began, in seconds.
    pub(super) phase: f64,
    /// Time from the start to the last byte, or until the client gave up.
    pub(super) seconds: f64,
    /// The number of content bytes received.
    pub(super) bytes: u64,
    /// The reason why the download is incomplete.
    pub(super) failed: Option<String>,
}

/// The bytes that each link carried towards the client during a download.
#[derive(Debug, Clone, Default)]
pub(super) struct Trace {
    /// The position in the links' cycle when the trace began, in seconds.
    pub(super) phase: f64,
    /// Seconds since then, and bytes of frames, by link.
    pub(super) samples: Vec<(f64, [u64; LINKS])>,
}

/// A way that is ready for downloads.
pub(super) struct TestPath {
    pub(super) way: Variant,
    programs: Vec<Program>,
    pub(super) lab: Lab,
    directory: PathBuf,
    server_ca: PathBuf,
    asked: u64,
}

impl TestPath {
    /// Creates the network and starts its programs. `number` distinguishes the chains of one process.
    ///
    /// # Errors
    /// Returns iproute2's error, or the error of a node that does not start.
    pub(super) async fn start(
        setting: &Setting,
        way: Variant,
        number: usize,
        conditions: impl Fn(usize) -> Conditions,
    ) -> anyhow::Result<Self> {
        let directory = setting.directory.join(format!("{number:02}-{}", way.slug()));
        std::fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let lab = Lab::new(number, setting.server.clone(), conditions)?;
        let server_ca = setting.directory.join(format!("{SERVER_CA}.pem"));
        let mut this = Self { way, programs: Vec::new(), lab, directory, server_ca, asked: 0 };
        for node in (0..NODES).rev() {
            this.launch(setting, node)?;
        }
        for (program, place) in this.programs.iter_mut().zip(this.lab.places.iter().rev()) {
            wait_ready(program, if way.is_envoy() { envoy::READY } else { READY }, || {
                Client::connect_from(place, ADMIN)
            })
            .await?;
        }
        Ok(this)
    }

    fn launch(&mut self, setting: &Setting, node: usize) -> anyhow::Result<()> {
        let (name, place) = (name(node), &self.lab.places[node]);
        let config = self.directory.join(format!("{name}.yaml"));
        let program = match &setting.envoy {
            Ok(binary) if self.way.is_envoy() => {
                if self.way == Variant::EnvoyTuned {
                    place.sysctl(envoy::KNOB, envoy::TUNED)?;
                }
                let document = envoy::document(node, OVERLAY, &setting.directory);
                std::fs::write(&config, serde_json::to_string_pretty(&document)? + "\n")?;
                let [binary, config] = [binary, &config].map(|path| path.to_string_lossy());
                let command = [&place.prefix()[..], &envoy::command(&binary, &config)].concat();
                Program::start(&name, &self.directory.join(format!("{name}.log")), &command)?
            }
            _ if self.way.is_hermes() => {
                let has_cache = self.way == Variant::HermesCache;
                std::fs::write(&config, nodes::document(node, setting.protocol, has_cache))?;
                start_node(&self.directory, &name, &config, &place.prefix())?
            }
            _ => return Ok(()),
        };
        self.programs.push(program);
        Ok(())
    }

    /// The next object that was not requested before.
    pub(super) fn fresh(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    /// Downloads an object, and samples the links meanwhile.
    ///
    /// # Errors
    /// curl cannot be run.
    pub(super) async fn download(
        &mut self,
        object: u64,
        size: u64,
        patience: Duration,
    ) -> anyhow::Result<(Download, Trace)> {
        let (begun, before) = (Instant::now(), self.lab.carried());
        let mut trace = Trace { phase: self.lab.phase(begun), samples: Vec::new() };
        let mut ticks = tokio::time::interval(SAMPLE);
        let done = {
            let curl = self.curl(object, size, patience);
            tokio::pin!(curl);
            loop {
                tokio::select! {
                    done = &mut curl => break done?,
                    _ = ticks.tick() => {
                        let mut bytes = self.lab.carried();
                        bytes.iter_mut().zip(before).for_each(|(bytes, before)| *bytes -= before);
                        trace.samples.push((begun.elapsed().as_secs_f64(), bytes));
                    }
                }
            }
        };
        let failed = done.failed.map(|why| why + &self.dead());
        Ok((Download { failed, ..done }, trace))
    }

    /// Downloads by curl, and compares every byte.
    async fn curl(&self, object: u64, size: u64, patience: Duration) -> anyhow::Result<Download> {
        let path = format!("/content/{object}/{size}");
        let proxy = format!("http://{APPS}");
        let ca = self.server_ca.to_string_lossy();
        let direct = format!("http://{}{path}", self.lab.server());
        let (plain, secure) = (format!("http://{NAME}{path}"), format!("https://{NAME}{path}"));
        let words: Vec<&str> = match self.way {
            Variant::Direct => vec!["--noproxy", "*", &direct],
            Variant::HermesConnect => vec!["--noproxy", "", "-x", &proxy, "--cacert", &ca, "--tlsv1.3", &secure],
            _ => vec!["--noproxy", "", "-x", &proxy, &plain],
        };
        let (file, log) = (self.directory.join("download"), self.directory.join("curl.log"));
        // Before the first download neither file exists.
        let _ = (std::fs::remove_file(&file), std::fs::remove_file(&log));
        let (out, most) = (file.to_string_lossy(), format!("{:.3}", patience.as_secs_f64()));
        let form = "%{http_code} %{size_download} %{time_total}\n";
        // The option `-q` must come first: curl then ignores the user's configuration.
        let curl = ["curl", "-q", "-sS", "-o", &out, "-w", form, "--max-time", &most];
        let command = [&self.lab.places[0].prefix()[..], &curl, &words].concat();
        let mut curl = Program::start("curl", &log, &command)?;
        let ended = curl.wait(patience + GRACE).await;
        let at = Instant::now();
        let said = curl.last_lines(5);
        let (status, bytes, seconds) =
            said.iter().find_map(|line| parse(line)).unwrap_or((0, 0, patience.as_secs_f64()));
        let begun = at.checked_sub(Duration::from_secs_f64(seconds)).unwrap_or(at);
        let complaint = || said.iter().find(|line| parse(line).is_none()).map_or("curl did not end", String::as_str);
        let failed = if !ended.is_some_and(|status| status.success()) {
            Some(complaint().to_owned())
        } else if status != 200 {
            Some(format!("answered with {status}"))
        } else if std::fs::read(&file).unwrap_or_default() != content(object, size as usize) {
            Some("the received bytes differ from the sent ones".to_owned())
        } else {
            None
        };
        Ok(Download { phase: self.lab.phase(begun), seconds, bytes, failed })
    }

    /// Describes a node that exited unexpectedly.
    fn dead(&mut self) -> String {
        if self.programs.iter_mut().any(|program| program.ended().is_some()) {
            return program::last_words(&mut self.programs);
        }
        String::new()
    }
}

/// Parses curl's report of a transfer.
fn parse(line: &str) -> Option<(u16, u64, f64)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [status, bytes, seconds] = words[..] else { return None };
    Some((status.parse().ok()?, bytes.parse().ok()?, seconds.parse().ok()?))
}
