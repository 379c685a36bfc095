//! What `hermes-user` is worth, by who brings it.

use hermes_testkit::{
    ca::Subject,
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, TunnelMode},
    multiplex::Answer,
};
use http::Request;

use crate::identity::lab::{client, identity, ingress, middle, origin, overlay, subject};

/// GET from a listener client, with claims.
async fn ask(client: &ListenerClient, authority: &str, claims: &[&str]) -> Answer {
    let request = Request::get(format!("http://{authority}/"));
    let request = claims.iter().fold(request, |request, claim| request.header("hermes-user", *claim));
    client.h2().await.unwrap().ask(request.body(()).unwrap(), b"").await.unwrap()
}

#[tokio::test]
async fn a_device_speaks_for_the_users_in_its_certificate() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    let laptop = identity(&overlay, &Subject::node("laptop").with_user("alice").with_user("bob"));
    let laptop = client(&overlay, &node, "door", Some(&laptop));
    for user in ["alice", "bob"] {
        assert_eq!(ask(&laptop, "HOME", &[user]).await.status, 200);
        node.record(|record| record["user"] == user && record["peer"] == "laptop").await;
        // The origin is not told who asks.
        assert_eq!(receiver.recv().await.unwrap().header("hermes-user"), None);
    }
    // Two users and no claim: nobody in particular.
    assert_eq!(ask(&laptop, "HOME", &[]).await.status, 404);
    // One user and no claim: that one.
    let phone = identity(&overlay, &Subject::default().with_user("alice"));
    assert_eq!(ask(&client(&overlay, &node, "door", Some(&phone)), "HOME", &[]).await.status, 200);
}

#[tokio::test]
async fn a_claim_to_be_somebody_else_is_refused_at_the_first_hop() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    let laptop = identity(&overlay, &Subject::node("laptop").with_user("alice"));
    let laptop = client(&overlay, &node, "door", Some(&laptop));
    let answer = ask(&laptop, "OPEN", &["bob"]).await;
    assert_eq!(answer.status, 403);
    let sentence = "node laptop claims to be user bob, who is not bound to it";
    assert!(answer.text().contains(sentence), "{}", answer.text());
    // The remedy stands beside it.
    assert!(answer.text().contains("users: {laptop: [bob]}"), "{}", answer.text());
    assert!(answer.header("proxy-status").unwrap().contains("http_request_denied"), "{answer:?}");
    // Tunnels and flows are no way around.
    let liar = laptop.clone().with("hermes-user", "bob");
    for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2] {
        let output = liar.tunnel(mode, "DB:5432").await.err().unwrap().to_string();
        assert!(output.contains("403") && output.contains(sentence), "{mode:?}: {output}");
    }
    for mode in [FlowMode::UpgradeH1, FlowMode::ConnectH2] {
        let output = Flow::open(&liar, mode, "GAME", 9).await.err().unwrap().to_string();
        assert!(output.contains("403") && output.contains(sentence), "{mode:?}: {output}");
    }
    node.record(|record| record["status"] == 403 && record["peer"] == "laptop").await;
    assert!(receiver.try_recv().is_err(), "something of it reached the origin");
}

#[tokio::test]
async fn claims_that_cannot_be_understood_are_refused() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    let laptop = identity(&overlay, &Subject::node("laptop").with_user("alice"));
    let laptop = client(&overlay, &node, "door", Some(&laptop));
    assert_eq!(ask(&laptop, "HOME", &["alice", "alice"]).await.status, 200, "twice the same is the same");
    for claims in [&["alice", "bob"][..], &["alice, bob"], &[""], &["al ice"]] {
        let answer = ask(&laptop, "OPEN", claims).await;
        assert_eq!(answer.status, 400, "{claims:?}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_stranger_s_claim_is_removed() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    for stranger in [ListenerClient::plain(node.address("plain")), client(&overlay, &node, "perhaps", None)] {
        assert_eq!(ask(&stranger, "HOME", &["alice"]).await.status, 404);
        assert_eq!(ask(&stranger, "OPEN", &["alice"]).await.status, 200);
        assert_eq!(receiver.recv().await.unwrap().header("hermes-user"), None);
    }
    // The same listener believes who shows a certificate.
    let laptop = identity(&overlay, &Subject::node("laptop").with_user("alice"));
    assert_eq!(ask(&client(&overlay, &node, "perhaps", Some(&laptop)), "HOME", &["alice"]).await.status, 200);
    assert!(node.records().iter().all(|record| record["peer"] == "laptop" || record["user"].is_null()));
}

#[tokio::test]
async fn a_document_binds_users_to_nodes() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "users: {kiosk: [carol], hub: ['*']}", &origin).await;
    let kiosk = client(&overlay, &node, "door", Some(&identity(&overlay, &Subject::node("kiosk"))));
    assert_eq!(ask(&kiosk, "HOME", &["carol"]).await.status, 200);
    assert_eq!(ask(&kiosk, "HOME", &["alice"]).await.status, 403);
    let hub = client(&overlay, &node, "door", Some(&identity(&overlay, &Subject::node("hub"))));
    assert_eq!(ask(&hub, "HOME", &["alice"]).await.status, 200);
    assert_eq!(ask(&hub, "HOME", &["bob"]).await.status, 200);
    // Another node of the same overlay, without users: its claim is removed and counted.
    let other = client(&overlay, &node, "door", Some(&identity(&overlay, &Subject::node("other"))));
    assert_eq!(ask(&other, "OPEN", &["carol"]).await.status, 200);
    node.metric_reaches("hermes_identities_removed_total", "", 1.0).await;
}

#[tokio::test]
async fn a_lying_listener_of_a_laptop_is_refused_by_the_edge() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let ingress = ingress(&overlay, "", &origin).await;
    let edge = middle(&overlay, subject("edge").standalone(), None, &ingress).await;
    // Its owner may write into the document what he likes.
    let laptop = middle(&overlay, subject("laptop").with_user("alice"), Some("bob"), &edge).await;
    let answer = ask(&ListenerClient::plain(laptop.address("apps")), "HOME", &[]).await;
    assert_eq!(answer.status, 403, "{answer:?}");
    assert!(answer.text().contains("edge: node laptop claims to be user bob"), "{}", answer.text());
    // A bare connection cannot be told; it is reset.
    let database = ListenerClient::plain(laptop.address("database"));
    let end = async { database.tunnel(TunnelMode::Raw, "").await?.reader.to_end().await };
    assert!(end.await.is_err());
    assert!(receiver.try_recv().is_err());
    assert!(ingress.records().is_empty(), "{:?}", ingress.records());
}

#[tokio::test]
async fn a_standalone_node_forwards_its_own_identity() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let ingress = ingress(&overlay, "", &origin).await;
    let edge = middle(&overlay, subject("edge").standalone(), None, &ingress).await;
    for user in ["alice", "bob"] {
        let name = format!("{user}-laptop");
        let laptop = middle(&overlay, subject(&name).with_user(user), Some(user), &edge).await;
        assert_eq!(ask(&ListenerClient::plain(laptop.address("apps")), "HOME", &[]).await.status, 200);
        let route = format!("for-{user}");
        // The far end routes by the user that the first hop has proven.
        ingress.record(|record| record["user"] == user && record["route"] == *route && record["peer"] == "edge").await;
    }
}

#[tokio::test]
async fn a_dependent_node_is_not_believed_for_others() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let ingress = ingress(&overlay, "", &origin).await;
    // The edge's own document calls it what it likes: its certificate does not say standalone.
    let edge = middle(&overlay, subject("edge"), None, &ingress).await;
    let laptop = middle(&overlay, subject("laptop").with_user("alice"), Some("alice"), &edge).await;
    assert_eq!(ask(&ListenerClient::plain(laptop.address("apps")), "HOME", &[]).await.status, 404);
    assert_eq!(ask(&ListenerClient::plain(laptop.address("apps")), "OPEN", &[]).await.status, 200);
    ingress.metric_reaches("hermes_identities_removed_total", "", 2.0).await;
    // One with users of its own says so aloud when it is used for somebody else's.
    let operator = middle(&overlay, subject("desk").with_user("carol"), None, &ingress).await;
    let answer = ask(&ListenerClient::plain(operator.address("apps")), "HOME", &[]).await;
    assert_eq!(answer.status, 200, "carol's desk is carol: {answer:?}");
}
