//! Manifests are what Kubernetes takes, fit together and to the overlay's documents; and what they start is a node.
//!
//! There is no cluster here: types of its API judge the manifests, and a pod is run as a kubelet runs it, from nothing but them.

use hermes_testkit::binary::hermes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use hermes_testkit::process::{Program, Running};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, PersistentVolumeClaim, PodSpec, PodTemplateSpec, Probe, Secret, Service, Volume,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use hermes_testkit::control::{ControllerFixture, until};

/// What was printed, by its kinds: there is one of each at most.
struct Manifests {
    text: String,
    objects: BTreeMap<String, Value>,
}

/// Of this type, with no field that the type does not know: it reads over those.
fn typed<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T, String> {
    let object: T = serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
    let back = serde_json::to_value(&object).unwrap();
    if back == *value { Ok(object) } else { Err(format!("{value:#} is read as {back:#}")) }
}

impl Manifests {
    fn read(text: String) -> Self {
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let kind = |object: &Value| object["kind"].as_str().unwrap().to_owned();
        let objects: BTreeMap<_, _> = objects.into_iter().map(|object| (kind(&object), object)).collect();
        assert_eq!(objects.len(), text.matches("\nkind: ").count(), "{text}");
        Self { text, objects }
    }

    fn find<T: DeserializeOwned + Serialize>(&self, kind: &str) -> Option<T> {
        Some(typed(self.objects.get(kind)?).unwrap())
    }

    fn kinds(&self) -> Vec<&str> {
        self.objects.keys().map(String::as_str).collect()
    }

    fn template(&self) -> (LabelSelector, PodTemplateSpec) {
        if let Some(Deployment { spec: Some(spec), .. }) = self.find("Deployment") {
            assert_eq!((spec.replicas, spec.strategy.unwrap().type_.as_deref()), (Some(1), Some("Recreate")));
            return (spec.selector, spec.template);
        }
        let spec = self.find::<DaemonSet>("DaemonSet").unwrap().spec.unwrap();
        (spec.selector, spec.template)
    }

    fn pod(&self) -> PodSpec {
        self.template().1.spec.unwrap()
    }

    fn container(&self) -> Container {
        let [container] = <[Container; 1]>::try_from(self.pod().containers).unwrap();
        container
    }

    fn service(&self) -> Vec<(i32, String)> {
        let service = self.find::<Service>("Service").unwrap().spec.unwrap();
        let ports = service.ports.unwrap().into_iter();
        ports.map(|port| (port.port, port.protocol.unwrap())).collect()
    }

    /// Whatever names something else names what is there.
    fn fit_together(&self, namespace: Option<&str>, name: &str) {
        let (selector, template) = self.template();
        let labels = template.metadata.unwrap().labels.unwrap();
        let finds = |selector: Option<BTreeMap<String, String>>| {
            let selector = selector.unwrap();
            assert!(!selector.is_empty() && selector.iter().all(|(key, value)| labels.get(key) == Some(value)));
            assert_eq!(selector["app.kubernetes.io/instance"], name, "it finds no other pods");
        };
        finds(selector.match_labels);
        if let Some(service) = self.find::<Service>("Service") {
            finds(service.spec.unwrap().selector);
        }
        if let Some(budget) = self.find::<PodDisruptionBudget>("PodDisruptionBudget") {
            finds(budget.spec.unwrap().selector.unwrap().match_labels);
        }
        for object in self.objects.values() {
            let meta: ObjectMeta = typed(&object["metadata"]).unwrap();
            assert_eq!(meta.namespace.as_deref(), namespace, "{object}");
            assert!(meta.name.unwrap().starts_with(name), "{object}");
            finds(meta.labels);
        }
        let (pod, container) = (self.pod(), self.container());
        let volumes: BTreeMap<_, _> =
            pod.volumes.unwrap().into_iter().map(|volume| (volume.name.clone(), volume)).collect();
        let mounted: BTreeSet<_> = container.volume_mounts.unwrap().into_iter().map(|mount| mount.name).collect();
        assert_eq!(volumes.keys().cloned().collect::<BTreeSet<_>>(), mounted);
        let claimed = |volume: &Volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone());
        let claims: Vec<_> = volumes.values().filter_map(claimed).collect();
        let claim = self.find::<PersistentVolumeClaim>("PersistentVolumeClaim");
        assert_eq!(claims, claim.map(|claim| claim.metadata.name.unwrap()).into_iter().collect::<Vec<_>>());
        if let Some(secret) = self.find::<Secret>("Secret") {
            let named = volumes.values().find_map(|volume| volume.secret.as_ref()?.secret_name.clone());
            assert_eq!(named, secret.metadata.name);
        }
        let map = self.find::<ConfigMap>("ConfigMap").unwrap();
        let refer = |env: &k8s_openapi::api::core::v1::EnvVar| env.value_from.clone()?.config_map_key_ref;
        for (variable, key) in container.env.unwrap().iter().filter_map(|env| Some((&env.name, refer(env)?))) {
            assert_eq!((Some(&key.name), variable), (map.metadata.name.as_ref(), &key.key));
            assert!(map.data.as_ref().unwrap().contains_key(&key.key));
        }
        let opened: BTreeMap<_, _> =
            container.ports.unwrap_or_default().into_iter().map(|port| (port.name.unwrap(), port.protocol)).collect();
        let service = self.find::<Service>("Service").and_then(|service| service.spec?.ports).unwrap_or_default();
        for port in service {
            let IntOrString::String(target) = port.target_port.unwrap() else { panic!("{}", self.text) };
            assert_eq!(opened.get(&target), Some(&port.protocol), "{target}");
        }
    }

    /// No right that it does not need, and its means are stated.
    fn is_modest(&self, has_device: bool) {
        let (pod, container) = (self.pod(), self.container());
        let security = pod.security_context.unwrap();
        assert_eq!(pod.automount_service_account_token, Some(false));
        assert_eq!((security.run_as_non_root, security.run_as_user == Some(0)), (Some(!has_device), has_device));
        assert_eq!(security.seccomp_profile.unwrap().type_, "RuntimeDefault");
        for container in pod.init_containers.into_iter().flatten().chain([container]) {
            let security = container.security_context.unwrap();
            assert_eq!(security.read_only_root_filesystem, Some(true));
            assert_eq!((security.allow_privilege_escalation, security.privileged), (Some(false), None));
            let rights = security.capabilities.unwrap();
            assert_eq!(rights.drop, Some(vec!["ALL".to_owned()]));
            let added = match &*container.name {
                "hermes" => has_device.then(|| vec!["NET_ADMIN".to_owned()]),
                _ => Some(vec!["CHOWN".to_owned()]),
            };
            assert_eq!(rights.add, added, "{}", container.name);
            let means = container.resources.unwrap();
            assert!(means.requests.unwrap().len() == 2 && means.limits.unwrap().contains_key("memory"));
        }
    }

    fn grace(&self) -> i64 {
        self.pod().termination_grace_period_seconds.unwrap()
    }
}

/// A command of a pod, where its directories and variables are these.
fn command(line: &[String], room: &Path, variables: &BTreeMap<String, String>) -> Vec<String> {
    let place = |word: &String| {
        let mut word = word.clone();
        for (variable, value) in variables {
            word = word.replace(&format!("$({variable})"), value);
        }
        assert!(!word.contains("$("), "{word}");
        let at = |name: &str| room.join(name).to_str().unwrap().to_owned();
        word.replace("/var/lib/hermes", &at("home"))
            .replace("/run/hermes/tokens", &at("tokens"))
            .replace("/usr/local/bin/hermes", hermes())
    };
    line.iter().map(place).collect()
}

fn is_of_this_program(line: &[String]) {
    let help = Command::new(&line[0]).args(&line[1..]).arg("--help").output().unwrap();
    assert!(help.status.success(), "{line:?}: {}", String::from_utf8_lossy(&help.stderr));
}

/// A router that others know by another port than it has, a server that nobody can dial, and laptops.
fn documents(port: u16) -> String {
    let laptop = |name: &str| {
        format!(
            "{{kind: Node, name: {name}, links: router, drain: 2m, apps: [{{bind: \"0.0.0.0:8080\"}}, {{bind: \"[::]:53\", protocol: udp, authority: \"APP:1\"}}, {{bind: \"127.0.0.1:8081\", protocol: socks5}}]}}\n---\n"
        )
    };
    format!(
        "kind: Overlay\nname: test\nnodes: {{admin: \"127.0.0.1:9900\"}}\n---\n\
         {{kind: Node, name: router, role: standalone, address: \"router.edge.svc:443\", bind: \"0.0.0.0:{port}\", http3: true, drain: 1500ms}}\n---\n\
         {{kind: Node, name: server, links: router}}\n---\n{}{}\
         {{kind: Node, name: gateway, links: router, listeners: [{{name: device, protocol: tun, device: hermes0, address: 10.20.0.2/32, capture: 10.30.0.0/16}}]}}\n---\n\
         {{kind: User, name: ann, nodes: [one.example, two.example]}}\n---\n\
         {{kind: Service, name: APP, authority: [APP, \"APP:1\"], at: {{node: server, http: \"127.0.0.1:1\"}}, for: {{users: ann}}}}\n",
        laptop("one.example"),
        laptop("two.example")
    )
}

async fn fixture(port: u16) -> ControllerFixture {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(port));
    fixture
}

fn placed(fixture: &ControllerFixture, args: &[&str]) -> Manifests {
    Manifests::read(fixture.hermes_ok(&[&["node", "deploy"], args].concat(), ""))
}

#[tokio::test]
async fn a_node_is_a_deployment() {
    let fixture = fixture(9443).await;
    let manifests = placed(&fixture, &["router", "--on", "kubernetes:edge", "--image", "registry.example/hermes:7"]);
    let kinds = ["ConfigMap", "Deployment", "PersistentVolumeClaim", "PodDisruptionBudget", "Service"];
    assert_eq!(manifests.kinds(), kinds, "and no token");
    manifests.fit_together(Some("edge"), "router");
    manifests.is_modest(false);
    // As the overlay's documents have it: others dial port 443, over HTTP/3 too.
    let of = |transport: &str| (443, transport.to_owned());
    assert_eq!(manifests.service(), [of("TCP"), of("UDP")]);
    let container = manifests.container();
    assert_eq!(container.image.as_deref(), Some("registry.example/hermes:7"));
    assert!(container.ports.unwrap().iter().all(|port| port.container_port == 9443));
    // 1.5 s, and ten beyond that.
    assert_eq!(manifests.grace(), 12);
    let service = manifests.find::<Service>("Service").unwrap().spec.unwrap();
    assert_eq!((service.publish_not_ready_addresses, service.type_), (Some(true), None));
    let budget = manifests.find::<PodDisruptionBudget>("PodDisruptionBudget").unwrap().spec.unwrap();
    assert_eq!(budget.max_unavailable, Some(IntOrString::Int(0)), "not while it takes sessions");
    assert_eq!(budget.unhealthy_pod_eviction_policy.as_deref(), Some("AlwaysAllow"), "but once it is drained");
    let map = manifests.find::<ConfigMap>("ConfigMap").unwrap().data.unwrap();
    assert_eq!(map["HERMES_CONTROLLER"], format!("https://{}", fixture.socket(9400)));
    // A Secret that is made as the first lines say is the one that is read.
    let secret = manifests.pod().volumes.unwrap().into_iter().find_map(|volume| volume.secret).unwrap();
    let (name, optional) = (secret.secret_name.unwrap(), secret.optional);
    let how = format!("kubectl --namespace edge create secret generic {name} --from-file=router=/dev/stdin\n");
    assert!(optional == Some(true) && manifests.text.contains(&how), "{}", manifests.text);

    // Who nobody dials has no Service, and each document has its own drain.
    let server = placed(&fixture, &["server", "--on", "kubernetes", "--storage", "20Gi"]);
    server.fit_together(None, "server");
    assert!(!server.kinds().contains(&"Service") && server.grace() == 20, "{}", server.text);
    let claim = server.find::<PersistentVolumeClaim>("PersistentVolumeClaim").unwrap().spec.unwrap();
    assert_eq!(claim.resources.unwrap().requests.unwrap()["storage"].0, "20Gi");
    // Only who makes devices may.
    let gateway = placed(&fixture, &["gateway", "--on", "kubernetes", "--host-network"]);
    gateway.fit_together(None, "gateway");
    gateway.is_modest(true);
    assert_eq!(gateway.pod().host_network, Some(true));
    // Several at once are as many Deployments, and another controller is another configuration.
    let both = fixture.hermes_ok(&["node", "deploy", "server", "router", "--on", "kubernetes"], "");
    assert_eq!(both.matches("\nkind: Deployment\n").count(), 2);
    let digest = |manifests: &Manifests| manifests.template().1.metadata.unwrap().annotations.unwrap();
    let elsewhere = placed(&fixture, &["server", "--on", "kubernetes", "--controller", "https://elsewhere:9400"]);
    assert_ne!(digest(&server), digest(&elsewhere));
}

#[tokio::test]
async fn machines_are_nodes_of_one_daemon_set() {
    let fixture = fixture(9443).await;
    let nodes = ["one.example", "two.example"];
    let set = ["--on", "kubernetes:edge", "--daemon-set", "laptops", "--with-token"];
    let manifests = placed(&fixture, &[&nodes[..], &set].concat());
    assert_eq!(manifests.kinds(), ["ConfigMap", "DaemonSet", "Secret", "Service"], "eviction passes it by");
    manifests.fit_together(Some("edge"), "laptops");
    manifests.is_modest(false);
    assert_eq!(manifests.grace(), 130);
    // What is at a loopback address is its own container's alone.
    assert_eq!(manifests.service(), [(8080, "TCP".to_owned()), (53, "UDP".to_owned())]);
    let service = manifests.find::<Service>("Service").unwrap().spec.unwrap();
    assert_eq!(service.internal_traffic_policy.as_deref(), Some("Local"), "a program is served by its own machine");
    let pod = manifests.pod();
    assert_eq!(pod.security_context.unwrap().sysctls.unwrap()[0].value, "0", "it listens at port 53");
    // Each machine finds the token that is its own, and there is none on other machines.
    let affinity = pod.affinity.unwrap().node_affinity.unwrap();
    let terms = affinity.required_during_scheduling_ignored_during_execution.unwrap().node_selector_terms;
    let machines = terms.into_iter().flat_map(|term| term.match_fields.unwrap());
    let machines: Vec<_> = machines.flat_map(|field| field.values.unwrap()).collect();
    assert_eq!(machines, nodes);
    let tokens = manifests.find::<Secret>("Secret").unwrap().string_data.unwrap();
    assert!(tokens.keys().eq(&nodes) && tokens[nodes[0]] != tokens[nodes[1]], "{tokens:?}");
    let container = manifests.container();
    let machine = container.env.unwrap().into_iter().find_map(|env| env.value_from?.field_ref).unwrap();
    assert_eq!(machine.field_path, "spec.nodeName");
    let args = container.args.unwrap();
    let mounts = container.volume_mounts.unwrap();
    let mounted = &mounts.iter().find(|mount| mount.name == "tokens").unwrap().mount_path;
    assert!(args.contains(&format!("{mounted}/$(HERMES_MACHINE)")), "{args:?}");
    let chown = pod.init_containers.unwrap()[0].command.clone().unwrap();
    assert_eq!(chown[1], format!("{0}:{0}", manifests.pod().security_context.unwrap().run_as_user.unwrap()));
}

#[tokio::test]
async fn documents_that_cannot_run_in_kubernetes_are_rejected() {
    let fixture = fixture(9443).await;
    fixture.hermes_ok(
        &["apply", "-f", "-", "--wait", "0s"],
        "{kind: Node, name: Big, links: router}\n---\n\
         {kind: Node, name: file, links: router, access-log: /var/log/records}\n---\n\
         {kind: Node, name: inner, links: router, apps: {bind: \"127.0.0.1:8080\", user: ann}}\n---\n\
         {kind: Node, name: fixed, links: router, address: \"fixed:1443\", bind: \"192.0.2.1:1443\"}\n---\n\
         {kind: User, name: ann, nodes: [one.example, two.example, inner]}\n",
    );
    for (args, remedy) in [
        (&["Big", "--on", "kubernetes"][..], "small letters"),
        (&["one.example", "--on", "kubernetes"], "small letters"),
        (&["file", "--on", "kubernetes"], "access-log: stdout"),
        (&["inner", "--on", "kubernetes"], "bind 0.0.0.0, or deploy with --host-network"),
        (&["fixed", "--on", "kubernetes"], "bind 0.0.0.0, or deploy with --host-network"),
        (&["router", "--on", "kubernetes", "--daemon-set", "all"], "deploy it without --daemon-set"),
        (&["one.example", "inner", "--on", "kubernetes", "--host-network", "--daemon-set", "all"], "different ports"),
        (&["server", "--on", "kubernetes", "--daemon-set", "hermes-controller"], "choose another one"),
    ] {
        let output = fixture.refused(&[&["node", "deploy"], args].concat(), "");
        assert!(output.contains(remedy) && output.lines().count() < 4, "{args:?}: {output}");
    }
    placed(&fixture, &["inner", "--on", "kubernetes", "--host-network"]).fit_together(None, "inner");
    // Without it, its probes would ask nobody.
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], "{kind: Overlay, name: test}\n");
    let output = fixture.refused(&["node", "deploy", "server", "--on", "kubernetes"], "");
    assert!(output.contains("has no `admin`") && output.contains("127.0.0.1:9900"), "{output}");
    let output = fixture.hermes(&["node", "deploy", "server", "--on", "kubernetes:Edge"], "");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// Types of Kubernetes read over what they do not know: the comparison here does not.
#[tokio::test]
async fn a_misspelt_field_would_be_seen() {
    let fixture = fixture(9443).await;
    let manifests = placed(&fixture, &["router", "--on", "kubernetes"]);
    let mut deployment = manifests.objects["Deployment"].clone();
    assert!(typed::<Deployment>(&deployment).is_ok());
    let spec = deployment["spec"]["template"]["spec"].as_object_mut().unwrap();
    let grace = spec.remove("terminationGracePeriodSeconds").unwrap();
    spec.insert("terminationGraceSeconds".to_owned(), grace);
    assert!(typed::<Deployment>(&deployment).is_err());
}

#[test]
fn a_controller_is_a_deployment() {
    let print = |args: &[&str]| {
        let output = Command::new(hermes()).args(["install", "--print", "kubernetes"]).args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, printed) =
        print(&["controller", "--namespace", "edge", "--listen", "[::]:9401", "--load-balancer"]);
    assert_eq!(code, Some(0), "{printed}");
    let manifests = Manifests::read(text);
    assert_eq!(manifests.kinds(), ["ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"]);
    manifests.fit_together(Some("edge"), "hermes-controller");
    manifests.is_modest(false);
    assert_eq!(manifests.service(), [(9401, "TCP".to_owned())]);
    assert_eq!(manifests.find::<Service>("Service").unwrap().spec.unwrap().type_.as_deref(), Some("LoadBalancer"));
    let container = manifests.container();
    let probe = container.readiness_probe.unwrap().tcp_socket.unwrap();
    assert_eq!(probe.port, IntOrString::Int(9401));
    // Its certificate is for the names that its Service has.
    let args = container.args.unwrap();
    for name in ["hermes-controller.edge.svc", "hermes-controller"] {
        assert!(args.windows(2).any(|pair| pair == ["--name", name]), "{args:?}");
    }
    is_of_this_program(&command(&[container.command.unwrap(), args].concat(), Path::new("/"), &BTreeMap::new()));
    let (code, _, printed) = print(&["--controller", "https://127.0.0.1:9400"]);
    assert!(code == Some(1) && printed.contains("hermes node deploy NAME --on kubernetes"), "{printed}");
}

/// A container as a kubelet runs it, without a container.
struct Kubelet {
    room: PathBuf,
    container: Container,
    variables: BTreeMap<String, String>,
}

impl Kubelet {
    fn new(room: PathBuf, manifests: &Manifests) -> Self {
        let variables = manifests.find::<ConfigMap>("ConfigMap").unwrap().data.unwrap();
        std::fs::create_dir_all(room.join("tokens")).unwrap();
        for (key, token) in manifests.find::<Secret>("Secret").unwrap().string_data.unwrap() {
            std::fs::write(room.join("tokens").join(key), token).unwrap();
        }
        Self { room, container: manifests.container(), variables }
    }

    fn start(&self) -> Running {
        let line = [self.container.command.clone().unwrap(), self.container.args.clone().unwrap()].concat();
        let line = command(&line, &self.room, &self.variables);
        let log = &self.variables["HERMES_LOG"];
        let program = Program::new("pod", &line[0], &self.room).args(&line[1..]);
        program.env("HERMES_LOG", log).start().unwrap()
    }

    fn probe(&self, probe: Option<&Probe>) -> ExitStatus {
        let line = probe.unwrap().exec.as_ref().unwrap().command.clone().unwrap();
        let line = command(&line, &self.room, &self.variables);
        Command::new(&line[0]).args(&line[1..]).output().unwrap().status
    }

    fn is_alive(&self) -> bool {
        self.probe(self.container.liveness_probe.as_ref()).success()
    }

    fn is_ready(&self) -> bool {
        self.probe(self.container.readiness_probe.as_ref()).success()
    }
}

#[tokio::test]
async fn a_pod_is_a_node_and_stays_that_one() {
    // A free port of all addresses, since it is those that a pod binds.
    let port = hermes_testkit::port::reserve("0.0.0.0").port();
    let admin = hermes_testkit::port::reserve("127.0.0.1");
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(
        &["apply", "-f", "-", "--wait", "0s"],
        &documents(port).replace("127.0.0.1:9900", &admin.to_string()),
    );
    let manifests = placed(&fixture, &["router", "--on", "kubernetes", "--with-token"]);
    let kubelet = Kubelet::new(fixture.directory.path().join("pod"), &manifests);
    assert!(kubelet.is_alive() && !kubelet.is_ready(), "it has nothing to serve yet, and is well");
    let pod = kubelet.start();
    until("it is ready", || kubelet.is_ready()).await;
    let state = || {
        fixture.hermes_ok(&["node", "list"], "").lines().find(|line| line.starts_with("router ")).unwrap().to_owned()
    };
    until("it is under control", || state().ends_with(" running")).await;
    assert!(std::net::TcpStream::connect((std::net::Ipv4Addr::LOCALHOST, port)).is_ok());

    // What is drained is alive and not ready: so it may be evicted.
    fixture.hermes_ok(&["node", "drain", "router"], "");
    until("it is not ready", || !kubelet.is_ready()).await;
    assert!(kubelet.is_alive());
    let output = fixture.refused(&["node", "deploy", "router", "--on", "kubernetes"], "");
    assert!(output.contains("hermes node drain router --undo"), "{output}");
    fixture.hermes_ok(&["node", "drain", "router", "--undo"], "");

    // Another pod with the same volume is the same node, though its token is used up, and gone.
    let stop = |pod: Running| {
        kill(Pid::from_raw(i32::try_from(pod.pid()).unwrap()), Signal::SIGTERM).unwrap();
        let grace = Duration::from_secs(manifests.grace().try_into().unwrap());
        assert!(pod.end(grace).unwrap().success(), "it ends by itself");
    };
    stop(pod);
    until("it is away", || state().ends_with(" unreachable")).await;
    let key = || std::fs::read(kubelet.room.join("home/state/node.key")).unwrap();
    let before = key();
    std::fs::remove_dir_all(kubelet.room.join("tokens")).unwrap();
    let pod = kubelet.start();
    until("it is there again", || state().ends_with(" running") && kubelet.is_ready()).await;
    assert_eq!(key(), before);
    stop(pod);
    let output = fixture.hermes_ok(&["node", "undeploy", "router", "--on", "kubernetes:edge", "--now"], "");
    assert!(
        output.starts_with("kubectl --namespace edge delete deployment,") && output.contains("router-tokens"),
        "{output}"
    );
}
