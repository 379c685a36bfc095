//! Certificates that live for seconds, under traffic: they are renewed in time, no request fails, and no tunnel breaks.

use std::time::{Duration, Instant};

use hermes_testkit::origin::{self, stream};
use hermes_testkit::traffic::{Traffic, TunnelTarget};

use hermes_testkit::control::PersistentClient;
use hermes_testkit::control::{ControllerFixture, until};

/// Between two requests: what is tested is time, and not the rate.
const PAUSE: Duration = Duration::from_millis(10);

/// Traffic over certificates that live this long, until each was renewed so often and so long is over.
async fn renewed_under_traffic(life: Duration, times: usize, time: Duration) {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    let echo = stream::echo(origin::listen(fixture.socket(7007)).unwrap()).unwrap();
    let life = format!("name: test\ncertificate-lifetime: {}s\n", life.as_secs());
    let tunnels = format!(
        "---\n{{kind: Service, name: ECHO, authority: \"ECHO:7\", at: {{node: server, tcp: \"{}\"}}, for: {{users: ann}}}}\n",
        echo.address()
    );
    fixture.hermes_ok(&["apply", "-f", "-"], &(fixture.documents(7001).replace("name: test\n", &life) + &tunnels));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    let renewals = |node: &str| fixture.log(node).matches("certificate renewed").count();
    let mut traffic = Traffic::default();
    // One that is as old as the first certificates, and is there when they are long over.
    traffic.tunnel(TunnelTarget::Connect(fixture.socket(8080), "ECHO:7".to_owned()), 7);
    let (mut client, mut requests) = (PersistentClient::new(fixture.socket(8080), "APP"), 0);
    let began = Instant::now();
    while renewals("laptop") < times || renewals("server") < times || began.elapsed() < time {
        for _ in 0..20 {
            let answered = client.ask().await;
            assert!(answered.is_ok(), "request {requests} after {:?}: {answered:?}", began.elapsed());
            requests += 1;
            tokio::time::sleep(PAUSE).await;
        }
        assert!(began.elapsed() < time + Duration::from_secs(60), "nothing is renewed: {}", fixture.log("laptop"));
    }
    let report = traffic.finish().await;
    println!("{requests} requests in {:?}, {report}", began.elapsed());
    println!("renewed: laptop {} times, server {} times", renewals("laptop"), renewals("server"));
    assert!(requests > 20, "{requests}");
    report.assert_whole(20);
    until("both run what they should", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2)
        .await;
}

/// The first ones are long over by then.
#[tokio::test]
async fn certificates_are_renewed_under_traffic() {
    renewed_under_traffic(Duration::from_secs(6), 3, Duration::ZERO).await;
}

#[tokio::test]
#[ignore = "takes ten minutes"]
async fn certificates_of_a_minute_are_renewed_under_traffic_for_ten_minutes() {
    renewed_under_traffic(Duration::from_secs(60), 10, Duration::from_secs(600)).await;
}

/// Who may pass on what others say is in its certificate: it has that as soon as its document does.
#[tokio::test]
async fn a_node_whose_role_changes_has_another_certificate_at_once() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    let is_standalone = || {
        let args = ["x509", "-noout", "-ext", "subjectAltName", "-in"];
        let output =
            std::process::Command::new("openssl").args(args).arg(fixture.state("server/node.pem")).output().unwrap();
        String::from_utf8(output.stdout).unwrap().contains("/role/standalone")
    };
    until("it runs", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 1).await;
    assert!(!is_standalone());
    let other = fixture.documents(7001).replace("name: server,", "name: server, role: standalone,");
    fixture.hermes_ok(&["apply", "-f", "-"], &other);
    until("it is standalone", is_standalone).await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    until("it is not any more", || !is_standalone()).await;
}
