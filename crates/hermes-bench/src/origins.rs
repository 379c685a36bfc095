//! The origins' process: all servers at the end of a path, on one thread.
//!
//! In: the address to bind, the payload's length, the certificate. Out: one line of JSON with the addresses; the
//! process then serves until its standard input ends.

use std::{collections::BTreeMap, fs, io::Read as _, net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use clap::Args;
use hermes_testkit::{
    ca::Identity,
    limits,
    load::exchange::payload,
    origin::{Origin, http, listen, stream},
    tls,
};

/// The arguments of the origins' process.
#[derive(Debug, Args)]
pub(crate) struct OriginArgs {
    /// Address to bind; the ports are any that are free.
    #[arg(long)]
    bind: std::net::IpAddr,
    /// Length of the fixed payload.
    #[arg(long)]
    length: usize,
    /// Certificate (PEM) of the TLS origin.
    #[arg(long)]
    cert: PathBuf,
    /// The certificate's private key (PEM).
    #[arg(long)]
    key: PathBuf,
}

/// Serves until standard input ends.
pub(crate) fn serve(args: &OriginArgs) -> Result<()> {
    limits::raise_open_files()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let origins = start(args)?;
        let addresses: BTreeMap<_, _> = origins.iter().map(|(name, origin)| (*name, origin.address())).collect();
        println!("{}", serde_json::to_string(&addresses)?);
        let (ended, until) = tokio::sync::oneshot::channel::<()>();
        // A blocking thread reads standard input, since not every kind of pipe supports readiness events.
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let _ = ended.send(());
        });
        let _ = until.await;
        Ok(())
    })
}

fn start(args: &OriginArgs) -> Result<Vec<(&'static str, Origin)>> {
    let any = SocketAddr::new(args.bind, 0);
    let body = Bytes::from(payload(args.length));
    let read = |path: &PathBuf| fs::read_to_string(path).with_context(|| format!("reading {}", path.display()));
    let identity = Identity { cert_pem: read(&args.cert)?, key_pem: read(&args.key)?, ca_pem: String::new() };
    let secure = tls::server(&identity, None, &["http/1.1"])?;
    Ok(vec![
        ("http", http::serve(listen(any)?, http::Version::H1, body.clone())?),
        ("http2", http::serve(listen(any)?, http::Version::H2, body.clone())?),
        ("secure", http::serve_tls(listen(any)?, secure, body)?),
        ("tcp", stream::echo(listen(any)?)?),
        ("udp", Origin::udp_echo(any)?),
    ])
}
