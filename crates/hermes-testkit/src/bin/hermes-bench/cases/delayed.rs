//! Figure 10 where it matters: 20 ms between the proxies, and a server slow at accepting.
//!
//! In: a session. Out: samples `delayed-single` and `delayed-burst`. Client and near proxy stand in one namespace,
//! far proxy and the Python server in another; the direct way crosses the same link.

use anyhow::Result;

use super::{Session, figure10, progress};
use crate::{bed::Bed, chain::Security};

/// Singles a round: each takes at least 20 ms.
const SINGLES: usize = 40;

/// The whole of it, in the clear as in the paper.
pub(crate) fn run(session: &mut Session<'_>) -> Result<()> {
    let bed = Bed::delayed(session.dir)?;
    let settings = crate::settings::Settings { singles: SINGLES, bursts: 1, ..session.settings.clone() };
    let mut inner =
        Session { contenders: session.contenders, settings: &settings, dir: session.dir, samples: Vec::new() };
    for round in 0..settings.delayed_rounds {
        progress(&format!("delayed: round {} of {}", round + 1, settings.delayed_rounds));
        figure10::one_round(&mut inner, &bed, Security::Plain, round)?;
    }
    if let Some((delivered, dropped)) = bed.frames() {
        progress(&format!("delayed: the link delivered {delivered} frames and dropped {dropped}"));
    }
    session.samples.extend(inner.samples.into_iter().map(|mut sample| {
        sample.key.measure = format!("delayed-{}", sample.key.measure);
        sample
    }));
    Ok(())
}
