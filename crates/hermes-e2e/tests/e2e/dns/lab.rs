//! A node that answers DNS before a server of the test's, and a client that writes each message itself.

use hermes_testkit::binary::hermes;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use hermes_testkit::{
    origin::{self, services::Services},
    overlay::{Node, Overlay},
    raw_http1::in_time,
};
use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RecordType},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    task::JoinSet,
};

pub(crate) const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

pub(crate) const NODE: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- name: names
  bind: '127.0.0.1:0'
  protocol: dns
  names: [VIDEO, ECHO, '*.corp']
  addresses: [198.18.0.0/16, 'fd00:6865:726d::/64']
  forward: [$FORWARD]
- {name: socks, bind: '127.0.0.1:0', protocol: socks5}
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: video, match: {kind: tcp, authority: 'VIDEO:80'}, terminate: {tcp: '$WEB'}}
- {name: video-by-http, match: {kind: http, authority: VIDEO}, upstream: web}
- {name: echo, match: {kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

/// A node with DNS, SOCKS and HTTP, and services behind it.
pub(crate) struct Lab {
    pub(crate) node: Node,
    pub(crate) services: Services,
    _overlay: Overlay,
}

impl Lab {
    pub(crate) async fn new() -> Self {
        // Nobody is there.
        Self::with("", &["127.0.0.1:1".parse().unwrap()]).await
    }

    pub(crate) async fn with(limits: &str, servers: &[SocketAddr]) -> Self {
        let (overlay, services) = (overlay(), Services::start().unwrap());
        let forward: Vec<String> = servers.iter().map(|server| format!("'{server}'")).collect();
        let draft = overlay.node("node").document(NODE).with("LIMITS", limits).with("FORWARD", forward.join(", "));
        let node = services.fill(draft).start().await.unwrap();
        Self { node, services, _overlay: overlay }
    }

    pub(crate) fn dns(&self) -> SocketAddr {
        self.node.address("names")
    }

    /// The first address of a name.
    pub(crate) async fn address_of(&self, name: &str, kind: RecordType) -> IpAddr {
        let answer = by_udp(self.dns(), &question(name, kind)).await.unwrap();
        addresses(&answer).first().copied().unwrap_or_else(|| panic!("{name} {kind}: {answer}"))
    }
}

/// A question of a client that speaks no EDNS.
pub(crate) fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(Name::from_ascii(format!("{name}.")).unwrap(), kind));
    message
}

/// The same of one that takes so many bytes by UDP.
pub(crate) fn question_with_room(name: &str, kind: RecordType, room: u16) -> Message {
    let mut message = question(name, kind);
    let mut edns = Edns::new();
    edns.set_max_payload(room);
    message.set_edns(edns);
    message
}

pub(crate) fn addresses(answer: &Message) -> Vec<IpAddr> {
    answer.answers.iter().filter_map(|record| record.data.ip_addr()).collect()
}

/// Asks by UDP, as it is.
pub(crate) async fn ask(dns: SocketAddr, message: &[u8]) -> io::Result<Vec<u8>> {
    let socket = UdpSocket::bind(ANY).await?;
    socket.connect(dns).await?;
    socket.send(message).await?;
    let mut room = vec![0; 65_536];
    let length = in_time("waiting for an answer", socket.recv(&mut room)).await?;
    room.truncate(length);
    Ok(room)
}

pub(crate) async fn by_udp(dns: SocketAddr, question: &Message) -> io::Result<Message> {
    read(question, &ask(dns, &question.to_vec().unwrap()).await?)
}

pub(crate) async fn by_tcp(dns: SocketAddr, question: &Message) -> io::Result<Message> {
    let mut stream = TcpStream::connect(dns).await?;
    send(&mut stream, &question.to_vec().unwrap()).await?;
    read(question, &receive(&mut stream).await?)
}

fn read(question: &Message, answer: &[u8]) -> io::Result<Message> {
    let answer = Message::from_vec(answer).map_err(io::Error::other)?;
    assert_eq!((answer.metadata.id, answer.metadata.message_type), (question.metadata.id, MessageType::Response));
    assert_eq!(answer.queries, question.queries);
    Ok(answer)
}

pub(crate) async fn send(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    stream.write_all(&[&(message.len() as u16).to_be_bytes()[..], message].concat()).await
}

pub(crate) async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    in_time("waiting for an answer", async {
        let mut message = vec![0; usize::from(stream.read_u16().await?)];
        stream.read_exact(&mut message).await?;
        Ok(message)
    })
    .await
}

/// A question that a server got.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) message: Vec<u8>,
    pub(crate) source: SocketAddr,
    pub(crate) by_tcp: bool,
}

impl Asked {
    pub(crate) fn id(&self) -> u16 {
        u16::from_be_bytes([self.message[0], self.message[1]])
    }

    /// An answer to it, with this code and nothing in it.
    pub(crate) fn answer(&self, code: ResponseCode) -> Message {
        let requests = Message::from_vec(&self.message).unwrap();
        let mut answer = Message::response(requests.metadata.id, OpCode::Query);
        answer.metadata.response_code = code;
        answer.queries = requests.queries;
        answer
    }
}

/// A server of the test's, by UDP and TCP.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Asked>>>,
    _tasks: JoinSet<()>,
}

impl Server {
    /// Says whatever `answer` makes of a question, one message after the other.
    pub(crate) async fn start(answer: impl Fn(&Asked) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::at(ANY, answer).await
    }

    pub(crate) async fn at(bind: SocketAddr, answer: impl Fn(&Asked) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        let (tcp, udp) = origin::twins(bind).unwrap();
        let (address, udp) = (tcp.local_addr().unwrap(), UdpSocket::from_std(udp).unwrap());
        let (requests, answer) = (Arc::<Mutex<Vec<Asked>>>::default(), Arc::new(answer));
        let mut tasks = JoinSet::new();
        let (log, say) = (requests.clone(), answer.clone());
        tasks.spawn(async move {
            let mut room = vec![0; 65_536];
            while let Ok((length, source)) = udp.recv_from(&mut room).await {
                let question = Asked { message: room[..length].to_vec(), source, by_tcp: false };
                log.lock().unwrap().push(question.clone());
                for message in say(&question) {
                    let _ = udp.send_to(&message, source).await;
                }
            }
        });
        let log = requests.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut stream, source)) = tcp.accept().await {
                let (log, answer) = (log.clone(), answer.clone());
                connections.spawn(async move {
                    while let Ok(message) = receive(&mut stream).await {
                        let question = Asked { message, source, by_tcp: true };
                        log.lock().unwrap().push(question.clone());
                        for message in answer(&question) {
                            let _ = send(&mut stream, &message).await;
                        }
                    }
                });
            }
        });
        Self { address, requests, _tasks: tasks }
    }

    pub(crate) fn requests(&self) -> Vec<Asked> {
        self.requests.lock().unwrap().clone()
    }
}
