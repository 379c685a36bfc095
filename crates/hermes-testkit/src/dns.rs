//! A small DNS server with the answers of a test, which records the queries.
//!
//! In: an address to bind (port 53, for programs that read `resolv.conf`) and the answers. Out: a running server.
//! Supports UDP and TCP, with one question per message and no name compression in responses: enough for a stub
//! resolver. Forwards nothing, so that no query leaves the machine.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    task::JoinSet,
};

use crate::{Error, Result, origin::listen};

/// Record types of RFC 1035 and RFC 3596.
const A: u16 = 1;
const CNAME: u16 = 5;
const AAAA: u16 = 28;
/// Response, authoritative, recursion available; the RCODE is added.
const FLAGS: u16 = 0x8480;
const NAME_ERROR: u16 = 3;
/// Maximum size of a UDP message without EDNS.
const ROOM: usize = 512;

/// A record of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The TTL in seconds.
    pub ttl: u32,
    /// The data.
    pub data: Data,
}

/// The data of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// An address; its family selects A or AAAA.
    Address(IpAddr),
    /// A CNAME.
    Alias(String),
    /// Queries for one family get no response at all.
    Silence {
        /// AAAA queries get no response; otherwise A queries.
        v6: bool,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Dns {
    requests: Asked,
    _task: JoinSet<()>,
}

/// The queries, and whether they came over TCP.
type Asked = Arc<Mutex<Vec<(String, bool)>>>;

impl Record {
    /// An address record with a TTL of `ttl` seconds.
    pub fn address(ttl: u32, address: impl Into<IpAddr>) -> Self {
        Self { ttl, data: Data::Address(address.into()) }
    }
}

impl Dns {
    /// Serves `answers`: all records of a name (in lower case, without the last dot), or `None` if it does not exist.
    /// The server sends the records of the queried type; aliases match every query.
    ///
    /// # Errors
    /// The address cannot be bound: port 53 needs root.
    pub async fn serve<F>(bind: SocketAddr, answers: F) -> Result<Self>
    where
        F: Fn(&str) -> Option<Vec<Record>> + Send + Sync + 'static,
    {
        let socket = UdpSocket::bind(bind).await.map_err(Error::io(format!("binding a DNS server to {bind}")))?;
        let at = socket.local_addr().map_err(Error::io("address of a DNS server"))?;
        let listener = listen(at)?;
        let requests = Asked::default();
        let log = Arc::clone(&requests);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let answer = |message: &[u8], by_tcp| {
                let question = Question::parse(message)?;
                log.lock().unwrap_or_else(PoisonError::into_inner).push((question.name.clone(), by_tcp));
                let records = answers(&question.name);
                let is_silent = |record: &Record| match record.data {
                    Data::Silence { v6 } => question.kind == if v6 { AAAA } else { A },
                    Data::Address(_) | Data::Alias(_) => false,
                };
                if records.iter().flatten().any(is_silent) {
                    return None;
                }
                Some(question.answer(records))
            };
            let mut room = [0; ROOM];
            loop {
                tokio::select! {
                    received = socket.recv_from(&mut room) => {
                        let Ok((length, peer)) = received else { continue };
                        if let Some(message) = answer(&room[..length], false) {
                            // A response that cannot be sent is lost, and the client repeats its query.
                            let _ = socket.send_to(&message, peer).await;
                        }
                    }
                    accepted = listener.accept() => {
                        if let Ok((stream, _)) = accepted {
                            // A connection that fails gets no response.
                            let _ = by_tcp(stream, |message| answer(message, true)).await;
                        }
                    }
                }
            }
        });
        Ok(Self { requests, _task: task })
    }

    /// The number of queries for a name, of any family and transport.
    pub fn requests(&self, name: &str) -> usize {
        self.count(|requests, _| requests == name)
    }

    /// The number of queries for a name over TCP.
    pub fn asked_by_tcp(&self, name: &str) -> usize {
        self.count(|requests, by_tcp| requests == name && by_tcp)
    }

    fn count(&self, fits: impl Fn(&str, bool) -> bool) -> usize {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().filter(|(name, by_tcp)| fits(name, *by_tcp)).count()
    }
}

/// Serves one connection: each message has a length prefix (RFC 1035, section 4.2.2).
async fn by_tcp(mut stream: TcpStream, answer: impl Fn(&[u8]) -> Option<Vec<u8>>) -> io::Result<()> {
    while let Ok(length) = stream.read_u16().await {
        let mut message = vec![0; usize::from(length)];
        stream.read_exact(&mut message).await?;
        let Some(message) = answer(&message) else { return Ok(()) };
        let length = (message.len() as u16).to_be_bytes();
        stream.write_all(&[&length[..], &message].concat()).await?;
    }
    Ok(())
}

/// Writes a `resolv.conf` with one server. Returns the words of a wrapper command that replaces `/etc/resolv.conf` and
/// then executes a program. Needs root.
///
/// # Errors
/// The file cannot be written.
pub fn resolving_by(server: IpAddr, dir: &Path) -> Result<Vec<String>> {
    let file: PathBuf = dir.join("resolv.conf");
    let text = format!("nameserver {server}\noptions attempts:2 timeout:2\n");
    fs::write(&file, text).map_err(Error::io(format!("writing {}", file.display())))?;
    let script = format!("mount --bind {} /etc/resolv.conf && exec \"$@\"", file.display());
    Ok(["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec())
}

struct Question {
    id: [u8; 2],
    name: String,
    kind: u16,
    /// The raw question, to repeat it in the response.
    bytes: Vec<u8>,
}

impl Question {
    fn parse(message: &[u8]) -> Option<Self> {
        let id = [*message.first()?, *message.get(1)?];
        let mut labels = Vec::new();
        let mut at = 12;
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            labels.push(String::from_utf8_lossy(message.get(at..at + length)?).to_ascii_lowercase());
            at += length;
        }
        let kind = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
        Some(Self { id, name: labels.join("."), kind, bytes: message.get(12..at + 4)?.to_vec() })
    }

    fn answer(&self, records: Option<Vec<Record>>) -> Vec<u8> {
        let code = if records.is_some() { 0 } else { NAME_ERROR };
        let records: Vec<Record> = records.unwrap_or_default().into_iter().filter(|r| r.fits(self.kind)).collect();
        let mut out = self.id.to_vec();
        for field in [FLAGS | code, 1, records.len() as u16, 0, 0] {
            out.extend_from_slice(&field.to_be_bytes());
        }
        out.extend_from_slice(&self.bytes);
        // Records after an alias belong to the alias's target.
        let mut owner = self.name.clone();
        for record in &records {
            put_name(&mut out, &owner);
            record.put(&mut out);
            if let Data::Alias(name) = &record.data {
                owner.clone_from(name);
            }
        }
        out
    }
}

impl Record {
    fn fits(&self, kind: u16) -> bool {
        match self.data {
            Data::Address(IpAddr::V4(_)) => kind == A,
            Data::Address(IpAddr::V6(_)) => kind == AAAA,
            Data::Alias(_) => true,
            Data::Silence { .. } => false,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        let (kind, data) = match &self.data {
            Data::Address(IpAddr::V4(address)) => (A, Ipv4Addr::octets(address).to_vec()),
            Data::Address(IpAddr::V6(address)) => (AAAA, Ipv6Addr::octets(address).to_vec()),
            Data::Alias(name) => {
                let mut data = Vec::new();
                put_name(&mut data, name);
                (CNAME, data)
            }
            // The record matches no query.
            Data::Silence { .. } => return,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        // The class IN.
        out.extend_from_slice(&1u16.to_be_bytes());
        out.extend_from_slice(&self.ttl.to_be_bytes());
        out.extend_from_slice(&(data.len() as u16).to_be_bytes());
        out.extend_from_slice(&data);
    }
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    for label in name.split('.').filter(|label| !label.is_empty()) {
        out.push(label.len() as u8);
        out.extend_from_slice(label.as_bytes());
    }
    out.push(0);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_as_rfc_1035_has_it() {
        // ID 0x1234, recursion desired, one question: WEB.test IN A.
        let query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03WEB\x04test\x00\x00\x01\x00\x01";
        let question = Question::parse(query).unwrap();
        assert_eq!((question.name.as_str(), question.kind), ("web.test", A));
        let records = vec![Record::address(60, [11, 0, 0, 2]), Record::address(60, Ipv6Addr::LOCALHOST)];
        let wanted = b"\x12\x34\x84\x80\x00\x01\x00\x01\x00\x00\x00\x00\x03WEB\x04test\x00\x00\x01\x00\x01\
            \x03web\x04test\x00\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x0b\x00\x00\x02";
        assert_eq!(question.answer(Some(records)), wanted);
        assert_eq!(question.answer(None)[3] & 0xf, 3);
    }
}
