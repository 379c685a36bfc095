//! Tests of the order in which an Envoy receives its resources.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::session::{Kind, Session, UpdateOutcome, WantedResources, XdsRequest, XdsResponse};
use crate::compile::envoy::{Resources, VersionedResource};

fn held(version: &str) -> VersionedResource {
    VersionedResource { version: version.to_owned(), body: Some(Default::default()) }
}

fn goal(revision: u64, clusters: &[&str], routes: &str) -> WantedResources {
    let resources = Resources {
        clusters: clusters.iter().map(|name| ((*name).to_owned(), held("1"))).collect(),
        listeners: BTreeMap::from([("overlay".to_owned(), held("1"))]),
        routes: BTreeMap::from([("overlay".to_owned(), held(routes))]),
    };
    WantedResources { revision, resources, ..WantedResources::default() }
}

fn ask(session: &mut Session, kind: Kind, is_sotw: bool) {
    let subscribe = if kind == Kind::Routes { vec!["overlay".to_owned()] } else { Vec::new() };
    assert_eq!(session.receive(kind, XdsRequest { subscribe, is_sotw, ..XdsRequest::default() }), None);
}

/// Acknowledges a response, as an Envoy does.
fn take(session: &mut Session, said: &XdsResponse, is_sotw: bool) -> Option<UpdateOutcome> {
    let subscribe = if is_sotw && said.kind == Kind::Routes { vec!["overlay".to_owned()] } else { Vec::new() };
    session.receive(said.kind, XdsRequest { nonce: said.nonce.clone(), subscribe, is_sotw, ..XdsRequest::default() })
}

fn names(said: &XdsResponse) -> Vec<&str> {
    said.all.keys().map(String::as_str).collect()
}

fn started(is_sotw: bool) -> Session {
    let mut session = Session::new(goal(1, &["a", "b"], "1"));
    assert_eq!(session.next(), None, "nobody has asked");
    for kind in [Kind::Clusters, Kind::Listeners, Kind::Routes] {
        ask(&mut session, kind, is_sotw);
        let said = session.next().unwrap();
        assert_eq!(said.kind, kind);
        assert_eq!(session.next(), None, "one at a time");
        let verdict = take(&mut session, &said, is_sotw);
        assert_eq!(verdict, (kind == Kind::Routes).then_some(UpdateOutcome::Runs));
    }
    assert_eq!(session.next(), None);
    session
}

#[test]
fn clusters_come_before_routes_and_go_after_them() {
    for is_sotw in [false, true] {
        let mut session = started(is_sotw);
        session.aim(goal(2, &["b", "c"], "2"));
        let said = session.next().unwrap();
        assert_eq!((said.kind, names(&said)), (Kind::Clusters, vec!["a", "b", "c"]));
        assert_eq!((said.changed.len(), said.removed.len()), (1, 0));
        assert_eq!(session.next(), None, "no route before its cluster is there");
        assert_eq!(take(&mut session, &said, is_sotw), None);
        let said = session.next().unwrap();
        assert_eq!(said.kind, Kind::Routes);
        assert_eq!(session.next(), None, "no cluster goes that a route may need");
        assert_eq!(take(&mut session, &said, is_sotw), None);
        let said = session.next().unwrap();
        assert_eq!((said.kind, names(&said)), (Kind::Clusters, vec!["b", "c"]));
        assert_eq!(said.removed, ["a"]);
        assert_eq!(take(&mut session, &said, is_sotw), Some(UpdateOutcome::Runs));
        assert_eq!(session.next(), None);
    }
}

#[test]
fn what_is_refused_is_told_once_and_not_sent_again() {
    let mut session = started(false);
    session.aim(goal(2, &["a", "b"], "2"));
    let said = session.next().unwrap();
    // A rejection of an earlier response does not count.
    let old = XdsRequest { nonce: "0".to_owned(), refused: Some("old".to_owned()), ..XdsRequest::default() };
    assert_eq!(session.receive(Kind::Routes, old), None);
    let no = XdsRequest { nonce: said.nonce, refused: Some("no".to_owned()), ..XdsRequest::default() };
    assert_eq!(session.receive(Kind::Routes, no), Some(UpdateOutcome::Refused("no".to_owned())));
    assert_eq!(session.next(), None);
    session.aim(goal(3, &["a", "b"], "3"));
    let said = session.next().unwrap();
    assert_eq!((said.kind, said.all["overlay"].version.as_str()), (Kind::Routes, "3"));
    assert_eq!(take(&mut session, &said, false), Some(UpdateOutcome::Runs));
}

#[test]
fn an_envoy_that_comes_back_is_sent_what_differs() {
    let mut session = Session::new(goal(2, &["b", "c"], "2"));
    let has = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "1".to_owned())]);
    session.receive(Kind::Clusters, XdsRequest { has, ..XdsRequest::default() });
    let said = session.next().unwrap();
    assert_eq!(said.changed.keys().collect::<Vec<_>>(), ["c"]);
    assert!(said.removed.is_empty(), "its routes may need it yet");
}
