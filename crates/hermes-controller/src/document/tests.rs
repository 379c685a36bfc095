//! Documents are parsed with all their problems reported, and serialised as they were read.

#![allow(clippy::unwrap_used)]

use super::{Key, Kind, read};

const WHOLE: &str = "\
kind: Overlay
name: video
---
kind: Node
name: ingress
role: standalone
address: 192.0.2.1:9443
---
kind: Service
name: VIDEO
at: {node: ingress, http: 127.0.0.1:80}
for: {users: alice}
---
kind: User
name: alice
";

#[test]
fn a_stream_is_read_and_written_again() {
    let all = read(WHOLE).unwrap();
    let keys: Vec<_> = all.iter().map(|resource| resource.key.to_string()).collect();
    assert_eq!(keys, ["Overlay/video", "Node/ingress", "Service/VIDEO", "User/alice"]);
    for resource in &all {
        let text = serde_json::to_string(resource).unwrap();
        assert_eq!(serde_json::from_str::<super::Resource>(&text).unwrap(), *resource, "{text}");
    }
}

#[test]
fn every_problem_of_every_document_is_told() {
    let text = "\
kind: Nodes
name: x y
---
kind: Nod
name: z
---
kind: Objective
name: fast
---
kind: Service
name: VIDEO
provider: acme
fro: everyone
at: {node: ingress, http: 127.0.0.1}
---
kind: Node
name: VIDEO
provider: acme
rôle: 3
";
    let said: Vec<_> = read(text).unwrap_err().iter().map(ToString::to_string).collect();
    let expected = [
        "document 1: name: invalid name \"x y\"",
        "document 2: kind: unknown kind of document \"Nod\"; expected one of Overlay, Node",
        "document 3: kind: Objective is not in this version of Hermes; leave it out",
        "Service/acme/VIDEO: fro: unknown key \"fro\" (did you mean \"for\"?)",
        "Service/acme/VIDEO: at.http: ",
        "Service/acme/VIDEO: for: missing key \"for\"",
        "Node/acme/VIDEO: provider: a Node belongs to the operator; leave provider out",
        "Node/acme/VIDEO: rôle: ",
    ];
    for words in expected {
        assert!(said.iter().any(|said| said.starts_with(words)), "{words:?} is not in {said:#?}");
    }
    assert_eq!(said.len(), expected.len(), "{said:#?}");
}

#[test]
fn the_same_document_twice_is_one_too_many() {
    let said = read("kind: User\nname: a\n---\nkind: User\nname: a\n").unwrap_err();
    assert_eq!(said.len(), 1);
    assert!(said[0].to_string().starts_with("User/a: duplicate document"), "{said:?}");
}

#[test]
fn keys_are_read_as_people_write_them() {
    let key: Key = "services/acme/VIDEO".parse().unwrap();
    assert_eq!((key.kind, key.to_string()), (Kind::Service, "Service/acme/VIDEO".to_owned()));
    for wrong in ["VIDEO", "service", "service/a/b/c", "service/../x", "service/"] {
        assert!(wrong.parse::<Key>().is_err(), "{wrong}");
    }
}
