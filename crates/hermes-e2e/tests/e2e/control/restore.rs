//! Revoked nodes stay revoked, whatever backup a controller starts with: nodes keep revocations, and return them.

use hermes_testkit::binary::hermes;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use hermes_testkit::process::{Program, Running};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::Value;

use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::{ControllerFixture, EFFECT_TIMEOUT, audit, sigkill, until};

/// Devices, and the ports of their applications.
const DEVICES: [(&str, u16); 2] = [("d0", 8080), ("d1", 8081)];

/// A server, and devices that link to it.
fn documents(fixture: &ControllerFixture) -> String {
    let overlay = fixture.socket(9443);
    let mut text = format!(
        "kind: Overlay\nname: test\n---\n{{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
         {{kind: Service, name: APP, at: {{node: server, http: \"{}\"}}, for: everyone}}\n",
        fixture.socket(7001)
    );
    for (name, port) in DEVICES {
        text += &format!(
            "---\n{{kind: Node, name: {name}, links: server, apps: {{bind: \"{}\"}}}}\n",
            fixture.socket(port)
        );
    }
    text
}

/// The status that an application gets at this port; empty without a listener.
fn status(fixture: &ControllerFixture, port: u16) -> String {
    let mut text = String::new();
    let requests = TcpStream::connect(fixture.socket(port)).and_then(|mut stream| {
        stream.set_read_timeout(Some(EFFECT_TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: APP\r\nconnection: close\r\n\r\n")?;
        stream.read_to_string(&mut text)
    });
    let _ = requests;
    text.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// A thief with a copy of a node's state, who ignores revocations.
fn thief(fixture: &ControllerFixture, of: &str, own: u16, port: u16) -> Running {
    let name = format!("thief-{port}");
    let directory = fixture.state(&name);
    std::fs::create_dir(&directory).unwrap();
    for file in ["node.pem", "node.key", "ca.pem"] {
        std::fs::copy(fixture.state(of).join(file), directory.join(file)).unwrap();
    }
    let document = std::fs::read_to_string(fixture.state(of).join("document.json")).unwrap();
    let document = document.replace(&fixture.socket(own).to_string(), &fixture.socket(port).to_string());
    std::fs::write(directory.join("document.json"), document).unwrap();
    let program = Program::new(&name, hermes(), fixture.directory.path()).args(["proxy", "--config"]);
    program.args([directory.join("document.json")]).start().unwrap()
}

fn restore(fixture: &mut ControllerFixture, backup: &Path) {
    let data = fixture.state("controller");
    let operator = std::fs::read(data.join("operator.json")).unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    let output =
        fixture.hermes_at("nobody", &["restore", backup.to_str().unwrap(), "--data", data.to_str().unwrap()], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
}

async fn restored(fixture: &ControllerFixture) -> Value {
    let mut operator = OperatorClient::new(&fixture.state("controller/operator.json"));
    operator.ask(http::Method::GET, "/v1/restored", "").await.unwrap().1
}

#[tokio::test]
async fn a_restored_backup_undoes_no_revocation() {
    let mut fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture));
    let server = fixture.node("server", Some(&fixture.token("server")));
    let d0 = fixture.node("d0", Some(&fixture.token("d0")));
    let _d1 = fixture.node("d1", Some(&fixture.token("d1")));
    until("both are served", || status(&fixture, 8080) == "200" && status(&fixture, 8081) == "200").await;
    let backup = fixture.state("backup.json");
    fixture.hermes_ok(&["backup", backup.to_str().unwrap()], "");
    let unused = fixture.token("d0");
    let _thief = thief(&fixture, "d0", 8080, 8180);
    until("the thief is served", || status(&fixture, 8180) == "200").await;
    fixture.hermes_ok(&["node", "revoke", "d0"], "");
    until("the thief is not", || status(&fixture, 8180) == "403" || status(&fixture, 8180) == "502").await;
    let kept = || std::fs::read_to_string(fixture.state("server/history.json")).unwrap_or_default().contains("\"d0\"");
    until("the server keeps it", kept).await;
    d0.end(EFFECT_TIMEOUT).unwrap();
    // The server is down while the controller starts with the backup, which learns of no revocation from it.
    sigkill(server);
    fixture.kill_controller();
    restore(&mut fixture, &backup);
    fixture.start_controller().await;
    let again = fixture.node("d0", None);
    until("d1 is back", || fixture.log("d1").matches("under control").count() > 1).await;
    until("so is the one that was revoked", || fixture.log("d0").contains("under control")).await;
    let now = restored(&fixture).await;
    assert_eq!((&now["unconfirmed"], &now["missing"]), (&true.into(), &serde_json::json!(["server"])), "{now}");
    assert!(fixture.hermes_ok(&["restore", "--status"], "").contains("Missing: server"));
    let output = fixture.hermes(&["restore", "--confirm"], "");
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && why.contains("not reconnected") && why.contains("server"), "{why}");
    let output =
        fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(&fixture).replace(":7001", ":7002"));
    assert!(output.contains("warning: store restored"), "{output}");
    // The server returns, refuses the revoked node, and reports the revocation.
    let _server = fixture.node("server", None);
    until("all are back", || audit(&fixture.state("controller")).contains("\"what\":\"recall\"")).await;
    fixture.origin(7002, "two");
    until("what was changed goes out", || {
        std::fs::read_to_string(fixture.state("server/document.json")).unwrap_or_default().contains(":7002")
    })
    .await;
    until("d1 is served", || status(&fixture, 8081) == "200").await;
    assert_ne!(status(&fixture, 8180), "200");
    until("it is sent away", || {
        fixture.log("d0").contains("not part of the overlay") || fixture.log("d0").contains("was removed")
    })
    .await;
    assert_ne!(status(&fixture, 8080), "200");
    again.end(EFFECT_TIMEOUT).unwrap();
    assert_eq!(restored(&fixture).await["unconfirmed"], false);
    // A token from before the restore is void: it may have been used.
    let _ = unused;
    let log = audit(&fixture.state("controller"));
    assert!(log.contains("node d0 is revoked, as reported by node server"), "{log}");
    assert!(log.contains("has run revision"), "what is lost is said: {log}");
    // A revoked node returns with a new token, as always.
    std::fs::remove_dir_all(fixture.state("d0")).unwrap();
    let _d0 = fixture.node("d0", Some(&fixture.token("d0")));
    until("it is served again", || status(&fixture, 8080) == "200").await;
    assert_ne!(status(&fixture, 8180), "200");
}

/// The running processes, and the revoked nodes.
struct Scene {
    fixture: ControllerFixture,
    server: Option<Running>,
    devices: BTreeMap<&'static str, Running>,
    /// The thieves, by port.
    thieves: BTreeMap<u16, Running>,
    backups: Vec<std::path::PathBuf>,
}

impl Scene {
    fn check(&self, step: &str) {
        for port in self.thieves.keys() {
            let output = status(&self.fixture, *port);
            assert!(
                output != "200" && !output.is_empty(),
                "after {step}: who was revoked is served at {port}: {output}"
            );
        }
    }

    fn backup(&mut self) {
        let path = self.fixture.state(&format!("backup-{}.json", self.backups.len()));
        self.fixture.hermes_ok(&["backup", path.to_str().unwrap()], "");
        self.backups.push(path);
    }

    async fn enrol(&mut self, device: (&'static str, u16)) {
        let _ = std::fs::remove_dir_all(self.fixture.state(device.0));
        let running = self.fixture.node(device.0, Some(&self.fixture.token(device.0)));
        until("it is served", || status(&self.fixture, device.1) == "200").await;
        self.devices.insert(device.0, running);
    }

    async fn revoke(&mut self, (name, own): (&'static str, u16)) {
        let port = 8180 + u16::try_from(self.thieves.len()).unwrap();
        let thief = thief(&self.fixture, name, own, port);
        until("the thief is served", || status(&self.fixture, port) == "200").await;
        self.fixture.hermes_ok(&["node", "revoke", name], "");
        until("the thief is not", || !matches!(&*status(&self.fixture, port), "200" | "")).await;
        sigkill(self.devices.remove(name).unwrap());
        self.thieves.insert(port, thief);
    }

    async fn restore(&mut self, backup: usize) {
        self.fixture.kill_controller();
        let path = self.backups[backup].clone();
        restore(&mut self.fixture, &path);
        self.fixture.start_controller().await;
        // The server has learned every revocation, so that none is unknown once it has reported.
        let mut operator = OperatorClient::new(&self.fixture.state("controller/operator.json"));
        loop {
            self.check("a restore that is not confirmed");
            let (_, now) = operator.ask(http::Method::GET, "/v1/restored", "").await.unwrap();
            if !now["missing"].to_string().contains("\"server\"") {
                break;
            }
        }
        self.fixture.hermes_ok(&["restore", "--confirm", "--yes"], "");
        // The controller does not know nodes that enrolled after the backup.
        let enrolled = self.fixture.hermes_ok(&["node", "list"], "");
        for (name, _) in DEVICES {
            let is_back = || {
                self.fixture
                    .hermes_ok(&["node", "list"], "")
                    .lines()
                    .any(|line| line.starts_with(name) && line.contains(" running"))
            };
            if self.devices.contains_key(name) && !is_back() {
                tokio::time::timeout(std::time::Duration::from_secs(3), until("it is back", is_back))
                    .await
                    .unwrap_or_else(|_| {
                        eprintln!("{name} has to enrol anew: {enrolled}");
                    });
                if !is_back() {
                    sigkill(self.devices.remove(name).unwrap());
                }
            }
        }
    }
}

/// Random backups, restores, revocations and kills: no revoked node is served again.
#[tokio::test]
async fn revoked_nodes_are_never_served_again() {
    let seed = std::env::var("HERMES_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    let steps = std::env::var("HERMES_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(14);
    eprintln!("HERMES_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture));
    let server = Some(fixture.node("server", Some(&fixture.token("server"))));
    let mut scene = Scene { fixture, server, devices: BTreeMap::new(), thieves: BTreeMap::new(), backups: Vec::new() };
    for device in DEVICES {
        scene.enrol(device).await;
    }
    scene.backup();
    scene.revoke(DEVICES[0]).await;
    for step in 0..steps {
        let device = DEVICES[random.random_range(0..DEVICES.len())];
        let is_there = scene.devices.contains_key(device.0);
        let what = match random.random_range(0..6) {
            0 => {
                scene.backup();
                "a backup"
            }
            1 | 2 => {
                let backup = random.random_range(0..scene.backups.len());
                scene.restore(backup).await;
                "a restore"
            }
            3 if is_there && scene.thieves.len() < 5 => {
                scene.revoke(device).await;
                "a revocation"
            }
            3 | 4 if !is_there => {
                scene.enrol(device).await;
                "an enrolment"
            }
            4 => {
                scene.fixture.kill_controller();
                scene.fixture.start_controller().await;
                "the death of the controller"
            }
            _ => {
                sigkill(scene.server.take().unwrap());
                scene.server = Some(scene.fixture.node("server", None));
                until("the server is back", || TcpStream::connect(scene.fixture.socket(9443)).is_ok()).await;
                "the death of the server"
            }
        };
        eprintln!("{step}: {what} ({})", device.0);
        scene.check(what);
    }
}
