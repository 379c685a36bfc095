//! Who changes the overlay from a shell: where the controller is, and the certificate that is shown there.
//!
//! In: the operator's file, which the controller wrote. Out: requests of its REST API, and their answers.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use clap::Parser;
use hermes_controller::authority::Subject;
use hermes_controller::client::{Client, Known, Place};
use hermes_controller::controller::Controller;
use hermes_controller::document::Name;
use hermes_net::tls::CertifiedKey;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use rcgen::{CertificateParams, KeyPair};
use serde::{Deserialize, Serialize};

/// The operator's file, in the controller's directory.
pub(crate) const FILE: &str = "operator.json";
/// How long its certificate lives.
const LIFE: std::time::Duration = std::time::Duration::from_secs(365 * 24 * 3600);
/// The largest answer that is read.
const LARGEST: usize = 256 << 20;

/// What the file has.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Operator {
    /// Where the controller is.
    controller: String,
    /// The authorities that it is known by (PEM).
    authorities: String,
    /// Who shows this (PEM).
    certificate: String,
    /// Its key (PEM).
    key: String,
}

impl Operator {
    /// Makes one who may change everything, and writes the file.
    ///
    /// # Errors
    /// There is no authority, or the file cannot be written.
    pub(crate) fn create(controller: &Controller, place: &Place, path: &Path) -> anyhow::Result<()> {
        let key = KeyPair::generate()?;
        let request = CertificateParams::default().serialize_request(&key)?;
        let name: Name = "root".parse().map_err(anyhow::Error::msg)?;
        let issued = controller.sign(request.der(), &Subject::Operator { provider: None, name: &name }, LIFE)?;
        let operator = Self {
            controller: place.to_string(),
            authorities: issued.authorities,
            certificate: issued.certificate,
            key: key.serialize_pem(),
        };
        operator.write(path)
    }

    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        let opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// How a controller is asked.
#[derive(Debug, Parser)]
pub(crate) struct Access {
    /// The operator's file: `operator.json` in the controller's directory.
    #[arg(long, env = "HERMES_OPERATOR", value_name = "FILE", default_value = "hermes-controller/operator.json")]
    operator: PathBuf,
}

/// What a controller answered.
pub(crate) struct Answer {
    /// The status.
    pub(crate) status: http::StatusCode,
    /// The body, where it is JSON.
    pub(crate) body: serde_json::Value,
}

impl Access {
    fn operator(&self) -> anyhow::Result<Operator> {
        let file = self.operator.display();
        let text = std::fs::read_to_string(&self.operator).with_context(|| {
            format!("cannot read {file}; name the file that the controller wrote with --operator, or HERMES_OPERATOR")
        })?;
        serde_json::from_str(&text).with_context(|| format!("{file} is no operator's file"))
    }

    /// Where the controller is.
    ///
    /// # Errors
    /// There is no operator's file.
    pub(crate) fn controller(&self) -> anyhow::Result<String> {
        Ok(self.operator()?.controller)
    }

    /// Makes a file for somebody else, who may change all documents, or one provider's.
    ///
    /// # Errors
    /// The controller refuses, or the file cannot be written.
    pub(crate) async fn make_operator(
        &self,
        name: &Name,
        provider: Option<&Name>,
        life: std::time::Duration,
        path: &Path,
    ) -> anyhow::Result<()> {
        anyhow::ensure!(!path.exists(), "{} is there already; name another file", path.display());
        let key = KeyPair::generate()?;
        let request = BASE64.encode(CertificateParams::default().serialize_request(&key)?.der());
        let asked =
            serde_json::json!({ "name": name, "provider": provider, "request": request, "life": life.as_secs() });
        let issued = self.get(Method::POST, "/v1/operators", asked.to_string().into_bytes()).await?;
        let text = |key: &str| issued[key].as_str().unwrap_or_default().to_owned();
        let (authorities, certificate) = (text("authorities"), text("certificate"));
        let controller = self.operator()?.controller;
        Operator { controller, authorities, certificate, key: key.serialize_pem() }.write(path)
    }

    /// One request.
    ///
    /// # Errors
    /// There is no operator's file, or no controller.
    pub(crate) async fn ask(&self, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<Answer> {
        let operator = self.operator()?;
        let place: Place = operator.controller.parse().map_err(anyhow::Error::msg)?;
        let own = CertifiedKey::from_pem(operator.certificate.as_bytes(), operator.key.as_bytes())?;
        let client = Client::connect(&place, &Known::Authorities(operator.authorities), Some(&own)).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(hermes_controller::client::body(Full::new(body.into())))?;
        let response = client.request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("{place} broke off its answer: {error}"))?.to_bytes();
        let body = if body.is_empty() { serde_json::Value::Null } else { serde_json::from_slice(&body)? };
        Ok(Answer { status, body })
    }

    /// The same, where anything but success is an error that says what is wrong.
    ///
    /// # Errors
    /// As [`Access::ask`]; or the controller refuses.
    pub(crate) async fn get(&self, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<serde_json::Value> {
        let Answer { status, body } = self.ask(method, path, body).await?;
        if status.is_success() {
            return Ok(body);
        }
        let mut said = body["detail"].as_str().unwrap_or(status.as_str()).to_owned();
        for problem in body["problems"].as_array().into_iter().flatten() {
            let text =
                |key: &str| problem[key].as_str().filter(|text| !text.is_empty()).map(|text| format!("{text}: "));
            let document =
                text("document").or_else(|| problem["number"].as_u64().map(|number| format!("document {number}: ")));
            let (document, path) = (document.unwrap_or_default(), text("path").unwrap_or_default());
            said.push_str(&format!("\n  {document}{path}{}", problem["message"].as_str().unwrap_or_default()));
        }
        anyhow::bail!(said)
    }
}

/// Runs what asks a controller.
pub(crate) fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}
