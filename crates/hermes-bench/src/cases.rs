//! The benchmarks themselves.
//!
//! In: a [`Session`]. Out: samples. Contenders take turns within a round, so that a disturbance of the machine affects
//! all of them.

use std::path::Path;

use anyhow::Result;
use hermes_testkit::load::Load;

use crate::{
    chain::{Chain, Security, Shape},
    contender::{Contender, Programs},
    packet_path::PacketPath,
    record::{Key, Sample},
    settings::Settings,
    testbed::{Measured, Testbed},
};

pub(crate) mod delayed;
pub(crate) mod figure10;
pub(crate) mod layer3;
pub(crate) mod memory;
pub(crate) mod table7;
pub(crate) mod throughput;
pub(crate) mod tunnels;

/// The context of a benchmark.
pub(crate) struct Session<'a> {
    /// The contenders that take part.
    pub(crate) contenders: Vec<&'a dyn Contender>,
    /// The durations and counts.
    pub(crate) settings: &'a Settings,
    /// The directory for configurations and logs.
    pub(crate) dir: &'a Path,
    /// The programs that carry IP.
    pub(crate) programs: &'a Programs,
    /// A filter by contender; empty selects all.
    pub(crate) only: &'a [String],
    /// The samples measured so far.
    pub(crate) samples: Vec<Sample>,
}

impl Session<'_> {
    /// The selected paths of layer 3. `hermes` stands for all of its versions; the bare path is always included as the
    /// reference.
    fn paths(&self, paths: &[PacketPath]) -> Vec<PacketPath> {
        let wanted = |path: &PacketPath| {
            let name = path.name();
            self.only.is_empty() || *path == PacketPath::Bare || self.only.iter().any(|o| name.starts_with(o.as_str()))
        };
        paths.iter().copied().filter(wanted).collect()
    }

    /// Starts every contender's path; contenders without a path of this kind are skipped.
    fn start_all(&self, testbed: &Testbed, shape: Shape, security: Security) -> Result<Vec<Chain>> {
        let mut chains = Vec::new();
        for contender in &self.contenders {
            chains.extend(testbed.start(*contender, shape, security)?);
        }
        Ok(chains)
    }

    /// Measures and records the result.
    fn record(
        &mut self,
        (testbed, chain): (&Testbed, &Chain),
        key: &Key,
        round: usize,
        load: Load,
        figures: impl FnOnce(&Measured) -> crate::record::Figures,
    ) -> Result<()> {
        let measured = testbed.measure(chain, load)?;
        let figures = figures(&measured);
        self.samples.push(Sample::new(key.clone(), chain.contender, round, &measured, figures));
        Ok(())
    }
}

/// All chains once. Each round starts with another chain, so that no chain always follows the same one.
fn in_turn(chains: &[Chain], round: usize) -> impl Iterator<Item = &Chain> {
    chains.iter().cycle().skip(round).take(chains.len())
}
