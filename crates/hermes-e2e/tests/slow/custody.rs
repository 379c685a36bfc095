//! Custody, hop by hop, over links that are never all up at one instant.
mod alternating_links;
mod bad_links;
mod clients;
mod eight_links;
mod kills;

use hermes_testkit::binary::hermes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use hermes_testkit::{
    Result,
    link::Conditions,
    origin::Origin,
    unstable::{Chain, HopSettings},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// A chain of nodes of this build.
async fn chain(links: usize, protocol: &'static str, conditions: impl Fn(usize) -> Conditions) -> Chain {
    Chain::start(hermes().as_ref(), links, HopSettings::custody(protocol), conditions).await.unwrap()
}

/// An origin that counts the requests that it gets, one a connection, and answers each with these bytes after so long. Of
/// a request it reads the head.
fn counting(
    requests: &Arc<AtomicUsize>,
    after: Duration,
    answer: Vec<u8>,
) -> impl FnOnce(TcpListener) -> Result<Origin> + use<> {
    let (requests, answer) = (requests.clone(), Arc::<[u8]>::from(answer));
    move |listener| {
        let serve = move |mut stream: TcpStream| {
            let (requests, answer) = (requests.clone(), answer.clone());
            async move {
                let mut head = Vec::new();
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    let Ok(1..) = stream.read_buf(&mut head).await else { return };
                }
                requests.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(after).await;
                let _ = stream.write_all(&answer).await;
            }
        };
        Origin::accepting(listener, serve)
    }
}
