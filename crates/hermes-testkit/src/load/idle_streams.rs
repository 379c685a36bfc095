//! Requests over HTTP/2 whose responses have begun and do not go on: many streams on few connections.
//!
//! In: how many connections, and how many requests on each. Out: after each response has begun, a line `ready` on standard output;
//! then nothing until standard input ends. A response that ends before is a failure.

use std::io::{Read as _, Write as _};
use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::client::SendRequest;
use http::Request;
use tokio::task::JoinSet;

use super::{
    Load, Outcome,
    multiplexed::{Driver, h2_failure, handshake},
    outcome::{Failure, Recorder},
};
use crate::{Error, Result};

pub(super) async fn run(load: &Load) -> Result<Outcome> {
    let Load::IdleStreams { address, authority, path, connections, streams } = load else {
        unreachable!("dispatched by kind");
    };
    let uri: Rc<str> = format!("http://{authority}{path}").into();
    let (mut recorder, mut drivers, mut held) = (Recorder::default(), JoinSet::new(), Vec::new());
    for _ in 0..*connections {
        let (sender, driver): (SendRequest<Bytes>, Driver) = match handshake(*address).await {
            Ok(opened) => opened,
            Err(failure) => {
                recorder.failure(&failure);
                continue;
            }
        };
        drivers.spawn_local(driver);
        let mut beginning = JoinSet::new();
        for _ in 0..*streams {
            beginning.spawn_local(begin(sender.clone(), uri.clone()));
        }
        while let Some(begun) = beginning.join_next().await {
            match begun.unwrap_or(Err(Failure::Malformed("a stream's task broke"))) {
                Ok((body, took)) => {
                    recorder.success(took);
                    held.push(body);
                }
                Err(failure) => recorder.failure(&failure),
            }
        }
    }
    println!("ready");
    std::io::stdout().flush().map_err(Error::io("announcing that all streams are idle"))?;
    // The connections go on meanwhile: the peer may ask for signs of life.
    let read = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let _ = read.await;
    for mut body in held {
        loop {
            match body.data().now_or_never() {
                // The response is still open.
                None => break,
                Some(Some(Ok(_))) => {}
                Some(Some(Err(error))) => {
                    recorder.failure(&h2_failure(&error));
                    break;
                }
                Some(None) => {
                    recorder.failure(&Failure::Malformed("a response ended"));
                    break;
                }
            }
        }
    }
    drivers.abort_all();
    Ok(recorder.outcome())
}

/// Sends a request, and returns its body once the response has begun, with the time that it took.
async fn begin(
    sender: SendRequest<Bytes>,
    uri: Rc<str>,
) -> std::result::Result<(h2::RecvStream, std::time::Duration), Failure> {
    let begun = Instant::now();
    let mut sender = sender.ready().await.map_err(|e| h2_failure(&e))?;
    let request = Request::get(&*uri).body(()).map_err(|_| Failure::Malformed("the request's URI"))?;
    let (response, _) = sender.send_request(request, true).map_err(|e| h2_failure(&e))?;
    let response = response.await.map_err(|e| h2_failure(&e))?;
    if response.status() != http::StatusCode::OK {
        return Err(Failure::Status(response.status().as_u16()));
    }
    Ok((response.into_body(), begun.elapsed()))
}
