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

use hermes_testkit::control::Desk;
use hermes_testkit::control::{Bed, PATIENCE, audit, sigkill, until};

/// Devices, and the ports of their applications.
const DEVICES: [(&str, u16); 2] = [("d0", 8080), ("d1", 8081)];

/// A server, and devices that link to it.
fn documents(bed: &Bed) -> String {
    let overlay = bed.socket(9443);
    let mut text = format!(
        "kind: Overlay\nname: test\n---\n{{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
         {{kind: Service, name: APP, at: {{node: server, http: \"{}\"}}, for: everyone}}\n",
        bed.socket(7001)
    );
    for (name, port) in DEVICES {
        text +=
            &format!("---\n{{kind: Node, name: {name}, links: server, apps: {{bind: \"{}\"}}}}\n", bed.socket(port));
    }
    text
}

/// The status that an application gets at this port; empty without a listener.
fn status(bed: &Bed, port: u16) -> String {
    let mut text = String::new();
    let asked = TcpStream::connect(bed.socket(port)).and_then(|mut stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: APP\r\nconnection: close\r\n\r\n")?;
        stream.read_to_string(&mut text)
    });
    let _ = asked;
    text.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// A thief with a copy of a node's state, who ignores revocations.
fn thief(bed: &Bed, of: &str, own: u16, port: u16) -> Running {
    let name = format!("thief-{port}");
    let directory = bed.state(&name);
    std::fs::create_dir(&directory).unwrap();
    for file in ["node.pem", "node.key", "ca.pem"] {
        std::fs::copy(bed.state(of).join(file), directory.join(file)).unwrap();
    }
    let document = std::fs::read_to_string(bed.state(of).join("document.json")).unwrap();
    let document = document.replace(&bed.socket(own).to_string(), &bed.socket(port).to_string());
    std::fs::write(directory.join("document.json"), document).unwrap();
    let program = Program::new(&name, hermes(), bed.directory.path()).args(["proxy", "--config"]);
    program.args([directory.join("document.json")]).start().unwrap()
}

fn restore(bed: &mut Bed, backup: &Path) {
    let data = bed.state("controller");
    let operator = std::fs::read(data.join("operator.json")).unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    let said = bed.hermes_at("nobody", &["restore", backup.to_str().unwrap(), "--data", data.to_str().unwrap()], "");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
}

async fn restored(bed: &Bed) -> Value {
    let mut desk = Desk::new(&bed.state("controller/operator.json"));
    desk.ask(http::Method::GET, "/v1/restored", "").await.unwrap().1
}

#[tokio::test]
async fn a_restored_backup_undoes_no_revocation() {
    let mut bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &documents(&bed));
    let server = bed.node("server", Some(&bed.token("server")));
    let d0 = bed.node("d0", Some(&bed.token("d0")));
    let _d1 = bed.node("d1", Some(&bed.token("d1")));
    until("both are served", || status(&bed, 8080) == "200" && status(&bed, 8081) == "200").await;
    let backup = bed.state("backup.json");
    bed.told(&["backup", backup.to_str().unwrap()], "");
    let unused = bed.token("d0");
    let _thief = thief(&bed, "d0", 8080, 8180);
    until("the thief is served", || status(&bed, 8180) == "200").await;
    bed.told(&["node", "revoke", "d0"], "");
    until("the thief is not", || status(&bed, 8180) == "403" || status(&bed, 8180) == "502").await;
    let kept = || std::fs::read_to_string(bed.state("server/history.json")).unwrap_or_default().contains("\"d0\"");
    until("the server keeps it", kept).await;
    d0.end(PATIENCE).unwrap();
    // The server is down while the controller starts with the backup, which learns of no revocation from it.
    sigkill(server);
    bed.kill_controller();
    restore(&mut bed, &backup);
    bed.start_controller().await;
    let again = bed.node("d0", None);
    until("d1 is back", || bed.log("d1").matches("under control").count() > 1).await;
    until("so is the one that was revoked", || bed.log("d0").contains("under control")).await;
    let now = restored(&bed).await;
    assert_eq!((&now["unconfirmed"], &now["missing"]), (&true.into(), &serde_json::json!(["server"])), "{now}");
    assert!(bed.told(&["restore", "--status"], "").contains("Missing: server"));
    let said = bed.hermes(&["restore", "--confirm"], "");
    let why = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && why.contains("not back") && why.contains("server"), "{why}");
    let said = bed.told(&["apply", "-f", "-", "--wait", "0s"], &documents(&bed).replace(":7001", ":7002"));
    assert!(said.contains("warning: store restored"), "{said}");
    // The server returns, refuses the revoked node, and reports the revocation.
    let _server = bed.node("server", None);
    until("all are back", || audit(&bed.state("controller")).contains("\"what\":\"recall\"")).await;
    bed.origin(7002, "two");
    until("what was changed goes out", || {
        std::fs::read_to_string(bed.state("server/document.json")).unwrap_or_default().contains(":7002")
    })
    .await;
    until("d1 is served", || status(&bed, 8081) == "200").await;
    assert_ne!(status(&bed, 8180), "200");
    until("it is sent away", || {
        bed.log("d0").contains("no part of the overlay") || bed.log("d0").contains("was removed")
    })
    .await;
    assert_ne!(status(&bed, 8080), "200");
    again.end(PATIENCE).unwrap();
    assert_eq!(restored(&bed).await["unconfirmed"], false);
    // A token from before the restore is void: it may have been used.
    let _ = unused;
    let log = audit(&bed.state("controller"));
    assert!(log.contains("node d0 is revoked, as reported by node server"), "{log}");
    assert!(log.contains("has run revision"), "what is lost is said: {log}");
    // A revoked node returns with a new token, as always.
    std::fs::remove_dir_all(bed.state("d0")).unwrap();
    let _d0 = bed.node("d0", Some(&bed.token("d0")));
    until("it is served again", || status(&bed, 8080) == "200").await;
    assert_ne!(status(&bed, 8180), "200");
}

/// The running processes, and the revoked nodes.
struct Scene {
    bed: Bed,
    server: Option<Running>,
    devices: BTreeMap<&'static str, Running>,
    /// The thieves, by port.
    thieves: BTreeMap<u16, Running>,
    backups: Vec<std::path::PathBuf>,
}

impl Scene {
    fn check(&self, step: &str) {
        for port in self.thieves.keys() {
            let said = status(&self.bed, *port);
            assert!(said != "200" && !said.is_empty(), "after {step}: who was revoked is served at {port}: {said}");
        }
    }

    fn backup(&mut self) {
        let path = self.bed.state(&format!("backup-{}.json", self.backups.len()));
        self.bed.told(&["backup", path.to_str().unwrap()], "");
        self.backups.push(path);
    }

    async fn enrol(&mut self, device: (&'static str, u16)) {
        let _ = std::fs::remove_dir_all(self.bed.state(device.0));
        let running = self.bed.node(device.0, Some(&self.bed.token(device.0)));
        until("it is served", || status(&self.bed, device.1) == "200").await;
        self.devices.insert(device.0, running);
    }

    async fn revoke(&mut self, (name, own): (&'static str, u16)) {
        let port = 8180 + u16::try_from(self.thieves.len()).unwrap();
        let thief = thief(&self.bed, name, own, port);
        until("the thief is served", || status(&self.bed, port) == "200").await;
        self.bed.told(&["node", "revoke", name], "");
        until("the thief is not", || !matches!(&*status(&self.bed, port), "200" | "")).await;
        sigkill(self.devices.remove(name).unwrap());
        self.thieves.insert(port, thief);
    }

    async fn restore(&mut self, backup: usize) {
        self.bed.kill_controller();
        let path = self.backups[backup].clone();
        restore(&mut self.bed, &path);
        self.bed.start_controller().await;
        // The server has learned every revocation, so that none is unknown once it has reported.
        let mut desk = Desk::new(&self.bed.state("controller/operator.json"));
        loop {
            self.check("a restore that is not confirmed");
            let (_, now) = desk.ask(http::Method::GET, "/v1/restored", "").await.unwrap();
            if !now["missing"].to_string().contains("\"server\"") {
                break;
            }
        }
        self.bed.told(&["restore", "--confirm", "--yes"], "");
        // The controller does not know nodes that enrolled after the backup.
        let enrolled = self.bed.told(&["node", "list"], "");
        for (name, _) in DEVICES {
            let is_back = || {
                self.bed
                    .told(&["node", "list"], "")
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
async fn nobody_who_was_revoked_is_served_again() {
    let seed = std::env::var("HERMES_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    let steps = std::env::var("HERMES_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(14);
    eprintln!("HERMES_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &documents(&bed));
    let server = Some(bed.node("server", Some(&bed.token("server"))));
    let mut scene = Scene { bed, server, devices: BTreeMap::new(), thieves: BTreeMap::new(), backups: Vec::new() };
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
                scene.bed.kill_controller();
                scene.bed.start_controller().await;
                "the death of the controller"
            }
            _ => {
                sigkill(scene.server.take().unwrap());
                scene.server = Some(scene.bed.node("server", None));
                until("the server is back", || TcpStream::connect(scene.bed.socket(9443)).is_ok()).await;
                "the death of the server"
            }
        };
        eprintln!("{step}: {what} ({})", device.0);
        scene.check(what);
    }
}
