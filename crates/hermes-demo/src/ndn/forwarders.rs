//! Runs third-party NDN forwarders between the programs of the case and its ways.
//!
//! In: the command of a forwarder, which gets two arguments: the address at which it serves programs over TCP and UDP, and
//! the URI of the face to which all Interests go. Out: a running forwarder for each way on the device, and one before the
//! first producer. Never: a forwarder that outlives its value.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::consumer::Consumer;
use crate::namespace::Namespace;
use crate::program::{Program, last_words};

/// The time within which a forwarder must listen.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval between connection attempts.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The running forwarders.
pub(super) struct Forwarders {
    command: Vec<String>,
    directory: PathBuf,
    running: Vec<Program>,
}

impl Forwarders {
    /// Without a command, programs use the ways themselves.
    pub(super) fn new(command: &[String], directory: &Path) -> Self {
        Self { command: command.to_vec(), directory: directory.to_owned(), running: Vec::new() }
    }

    pub(super) fn is_enabled(&self) -> bool {
        !self.command.is_empty()
    }

    /// Starts a forwarder, and waits until it serves programs.
    ///
    /// # Errors
    /// The forwarder ends, or does not listen in time; the error has its last words.
    pub(super) async fn start(&mut self, place: &Namespace, at: SocketAddr, face: &str) -> anyhow::Result<()> {
        let name = format!("forwarder-{}", self.running.len());
        let arguments = [self.command.clone(), vec![at.to_string(), face.to_owned()]].concat();
        let command = place.prefix().into_iter().chain(arguments.iter().map(String::as_str)).collect::<Vec<_>>();
        self.running.push(Program::start(&name, &self.directory.join(format!("{name}.log")), &command)?);
        let begun = Instant::now();
        while Consumer::tcp(place, at).await.is_err() {
            let ended = self.running.last_mut().is_some_and(|program| program.ended().is_some());
            let command = self.command.join(" ");
            ensure!(!ended, "the forwarder {command:?} has ended{}", last_words(&mut self.running));
            let is_late = begun.elapsed() > START_TIMEOUT;
            ensure!(!is_late, "the forwarder {command:?} does not listen at {at}{}", last_words(&mut self.running));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Stops all but the first forwarders.
    pub(super) fn truncate(&mut self, count: usize) {
        self.running.truncate(count);
    }
}
