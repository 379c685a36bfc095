//! The benchmarks themselves.
//!
//! In: a [`Session`]. Out: samples. Contenders take turns within a round, so that what disturbs the machine disturbs
//! all of them.

use std::path::Path;

use anyhow::Result;
use hermes_testkit::load::Load;

use crate::{
    bed::{Bed, Measured},
    chain::{Chain, Security, Shape},
    contender::Contender,
    record::{Key, Sample},
    row::{Programs, Way},
    settings::Settings,
};

pub(crate) mod delayed;
pub(crate) mod figure10;
pub(crate) mod layer3;
pub(crate) mod memory;
pub(crate) mod table7;
pub(crate) mod throughput;
pub(crate) mod tunnels;

/// What a benchmark works with.
pub(crate) struct Session<'a> {
    /// Who takes part.
    pub(crate) contenders: Vec<&'a dyn Contender>,
    /// How long and how often.
    pub(crate) settings: &'a Settings,
    /// For configurations and logs.
    pub(crate) dir: &'a Path,
    /// What carries IP.
    pub(crate) programs: &'a Programs,
    /// Only these contenders; empty is all.
    pub(crate) only: &'a [String],
    /// What was measured so far.
    pub(crate) samples: Vec<Sample>,
}

impl Session<'_> {
    /// Those of the ways of layer 3 that take part. `hermes` stands for all of its versions; the bare path is always
    /// there, as what the others are compared with.
    fn ways(&self, ways: &[Way]) -> Vec<Way> {
        let wanted = |way: &Way| {
            let name = way.name();
            self.only.is_empty() || *way == Way::Bare || self.only.iter().any(|o| name.starts_with(o.as_str()))
        };
        ways.iter().copied().filter(wanted).collect()
    }

    /// Starts everybody's path; those who have none of this kind are left out.
    fn start_all(&self, bed: &Bed, shape: Shape, security: Security) -> Result<Vec<Chain>> {
        let mut chains = Vec::new();
        for contender in &self.contenders {
            chains.extend(bed.start(*contender, shape, security)?);
        }
        Ok(chains)
    }

    /// Measures and puts the result on record.
    fn record(
        &mut self,
        (bed, chain): (&Bed, &Chain),
        key: &Key,
        round: usize,
        load: Load,
        figures: impl FnOnce(&Measured) -> crate::record::Figures,
    ) -> Result<()> {
        let measured = bed.measure(chain, load)?;
        let figures = figures(&measured);
        self.samples.push(Sample::new(key.clone(), chain.contender, round, &measured, figures));
        Ok(())
    }
}

/// Everybody once, each round beginning with another, so that nobody always follows the same neighbour.
fn in_turn(chains: &[Chain], round: usize) -> impl Iterator<Item = &Chain> {
    chains.iter().cycle().skip(round).take(chains.len())
}

/// Says what is going on.
fn progress(text: &str) {
    eprintln!("[{:>7.1} s] {text}", crate::run::since_start().as_secs_f64());
}
