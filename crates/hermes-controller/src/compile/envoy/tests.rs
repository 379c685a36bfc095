//! Node documents as xDS resources.
#![allow(clippy::unwrap_used)]

use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use envoy_types::pb::envoy::config::route::v3::route::Action;
use envoy_types::pb::envoy::config::route::v3::route_action::ClusterSpecifier;
use envoy_types::pb::envoy::config::route::v3::{Route, RouteConfiguration, RouteList};
use envoy_types::pb::xds::r#type::matcher::v3::Matcher;
use envoy_types::pb::xds::r#type::matcher::v3::matcher::{MatcherType, OnMatch, matcher_tree::TreeType, on_match};
use hermes_model::document::Document;
use prost::Message as _;

use super::{EnvoyIdentity, resources};
use crate::catalog::Catalog;
use crate::compile::compile;
use crate::document::read;

const IDENTITY: EnvoyIdentity<'_> = EnvoyIdentity { overlay: "x", directory: "/state", revocations: "" };

const OVERLAY: &str = "\
kind: Overlay
name: x
---
{kind: Node, name: laptop, links: in, apps: {bind: \"127.0.0.1:8080\", user: ann}}
---
{kind: Node, name: desk, links: in}
---
{kind: Node, name: in, role: standalone, runs: envoy, address: \"192.0.2.1:9443\", links: [a, b]}
---
{kind: Node, name: a, address: \"192.0.2.2:9443\", http3: true}
---
{kind: Node, name: b, address: \"b.example:9443\"}
---
{kind: User, name: ann, nodes: laptop}
---
{kind: User, name: bob, nodes: [desk, laptop]}
---
{kind: Service, name: WEB, at: [{node: a, http: \"127.0.0.1:80\"}, {node: b, http: \"127.0.0.1:80\"}], for: {users: [ann, bob]}}
---
{kind: Service, name: DB, authority: \"DB:3306\", at: {node: in, tcp: \"127.0.0.1:3306\"}, for: {users: bob}, timeout: {connect: 9s}}
";

fn document(text: &str) -> Document {
    let mut catalog = Catalog::default();
    for resource in read(text).unwrap() {
        catalog.put(resource);
    }
    compile(&catalog).unwrap_or_else(|faults| panic!("{faults:#?}")).remove(&"in".parse().unwrap()).unwrap()
}

fn faults(text: &str) -> String {
    let mut catalog = Catalog::default();
    for resource in read(text).unwrap() {
        catalog.put(resource);
    }
    let faults = compile(&catalog).err().unwrap_or_default();
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn map(matcher: &Matcher) -> &std::collections::HashMap<String, OnMatch> {
    let Some(MatcherType::MatcherTree(tree)) = &matcher.matcher_type else { panic!("{matcher:?}") };
    let Some(TreeType::ExactMatchMap(map)) = &tree.tree_type else { panic!("{tree:?}") };
    &map.map
}

fn routes(on: &OnMatch) -> Vec<Route> {
    let Some(on_match::OnMatch::Action(action)) = &on.on_match else { panic!("{on:?}") };
    RouteList::decode(&*action.typed_config.as_ref().unwrap().value).unwrap().routes
}

fn cluster_of(route: &Route) -> &str {
    let Some(Action::Route(action)) = &route.action else { panic!("{route:?}") };
    let Some(ClusterSpecifier::Cluster(cluster)) = &action.cluster_specifier else { panic!("{action:?}") };
    cluster
}

#[test]
fn the_same_document_gives_the_same_bytes_and_each_user_the_routes_that_are_theirs() {
    let document = document(OVERLAY);
    let made = resources(&document, IDENTITY).unwrap();
    for _ in 0..20 {
        assert_eq!(resources(&document, IDENTITY).unwrap(), made);
    }
    let body = made.routes["overlay"].body.as_ref().unwrap();
    // The ordered maps decode as the message of this name.
    let all = RouteConfiguration::decode(&*body.value).unwrap();
    assert!(body.type_url.ends_with("/envoy.config.route.v3.RouteConfiguration"));
    let users = map(all.virtual_hosts[0].matcher.as_ref().unwrap());
    let of = |user: &str| {
        let mut clusters: Vec<_> = routes(&users[user]).iter().map(|route| cluster_of(route).to_owned()).collect();
        clusters.dedup();
        clusters
    };
    assert_eq!(of("ann"), ["hop/a+b"]);
    assert_eq!(of("bob"), ["origin/raw/127.0.0.1:3306", "hop/a+b"]);
    assert_eq!(users.len(), 2);
    assert!(all.virtual_hosts[0].matcher.as_ref().unwrap().on_no_match.is_none(), "nobody has a route");
    let names: Vec<_> = made.clusters.keys().map(String::as_str).collect();
    assert_eq!(names, ["hop/a+b", "origin/raw/127.0.0.1:3306"]);
    let origin = made.clusters["origin/raw/127.0.0.1:3306"].body.as_ref().unwrap();
    assert_eq!(Cluster::decode(&*origin.value).unwrap().connect_timeout.unwrap().seconds, 9);
    let trust = format!("{:?}", all.typed_per_filter_config);
    assert!(trust.contains("RBACPerRoute"), "{trust}");
}

#[test]
fn an_alternate_is_of_a_priority_of_its_own_and_neighbours_are_asked_after() {
    let more = "---\n{kind: Node, name: side, role: standalone, address: \"192.0.2.9:9443\", links: far}\n\
                ---\n{kind: Node, name: far, address: \"192.0.2.8:9443\"}\n\
                ---\n{kind: Node, name: hidden, role: standalone, links: [in, far]}\n";
    let text = OVERLAY.replace("links: [a, b]", "links: [a, b, side]").replace(
        "{node: b, http: \"127.0.0.1:80\"}]",
        "{node: b, http: \"127.0.0.1:80\"}, {node: far, http: \"127.0.0.1:80\"}]",
    );
    let made = resources(&document(&(text + more)), IDENTITY).unwrap();
    // An Envoy does not use nodes that it cannot dial as alternates.
    let body = made.clusters["hop/a+b|*"].body.as_ref().unwrap();
    let cluster = Cluster::decode(&*body.value).unwrap();
    let localities = cluster.load_assignment.unwrap().endpoints;
    let shape: Vec<_> = localities.iter().map(|one| (one.priority, one.lb_endpoints.len())).collect();
    assert_eq!(shape, [(0, 2), (1, 1)]);
    assert_eq!(cluster.health_checks.len(), 1);
    assert_eq!(cluster.health_checks[0].interval.as_ref().unwrap().seconds, 5);
}

/// An Envoy that cannot dial a node sends it nothing, so it is not an alternate for its sessions.
#[test]
fn an_envoy_that_could_not_send_on_stands_in_for_nobody() {
    let more = "---\n{kind: Node, name: side, role: standalone, runs: envoy, address: \"192.0.2.9:9443\", links: in}\n\
                ---\n{kind: Node, name: far, address: \"192.0.2.8:9443\", links: side}\n";
    let text = OVERLAY.replace(
        "{node: b, http: \"127.0.0.1:80\"}]",
        "{node: b, http: \"127.0.0.1:80\"}, {node: far, http: \"127.0.0.1:80\"}]",
    );
    let document = document(&(text + more));
    assert!(document.upstreams.iter().all(|upstream| upstream.backup.is_empty()));
}

#[test]
fn what_an_envoy_cannot_do_is_told() {
    let change = |from: &str, to: &str| {
        assert!(OVERLAY.contains(from), "{from}");
        faults(&OVERLAY.replace(from, to))
    };
    assert_eq!(faults(OVERLAY), "");
    for (from, to, words) in [
        ("role: standalone, runs", "runs", "Node/in: role: this node runs Envoy"),
        ("runs: envoy,", "runs: envoy, apps: {bind: \"127.0.0.1:1\"},", "Node/in: apps: this node runs Envoy"),
        ("runs: envoy, address: \"192.0.2.1:9443\",", "runs: envoy,", "Node/in: address: this node runs Envoy"),
        ("tcp: \"127.0.0.1:3306\"", "tcp: authority", "an Envoy terminates sessions only at HOST:PORT"),
        ("users: [ann, bob]}", "users: [ann, bob]}, custody: {}", "WEB: an Envoy does not support custody"),
    ] {
        let said = change(from, to);
        assert!(said.contains(words), "{words}: {said}");
    }
    // A dependent node that would dial the Envoy for sessions, and one that the Envoy would have to dial.
    let waits = OVERLAY.replace("links: [a, b]", "links: a").replace("b, address: \"b.example:9443\"", "b, links: in");
    let said = faults(&waits);
    assert!(said.contains("give b an address, and in a link to it"), "{said}");
    let waited =
        OVERLAY.replace("laptop, links: in,", "laptop, address: \"192.0.2.9:1\",").replace("[a, b]", "[a, b, laptop]");
    let said = faults(&waited);
    assert!(said.contains("give laptop a link to in"), "{said}");
}
