//! Source NAT at a gateway: what leaves a device for the rest of the world carries this machine's address.
//!
//! In: a device, and the addresses behind it. Out: a table of nftables of its own, `hermes-DEVICE`, which ends with its
//! value; what killed processes left behind is removed when the next is made. Forwarding is switched on where it is not,
//! and stays on. Never: a table of somebody else, or a filter: what may be forwarded is decided elsewhere.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitStatus};
use std::sync::LazyLock;
use std::time::Duration;

use ipnet::IpNet;
use nix::errno::Errno;
use tokio::sync::watch;

use super::{Device, TunError};
use crate::handover::{Handed, read_text};

/// What our tables' names begin with.
const PREFIX: &str = "hermes-";
/// Whether this process has made any: who has none listens to no changes of tables.
static MADE: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::Sender::new(false));
/// nft takes milliseconds; but the kernel lets nobody at the tables while somebody changes them.
const PATIENCE: Duration = Duration::from_secs(10);
const LATE: &str = "it did not end in time, and was ended";
const FORWARDING_V4: &str = "net/ipv4/ip_forward";
const FORWARDING_V6: &str = "net/ipv6/conf/all/forwarding";

/// Source NAT of one device. Ends when it is dropped, unless another process has the device.
#[derive(Debug)]
pub struct Masquerade {
    table: String,
    device: Device,
}

/// Lets `addresses` behind `device` reach what this machine reaches, with its address. Replaces what there is for this
/// device of another process. Runs a program a few times and waits for it, which takes some milliseconds, and 10 s each
/// time at most; so does all that changes it, and its end.
///
/// # Errors
/// `TunError`: nft is missing or refuses, somebody has a table of that name, or forwarding cannot be switched on.
pub fn masquerade(device: &Device, addresses: &[IpNet]) -> Result<Masquerade, TunError> {
    remove_stale();
    let table = format!("{PREFIX}{}", device.name());
    if let Some(listing) = listing(&table)?
        && !is_like_ours(&listing, device.name())
    {
        return Err(TunError::TableTaken { table });
    }
    device.exempt()?;
    forward_for(addresses)?;
    device.change_nat(Some(addresses), || set_rules(&table, device, addresses))?;
    MADE.send_replace(true);
    Ok(Masquerade { table, device: device.clone() })
}

/// Waits until this process has made one.
pub(crate) async fn made() {
    // Its other end is a static.
    let _ = MADE.subscribe().wait_for(|made| *made).await;
}

/// The device whose table this would be.
pub(crate) fn device_of(table: &str) -> Option<&str> {
    table.strip_prefix(PREFIX)
}

/// Sets a device's rules anew where somebody has removed some. False where none was missing.
///
/// # Errors
/// As of [`masquerade`].
pub(crate) fn put_back(device: &Device, addresses: &[IpNet]) -> Result<bool, TunError> {
    let table = format!("{PREFIX}{}", device.name());
    let listing = listing(&table)?;
    forward_for(addresses)?;
    let has = |listing: &String| sources_in(listing, device.name()).is_superset(&sources(addresses));
    if listing.as_ref().is_some_and(has) {
        return Ok(false);
    }
    if listing.is_some_and(|listing| is_anothers(&listing, device.name())) {
        return Err(TunError::TableTaken { table });
    }
    set_rules(&table, device, addresses).map(|()| true)
}

fn set_rules(table: &str, device: &Device, addresses: &[IpNet]) -> Result<(), TunError> {
    let script = rules(table, device.name(), addresses);
    let said = nft(&["-f", "-"], &script).map_err(|source| TunError::NoNft { source })?;
    if said.status.success() {
        return Ok(());
    }
    let reason = said.complaint.lines().next().unwrap_or_default().to_owned();
    Err(TunError::Nft { device: device.name().to_owned(), reason })
}

fn forward_for(addresses: &[IpNet]) -> Result<(), TunError> {
    if addresses.iter().any(|address| address.addr().is_ipv4()) {
        forward(FORWARDING_V4)?;
    }
    if addresses.iter().any(|address| address.addr().is_ipv6()) {
        keep_router_advertisements();
        forward(FORWARDING_V6)?;
    }
    Ok(())
}

impl Masquerade {
    /// From now on it is for these addresses. No packet meets neither the old rules nor the new ones.
    ///
    /// # Errors
    /// As of [`masquerade`]; the old rules stay then.
    pub fn replace(&self, addresses: &[IpNet]) -> Result<(), TunError> {
        if listing(&self.table)?.is_some_and(|listing| is_anothers(&listing, self.device.name())) {
            return Err(TunError::TableTaken { table: self.table.clone() });
        }
        forward_for(addresses)?;
        self.device.change_nat(Some(addresses), || set_rules(&self.table, &self.device, addresses))
    }

    /// Sets its rules anew where somebody has removed some. They are for `addresses`.
    ///
    /// # Errors
    /// As of [`masquerade`].
    pub fn restore(&self, addresses: &[IpNet]) -> Result<(), TunError> {
        self.device.change_nat(Some(addresses), || put_back(&self.device, addresses).map(drop))
    }
}

/// Ours was removed, and somebody made one of that name.
fn is_anothers(listing: &str, device: &str) -> bool {
    !is_like_ours(listing, device) && sources_in(listing, device).is_empty()
}

/// Ends source NAT of a device that another process set, and failed.
pub fn sweep(device: &Device) {
    let table = format!("{PREFIX}{}", device.name());
    if is_known(&table, |listing| is_like_ours(listing, device.name())) {
        remove(&table);
    }
}

impl Drop for Masquerade {
    /// Waits for nft, on whatever thread lets go of it last: a process that ends waits for no other one.
    fn drop(&mut self) {
        let is_ours = |listing: &str| !is_anothers(listing, self.device.name());
        // Cannot fail: what stays is told of.
        let _ = self.device.change_nat(None, || {
            if self.device.is_ours() && is_known(&self.table, is_ours) {
                remove(&self.table);
            }
            Ok(())
        });
    }
}

/// Only what comes out of the device: this machine may forward others' packets too. All in one transaction. A table is
/// made before it is deleted, since only what is there can be.
fn rules(table: &str, device: &str, addresses: &[IpNet]) -> String {
    let mut script = format!("table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n");
    script.push_str("  chain postrouting {\n    type nat hook postrouting priority 100; policy accept;\n");
    for address in addresses {
        let family = if address.addr().is_ipv4() { "ip" } else { "ip6" };
        // Writing to a String cannot fail.
        let source = address.trunc();
        let _ = writeln!(script, "    iifname \"{device}\" oifname != \"{device}\" {family} saddr {source} masquerade");
    }
    script.push_str("  }\n}\n");
    script
}

/// What a table has. `None`: there is no such table.
///
/// # Errors
/// `TunError::NoNft`: nft does not say. There may be one.
fn listing(table: &str) -> Result<Option<String>, TunError> {
    let said = nft(&["list", "table", "inet", table], "").map_err(|source| TunError::NoNft { source })?;
    Ok(said.status.success().then_some(said.output))
}

/// Whether there is one, and `is` says so of what it has. What nft does not say is left alone.
fn is_known(table: &str, is: impl FnOnce(&str) -> bool) -> bool {
    listing(table).is_ok_and(|listing| listing.is_some_and(|listing| is(&listing)))
}

/// Whether a table has what [`rules`] writes, and nothing else: its name anybody may choose.
fn is_like_ours(listing: &str, device: &str) -> bool {
    let mut lines = listing.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "}");
    lines.next() == Some(&format!("table inet {PREFIX}{device} {{"))
        && lines.next() == Some("chain postrouting {")
        && lines.next().is_some_and(|line| line.starts_with("type nat hook postrouting priority "))
        && lines.all(|line| is_rule(line, device))
}

fn is_rule(line: &str, device: &str) -> bool {
    line.starts_with(&format!("iifname \"{device}\" oifname != \"{device}\" ip")) && line.ends_with(" masquerade")
}

/// What the rules are for that are as ours.
fn sources_in(listing: &str, device: &str) -> BTreeSet<IpNet> {
    let ours = listing.lines().map(str::trim).filter(|line| is_rule(line, device));
    let sources = ours.filter_map(|line| line.split_once(" saddr ")?.1.split(' ').next());
    // nft leaves out the length of a lone address.
    sources.filter_map(|source| source.parse().ok().or_else(|| Some(source.parse::<IpAddr>().ok()?.into()))).collect()
}

fn sources(addresses: &[IpNet]) -> BTreeSet<IpNet> {
    addresses.iter().map(IpNet::trunc).collect()
}

/// Removes tables of devices that are gone, which a killed process of ours has left. Waits for nft.
pub(crate) fn remove_stale() {
    let Ok(said) = nft(&["list", "tables", "inet"], "") else { return };
    for line in said.output.lines() {
        let table = line.trim().strip_prefix("table inet ").unwrap_or_default();
        let Some(device) = table.strip_prefix(PREFIX) else { continue };
        // Any other error, such as that of no descriptor left, says nothing of it.
        let is_gone = matches!(nix::net::if_::if_nametoindex(device), Err(Errno::ENXIO | Errno::ENODEV));
        if is_gone && is_known(table, |listing| is_like_ours(listing, device)) {
            remove(table);
        }
    }
}

fn remove(table: &str) {
    match nft(&["-f", "-"], &format!("table inet {table}\ndelete table inet {table}\n")) {
        Ok(said) if said.status.success() => {}
        Ok(said) => tracing::warn!(table, reason = %said.complaint, "a table of nftables stays"),
        Err(error) => tracing::warn!(table, %error, "a table of nftables stays"),
    }
}

/// What nft says it is.
///
/// # Errors
/// `TunError::NoNft`.
pub fn nft_version() -> Result<String, TunError> {
    let said = nft(&["--version"], "").map_err(|source| TunError::NoNft { source })?;
    Ok(said.output.trim().to_owned())
}

/// What came of a run of nft.
struct Said {
    status: ExitStatus,
    output: String,
    complaint: String,
}

fn nft(words: &[&str], script: &str) -> io::Result<Said> {
    run("nft", words, script, PATIENCE)
}

/// Runs a program to its end, or ends it where it says nothing for as long as `patience`.
fn run(program: &str, words: &[&str], input: &str, patience: Duration) -> io::Result<Said> {
    // It waits for nobody who reads or writes these; and its output ends with it, if not before.
    let text = |text: &str| Handed::text(String::new(), text).map(|handed| handed.fd);
    let (mut input, complaint) = (fs::File::from(text(input)?), text("")?);
    input.rewind()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(patience))?;
    let mut command = Command::new(program);
    command.args(words).stdin(input).stdout(OwnedFd::from(theirs)).stderr(complaint.try_clone()?);
    let mut child = command.spawn()?;
    // It has the other end.
    drop(command);
    let mut output = Vec::new();
    if let Err(error) = ours.read_to_end(&mut output) {
        // The kernel may hold it yet.
        let _ = child.kill();
        // Where no thread is to be had it stays in the table of processes.
        let _ = std::thread::Builder::new().spawn(move || child.wait());
        let is_late = error.kind() == io::ErrorKind::WouldBlock;
        return Err(if is_late { io::Error::new(io::ErrorKind::TimedOut, LATE) } else { error });
    }
    let status = child.wait()?;
    Ok(Said {
        status,
        output: String::from_utf8_lossy(&output).into_owned(),
        complaint: read_text(&complaint).unwrap_or_default(),
    })
}

/// Does this machine forward packets: of IPv4, of IPv6?
pub fn forwards() -> (bool, bool) {
    (is_on(FORWARDING_V4), is_on(FORWARDING_V6))
}

/// Says whether this machine forwards packets, where [`masquerade`] could make it.
///
/// # Errors
/// `TunError::Forwarding`: it does not, and this process cannot change that.
pub fn check_forwarding() -> Result<String, TunError> {
    let mut found = Vec::new();
    for (family, setting) in [("IPv4", FORWARDING_V4), ("IPv6", FORWARDING_V6)] {
        let path = format!("/proc/sys/{setting}");
        if is_on(setting) {
            found.push(format!("{family} is on"));
        } else if !fs::exists(&path).unwrap_or_default() {
            found.push(format!("there is no {family}"));
        } else if let Err(source) = fs::OpenOptions::new().write(true).open(&path) {
            return Err(TunError::Forwarding { setting: setting.replace('/', "."), source });
        } else {
            found.push(format!("{family} is off, and can be switched on"));
        }
    }
    Ok(found.join("; "))
}

fn is_on(setting: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/{setting}")).is_ok_and(|text| text.trim() != "0")
}

fn forward(setting: &str) -> Result<(), TunError> {
    if is_on(setting) {
        return Ok(());
    }
    let fault = |source| TunError::Forwarding { setting: setting.replace('/', "."), source };
    fs::write(format!("/proc/sys/{setting}"), "1").map_err(fault)?;
    tracing::info!(setting = %setting.replace('/', "."), "this machine forwards packets from now on, for its gateway");
    Ok(())
}

/// A machine that forwards IPv6 ignores router advertisements unless accept_ra is 2, and would lose its routes to the
/// outside. Interfaces without a route from a router keep their setting.
fn keep_router_advertisements() {
    if is_on(FORWARDING_V6) {
        return;
    }
    let routes = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    for interface in advertised(&routes) {
        let setting = format!("/proc/sys/net/ipv6/conf/{interface}/accept_ra");
        if fs::read_to_string(&setting).is_ok_and(|text| text.trim() == "1") && fs::write(&setting, "2").is_ok() {
            tracing::info!(%interface, "accepts router advertisements although it forwards (accept_ra=2)");
        }
    }
}

/// Interfaces that have routes from router advertisements, in the kernel's list of IPv6 routes (`/proc/net/ipv6_route`).
fn advertised(routes: &str) -> BTreeSet<&str> {
    // RTF_ADDRCONF: learned from an advertisement. RTF_DEFAULT: the default route among these.
    const LEARNED: u32 = 0x0004_0000 | 0x0001_0000;
    let learned = |line: &&str| {
        let flags = line.split_whitespace().nth(8).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & LEARNED != 0)
    };
    let interfaces = routes.lines().filter(learned).filter_map(|line| line.split_whitespace().nth(9));
    // The name becomes part of a path.
    interfaces.filter(|name| !name.contains('/') && *name != "lo").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_name_every_address_and_spare_the_device() {
        let addresses = ["10.9.0.7/24", "fd09::/64"].map(|address| address.parse().expect("a prefix"));
        let expected = "table inet hermes-gw0\ndelete table inet hermes-gw0\ntable inet hermes-gw0 {\n  \
             chain postrouting {\n    type nat hook postrouting priority 100; policy accept;\n    \
             iifname \"gw0\" oifname != \"gw0\" ip saddr 10.9.0.0/24 masquerade\n    \
             iifname \"gw0\" oifname != \"gw0\" ip6 saddr fd09::/64 masquerade\n  }\n}\n";
        assert_eq!(rules("hermes-gw0", "gw0", &addresses), expected);
    }

    #[test]
    fn interfaces_with_routes_from_routers_are_found() {
        let any = "0".repeat(32);
        let line =
            |flags: &str, name: &str| format!("{any} 00 {any} 00 {any} 00000400 00000001 00000000 {flags} {name:>8}\n");
        let routes =
            line("00450003", "eth0") + &line("00040001", "wlan0") + &line("00000001", "gw0") + &line("80200001", "lo");
        assert_eq!(advertised(&routes).into_iter().collect::<Vec<_>>(), ["eth0", "wlan0"]);
        assert!(advertised("").is_empty() && advertised("nonsense\n").is_empty());
    }

    #[test]
    fn what_rules_are_for_is_read_as_nft_lists_it() {
        let listing = "table inet hermes-gw0 {\n\tchain postrouting {\n\t\t\
             type nat hook postrouting priority srcnat; policy accept;\n\t\t\
             iifname \"gw0\" oifname != \"gw0\" ip saddr 0.0.0.0/0 masquerade\n\t\t\
             iifname \"gw0\" oifname != \"gw0\" ip saddr 10.9.0.7 masquerade\n\t\t\
             iifname \"gw1\" oifname != \"gw1\" ip saddr 10.8.0.0/24 masquerade\n\t\t\
             iifname \"gw0\" oifname != \"gw0\" ip6 saddr fd09::/63 masquerade\n\t}\n}\n";
        let addresses = |all: &[&str]| all.iter().map(|one| one.parse().expect("a prefix")).collect::<Vec<IpNet>>();
        let wanted = addresses(&["10.9.0.7/32", "0.0.0.0/0", "fd09::1/63"]);
        assert_eq!(sources_in(listing, "gw0"), sources(&wanted));
        // As many as there are, but another one.
        assert_ne!(sources_in(listing, "gw0"), sources(&addresses(&["10.9.0.8/32", "0.0.0.0/0", "fd09::/63"])));
        assert!(sources_in("table inet hermes-gw0 {\n}\n", "gw0").is_empty());
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let said = run("sh", &["-c", "cat; cat /dev/stdin; echo no >&2; exit 3"], "words ", PATIENCE).expect("it runs");
        assert_eq!((said.status.code(), &*said.output, &*said.complaint), (Some(3), "words words ", "no\n"));
        let error =
            run("sleep", &["1000"], "", Duration::from_millis(10)).map(|said| said.output).expect_err("it hangs");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let remedy = TunError::NoNft { source: error }.remedy();
        assert!(remedy.contains("nft monitor"), "{remedy}");
    }

    #[test]
    fn a_table_is_known_by_what_is_in_it() {
        let addresses = ["10.9.0.7/24", "::/0"].map(|address| address.parse().expect("a prefix"));
        let script = rules("hermes-gw0", "gw0", &addresses);
        let (_, ours) = script.split_at(script.rfind("table inet").expect("it is made last"));
        assert!(is_like_ours(ours, "gw0") && !is_like_ours(ours, "gw1"));
        // As nft lists it.
        assert!(is_like_ours(&ours.replace("priority 100", "priority srcnat"), "gw0"));
        let others = [
            ours.replace("masquerade\n", "accept\n"),
            ours.replace("type nat", "type filter"),
            ours.replace("  }\n}", "  }\n  chain mine {\n  }\n}"),
            ours.replace("  chain", "  set mine {\n  }\n  chain"),
            "table inet hermes-gw0 {\n}\n".to_owned(),
        ];
        others.iter().for_each(|other| assert!(!is_like_ours(other, "gw0"), "{other}"));
    }
}
