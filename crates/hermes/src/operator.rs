//! Gives shell commands access to a controller: its URL and the operator's certificate.
//!
//! In: the operator's file, which the controller wrote. Out: requests to its REST API, and their responses.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use clap::Args;
use hermes_controller::api::TRUST;
use hermes_controller::ca::OPERATOR_LIFE;
use hermes_controller::client::{Client, ClientError, ControllerAddr, ControllerPin};
use hermes_controller::controller::{ApplyError, Controller};
use hermes_controller::digest::key_digest;
use hermes_controller::document::Name;
use hermes_net::tls::CertifiedKey;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use rcgen::{CertificateParams, KeyPair};
use serde::{Deserialize, Serialize};

/// The operator's file, in the controller's directory.
pub(crate) const FILE: &str = "operator.json";
/// The maximum size of a response.
const LARGEST: usize = 256 << 20;

/// The content of the operator's file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Operator {
    /// The URL of the controller.
    controller: String,
    /// The CA certificates that authenticate the controller (PEM).
    authorities: String,
    /// The operator's certificate (PEM).
    certificate: String,
    /// The operator's private key (PEM).
    key: String,
    /// The controller's digest of the CAs that the overlay trusted when this file was written.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    trust: String,
}

impl Operator {
    /// Issues an operator who may change everything. [`Operator::create`] adds the controller's URL.
    ///
    /// # Errors
    /// There is no CA, or the store cannot be written.
    pub(crate) async fn issue(controller: &Controller) -> Result<Self, ApplyError> {
        let unable = |error: rcgen::Error| ApplyError::Denied(format!("the operator's key: {error}"));
        let key = KeyPair::generate().map_err(unable)?;
        let request = CertificateParams::default().serialize_request(&key).map_err(unable)?;
        let name: Name = "root".parse().map_err(ApplyError::Denied)?;
        let issued =
            controller.make_operator(("controller", None), request.der(), (&name, None), OPERATOR_LIFE).await?;
        let trust = controller.trust().borrow().mark();
        let (authorities, certificate) = (issued.authorities, issued.certificate);
        Ok(Self { controller: String::new(), authorities, certificate, key: key.serialize_pem(), trust })
    }

    /// True if the file must be written anew: it does not exist, its certificate expires soon or is revoked, or the
    /// state lacks the operator, as after a restore from an older backup.
    pub(crate) fn is_due(path: &Path, controller: &Controller) -> bool {
        let Ok(text) = std::fs::read(path) else { return !path.exists() };
        let read: Option<Self> = serde_json::from_slice(&text).ok();
        let own = read.and_then(|this| CertifiedKey::from_pem(this.certificate.as_bytes(), this.key.as_bytes()).ok());
        let Some(own) = own else { return false };
        let key = own.public_key().map(|info| key_digest(&info)).unwrap_or_default();
        let Some(end) = own.leaf_not_after().filter(|_| controller.view().has_operator(&key)) else { return true };
        let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        end.saturating_sub(now.as_secs().cast_signed()) < (OPERATOR_LIFE / 3).as_secs().cast_signed()
    }

    /// Writes the file, and replaces an existing one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(self, place: &ControllerAddr, path: &Path) -> anyhow::Result<()> {
        let this = Self { controller: place.to_string(), ..self };
        if path.exists() {
            return this.replace(path);
        }
        // A process that is killed meanwhile leaves no partial file, which would lock its owner out.
        let new = temporary(path);
        this.write(&new)?;
        std::fs::rename(&new, path)
            .inspect_err(|_| _ = std::fs::remove_file(&new))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Renews the certificate and the CA certificates over an authenticated connection, and writes the file.
    async fn renew(mut self, client: &Client, path: &Path, trust: &str) -> anyhow::Result<()> {
        let key = KeyPair::from_pem(&self.key)?;
        let request = BASE64.encode(CertificateParams::default().serialize_request(&key)?.der());
        let asked = serde_json::json!({ "request": request }).to_string().into_bytes();
        let Answer { status, body, .. } = exchange(client, Method::POST, "/v1/certificate", asked).await?;
        anyhow::ensure!(status.is_success(), "{}", body["detail"].as_str().unwrap_or(status.as_str()));
        let text = |key: &str| body[key].as_str().context("the controller's answer").map(str::to_owned);
        (self.authorities, self.certificate, self.trust) =
            (text("authorities")?, text("certificate")?, trust.to_owned());
        self.replace(path)
    }

    /// Replaces the file atomically, because its owner has no other access.
    fn replace(&self, path: &Path) -> anyhow::Result<()> {
        // The path may be a symbolic link, which stays.
        let path = path.canonicalize()?;
        let before = std::fs::metadata(&path)?;
        let new = temporary(&path);
        self.write(&new)?;
        let replaced = || {
            std::fs::set_permissions(&new, before.permissions())?;
            // The file keeps its owner, even if root runs the command.
            let after = std::fs::metadata(&new)?;
            if (after.uid(), after.gid()) != (before.uid(), before.gid()) {
                std::os::unix::fs::chown(&new, Some(before.uid()), Some(before.gid()))?;
            }
            std::fs::rename(&new, &path)
        };
        replaced()
            .inspect_err(|_| _ = std::fs::remove_file(&new))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        let opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Returns the path of the file that will replace `path`, and removes a file that is left there. The process ID keeps
/// concurrent commands apart.
fn temporary(path: &Path) -> PathBuf {
    let new = path.with_extension(format!("new{}", std::process::id()));
    let _ = std::fs::remove_file(&new);
    new
}

/// The environment variable with the URL of the controller.
const CONTROLLER: &str = "HERMES_CONTROLLER";

/// Access to a controller.
#[derive(Clone, Debug, Args)]
pub(crate) struct Access {
    #[command(flatten)]
    file: OperatorFile,
    /// Connect to this controller [default: HERMES_CONTROLLER, else the one in the operator's file]
    #[arg(long, value_name = "URL")]
    controller: Option<ControllerAddr>,
}

/// The controller that the environment names. `None`: it names none; an empty variable counts as unset.
///
/// # Errors
/// The variable does not have the URL of a controller.
fn of_environment() -> anyhow::Result<Option<ControllerAddr>> {
    let named = std::env::var(CONTROLLER).ok().filter(|url| !url.is_empty());
    named.map(|url| url.parse().map_err(|error| anyhow::anyhow!("{CONTROLLER}: {error}"))).transpose()
}

/// The operator's file, for commands with a `--controller` of their own.
#[derive(Clone, Debug, Args)]
pub(crate) struct OperatorFile {
    /// Authenticate with this operator's file: `operator.json` in the controller's directory
    #[arg(long, env = "HERMES_OPERATOR", value_name = "FILE", default_value = "hermes-controller/operator.json")]
    operator: PathBuf,
}

impl OperatorFile {
    /// Access to this controller, else to that of the environment, or of the file.
    ///
    /// # Errors
    /// The environment names no controller.
    pub(crate) fn access(&self, controller: Option<ControllerAddr>) -> anyhow::Result<Access> {
        let access = Access { file: self.clone(), controller };
        Ok(Access { controller: access.named()?, ..access })
    }
}

/// Access to a controller, for commands with output for scripts.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print the controller's response as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) access: Access,
}

/// A response of the controller.
pub(crate) struct Answer {
    /// The status.
    pub(crate) status: http::StatusCode,
    /// The body if it is JSON.
    pub(crate) body: serde_json::Value,
    /// The controller's digest of the CAs that the overlay trusts.
    trust: String,
}

impl Access {
    fn operator(&self) -> anyhow::Result<Operator> {
        let file = self.file.operator.display();
        let text = std::fs::read_to_string(&self.file.operator).with_context(|| {
            format!("cannot read {file}; name the file that the controller wrote with --operator, or HERMES_OPERATOR")
        })?;
        serde_json::from_str(&text).with_context(|| format!("{file} is no operator's file"))
    }

    /// The controller of the command line, else of the environment.
    fn named(&self) -> anyhow::Result<Option<ControllerAddr>> {
        self.controller.clone().map_or_else(of_environment, |place| Ok(Some(place)))
    }

    /// The URL of the controller.
    ///
    /// # Errors
    /// There is no operator's file.
    pub(crate) fn controller(&self) -> anyhow::Result<String> {
        match self.named()? {
            Some(controller) => Ok(controller.to_string()),
            None => Ok(self.operator()?.controller),
        }
    }

    /// Writes a file for another operator, who may change all documents or those of one provider. Its controller URL
    /// is the named one, else the controller's public name, else the one in the own file.
    ///
    /// # Errors
    /// The controller refuses, or the file cannot be written.
    pub(crate) async fn make_operator(
        &self,
        name: &Name,
        provider: Option<&Name>,
        life: std::time::Duration,
        path: &Path,
    ) -> anyhow::Result<String> {
        anyhow::ensure!(!path.exists(), "{} already exists; name another file", path.display());
        let key = KeyPair::generate()?;
        let request = BASE64.encode(CertificateParams::default().serialize_request(&key)?.der());
        let asked =
            serde_json::json!({ "name": name, "provider": provider, "request": request, "life": life.as_secs() });
        let answer = self.send_request(Method::POST, "/v1/operators", asked.to_string().into_bytes()).await?;
        let trust = answer.trust.clone();
        let issued = answer.or_refused()?;
        let text = |key: &str| issued[key].as_str().unwrap_or_default().to_owned();
        let (authorities, certificate) = (text("authorities"), text("certificate"));
        let is_named = self.named()?.is_some();
        let public = issued["controller"].as_str().filter(|_| !is_named);
        let controller = public.map_or_else(|| self.controller(), |public| Ok(public.to_owned()))?;
        let key = key.serialize_pem();
        Operator { controller: controller.clone(), authorities, certificate, key, trust }.write(path)?;
        Ok(controller)
    }

    /// Sends one request.
    ///
    /// # Errors
    /// There is no operator's file, or the controller is unreachable.
    pub(crate) async fn send_request(&self, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<Answer> {
        let operator = self.operator()?;
        let of_file = || operator.controller.parse().map_err(anyhow::Error::msg);
        let place: ControllerAddr = self.named()?.map_or_else(of_file, Ok)?;
        let own = CertifiedKey::from_pem(operator.certificate.as_bytes(), operator.key.as_bytes())?;
        let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs().cast_signed();
        anyhow::ensure!(
            own.leaf_not_after().is_none_or(|end| end > now),
            "the certificate in {} has expired; another operator can create such a file with `hermes operator create`, or restart \
             the controller, which writes its operator.json again",
            self.file.operator.display()
        );
        let known = ControllerPin::Authorities(operator.authorities.clone());
        let client = Client::connect(&place, &known, Some(&own)).await?;
        let answer = exchange(&client, method, path, body).await?;
        if !answer.trust.is_empty() && answer.trust != operator.trust {
            // The request itself has succeeded, and the user may lack the right to write the file. A failure is
            // therefore only a warning.
            let renewed = operator.renew(&client, &self.file.operator, &answer.trust).await;
            if let Err(error) = renewed {
                let file = self.file.operator.display();
                let _ = writeln!(std::io::stderr(), "{file} has not what the overlay trusts now: {error:#}");
            }
        }
        Ok(answer)
    }

    /// Sends one request. A response other than success becomes an error with the controller's reasons.
    ///
    /// # Errors
    /// The same as for [`Access::send_request`]; or the controller refuses.
    pub(crate) async fn get(&self, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<serde_json::Value> {
        self.send_request(method, path, body).await?.or_refused()
    }
}

/// It is unknown whether the change was made: the controller reports so, or the connection broke before its response.
#[derive(Debug)]
pub(crate) struct OutcomeUnknown(String);

impl std::fmt::Display for OutcomeUnknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OutcomeUnknown {}

/// Sends one request over an open connection.
async fn exchange(client: &Client, method: Method, path: &str, body: Vec<u8>) -> anyhow::Result<Answer> {
    let may_change = method != Method::GET && !path.contains("dry-run=true");
    let broken = |error: anyhow::Error| match may_change {
        true => OutcomeUnknown(format!(
            "outcome unknown: {error:#}. The change may have been made; read the documents again before you repeat it"
        ))
        .into(),
        false => error,
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", "application/json")
        .body(hermes_controller::client::body(Full::new(body.into())))?;
    let response = client.request(request).await.map_err(|error| match error {
        ClientError::Broken { .. } => broken(error.into()),
        error => error.into(),
    })?;
    let status = response.status();
    let trust = response.headers().get(TRUST).and_then(|mark| mark.to_str().ok()).unwrap_or_default().to_owned();
    let body = Limited::new(response.into_body(), LARGEST).collect().await;
    let body = body
        .map_err(|error| broken(anyhow::anyhow!("the response of the controller was interrupted: {error}")))?
        .to_bytes();
    let body = if body.is_empty() {
        serde_json::Value::Null
    } else {
        serde_json::from_slice(&body).map_err(|error| broken(error.into()))?
    };
    Ok(Answer { status, body, trust })
}

impl Answer {
    /// Returns the body of a success. Any other response becomes an error with the controller's reasons.
    ///
    /// # Errors
    /// The controller refuses.
    pub(crate) fn or_refused(self) -> anyhow::Result<serde_json::Value> {
        self.or_refused_at(|_| String::new())
    }

    /// The same as [`or_refused`](Self::or_refused), with each problem's position in the request.
    ///
    /// # Errors
    /// The controller refuses.
    pub(crate) fn or_refused_at(
        self,
        place: impl Fn(&serde_json::Value) -> String,
    ) -> anyhow::Result<serde_json::Value> {
        let Self { status, body, .. } = self;
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
            let message = problem["message"].as_str().unwrap_or_default();
            said.push_str(&format!("\n  {}{document}{path}{message}", place(problem)));
        }
        if status == http::StatusCode::GATEWAY_TIMEOUT {
            return Err(OutcomeUnknown(said).into());
        }
        anyhow::bail!(said)
    }
}

/// Runs the future of a command that sends requests to a controller.
pub(crate) fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}
