//! Custody, hop by hop, over links that are never all up at one instant.
mod clients;
mod eight;
mod hard;
mod kills;
mod turns;

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
    unstable::{Between, Chain},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// A chain of nodes of this build.
async fn chain(links: usize, protocol: &'static str, conditions: impl Fn(usize) -> Conditions) -> Chain {
    Chain::start(hermes().as_ref(), links, Between::custody(protocol), conditions).await.unwrap()
}

/// An origin that counts the requests that it gets, one a connection, and answers each with these bytes after so long. Of
/// a request it reads the head.
fn counting(
    asked: &Arc<AtomicUsize>,
    after: Duration,
    answer: Vec<u8>,
) -> impl FnOnce(TcpListener) -> Result<Origin> + use<> {
    let (asked, answer) = (asked.clone(), Arc::<[u8]>::from(answer));
    move |listener| {
        let serve = move |mut stream: TcpStream| {
            let (asked, answer) = (asked.clone(), answer.clone());
            async move {
                let mut head = Vec::new();
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    let Ok(1..) = stream.read_buf(&mut head).await else { return };
                }
                asked.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(after).await;
                let _ = stream.write_all(&answer).await;
            }
        };
        Origin::accepting(listener, serve)
    }
}
