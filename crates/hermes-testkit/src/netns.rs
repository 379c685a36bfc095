//! Network namespaces: a private loopback, private sysctls, and links between two of them.
//!
//! In: names and addresses. Out: namespaces that are removed when dropped, with everything in them. Uses iproute2 and
//! needs root; without it [`Namespace::new`] returns an error. Never changes the caller's namespace.

use std::thread::JoinHandle;
use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::Path,
    pin::Pin,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    task::{Context, Poll},
};

use nix::sched::{CloneFlags, setns};

use crate::{Error, Result};

/// Congestion control of every connection in a namespace, independent of the machine's default. Comparisons need a
/// common one, and the pacing of bbr would be measured with the programs. Set by route, since only the initial
/// namespace may use a default that is not in `tcp_allowed_congestion_control`.
pub const CONGESTION_CONTROL: &str = "cubic";

/// Prefix of all namespaces; the creator's pid follows, so that leftovers can be recognised.
const PREFIX: &str = "hermes-lab";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A temporary network namespace, with its loopback up.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace and brings its loopback up.
    ///
    /// # Errors
    /// Missing root privileges or iproute2.
    pub fn new() -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            let remedy = "run as root (namespaces and taps need CAP_NET_ADMIN)".to_owned();
            return Err(Error::Missing { program: "root".into(), remedy });
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}-{}-{number}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.ip(&["link", "set", "lo", "up"])?;
        namespace.control_congestion("lo", Ipv4Addr::LOCALHOST)?;
        Ok(namespace)
    }

    /// Removes namespaces whose creator has died, left by killed runs.
    pub fn sweep() {
        let Ok(entries) = fs::read_dir("/run/netns") else {
            return;
        };
        for name in entries.flatten().filter_map(|e| e.file_name().into_string().ok()) {
            let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').nth(1));
            if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                // Best effort: a namespace that cannot be removed does no harm.
                let _ = ip(&["netns", "del", &name]);
            }
        }
    }

    /// The name, for `ip netns exec`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Moves the calling thread into this namespace permanently: its later sockets and programs belong to it. Only for
    /// threads that were created for it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn enter(&self) -> Result<()> {
        Ok(setns(file_of(&self.name)?, CloneFlags::CLONE_NEWNET)?)
    }

    /// Starts a thread in this namespace. Its result is an error if the kernel refuses the namespace.
    ///
    /// # Errors
    /// The namespace was removed.
    pub fn spawn_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<Result<T>>> {
        let file = file_of(&self.name)?;
        Ok(std::thread::spawn(move || {
            setns(file, CloneFlags::CLONE_NEWNET)?;
            Ok(work())
        }))
    }

    /// Runs a future in this namespace: sockets and programs that it creates belong to the namespace. Spawned tasks do
    /// not.
    ///
    /// # Errors
    /// The kernel refuses.
    pub async fn run<F: Future>(&self, future: F) -> Result<F::Output> {
        within(&self.name, future).await
    }

    /// Runs a program in this namespace to its end, and returns its standard output.
    ///
    /// # Errors
    /// The program cannot be run or fails; the error contains its output.
    pub async fn output(&self, words: &[&str]) -> Result<String> {
        let line = words.join(" ");
        let mut command = tokio::process::Command::new(words.first().copied().unwrap_or_default());
        command.args(words.get(1..).unwrap_or_default()).stdin(Stdio::null()).kill_on_drop(true);
        // The async block matters: `output` alone would start the program outside the namespace.
        let output = self.run(async { command.output().await }).await?;
        let output = output.map_err(Error::io(format!("running `{line}`")))?;
        let [text, complained] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        if output.status.success() {
            return Ok(text);
        }
        Err(Error::Command { command: line, output: format!("{}{}", text.trim(), complained.trim()) })
    }

    /// Runs `ip ARGS` on this namespace.
    ///
    /// # Errors
    /// The command `ip` fails; the error contains its output.
    pub fn ip(&self, args: &[&str]) -> Result<()> {
        ip(&[&["-n", self.name.as_str()], args].concat())
    }

    /// Sets a sysctl that belongs to a network namespace, such as `net/ipv4/ip_local_port_range`.
    ///
    /// # Errors
    /// The kernel does not know the name or rejects the value.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let script = format!("echo '{value}' > /proc/sys/{name}");
        run(Command::new("ip").args(["netns", "exec", &self.name, "sh", "-c", &script]))
    }

    /// Makes it a NAT router that hides the sources of `inside` behind its own address, as home routers do: nobody
    /// outside can reach a host inside, except in reply.
    ///
    /// # Errors
    /// nftables is missing, or the kernel refuses.
    pub fn masquerade(&self, inside: &str) -> Result<()> {
        self.sysctl("net/ipv4/ip_forward", "1")?;
        let rules = format!(
            "add table ip nat; add chain ip nat post {{ type nat hook postrouting priority srcnat; }}; \
             add rule ip nat post ip saddr {inside} masquerade"
        );
        self.nft(&rules)
    }

    /// Adds rules of nftables.
    ///
    /// # Errors
    /// nftables is missing, or the kernel refuses.
    pub fn nft(&self, rules: &str) -> Result<()> {
        run(Command::new("ip").args(["netns", "exec", &self.name, "nft", rules]))
    }

    /// Drops packets of unknown connections without a reset, as many firewalls do.
    ///
    /// # Errors
    /// nftables is missing, or the kernel refuses.
    pub fn send_no_resets(&self) -> Result<()> {
        let rules = "add table ip mute; add chain ip mute out { type filter hook output priority 0; }; \
                     add rule ip mute out tcp flags & rst == rst drop";
        self.nft(rules)
    }

    /// Joins two namespaces with a veth pair, an address of `/24` at each end. Returns the names of its devices.
    ///
    /// # Errors
    /// The command `ip` fails.
    pub fn join(&self, here: Ipv4Addr, other: &Self, there: Ipv4Addr) -> Result<[String; 2]> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (a, b) = (format!("hv{number}a"), format!("hv{number}b"));
        self.ip(&["link", "add", &a, "type", "veth", "peer", "name", &b, "netns", &other.name])?;
        self.address(&a, here)?;
        other.address(&b, there)?;
        Ok([a, b])
    }

    /// Adds an address of `/24` to `device` and brings it up.
    ///
    /// # Errors
    /// The command `ip` fails.
    pub fn address(&self, device: &str, address: Ipv4Addr) -> Result<()> {
        self.ip(&["addr", "add", &format!("{address}/24"), "dev", device])?;
        self.ip(&["link", "set", device, "up"])?;
        self.control_congestion(device, address)?;
        let network = Ipv4Addr::from_bits(address.to_bits() & !0xff);
        self.route(&[&format!("{network}/24"), "dev", device, "scope", "link"], address)
    }

    /// Sets the congestion control of connections to the namespace's own `address`.
    fn control_congestion(&self, device: &str, address: Ipv4Addr) -> Result<()> {
        let destination = address.to_string();
        self.route(&["local", &destination, "dev", device, "table", "local", "scope", "host"], address)
    }

    fn route(&self, route: &[&str], source: Ipv4Addr) -> Result<()> {
        let source = source.to_string();
        let rest = ["proto", "kernel", "src", &source, "congctl", CONGESTION_CONTROL];
        self.ip(&[&["route", "replace"], route, &rest].concat())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The owners have ended the processes inside; the kernel frees the rest with the last of them.
        let _ = ip(&["netns", "del", &self.name]);
    }
}

/// Runs a future in the namespace of this name: see [`Namespace::run`].
pub(crate) async fn within<F: Future>(name: &str, future: F) -> Result<F::Output> {
    let own = File::open("/proc/thread-self/ns/net").map_err(Error::io("opening the namespace of this thread"))?;
    Inside { there: file_of(name)?, own, future: Box::pin(future) }.await
}

/// Runs a blocking function in the namespace of this name (`None`: the current one), and returns to the current one.
/// Sockets created there stay there.
pub(crate) fn inside<T>(name: Option<&str>, make: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(name) = name else { return make() };
    let own = File::open("/proc/thread-self/ns/net").map_err(Error::io("opening the namespace of this thread"))?;
    setns(file_of(name)?, CloneFlags::CLONE_NEWNET)?;
    let made = make();
    setns(own, CloneFlags::CLONE_NEWNET)?;
    made
}

fn file_of(name: &str) -> Result<File> {
    let path = Path::new("/run/netns").join(name);
    File::open(&path).map_err(Error::io(format!("opening {}", path.display())))
}

/// Enters a namespace for each poll, and leaves it afterwards: other tasks of the thread are elsewhere.
struct Inside<F> {
    there: File,
    own: File,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for Inside<F> {
    type Output = Result<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        setns(&self.there, CloneFlags::CLONE_NEWNET)?;
        let polled = self.future.as_mut().poll(cx);
        setns(&self.own, CloneFlags::CLONE_NEWNET)?;
        polled.map(Ok)
    }
}

/// Runs `ip ARGS` in the namespace of the caller.
pub(crate) fn ip(args: &[&str]) -> Result<()> {
    run(Command::new("ip").args(args))
}

fn run(command: &mut Command) -> Result<()> {
    let line = format!("{command:?}").replace('"', "");
    let output = command.stdin(Stdio::null()).output().map_err(Error::io(format!("running `{line}`")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Command { command: line, output: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_namespace_is_created_and_removed() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: namespaces need root");
            return;
        }
        let namespace = Namespace::new().unwrap();
        let path = Path::new("/run/netns").join(namespace.name());
        assert!(path.exists());
        namespace.sysctl("net/ipv4/tcp_fin_timeout", "30").unwrap();
        assert!(namespace.sysctl("net/ipv4/no_such_thing", "1").is_err());
        assert_eq!(congestion_control(&namespace), CONGESTION_CONTROL);
        drop(namespace);
        assert!(!path.exists());
    }

    /// The congestion control of an accepted connection over the loopback inside.
    fn congestion_control(namespace: &Namespace) -> String {
        let script = "import socket as s\nl=s.create_server(('127.0.0.1',0))\n\
                      c=s.create_connection(l.getsockname())\na,_=l.accept()\n\
                      print(a.getsockopt(s.IPPROTO_TCP,s.TCP_CONGESTION,16).rstrip(b'\\0').decode())";
        let output = Command::new("ip").args(["netns", "exec", namespace.name(), "python3", "-c", script]).output();
        String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
    }
}
