//! An operator's program: the REST API of one controller, over a connection that is kept while it lasts.
//!
//! In: the operator's file that this controller wrote, and requests. Out: status and JSON; or that there is no answer, in which
//! case nobody knows what became of the request.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hermes_controller::client::{Client, ControllerAddr, ControllerPin, body};
use hermes_net::tls::CertifiedKey;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use serde_json::Value;

/// Who has heard nothing by then gives up.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Desk {
    place: ControllerAddr,
    authorities: String,
    own: CertifiedKey,
    client: Option<Client>,
}

impl Desk {
    pub(crate) fn new(file: &Path) -> Self {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let text = |key: &str| file[key].as_str().unwrap().to_owned();
        let own = CertifiedKey::from_pem(text("certificate").as_bytes(), text("key").as_bytes()).unwrap();
        Self { place: text("controller").parse().unwrap(), authorities: text("authorities"), own, client: None }
    }

    pub(crate) async fn ask(&mut self, method: Method, path: &str, text: &str) -> Result<(u16, Value), String> {
        match tokio::time::timeout(PATIENCE, self.asked(method, path, text)).await {
            Ok(Ok(answer)) => Ok(answer),
            failed => {
                self.client = None;
                Err(failed.map_or_else(|late| late.to_string(), |failed| failed.map(drop).unwrap_err()))
            }
        }
    }

    async fn asked(&mut self, method: Method, path: &str, text: &str) -> Result<(u16, Value), String> {
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                let known = ControllerPin::Authorities(self.authorities.clone());
                Client::connect(&self.place, &known, Some(&self.own)).await.map_err(|error| error.to_string())?
            }
        };
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.body(body(Full::new(Bytes::copy_from_slice(text.as_bytes())))).unwrap();
        let response = client.request(request).await.map_err(|error| error.to_string())?;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        self.client = Some(client);
        Ok((status, serde_json::from_slice(&bytes).map_err(|error| error.to_string())?))
    }
}
