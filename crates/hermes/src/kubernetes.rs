//! Renders Kubernetes manifests for a node, for a DaemonSet of nodes, and for a controller.
//!
//! In: the workload, and for a node its document. Out: YAML for `kubectl apply -f -`. This code never contacts a
//! cluster, and prints a token only if it is given one.

mod pod_requirements;

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use hermes_controller::digest::sha256;
use hermes_controller::document::Name;
use hermes_model::document::Document;
use hermes_model::snapshot::{HostPort, Role};
use serde_json::{Value, json};

use pod_requirements::PodRequirements;

/// The time that a process has to end after its `drain`, before Kubernetes kills it.
pub(crate) const GRACE: Duration = Duration::from_secs(10);
/// The path of the program in the image, and of the persistent directory: the Containerfile creates both.
const PROGRAM: &str = "/usr/local/bin/hermes";
const HOME: &str = "/var/lib/hermes";
/// The directory of enrolment tokens in a container: one file a node, with the node's name.
const TOKENS: &str = "/run/hermes/tokens";
/// The user ID in the image, which no other account has.
const USER: u32 = 65_532;
/// The name of the controller's objects.
const CONTROLLER: &str = "hermes-controller";

/// The objects of a cluster that run it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(crate) struct Cluster {
    /// Use this image, which `make image` builds
    #[arg(long, value_name = "IMAGE", default_value = concat!("hermes:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// Request a persistent volume of this size
    #[arg(long, value_name = "QUANTITY", default_value = "1Gi", value_parser = quantity)]
    storage: String,
    /// Make the Service reachable from outside the cluster
    #[arg(long)]
    load_balancer: bool,
}

/// Options of the Kubernetes manifests.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(crate) struct ManifestOptions {
    #[command(flatten)]
    cluster: Cluster,
    /// Deploy these dependent nodes as one DaemonSet of this name. Each machine runs the node that has the machine's name
    #[arg(long, value_name = "NAME")]
    daemon_set: Option<Name>,
    /// Use the network of the machine, so that programs of the machine reach the node at a loopback address
    #[arg(long)]
    host_network: bool,
    /// Print a Secret with tokens, too. A reader of the Secret can enrol as these nodes, once
    #[arg(long)]
    pub(crate) with_token: bool,
}

/// A node that runs in a cluster.
pub(crate) struct Node {
    /// The node's name.
    pub(crate) name: Name,
    /// The node's document.
    pub(crate) document: Document,
    /// The address that other nodes dial.
    pub(crate) address: Option<HostPort>,
    /// An enrolment token that the manifest includes, if any.
    pub(crate) token: Option<String>,
}

/// Parses a byte quantity in the notation of Kubernetes.
fn quantity(text: &str) -> Result<String, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let is_one = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_unit = ["", "Ki", "Mi", "Gi", "Ti", "k", "M", "G", "T"].contains(&&text[digits.len()..]);
    if is_one && is_unit { Ok(text.to_owned()) } else { Err("write it as 512Mi or 10Gi".to_owned()) }
}

/// Manifests for nodes under a controller: one Deployment each, or one DaemonSet.
///
/// # Errors
/// A node's document cannot run in a pod; the error says what to change.
pub(crate) fn nodes(
    nodes: &[Node],
    controller: &str,
    namespace: Option<&str>,
    placing: &ManifestOptions,
) -> anyhow::Result<String> {
    let mut text = String::new();
    match &placing.daemon_set {
        Some(name) => text += &Workload::nodes(name, nodes, namespace, placing)?.node(controller),
        None => {
            for node in nodes {
                let one = std::slice::from_ref(node);
                text += &Workload::nodes(&node.name, one, namespace, placing)?.node(controller);
            }
        }
    }
    Ok(text)
}

/// The commands that delete a node's Deployment and its other objects.
pub(crate) fn deletion(node: &Name, namespace: Option<&str>) -> String {
    let namespace = namespace.map(|name| format!(" --namespace {name}")).unwrap_or_default();
    format!(
        "kubectl{namespace} delete deployment,service,configmap,poddisruptionbudget,persistentvolumeclaim \
         --selector app.kubernetes.io/name=hermes,app.kubernetes.io/instance={node},app.kubernetes.io/component=node\n\
         kubectl{namespace} delete secret --ignore-not-found {node}-tokens\n"
    )
}

/// Manifests for a controller with its store in a volume.
pub(crate) fn controller(port: u16, namespace: Option<&str>, cluster: &Cluster) -> String {
    let shape = PodRequirements::listens_at(port);
    let one = Workload {
        name: CONTROLLER,
        namespace,
        component: "controller",
        cluster,
        shape,
        nodes: &[],
        is_on_machines: false,
    };
    one.controller(port)
}

/// The Kubernetes objects of one Deployment or DaemonSet.
struct Workload<'a> {
    name: &'a str,
    namespace: Option<&'a str>,
    component: &'static str,
    cluster: &'a Cluster,
    shape: PodRequirements,
    nodes: &'a [Node],
    /// A DaemonSet: one pod on each machine that has the name of one of the nodes.
    is_on_machines: bool,
}

impl<'a> Workload<'a> {
    fn nodes(
        name: &'a Name,
        nodes: &'a [Node],
        namespace: Option<&'a str>,
        placing: &'a ManifestOptions,
    ) -> anyhow::Result<Self> {
        let name = name.as_str();
        ensure!(name != CONTROLLER, "{name} is the name of the controller there; choose another one");
        ensure!(
            is_label(name),
            "{name}: objects of Kubernetes have names of small letters, digits and hyphens, the first a letter"
        );
        let is_set = placing.daemon_set.is_some();
        for node in nodes.iter().filter(|_| is_set) {
            let node_name = &node.name;
            ensure!(
                node.document.role == Role::Dependent && node.address.is_none(),
                "node {node_name}: other nodes dial it, and a Service cannot select one pod of a DaemonSet; deploy it without --daemon-set"
            );
        }
        let shape = PodRequirements::of(nodes, placing.host_network)?;
        let cluster = &placing.cluster;
        Ok(Self { name, namespace, component: "node", cluster, shape, nodes, is_on_machines: is_set })
    }

    /// All objects of a node.
    fn node(&self, controller: &str) -> String {
        let tokens = self.called("tokens");
        let config = json!({ "HERMES_CONTROLLER": controller, "HERMES_LOG": "info" });
        let mut text = format!(
            "# Hermes: {}. kubectl apply -f THIS\n# It enrols with a token, a key of the Secret {tokens} with the node's name, \
             which is used up by that:\n",
            self.whom()
        );
        for node in self.nodes.iter().filter(|node| node.token.is_none()) {
            text += &format!(
                "#   hermes token create --node {0} | kubectl{1} create secret generic {tokens} --from-file={0}=/dev/stdin\n",
                node.name,
                self.namespace.map(|namespace| format!(" --namespace {namespace}")).unwrap_or_default(),
            );
        }
        let given: serde_json::Map<_, _> =
            self.nodes.iter().filter_map(|node| Some((node.name.to_string(), node.token.clone()?.into()))).collect();
        if !given.is_empty() {
            text += &self.object("v1", "Secret", &tokens, json!({ "type": "Opaque", "stringData": given }));
        }
        text += &self.object("v1", "ConfigMap", self.name, json!({ "data": config }));
        let state = format!("{HOME}/state");
        let node = if self.is_on_machines { "$(HERMES_MACHINE)" } else { self.nodes[0].name.as_str() };
        let token = format!("{TOKENS}/{node}");
        let args = ["proxy", "--controller", "$(HERMES_CONTROLLER)", "--state", &state, "--token-file", &token];
        // A draining node is still live; it is ready only while it accepts sessions.
        let ask = |more: &[&str]| {
            let command = [&[PROGRAM, "health", "--state", &state], more].concat();
            json!({ "exec": { "command": command }, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3 })
        };
        let mut container = self.container(&args, &config);
        container["livenessProbe"] = ask(&["--live"]);
        container["readinessProbe"] = ask(&[]);
        let pod = self.pod(container, &config);
        text += &match self.is_on_machines {
            true => {
                "# Eviction passes a DaemonSet by, so that it has no PodDisruptionBudget.\n".to_owned()
                    + &self.daemon_set(pod)
            }
            false => self.claim() + &self.deployment(pod) + &self.budget(),
        };
        text + &self.service()
    }

    /// All objects of a controller.
    fn controller(&self, port: u16) -> String {
        let listen = format!("0.0.0.0:{port}");
        let data = format!("{HOME}/data");
        let name = self.namespace.map_or_else(|| CONTROLLER.to_owned(), |name| format!("{CONTROLLER}.{name}.svc"));
        let mut args = vec!["controller", "--listen", &listen, "--data", &data, "--name", &name];
        if name != CONTROLLER {
            args.extend(["--name", CONTROLLER]);
        }
        let config = json!({ "HERMES_LOG": "info" });
        let mut container = self.container(&args, &config);
        let ask =
            json!({ "tcpSocket": { "port": port }, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3 });
        container["livenessProbe"] = ask.clone();
        container["readinessProbe"] = ask;
        format!(
            "# Hermes: a controller. kubectl apply -f THIS\n\
             # Nodes go on without it, so that it may be evicted: it has no PodDisruptionBudget. Its volume has the overlay's authority.\n\
             # kubectl exec deployment/{CONTROLLER} -- hermes get --operator {data}/operator.json\n"
        ) + &self.object("v1", "ConfigMap", self.name, json!({ "data": config }))
            + &self.claim()
            + &self.deployment(self.pod(container, &config))
            + &self.service()
    }

    fn whom(&self) -> String {
        let names: Vec<_> = self.nodes.iter().map(|node| node.name.as_str()).collect();
        format!("{} {}", if names.len() == 1 { "node" } else { "nodes" }, names.join(", "))
    }

    /// The name of an object of this workload.
    fn called(&self, what: &str) -> String {
        format!("{}-{what}", self.name)
    }

    /// The labels that select its pods.
    fn selector(&self) -> Value {
        json!({
            "app.kubernetes.io/name": "hermes",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": self.component,
        })
    }

    fn object(&self, version: &str, kind: &str, name: &str, rest: Value) -> String {
        let mut object = rest;
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        object["metadata"] = json!({ "name": name, "labels": self.selector() });
        if let Some(namespace) = self.namespace {
            object["metadata"]["namespace"] = namespace.into();
        }
        // Each JSON value can be written as YAML.
        format!("---\n{}", serde_saphyr::to_string(&object).unwrap_or_default())
    }

    fn container(&self, args: &[&str], config: &Value) -> Value {
        let from_map = |key: &String| json!({ "name": key, "valueFrom": { "configMapKeyRef": { "name": self.name, "key": key } } });
        let mut env: Vec<_> = config.as_object().into_iter().flat_map(serde_json::Map::keys).map(from_map).collect();
        if self.is_on_machines {
            env.push(
                json!({ "name": "HERMES_MACHINE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }),
            );
        }
        let capabilities = match self.shape.has_device {
            true => json!({ "drop": ["ALL"], "add": ["NET_ADMIN"] }),
            false => json!({ "drop": ["ALL"] }),
        };
        json!({
            "name": "hermes",
            "image": self.cluster.image,
            "command": [PROGRAM],
            "args": args,
            "env": env,
            "ports": self.shape.container_ports(),
            "volumeMounts": self.mounts(),
            "resources": {
                "requests": { "cpu": "100m", "memory": "64Mi" },
                // No CPU limit: a throttled node would delay all its sessions.
                "limits": { "memory": "1Gi" },
            },
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": capabilities,
            },
        })
    }

    fn mounts(&self) -> Vec<Value> {
        let mut mounts = vec![json!({ "name": "home", "mountPath": HOME })];
        if self.nodes.is_empty() {
            // SQLite writes large sorts to temporary files.
            mounts.push(json!({ "name": "scratch", "mountPath": "/tmp" }));
        } else {
            mounts.push(json!({ "name": "tokens", "mountPath": TOKENS, "readOnly": true }));
        }
        if self.shape.has_device {
            mounts.push(json!({ "name": "tun", "mountPath": "/dev/net/tun" }));
        }
        mounts
    }

    fn volumes(&self) -> Vec<Value> {
        let home = match self.is_on_machines {
            true => json!({
                "name": "home", "hostPath": { "path": format!("{HOME}/{}", self.name), "type": "DirectoryOrCreate" }
            }),
            false => json!({ "name": "home", "persistentVolumeClaim": { "claimName": self.called("home") } }),
        };
        let mut volumes = vec![home];
        if self.nodes.is_empty() {
            volumes.push(json!({ "name": "scratch", "emptyDir": { "sizeLimit": "256Mi" } }));
        } else {
            // An enrolled node needs no token any more, so the Secret is optional.
            let secret = json!({ "secretName": self.called("tokens"), "optional": true, "defaultMode": 0o440 });
            volumes.push(json!({ "name": "tokens", "secret": secret }));
        }
        if self.shape.has_device {
            volumes.push(json!({ "name": "tun", "hostPath": { "path": "/dev/net/tun", "type": "CharDevice" } }));
        }
        volumes
    }

    /// The pod template.
    fn pod(&self, container: Value, config: &Value) -> Value {
        // Kubernetes grants an added capability to root only; another user would not receive it.
        let user = if self.shape.has_device { 0 } else { USER };
        let mut security = json!({
            "runAsNonRoot": user != 0,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": { "type": "RuntimeDefault" },
        });
        if self.shape.has_low_port && !self.shape.host_network {
            security["sysctls"] = json!([{ "name": "net.ipv4.ip_unprivileged_port_start", "value": "0" }]);
        }
        let mut spec = json!({
            "automountServiceAccountToken": false,
            // Variables named after Services could be mistaken for the program's own.
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": self.shape.grace.as_secs(),
            "securityContext": security,
            "containers": [container],
            "volumes": self.volumes(),
        });
        if self.shape.host_network {
            spec["hostNetwork"] = true.into();
            spec["dnsPolicy"] = "ClusterFirstWithHostNet".into();
        }
        if self.is_on_machines {
            self.on_machines(&mut spec, user);
        }
        // The ConfigMap is read at start, so a changed one must replace the pod.
        let digest: String = sha256(config.to_string().as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        json!({ "metadata": { "labels": self.selector(), "annotations": { "checksum/config": digest } }, "spec": spec })
    }

    /// Restricts the pods to the machines that have the names of these nodes.
    fn on_machines(&self, spec: &mut Value, user: u32) {
        let term = |node: &Node| json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [node.name] }] });
        let terms: Vec<_> = self.nodes.iter().map(term).collect();
        spec["affinity"] = json!({
            "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } }
        });
        if user != 0 {
            // A hostPath directory belongs to root; `fsGroup` does not apply to it.
            spec["initContainers"] = json!([{
                "name": "home",
                "image": self.cluster.image,
                "command": ["chown", format!("{user}:{user}"), HOME],
                "volumeMounts": [{ "name": "home", "mountPath": HOME }],
                "resources": { "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
                "securityContext": {
                    "runAsNonRoot": false,
                    "runAsUser": 0,
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": { "drop": ["ALL"], "add": ["CHOWN"] },
                },
            }]);
        }
    }

    fn deployment(&self, pod: Value) -> String {
        let spec = json!({
            "replicas": 1,
            // Two pods must never share an identity or a store.
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": self.selector() },
            "template": pod,
        });
        self.object("apps/v1", "Deployment", self.name, json!({ "spec": spec }))
    }

    fn daemon_set(&self, pod: Value) -> String {
        let spec = json!({ "selector": { "matchLabels": self.selector() }, "template": pod });
        self.object("apps/v1", "DaemonSet", self.name, json!({ "spec": spec }))
    }

    fn claim(&self) -> String {
        let spec = json!({
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": self.cluster.storage } },
        });
        let object = self.object("v1", "PersistentVolumeClaim", &self.called("home"), json!({ "spec": spec }));
        let what = if self.nodes.is_empty() { "All of the overlay" } else { "Its key: a restart is the same node" };
        object.replacen("---\n", &format!("---\n# {what}.\n"), 1)
    }

    fn budget(&self) -> String {
        let spec = json!({
            "maxUnavailable": 0,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": { "matchLabels": self.selector() },
        });
        let object = self.object("policy/v1", "PodDisruptionBudget", self.name, json!({ "spec": spec }));
        let why = format!(
            "---\n# It is evicted once it is drained, since it is not ready then: `hermes node drain {}`.\n",
            self.nodes[0].name
        );
        object.replacen("---\n", &why, 1)
    }

    fn service(&self) -> String {
        let ports = self.shape.service_ports();
        if ports.is_empty() {
            return "# Nobody connects to it, so that it has no Service.\n".to_owned();
        }
        let mut spec = json!({ "selector": self.selector(), "ports": ports });
        if self.cluster.load_balancer {
            spec["type"] = "LoadBalancer".into();
        }
        match self.is_on_machines {
            // Programs use the node on their own machine.
            true => spec["internalTrafficPolicy"] = "Local".into(),
            // The overlay decides which node receives sessions: a draining one is dialled if there is no other path.
            false => spec["publishNotReadyAddresses"] = true.into(),
        }
        self.object("v1", "Service", self.name, json!({ "spec": spec }))
    }
}

/// True if the name is valid for Kubernetes objects of all kinds.
pub(crate) fn is_label(name: &str) -> bool {
    name.len() <= 63
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && !name.ends_with('-')
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}
