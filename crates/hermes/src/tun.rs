//! The life of `hermes tun`: make the device, give up privileges, carry packets, take the device away.
//!
//! In: a device, and where its packets go. Out: packets carried until a signal, then what became of them in one line.
//! Never: a node, a document, or more privileges than to remove its own rules.

use std::net::IpAddr;

use anyhow::Context as _;
use hermes_net::privilege;
use hermes_proxy::assist::{Assist, Carried, Target};

use crate::log::Log;
use crate::signals::Signals;

/// Carries packets until SIGTERM or SIGINT.
///
/// # Errors
/// What is missing for the device, in words that say what to do.
pub(crate) fn run(
    device: &str,
    addresses: Vec<IpAddr>,
    targets: Vec<Target>,
    user: &str,
    log: &str,
) -> anyhow::Result<()> {
    let assist = Assist::open(device, addresses, targets.clone())
        .map_err(|error| anyhow::anyhow!("{error}. {}", error.remedy()))?;
    // Before there is a second thread, the log's: each has capabilities of its own.
    privilege::keep_net_admin(user).context("privileges that are not needed cannot be given up; try another --user")?;
    let _log = Log::start(log)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let carried = runtime.block_on(async {
        let mut signals = Signals::new()?;
        for target in &targets {
            tracing::info!(network = %target.network, node = %target.node, device, "packets are captured");
        }
        let stop = async { while matches!(signals.next().await, "SIGHUP" | "SIGUSR1") {} };
        assist.run(stop).await.with_context(|| format!("device {device}"))
    })?;
    let Carried { sent, received, dropped } = carried;
    tracing::info!(sent, received, ?dropped, "stopped");
    Ok(())
}
