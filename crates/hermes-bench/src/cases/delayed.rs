//! Figure 10 with a delay: 20 ms between the proxies, and a server that accepts slowly.
//!
//! In: a session. Out: samples `delayed-single` and `delayed-burst`. Client and near proxy run in one namespace, far
//! proxy and the Python server in another; the direct path crosses the same link.

use anyhow::Result;

use super::{Session, figure10};
use crate::{chain::Security, progress, settings::Settings, testbed::Testbed};

/// The contenders of this case. HAProxy and nginx serve as a reference for throughput only.
const CONTENDERS: [&str; 3] = ["direct", "envoy", "hermes"];

/// Runs the case, in the clear as in the paper.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let testbed = Testbed::delayed(session.dir)?;
    let settings = Settings { singles: session.settings.delayed_singles, ..session.settings.clone() };
    let contenders = session.contenders.iter().copied().filter(|c| CONTENDERS.contains(&c.name())).collect();
    let mut inner = Session { contenders, settings: &settings, samples: Vec::new(), ..*session };
    for round in 0..settings.delayed_rounds {
        progress::print(&format!("delayed: round {} of {}", round + 1, settings.delayed_rounds));
        figure10::one_round(&mut inner, &testbed, Security::Plain, round)?;
    }
    if let Some((delivered, dropped)) = testbed.frames() {
        progress::print(&format!("delayed: the link delivered {delivered} frames and dropped {dropped}"));
    }
    session.samples.extend(inner.samples.into_iter().map(|mut sample| {
        sample.key.measure = format!("delayed-{}", sample.key.measure);
        sample
    }));
    Ok(())
}
