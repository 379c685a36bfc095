//! An operator's client: the REST API of one controller, over a persistent connection.
//!
//! In: the operator's file that this controller wrote, and requests. Out: status and JSON; or an error, after which
//! the outcome of the request is unknown.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use http::{Method, Request};
use rustls::ClientConfig;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{ca::Identity, multiplex::Multiplex, tls};

/// The timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// An operator at one controller.
pub struct OperatorClient {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
    client: Option<Multiplex>,
}

impl OperatorClient {
    /// The operator that this file names (`operator.json` in a controller's data directory).
    ///
    /// # Panics
    /// The file is not an operator's file.
    pub fn new(file: &Path) -> Self {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let text = |key: &str| file[key].as_str().unwrap().to_owned();
        let address = text("controller").trim_start_matches("https://").parse().unwrap();
        let own = Identity { cert_pem: text("certificate"), key_pem: text("key"), ca_pem: text("authorities") };
        Self { address, tls: tls::client_of_any_name(&own.ca_pem, &own, &["h2"]).unwrap(), client: None }
    }

    /// Sends one request and returns its status and its JSON.
    ///
    /// # Errors
    /// The response timed out.
    pub async fn ask(&mut self, method: Method, path: &str, text: &str) -> Result<(u16, Value), String> {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.requests(method, path, text)).await {
            Ok(Ok(answer)) => Ok(answer),
            failed => {
                self.client = None;
                Err(failed.map_or_else(|late| late.to_string(), |failed| failed.map(drop).unwrap_err().to_string()))
            }
        }
    }

    async fn requests(&mut self, method: Method, path: &str, text: &str) -> std::io::Result<(u16, Value)> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => self.connect().await?,
        };
        let request = Request::builder().method(method).uri(format!("https://{}{path}", self.address));
        let request = request.header("content-type", "application/json").body(()).unwrap();
        let answer = client.ask(request, text.as_bytes()).await?;
        self.client = Some(client);
        Ok((answer.status, serde_json::from_slice(&answer.data)?))
    }

    async fn connect(&self) -> std::io::Result<Multiplex> {
        let tcp = TcpStream::connect(self.address).await?;
        tcp.set_nodelay(true)?;
        let name = self.address.ip().into();
        Multiplex::over(TlsConnector::from(self.tls.clone()).connect(name, tcp).await?).await
    }
}
