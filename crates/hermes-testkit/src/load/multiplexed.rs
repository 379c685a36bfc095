//! HTTP/2 with several requests at a time on each connection.
//!
//! In: connections, streams on each, and the duration. Out: requests completed within the measured time, and their
//! latency. Closed loop: each response is followed by the next request at once.

use std::{rc::Rc, time::Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;
use tokio::{net::TcpStream, task::JoinSet};

use super::{
    Load, Outcome,
    exchange::{RESPONSE_TIMEOUT, payload},
    keepalive::Span,
    outcome::{Failure, Recorder},
};
use crate::Result;

/// Windows that never make a proxy wait for us.
const WINDOW: u32 = 4 << 20;

pub(super) async fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Multiplexed { address, authority, length, connections, streams, warmup, window } = load else {
        unreachable!("dispatched by kind");
    };
    let uri = format!("http://{authority}/");
    let payload = Rc::new(payload(*length));
    let span = Span::after(*warmup, *window);
    let mut tasks = JoinSet::new();
    for _ in 0..*connections {
        let (address, streams, span) = (*address, *streams, span.clone());
        let (uri, payload) = (uri.clone(), Rc::clone(&payload));
        tasks.spawn_local(async move { connection(address, streams, &uri, payload, span).await });
    }
    Ok(span.measure(tasks, watch).await)
}

async fn connection(
    address: std::net::SocketAddr,
    streams: usize,
    uri: &str,
    payload: Rc<Vec<u8>>,
    span: Span,
) -> Recorder {
    let mut recorder = Recorder::default();
    let (sender, driver) = match handshake(address).await {
        Ok(opened) => opened,
        Err(failure) => {
            recorder.failure(&failure);
            return recorder;
        }
    };
    let mut driver = JoinSet::from_iter([driver]);
    let mut tasks = JoinSet::new();
    for _ in 0..streams {
        tasks.spawn_local(stream(sender.clone(), uri.to_owned(), Rc::clone(&payload), span.clone()));
    }
    drop(sender);
    while let Some(finished) = tasks.join_next().await {
        match finished {
            Ok(finished) => recorder.absorb(finished),
            Err(_) => recorder.failure(&Failure::Malformed("a stream's task broke")),
        }
    }
    driver.abort_all();
    recorder
}

pub(super) type Driver = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) async fn handshake(
    address: std::net::SocketAddr,
) -> std::result::Result<(SendRequest<Bytes>, Driver), Failure> {
    let socket = TcpStream::connect(address).await.map_err(|e| Failure::Connect(e.kind()))?;
    socket.set_nodelay(true)?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW).enable_push(false);
    let (sender, connection) = builder.handshake(socket).await.map_err(|e| h2_failure(&e))?;
    // A broken connection shows in each of its streams.
    Ok((sender, Box::pin(async move { drop(connection.await) })))
}

async fn stream(sender: SendRequest<Bytes>, uri: String, payload: Rc<Vec<u8>>, span: Span) -> Recorder {
    let mut recorder = Recorder::default();
    let talk = converse(sender, &uri, &payload, &span, &mut recorder);
    match tokio::time::timeout_at((span.end + RESPONSE_TIMEOUT).into(), talk).await {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => recorder.failure(&failure),
        Err(_) => recorder.failure(&Failure::Timeout),
    }
    recorder
}

async fn converse(
    mut sender: SendRequest<Bytes>,
    uri: &str,
    payload: &[u8],
    span: &Span,
    recorder: &mut Recorder,
) -> std::result::Result<(), Failure> {
    let request = Request::get(uri).header("user-agent", "hermes-bench").header("accept", "*/*").body(());
    let request = request.map_err(|_| Failure::Malformed("the request's URI"))?;
    let mut requests = Instant::now();
    while requests < span.end {
        sender = sender.ready().await.map_err(|e| h2_failure(&e))?;
        get(&mut sender, request.clone(), payload).await?;
        let answered = Instant::now();
        if span.measuring() {
            recorder.success(answered - requests);
        }
        requests = answered;
    }
    Ok(())
}

async fn get(
    sender: &mut SendRequest<Bytes>,
    request: Request<()>,
    payload: &[u8],
) -> std::result::Result<(), Failure> {
    let (response, _) = sender.send_request(request, true).map_err(|e| h2_failure(&e))?;
    let response = response.await.map_err(|e| h2_failure(&e))?;
    let status = response.status().as_u16();
    if status != 200 {
        return Err(Failure::Status(status));
    }
    let mut body = response.into_body();
    let mut rest = payload;
    while let Some(data) = body.data().await {
        let data = data.map_err(|e| h2_failure(&e))?;
        rest = rest.strip_prefix(data.as_ref()).ok_or(Failure::WrongBytes)?;
        body.flow_control().release_capacity(data.len()).map_err(|e| h2_failure(&e))?;
    }
    if rest.is_empty() { Ok(()) } else { Err(Failure::Closed) }
}

pub(super) fn h2_failure(error: &h2::Error) -> Failure {
    Failure::H2(error.to_string())
}
