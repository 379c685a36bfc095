//! Source NAT at a gateway: packets from a TUN device leave through other interfaces with this machine's address.
//!
//! In: a device, and the source addresses of its packets. Out: an nftables table `hermes-DEVICE` of its own, removed
//! with its guard; tables of killed processes are removed when the next is created. IP forwarding is switched on if
//! needed, and stays on. Never: a change of another program's table, or a filter, because other modules decide what may
//! be forwarded.

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
use crate::fd_passing::{LabelledFd, read_text};

/// Prefix of the names of our tables.
const PREFIX: &str = "hermes-";
/// Whether this process has created a table. Only then does it subscribe to table changes.
static HAS_TABLE: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::Sender::new(false));
/// Timeout of a run of nft. A run takes milliseconds, but the kernel locks the tables while another program changes
/// them.
const NFT_TIMEOUT: Duration = Duration::from_secs(10);
const TIMED_OUT: &str = "timed out and was killed";
const FORWARDING_V4: &str = "net/ipv4/ip_forward";
const FORWARDING_V6: &str = "net/ipv6/conf/all/forwarding";

/// Source NAT of one device. Dropping the guard removes it, unless another process owns the device.
#[derive(Debug)]
pub struct Masquerade {
    table: String,
    device: Device,
}

/// Sets up source NAT: packets from `device` with one of `addresses` as their source leave with this machine's address.
/// Replaces the table that another process created for this device. Blocks while nft runs a few times; a run takes
/// milliseconds, and at most 10 s. Later changes and dropping the guard block, too.
///
/// # Errors
/// `TunError`: nft is missing or fails, another program's table has the name, or forwarding cannot be switched on.
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
    HAS_TABLE.send_replace(true);
    Ok(Masquerade { table, device: device.clone() })
}

/// Waits until this process has created a table.
pub(crate) async fn table_created() {
    // The sender is a static, so it never closes.
    let _ = HAS_TABLE.subscribe().wait_for(|created| *created).await;
}

/// Returns the name of the device to which a table belongs. `None`: another program's table.
pub(crate) fn device_of(table: &str) -> Option<&str> {
    table.strip_prefix(PREFIX)
}

/// Restores a device's rules if another program removed some. Returns false if none was missing.
///
/// # Errors
/// The errors of [`masquerade`].
pub(crate) fn restore_rules(device: &Device, addresses: &[IpNet]) -> Result<bool, TunError> {
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
    let run = nft(&["-f", "-"], &script).map_err(|source| TunError::NoNft { source })?;
    if run.status.success() {
        return Ok(());
    }
    let reason = run.stderr.lines().next().unwrap_or_default().to_owned();
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
    /// Replaces the addresses. The change is atomic, so that no packet is processed without rules.
    ///
    /// # Errors
    /// The errors of [`masquerade`]; the old rules stay then.
    pub fn replace(&self, addresses: &[IpNet]) -> Result<(), TunError> {
        if listing(&self.table)?.is_some_and(|listing| is_anothers(&listing, self.device.name())) {
            return Err(TunError::TableTaken { table: self.table.clone() });
        }
        forward_for(addresses)?;
        self.device.change_nat(Some(addresses), || set_rules(&self.table, &self.device, addresses))
    }

    /// Restores the rules for `addresses` if another program removed some.
    ///
    /// # Errors
    /// The errors of [`masquerade`].
    pub fn restore(&self, addresses: &[IpNet]) -> Result<(), TunError> {
        self.device.change_nat(Some(addresses), || restore_rules(&self.device, addresses).map(drop))
    }
}

/// Whether another program has replaced our table by one of the same name.
fn is_anothers(listing: &str, device: &str) -> bool {
    !is_like_ours(listing, device) && sources_in(listing, device).is_empty()
}

/// Removes the source NAT that a failed successor process set up for a device.
pub fn sweep(device: &Device) {
    let table = format!("{PREFIX}{}", device.name());
    if is_known(&table, |listing| is_like_ours(listing, device.name())) {
        remove(&table);
    }
}

impl Drop for Masquerade {
    /// Blocks the thread that drops the guard until nft ends, because an exiting process waits for no other thread.
    fn drop(&mut self) {
        let is_ours = |listing: &str| !is_anothers(listing, self.device.name());
        // `remove` logs a failure, so the closure cannot fail.
        let _ = self.device.change_nat(None, || {
            if self.device.is_ours() && is_known(&self.table, is_ours) {
                remove(&self.table);
            }
            Ok(())
        });
    }
}

/// Returns the nft script for a table. Its rules match only packets from the device, because this machine may forward
/// others, too. nft applies the script as one transaction. The script creates the table before it deletes it, because
/// deleting a missing table fails.
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

/// Returns the contents of a table, as nft lists them. `None`: the table does not exist.
///
/// # Errors
/// `TunError::NoNft`: nft cannot be run, so the table may exist.
fn listing(table: &str) -> Result<Option<String>, TunError> {
    let run = nft(&["list", "table", "inet", table], "").map_err(|source| TunError::NoNft { source })?;
    Ok(run.status.success().then_some(run.output))
}

/// Whether the table exists and `is` accepts its contents. False if nft cannot be run.
fn is_known(table: &str, is: impl FnOnce(&str) -> bool) -> bool {
    listing(table).is_ok_and(|listing| listing.is_some_and(|listing| is(&listing)))
}

/// Whether a table has the form that [`rules`] writes. Other programs may use its name, too.
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

/// Returns the source prefixes of the rules in a listing that have the form of ours.
fn sources_in(listing: &str, device: &str) -> BTreeSet<IpNet> {
    let ours = listing.lines().map(str::trim).filter(|line| is_rule(line, device));
    let sources = ours.filter_map(|line| line.split_once(" saddr ")?.1.split(' ').next());
    // nft omits the prefix length of a single address.
    sources.filter_map(|source| source.parse().ok().or_else(|| Some(source.parse::<IpAddr>().ok()?.into()))).collect()
}

fn sources(addresses: &[IpNet]) -> BTreeSet<IpNet> {
    addresses.iter().map(IpNet::trunc).collect()
}

/// Removes tables that killed processes left behind, and whose devices no longer exist. Waits for nft.
pub(crate) fn remove_stale() {
    let Ok(run) = nft(&["list", "tables", "inet"], "") else { return };
    for line in run.output.lines() {
        let table = line.trim().strip_prefix("table inet ").unwrap_or_default();
        let Some(device) = table.strip_prefix(PREFIX) else { continue };
        // Any other error, for example a lack of file descriptors, does not mean that the device is missing.
        let is_gone = matches!(nix::net::if_::if_nametoindex(device), Err(Errno::ENXIO | Errno::ENODEV));
        if is_gone && is_known(table, |listing| is_like_ours(listing, device)) {
            remove(table);
        }
    }
}

fn remove(table: &str) {
    match nft(&["-f", "-"], &format!("table inet {table}\ndelete table inet {table}\n")) {
        Ok(run) if run.status.success() => {}
        Ok(run) => tracing::warn!(table, reason = %run.stderr, "cannot remove an nftables table"),
        Err(error) => tracing::warn!(table, %error, "cannot remove an nftables table"),
    }
}

/// Returns the version that nft reports.
///
/// # Errors
/// `TunError::NoNft`.
pub fn nft_version() -> Result<String, TunError> {
    let run = nft(&["--version"], "").map_err(|source| TunError::NoNft { source })?;
    Ok(run.output.trim().to_owned())
}

/// The result of a run of nft.
struct NftOutput {
    status: ExitStatus,
    output: String,
    stderr: String,
}

fn nft(words: &[&str], script: &str) -> io::Result<NftOutput> {
    run("nft", words, script, NFT_TIMEOUT)
}

/// Runs a program to its end, or kills it if it writes nothing for `timeout`.
fn run(program: &str, words: &[&str], input: &str, timeout: Duration) -> io::Result<NftOutput> {
    // The input and stderr are files, which never block the child. Its output ends at the latest when the child exits.
    let text = |text: &str| LabelledFd::text(String::new(), text).map(|handed| handed.fd);
    let (mut input, stderr) = (fs::File::from(text(input)?), text("")?);
    input.rewind()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(timeout))?;
    let mut command = Command::new(program);
    command.args(words).stdin(input).stdout(OwnedFd::from(theirs)).stderr(stderr.try_clone()?);
    let mut child = command.spawn()?;
    // Close this process's copy of the child's socket, so that the output ends when the child exits.
    drop(command);
    let mut output = Vec::new();
    if let Err(error) = ours.read_to_end(&mut output) {
        // The child may still be blocked in the kernel, so another thread waits for it.
        let _ = child.kill();
        // If no thread can start, the child stays a zombie.
        let _ = std::thread::Builder::new().spawn(move || child.wait());
        let is_late = error.kind() == io::ErrorKind::WouldBlock;
        return Err(if is_late { io::Error::new(io::ErrorKind::TimedOut, TIMED_OUT) } else { error });
    }
    let status = child.wait()?;
    Ok(NftOutput {
        status,
        output: String::from_utf8_lossy(&output).into_owned(),
        stderr: read_text(&stderr).unwrap_or_default(),
    })
}

/// Returns whether this machine forwards packets of IPv4, and whether it forwards those of IPv6.
pub fn forwards() -> (bool, bool) {
    (is_on(FORWARDING_V4), is_on(FORWARDING_V6))
}

/// Reports whether this machine forwards packets, or whether [`masquerade`] could switch it on.
///
/// # Errors
/// `TunError::Forwarding`: forwarding is off, and this process cannot change that.
pub fn check_forwarding() -> Result<String, TunError> {
    let mut found = Vec::new();
    for (family, setting) in [("IPv4", FORWARDING_V4), ("IPv6", FORWARDING_V6)] {
        let path = format!("/proc/sys/{setting}");
        if is_on(setting) {
            found.push(format!("{family} is on"));
        } else if !fs::exists(&path).unwrap_or_default() {
            found.push(format!("{family} is not available"));
        } else if let Err(source) = fs::OpenOptions::new().write(true).open(&path) {
            return Err(TunError::Forwarding { setting: setting.replace('/', "."), source });
        } else {
            found.push(format!("{family} is off but can be switched on"));
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
    tracing::info!(setting = %setting.replace('/', "."), "enabled IP forwarding for the gateway");
    Ok(())
}

/// Sets accept_ra to 2 on interfaces with routes from IPv6 router advertisements. With forwarding on, Linux ignores
/// advertisements unless accept_ra is 2, so this machine would lose these routes. Other interfaces keep their setting.
fn keep_router_advertisements() {
    if is_on(FORWARDING_V6) {
        return;
    }
    let routes = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    for interface in advertised(&routes) {
        let setting = format!("/proc/sys/net/ipv6/conf/{interface}/accept_ra");
        if fs::read_to_string(&setting).is_ok_and(|text| text.trim() == "1") && fs::write(&setting, "2").is_ok() {
            tracing::info!(%interface, "set accept_ra=2, so that the interface accepts router advertisements although it forwards");
        }
    }
}

/// Returns the interfaces that have routes from router advertisements, from the kernel's list of IPv6 routes
/// (`/proc/net/ipv6_route`).
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
        // The same number of addresses, but one differs.
        assert_ne!(sources_in(listing, "gw0"), sources(&addresses(&["10.9.0.8/32", "0.0.0.0/0", "fd09::/63"])));
        assert!(sources_in("table inet hermes-gw0 {\n}\n", "gw0").is_empty());
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let result =
            run("sh", &["-c", "cat; cat /dev/stdin; echo no >&2; exit 3"], "words ", NFT_TIMEOUT).expect("it runs");
        assert_eq!((result.status.code(), &*result.output, &*result.stderr), (Some(3), "words words ", "no\n"));
        let error =
            run("sleep", &["1000"], "", Duration::from_millis(10)).map(|result| result.output).expect_err("it hangs");
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
        // The form in which nft lists it.
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
