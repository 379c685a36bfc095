//! Clients that stay: a thousand connections with nothing to say.
//!
//! In: an exchange and how many clients. Out: after each has had one answer, a line `ready` on standard output;
//! then nothing until standard input ends.

use std::io::{Read as _, Write as _};

use super::{
    Exchange, Outcome,
    exchange::{Client, IdleClient},
    outcome::Recorder,
};
use crate::{Error, Result};

pub(super) async fn run(exchange: &Exchange, clients: usize) -> Result<Outcome> {
    let client = Client::new(exchange)?;
    let mut kept: Vec<IdleClient> = Vec::with_capacity(clients);
    let mut recorder = Recorder::default();
    for number in 0..clients {
        let prepared = client.prepare().await?;
        let began = std::time::Instant::now();
        match client.exchange(prepared, number as u64).await {
            Ok(connection) => {
                kept.push(connection);
                recorder.success(began.elapsed());
            }
            Err(failure) => recorder.failure(&failure),
        }
    }
    println!("ready");
    std::io::stdout().flush().map_err(Error::io("announcing that all clients are idle"))?;
    // Blocking is right here: idle clients have nothing to do.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(kept);
    Ok(recorder.outcome())
}
