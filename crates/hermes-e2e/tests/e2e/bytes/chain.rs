//! Chains of nodes for transfers: every hop of every kind, every listener at the near end, origins at the far end.
//!
//! In: the kinds of hop from node to node, in the clear or with mutual TLS. Out: the listeners of the first node. Each
//! node routes by kind alone, except that the first may offer several hops side by side, chosen by name.

use hermes_testkit::binary::hermes;
use std::net::SocketAddr;

use bytes::Bytes;
use hermes_testkit::{
    Result,
    ca::{Identity, Subject},
    flow::FlowMode,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    origin::{self, Origin},
    overlay::{Node, Overlay},
};

/// How a node passes sessions on to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hop {
    /// HTTP/1.1: requests, CONNECT, Upgrade.
    H1,
    /// HTTP/2: requests, CONNECT, extended CONNECT.
    H2,
    /// Bare TCP (requests over it too) and bare UDP.
    Bare,
    /// As `H1`, but tunnels by POST.
    PostH1,
    /// As `H2`, but tunnels by POST.
    PostH2,
    /// HTTP/3: requests, CONNECT, extended CONNECT.
    H3,
    /// As `H3`, but tunnels by POST.
    PostH3,
}

impl Hop {
    const ALL: [Self; 7] = [Hop::H1, Hop::H2, Hop::Bare, Hop::PostH1, Hop::PostH2, Hop::H3, Hop::PostH3];

    /// All that there are: HTTP/3 is never in the clear.
    pub(crate) fn all(secure: bool) -> &'static [Self] {
        if secure { &Self::ALL } else { &Self::ALL[..5] }
    }

    /// Those that differ for requests.
    pub(crate) fn plain(secure: bool) -> &'static [Self] {
        if secure { &[Hop::H1, Hop::H2, Hop::Bare, Hop::H3] } else { &[Hop::H1, Hop::H2, Hop::Bare] }
    }

    /// The name that chooses it at the first node.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Hop::H1 => "H1",
            Hop::H2 => "H2",
            Hop::Bare => "BARE",
            Hop::PostH1 => "POST-H1",
            Hop::PostH2 => "POST-H2",
            Hop::H3 => "H3",
            Hop::PostH3 => "POST-H3",
        }
    }

    fn tcp_upstream(self) -> &'static str {
        match self {
            Hop::H1 => "h1",
            Hop::H2 => "h2",
            Hop::Bare => "bare",
            Hop::PostH1 => "post-h1",
            Hop::PostH2 => "post-h2",
            Hop::H3 => "h3",
            Hop::PostH3 => "post-h3",
        }
    }

    fn http_upstream(self) -> &'static str {
        match self {
            Hop::H1 | Hop::PostH1 => "h1",
            Hop::H2 | Hop::PostH2 => "h2",
            Hop::H3 | Hop::PostH3 => "h3",
            Hop::Bare => "bare-http",
        }
    }
}

/// A running chain.
pub(crate) struct Chain {
    overlay: Overlay,
    /// The near end last.
    nodes: Vec<Node>,
    origins: [Origin; 4],
    user: Option<Identity>,
}

/// What every node has. `$PEERS` says who is believed, `$MORE` stands for further listeners.
const LISTENERS: &str = "
limits: {datagram-queue: 16MiB}
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, $PEERS $HTTP3}
- {name: bare, bind: '127.0.0.1:0', protocol: tcp, authority: 'ECHO:7' $TLS}
- {name: bare-http, bind: '127.0.0.1:0', protocol: tcp, authority: 'WEB:80' $TLS}
- {name: bare-udp, bind: '127.0.0.1:0', protocol: udp, authority: 'ECHO:7'}
$MORE";

impl Chain {
    /// What nodes and kernel say of datagrams that were dropped, for a failure's message.
    pub(crate) async fn dropped(&self) -> String {
        let output = std::fs::read_to_string("/proc/net/snmp").unwrap_or_default();
        let mut counters: Vec<String> =
            output.lines().filter(|line| line.starts_with("Udp:")).map(str::to_owned).collect();
        for node in &self.nodes {
            let (_, metrics) = node.ask("/metrics").await.unwrap_or_default();
            counters
                .extend(metrics.lines().filter(|line| line.starts_with("hermes_datagrams_dropped")).map(str::to_owned));
        }
        counters.join("\n")
    }

    /// Starts `hops.len() + 1` nodes, from the far one on; `hops` is in the order of the way. With `last` the far
    /// node speaks HTTP/2 to the origin.
    pub(crate) async fn start(hops: &[Hop], secure: bool, h2_origin: bool) -> Result<Self> {
        let overlay = Overlay::new(hermes())?;
        let any = "127.0.0.1:0".parse().expect("an address");
        let origins = [
            origin::stream::echo(origin::listen(any)?)?,
            Origin::udp_echo(any)?,
            origin::http::serve(origin::listen(any)?, origin::http::Version::H1, Bytes::new())?,
            origin::http::serve(origin::listen(any)?, origin::http::Version::H2, Bytes::new())?,
        ];
        let user =
            secure.then(|| overlay.authority().issue(&Subject::node("client").with_user("alice"))).transpose()?;
        let mut chain = Self { overlay, nodes: Vec::new(), origins, user };
        let far = chain.far_document(h2_origin);
        chain.add("far", &far, "", secure).await?;
        for (place, hop) in hops.iter().enumerate().rev() {
            let next = chain.middle_document(&[(None, *hop)], secure);
            chain.add(&format!("node-{place}"), &next, "", secure).await?;
        }
        Ok(chain)
    }

    /// Two nodes with every hop between them, each by its name.
    pub(crate) async fn of_all_hops(secure: bool) -> Result<Self> {
        let mut chain = Self::start(&[], secure, false).await?;
        let hops: Vec<_> = Hop::all(secure).iter().map(|hop| (Some(hop.name()), *hop)).collect();
        let near = chain.middle_document(&hops, secure);
        // A bare connection names nothing: its listener does.
        let listener = |(_, hop): &(_, Hop)| {
            let name = hop.name();
            format!(
                "- {{name: bare-{name}, bind: '127.0.0.1:0', protocol: tcp, authority: '{name}:7' $TLS}}\n\
                 - {{name: bare-udp-{name}, bind: '127.0.0.1:0', protocol: udp, authority: '{name}:7'}}\n"
            )
        };
        let listeners: String = hops.iter().map(listener).collect();
        chain.add("near", &near, &listeners, secure).await?;
        Ok(chain)
    }

    async fn add(&mut self, name: &str, document: &str, listeners: &str, secure: bool) -> Result<()> {
        let document = format!("{}{document}", LISTENERS.replace("$MORE", listeners));
        let mut node = self.overlay.node(name).document(&document);
        node = if secure {
            let subject = Subject::node(name).standalone().with_dns(NODE_NAME);
            let node = node.identity(&subject)?.with("PEERS", "tls: {client: required}").with("HTTP3", ", http3: true");
            node.with("TLS", ", tls: {client: required}")
        } else {
            node.with("PEERS", "trust: [127.0.0.0/8]").with("HTTP3", "").with("TLS", "")
        };
        let node = node.start().await?;
        self.nodes.push(node);
        Ok(())
    }

    /// Terminates all. HTTP that comes in a bare TCP connection is HTTP/1.1, whatever the origin else speaks.
    fn far_document(&self, h2_origin: bool) -> String {
        let [echo, udp, h1, h2] = self.origins.each_ref().map(Origin::address);
        let (protocol, web) = if h2_origin { ("h2", h2) } else { ("h1", h1) };
        format!(
            "
routes:
- {{name: web-in-tcp, match: {{kind: tcp, authority: 'WEB:80'}}, terminate: {{tcp: '{h1}'}}}}
- {{name: tcp, match: {{kind: tcp}}, terminate: {{tcp: '{echo}'}}}}
- {{name: udp, match: {{kind: udp}}, terminate: {{udp: '{udp}'}}}}
- {{name: web, match: {{kind: http}}, upstream: origin}}
upstreams:
- {{name: origin, protocol: {protocol}, overlay: false, endpoints: ['{web}']}}
"
        )
    }

    /// Routes to the node before, by kind, and by name where there is one.
    fn middle_document(&self, hops: &[(Option<&str>, Hop)], secure: bool) -> String {
        let next = self.near();
        let tls = if secure { ", tls: {}" } else { "" };
        let udp = next.address("bare-udp");
        let routes: String = hops.iter().map(|(name, hop)| routes(*name, *hop, udp)).collect();
        let [client, bare, web] = ["door", "bare", "bare-http"].map(|listener| next.address(listener));
        let h3 = if secure {
            format!(
                "- {{name: h3, protocol: h3, overlay: true, endpoints: ['{client}'], tls: {{}}}}\n\
                 - {{name: post-h3, protocol: h3, tunnel-method: POST, overlay: true, endpoints: ['{client}'], tls: {{}}}}"
            )
        } else {
            String::new()
        };
        format!(
            "
routes:
{routes}
upstreams:
- {{name: h1, protocol: h1, overlay: true, endpoints: ['{client}']{tls}}}
- {{name: h2, protocol: h2, overlay: true, endpoints: ['{client}']{tls}}}
- {{name: post-h1, protocol: h1, tunnel-method: POST, overlay: true, endpoints: ['{client}']{tls}}}
- {{name: post-h2, protocol: h2, tunnel-method: POST, overlay: true, endpoints: ['{client}']{tls}}}
- {{name: bare, protocol: tcp, endpoints: ['{bare}']{tls}}}
- {{name: bare-web, protocol: tcp, endpoints: ['{web}']{tls}}}
- {{name: bare-http, protocol: h1, endpoints: ['{web}']{tls}}}
{h3}
"
        )
    }

    fn near(&self) -> &Node {
        &self.nodes[self.nodes.len() - 1]
    }

    fn client(&self, listener: &str) -> ListenerClient {
        let address = self.near().address(listener);
        match &self.user {
            Some(user) => ListenerClient::tls(address, self.overlay.authority().pem(), Some(user)),
            None => ListenerClient::plain(address),
        }
    }

    /// Where requests come in.
    pub(crate) fn http(&self) -> ListenerClient {
        self.client("door")
    }

    /// Where TCP comes in by this way; `hop` where the first node offers several.
    pub(crate) fn tcp(&self, mode: TunnelMode, hop: Option<Hop>) -> ListenerClient {
        match (mode, hop) {
            (TunnelMode::Raw, None) => self.client("bare"),
            (TunnelMode::Raw, Some(hop)) => self.client(&format!("bare-{}", hop.name())),
            _ => self.client("door"),
        }
    }

    /// Where UDP comes in by this way; `hop` where the first node offers several.
    pub(crate) fn udp(&self, mode: FlowMode, hop: Option<Hop>) -> ListenerClient {
        let listener = hop.map_or_else(|| "bare-udp".to_owned(), |hop| format!("bare-udp-{}", hop.name()));
        match mode {
            FlowMode::Raw => ListenerClient::plain(self.near().address(&listener)),
            _ => self.client("door"),
        }
    }
}

/// The routes of one hop. UDP over a bare hop goes to `udp`.
fn routes(name: Option<&str>, hop: Hop, udp: SocketAddr) -> String {
    let authority = name.map_or_else(String::new, |name| format!(", authority: '{name}:*'"));
    let label = name.unwrap_or("only");
    let (tcp, http) = (hop.tcp_upstream(), hop.http_upstream());
    // HTTP in a bare TCP connection stays apart from what is echoed.
    let web = match (name, hop) {
        (Some(_), _) => String::new(),
        (None, Hop::Bare) => {
            "- {name: web-in-tcp, match: {kind: tcp, authority: 'WEB:80'}, upstream: bare-web}\n".to_owned()
        }
        (None, _) => format!("- {{name: web-in-tcp, match: {{kind: tcp, authority: 'WEB:80'}}, upstream: {tcp}}}\n"),
    };
    let flows = match hop {
        Hop::Bare => format!("terminate: {{udp: '{udp}'}}"),
        _ => format!("upstream: {tcp}, rewrite: {{authority: 'ECHO:7'}}"),
    };
    format!(
        "{web}- {{name: {label}-tcp, match: {{kind: tcp{authority}}}, upstream: {tcp}, rewrite: {{authority: 'ECHO:7'}}}}\n\
         - {{name: {label}-udp, match: {{kind: udp{authority}}}, {flows}}}\n\
         - {{name: {label}-web, match: {{kind: http{authority}}}, upstream: {http}}}\n"
    )
}
