//! The life cycle of `hermes tun`: create the device, drop privileges, forward packets, remove the device.
//!
//! In: a device, and the destination of its packets. Out: packets, forwarded until a signal; then one line with
//! counts. It runs no node and reads no document. It keeps only the privileges that removing its own rules needs.

use std::net::IpAddr;

use anyhow::Context as _;
use hermes_net::privilege;
use hermes_proxy::detached_device::{DetachedDevice, PacketCounts, Target};

use crate::log::Log;
use crate::signals::Signals;

/// Forwards packets until SIGTERM or SIGINT.
///
/// # Errors
/// The device cannot be created; the error says what is missing and what to do.
pub(crate) fn run(
    device: &str,
    addresses: Vec<IpAddr>,
    targets: Vec<Target>,
    user: &str,
    log: &str,
) -> anyhow::Result<()> {
    let detached = DetachedDevice::open(device, addresses, targets.clone())
        .map_err(|error| anyhow::anyhow!("{error}. {}", error.remedy()))?;
    // Capabilities belong to a thread, so they are dropped before the log starts a second one.
    privilege::keep_net_admin(user).context("cannot drop privileges; try another --user")?;
    let _log = Log::start(log)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let carried = runtime.block_on(async {
        let mut signals = Signals::new()?;
        for target in &targets {
            tracing::info!(network = %target.network, node = %target.node, device, "packets are captured");
        }
        let stop = async { while matches!(signals.next().await, "SIGHUP" | "SIGUSR1") {} };
        detached.run(stop).await.with_context(|| format!("device {device}"))
    })?;
    let PacketCounts { sent, received, dropped } = carried;
    tracing::info!(sent, received, ?dropped, "stopped");
    Ok(())
}
