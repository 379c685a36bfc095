//! `hermes operator`: operators beside the owner of the controller's directory.
//!
//! In: names, and an operator's file. Out: files for other operators, and their removal. Never: a key that leaves this
//! machine other than in the requested file.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hermes_controller::document::Name;
use hermes_model::document::scalar::HumanDuration;
use http::Method;
use serde_json::Value;

use super::ca::date;
use crate::operator::{Access, Options, block_on};

/// Manage operators, who may change documents
#[derive(Debug, Parser)]
pub(super) struct Operator {
    #[command(subcommand)]
    command: OperatorCommand,
}

#[derive(Debug, Subcommand)]
enum OperatorCommand {
    /// Create an operator's file, for the whole overlay or for the documents of one provider
    Create {
        /// Name of the operator in the audit log
        #[arg(long)]
        name: Name,
        /// Limit the operator to the documents of this provider
        #[arg(long, value_name = "NAME")]
        provider: Option<Name>,
        /// Set the lifetime of the file
        #[arg(long, value_name = "DURATION", default_value = "30d")]
        life: HumanDuration,
        /// Write the operator's file here. Anyone with the file can use it. It names --controller, else the
        /// controller's public name
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        #[command(flatten)]
        access: Access,
    },
    /// List operators, and when their files expire
    List(Options),
    /// Remove an operator: all files of that name stop working
    Remove {
        /// Name of the operator in the audit log
        name: Name,
        /// Remove the operator of this provider
        #[arg(long, value_name = "NAME")]
        provider: Option<Name>,
        #[command(flatten)]
        access: Access,
    },
}

impl Operator {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            OperatorCommand::Create { name, provider, life, output, access } => {
                let controller = block_on(access.make_operator(&name, provider.as_ref(), life.0, &output))?;
                let mut text = format!("{}: for --operator, or HERMES_OPERATOR\n", output.display());
                if is_local(&controller) {
                    let _ = writeln!(
                        text,
                        "it names {controller}, which only this machine reaches: create it with --controller URL, or start the \
                         controller with --name HOST"
                    );
                }
                super::print(&text)?;
            }
            OperatorCommand::List(Options { json, access }) => {
                let answer = block_on(access.get(Method::GET, "/v1/operators", Vec::new()))?;
                super::print(&if json { format!("{answer}\n") } else { render(&answer) })?;
            }
            OperatorCommand::Remove { name, provider, access } => {
                let whose = provider.map(|provider| format!("?provider={provider}")).unwrap_or_default();
                let path = format!("/v1/operators/{name}{whose}");
                let answer = block_on(access.get(Method::DELETE, &path, Vec::new()))?;
                super::print(&format!("{name} is no operator any more ({} certificates)\n", answer["certificates"]))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns true if only this machine reaches a controller at this URL.
fn is_local(controller: &str) -> bool {
    let host = controller.parse::<http::Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Formats one line for each operator.
fn render(answer: &Value) -> String {
    let line = |operator: &Value| {
        let name = operator["name"].as_str().unwrap_or_default();
        let whose = operator["provider"].as_str().map_or("all".to_owned(), |provider| format!("those of {provider}"));
        format!("{name}  {whose}  until {}\n", date(&operator["until"]))
    };
    answer["operators"].as_array().into_iter().flatten().map(line).collect()
}
