//! `hermes rollout`: the current rollout in waves.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use http::Method;
use serde_json::Value;

use crate::operator::{Options, block_on};

/// Manage the current rollout in waves, for overlays with `rollout`
#[derive(Debug, Parser)]
pub(super) struct Rollout {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the progress of the rollout
    Show(Options),
    /// Finish the rollout: send the change to all nodes at once
    Finish(Options),
    /// Cancel the rollout: restore the documents from before it
    Cancel(Options),
}

impl Rollout {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let is_finish = matches!(self.command, Command::Finish(_));
        let (method, Options { json, access }) = match self.command {
            Command::Show(options) => (Method::GET, options),
            Command::Finish(options) => (Method::POST, options),
            Command::Cancel(options) => (Method::DELETE, options),
        };
        let answer = block_on(access.get(method, "/v1/rollout", Vec::new()))?;
        let done = if is_finish { "all nodes have the change; " } else { "" };
        super::print(&if json { format!("{answer}\n") } else { done.to_owned() + &render(&answer) })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn render(answer: &Value) -> String {
    let mut text = match answer["of"].as_u64() {
        None => "no rollout in progress\n".to_owned(),
        Some(of) => {
            let (step, remaining) = (answer["step"].as_u64().unwrap_or(1), answer["remaining"].as_u64().unwrap_or(0));
            let nodes: Vec<_> =
                answer["nodes"].as_array().into_iter().flatten().filter_map(Value::as_str).take(10).collect();
            format!("revision {of}: step {step} of {}, at {}\n", step + remaining, nodes.join(", "))
        }
    };
    if let Some(of) = answer["failed"]["revision"].as_u64() {
        let why = answer["failed"]["reason"].as_str().unwrap_or_default();
        text += &format!("revision {of} was rolled back: {why}\n");
    }
    text
}
