//! A device behind a real NAT, whose uplink changes its address.

use std::{
    io::Write as _,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    netns::Namespace,
    origin::services::Services,
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    skip::needs_root,
};

use tokio::task::JoinSet;

use crate::behind_nat::lab::{DEVICE, HUB, INGRESS, get, overlay, reach_all};

/// Two networks at home, the router's address there, and a public one. 11.0.0.0/8 is nobody's special block.
const HOME: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 7, 2), Ipv4Addr::new(192, 168, 8, 2)];
const GATEWAY: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 7, 1), Ipv4Addr::new(192, 168, 8, 1)];
const PUBLIC: Ipv4Addr = Ipv4Addr::new(11, 0, 1, 1);
const AT_ROUTER: Ipv4Addr = Ipv4Addr::new(11, 0, 1, 2);
const AT_INGRESS: Ipv4Addr = Ipv4Addr::new(11, 0, 2, 1);
const INGRESS_AT: Ipv4Addr = Ipv4Addr::new(11, 0, 2, 2);

/// device = router - hub - ingress, a namespace each. The device has two uplinks, `up0` and `up1`.
struct Home {
    device: Namespace,
    router: Namespace,
    hub: Namespace,
    ingress: Namespace,
}

impl Home {
    fn new() -> Self {
        let [device, router, hub, ingress] = [(); 4].map(|()| Namespace::new().unwrap());
        for (number, gateway) in GATEWAY.into_iter().enumerate() {
            let (up, lan) = (format!("up{number}"), format!("lan{number}"));
            device.ip(&["link", "add", &up, "type", "veth", "peer", "name", &lan, "netns", router.name()]).unwrap();
            router.address(&lan, gateway).unwrap();
        }
        router.ip(&["link", "add", "wan0", "type", "veth", "peer", "name", "net0", "netns", hub.name()]).unwrap();
        router.address("wan0", AT_ROUTER).unwrap();
        hub.address("net0", PUBLIC).unwrap();
        hub.join(AT_INGRESS, &ingress, INGRESS_AT).unwrap();
        ingress.ip(&["route", "add", "default", "via", &AT_INGRESS.to_string()]).unwrap();
        router.masquerade("192.168.0.0/16").unwrap();
        let home = Self { device, router, hub, ingress };
        home.goes_up(0, HOME[0]);
        home
    }

    /// The device has this address at this uplink, and goes that way.
    fn goes_up(&self, uplink: usize, address: Ipv4Addr) {
        self.device.address(&format!("up{uplink}"), address).unwrap();
        self.device.ip(&["route", "replace", "default", "via", &GATEWAY[uplink].to_string()]).unwrap();
    }
}

struct Lab {
    home: Home,
    overlay: Overlay,
    _services: Services,
    hub: Node,
    device: Node,
    http: ListenerClient,
    udp: ListenerClient,
    _ingress: Node,
    protocol: &'static str,
}

/// Runs a test in the ingress's namespace, where its clients are.
fn at_home(test: &str, protocol: &'static str, body: impl AsyncFnOnce(Lab) + Send + 'static) {
    if !needs_root(test) {
        return;
    }
    let thread = std::thread::spawn(move || {
        let home = Home::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A socket stays in the namespace that it was made in.
        home.device.enter().unwrap();
        let services = runtime.block_on(async { Services::start().unwrap() });
        home.ingress.enter().unwrap();
        runtime.block_on(async { body(Lab::start(home, services, protocol).await).await });
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

impl Lab {
    async fn start(home: Home, services: Services, protocol: &'static str) -> Self {
        let overlay = overlay();
        let hub = overlay.node("hub").document(HUB).with("WORKERS", 2).with("AT", PUBLIC).within(&home.hub);
        let hub = hub.identity(&Subject::node("hub").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
        let at = hub.address("door");
        let device = overlay.node("device").document(DEVICE).with("HUB", at).with("PROTOCOL", protocol);
        let device = services.fill(device.with("WORKERS", 2)).identity(&Subject::node("device")).unwrap();
        let device = device.within(&home.device).start().await.unwrap();
        let ingress = overlay.node("ingress").document(INGRESS).with("HUB", at).within(&home.ingress);
        let ingress = ingress.identity(&Subject::node("ingress")).unwrap().start().await.unwrap();
        hub.says_times("reverse connection accepted", 2).await;
        let (http, udp) =
            (ListenerClient::plain(ingress.address("apps")), ListenerClient::plain(ingress.address("udp")));
        Self { home, overlay, _services: services, hub, device, http, udp, _ingress: ingress, protocol }
    }

    /// Asks until the service answers, each time on a connection of its own, and a few seconds at most.
    async fn reached(&self) -> Duration {
        let began = Instant::now();
        while began.elapsed() < EFFECT_TIMEOUT {
            let requests = tokio::time::timeout(Duration::from_secs(5), get(&self.http, "WEB"));
            if matches!(requests.await, Ok((200, _))) {
                return began.elapsed();
            }
        }
        panic!("never again\n--- device\n{}\n--- hub\n{}", self.device.log(), self.hub.log());
    }
}

/// `survives`: what runs goes on from the new address, as QUIC's connections do.
async fn follows_its_uplink(lab: Lab, survives: bool) {
    reach_all(&lab.http, &lab.udp).await;
    // Nobody can dial it: that is the point.
    assert!(lab.home.hub.ip(&["route", "get", &HOME[0].to_string()]).is_err());
    let mut tunnel = lab.http.tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
    tunnel.writer.send("before").await.unwrap();
    assert_eq!(tunnel.reader.at_least(6).await.unwrap(), b"before");
    // Another address on the same link, as by a new lease.
    lab.home.device.ip(&["addr", "flush", "dev", "up0"]).unwrap();
    lab.home.goes_up(0, Ipv4Addr::new(192, 168, 7, 77));
    let by_lease = lab.reached().await;
    reach_all(&lab.http, &lab.udp).await;
    // Another network altogether, as from a cable to the air.
    lab.home.device.ip(&["link", "set", "up0", "down"]).unwrap();
    lab.home.goes_up(1, HOME[1]);
    let by_link = lab.reached().await;
    reach_all(&lab.http, &lab.udp).await;
    let by_router = new_routers(&lab).await;
    let report = format!("a new address in {by_lease:?}, another link in {by_link:?}, new routers in {by_router:?}");
    // Past the harness: what is promised is a second. This machine may be busy.
    let _ = writeln!(std::io::stderr(), "reached again ({}): {report}", lab.protocol);
    if survives {
        tunnel.writer.send("after").await.unwrap();
        assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"after");
    } else {
        let ended = tokio::time::timeout(EFFECT_TIMEOUT, tunnel.reader.to_end()).await;
        assert!(ended.is_ok(), "whoever is cut off is told");
    }
}

/// The router's own address changes: it forgets all that it knew, and nothing tells the device but silence. Once in the
/// midst of things; then after quiet spells, where only the device's own question finds out; and with no address at all
/// for a while, so that what is sent anew is lost too. In milliseconds.
const ROUTERS: [(u64, u64); 6] = [(0, 0), (1050, 0), (1250, 0), (1450, 0), (1650, 350), (1850, 550)];

async fn new_routers(lab: &Lab) -> Vec<Duration> {
    let mut reached = Vec::new();
    for (quiet, without) in ROUTERS {
        tokio::time::sleep(Duration::from_millis(quiet)).await;
        lab.home.router.ip(&["addr", "flush", "dev", "wan0"]).unwrap();
        tokio::time::sleep(Duration::from_millis(without)).await;
        lab.home.router.address("wan0", Ipv4Addr::new(11, 0, 1, 99 + reached.len() as u8)).unwrap();
        reached.push(lab.reached().await);
        reach_all(&lab.http, &lab.udp).await;
    }
    reached
}

const KEPT: &str = "reverse connection accepted";

/// The same one is lost twice, and is not dealt where it was: nobody may be left without.
#[test]
fn every_worker_of_the_hub_reaches_a_device_that_lost_the_same_connection_twice() {
    at_home("behind_nat and its first connection", "h2", async |lab| {
        lab.home.hub.output(&["nft", DARKNESS]).await.unwrap();
        // The first is dialled first: how many there are to be its call says.
        let mut newest = 0;
        for kept in [3, 4] {
            let log = lab.hub.log();
            let line = log.lines().filter(|line| line.contains(KEPT)).nth(newest).unwrap();
            let port = line.split(&format!("{AT_ROUTER}:")).nth(1).unwrap();
            let port: String = port.chars().take_while(char::is_ascii_digit).collect();
            lab.home
                .hub
                .output(&["nft", "add", "element", "ip", "dark", "ports", &format!("{{ {port} }}")])
                .await
                .unwrap();
            lab.hub.says_times(KEPT, kept).await;
            newest = kept - 1;
        }
        let identity = lab.overlay.authority().issue(&Subject::node("client")).unwrap();
        let client = ListenerClient::tls(lab.hub.address("door"), lab.overlay.authority().pem(), Some(&identity));
        // Whichever worker each comes to.
        let mut clients = JoinSet::new();
        for _ in 0..16 {
            let client = client.clone();
            clients.spawn(async move { get(&client, "WEB").await });
        }
        while let Some(answer) = clients.join_next().await {
            assert_eq!(answer.unwrap(), (200, "web".to_owned()), "{}", lab.hub.log());
        }
    });
}

/// Neither way anything passes of connections from these ports.
const DARKNESS: &str = "add table ip dark; add set ip dark ports { type inet_service; }; \
     add chain ip dark in { type filter hook input priority 0; }; add rule ip dark in tcp sport @ports drop; \
     add chain ip dark out { type filter hook output priority 0; }; add rule ip dark out tcp dport @ports drop";

/// And nobody says that the old way is gone.
#[test]
fn a_service_behind_nat_is_reached_again_although_its_old_path_drops_packets() {
    at_home("behind_nat in the dark", "h2", async |lab| {
        lab.home.hub.send_no_resets().unwrap();
        reach_all(&lab.http, &lab.udp).await;
        let reached = new_routers(&lab).await;
        let _ = writeln!(std::io::stderr(), "reached again (h2, in the dark): new routers in {reached:?}");
    });
}

#[test]
fn a_service_behind_nat_is_reached_through_two_hops_and_again_after_its_uplink_changed_over_h2() {
    at_home("behind_nat over h2", "h2", async |lab| follows_its_uplink(lab, false).await);
}

#[test]
fn a_service_behind_nat_is_reached_through_two_hops_and_again_after_its_uplink_changed_over_h3() {
    at_home("behind_nat over h3", "h3", async |lab| follows_its_uplink(lab, true).await);
}
