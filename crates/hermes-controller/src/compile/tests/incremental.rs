//! Tests that an update computes only what its change affects, and gives the same result as a full compilation.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::{compile, read};
use crate::catalog::Catalog;
use crate::compile::Plan;
use crate::document::{Key, Name};

/// A reproducible random number generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn some(&mut self, kind: &str, of: u64) -> String {
        let all: Vec<_> = (0..of).filter(|_| self.below(3) == 0).map(|number| format!("{kind}{number}")).collect();
        format!("[{}]", all.join(", "))
    }
}

const NODES: u64 = 7;
const USERS: u64 = 4;

/// A document that may exist, or a replacement.
fn document(chance: &mut Chance, has_providers: bool) -> String {
    let number = chance.below(NODES);
    let provider = if has_providers { ["p", "q"][chance.below(2) as usize] } else { "" };
    let owner = if has_providers { format!("provider: {provider}, ") } else { String::new() };
    match chance.below(7) {
        0..3 => {
            let role = if chance.below(2) == 0 { "standalone" } else { "dependent" };
            let address =
                if chance.below(8) > 0 { format!(", address: \"192.0.2.{number}:9443\"") } else { String::new() };
            let apps = if chance.below(3) == 0 { ", apps: {bind: 127.0.0.1:8080}" } else { "" };
            let h3 = if chance.below(4) == 0 { ", http3: true" } else { "" };
            let providers = if has_providers { ", providers: [p, q]" } else { "" };
            let draining = if chance.below(4) == 0 { ", draining: true" } else { "" };
            let runs = if chance.below(24) == 0 { ", runs: envoy" } else { "" };
            let links = chance.some("n", NODES);
            let links = if links == "[]" { String::new() } else { format!(", links: {links}") };
            format!(
                "{{kind: Node, name: n{number}, role: {role}{address}{apps}{h3}{providers}{draining}{runs}{links}}}"
            )
        }
        3 => {
            let nodes = chance.some("n", NODES);
            let nodes = if nodes == "[]" { String::new() } else { format!(", nodes: {nodes}") };
            format!("{{kind: User, {owner}name: u{}{nodes}}}", chance.below(USERS))
        }
        4 => {
            let users = chance.some("u", USERS);
            let users = if users == "[]" { String::new() } else { format!(", users: {users}") };
            format!("{{kind: Group, {owner}name: g{}{users}}}", chance.below(2))
        }
        _ => {
            let users = chance.some("u", USERS);
            let audience = match chance.below(3) {
                0 => "everyone".to_owned(),
                1 => format!("{{groups: g{}}}", chance.below(2)),
                _ if users == "[]" => "everyone".to_owned(),
                _ => format!("{{users: {users}}}"),
            };
            let other = (number + 1 + chance.below(NODES - 1)) % NODES;
            let at = format!("[{{node: n{number}, http: \"127.0.0.1:1\"}}, {{node: n{other}, http: \"127.0.0.1:2\"}}]");
            if chance.below(5) == 0 {
                return format!(
                    "{{kind: Network, {owner}name: L{}, prefixes: 10.0.{number}.0/24, at: [{{node: n{number}}}, {{node: n{other}}}], for: {audience}}}",
                    chance.below(2)
                );
            }
            let custody = if chance.below(8) == 0 { ", custody: {deadline: 1h}" } else { "" };
            format!("{{kind: Service, {owner}name: S{}, at: {at}, for: {audience}{custody}}}", chance.below(3))
        }
    }
}

fn whole(catalog: &Catalog) -> Result<BTreeMap<Name, Bytes>, ()> {
    let documents = compile(catalog).map_err(drop)?;
    Ok(documents.into_iter().map(|(name, one)| (name, serde_json::to_vec(&one).unwrap().into())).collect())
}

fn walk(seed: u64, has_providers: bool) -> usize {
    let mut chance = Chance(seed);
    let mut catalog = Catalog::default();
    let providers = if has_providers { "\nproviders: {p: {}, q: {}}" } else { "" };
    let mut text = format!("kind: Overlay\nname: x{providers}\n");
    let (serves, owners) = if has_providers { (", providers: [p, q]", &["p", "q"][..]) } else { ("", &[""][..]) };
    for number in 0..NODES {
        let role = if number < 3 { "standalone" } else { "dependent" };
        text += &format!(
            "---\n{{kind: Node, name: n{number}, role: {role}, address: \"192.0.2.{number}:9443\"{serves}}}\n"
        );
    }
    for owner in owners {
        let owner = if has_providers { format!("provider: {owner}, ") } else { String::new() };
        let users = (0..USERS).map(|number| format!("---\n{{kind: User, {owner}name: u{number}}}\n"));
        let groups = (0..2).map(|number| format!("---\n{{kind: Group, {owner}name: g{number}}}\n"));
        text.extend(users.chain(groups));
    }
    for resource in read(&text).unwrap() {
        catalog.put(resource);
    }
    let all: BTreeSet<Key> = catalog.iter().map(|resource| resource.key.clone()).collect();
    let (mut plan, _) = Plan::default().update(&catalog, &all).unwrap();
    let mut taken = 0;
    for step in 0..120 {
        let (mut next, mut changed) = (catalog.clone(), BTreeSet::new());
        for _ in 0..=chance.below(3) {
            if chance.below(12) == 0 {
                let keys: Vec<_> =
                    next.iter().map(|one| one.key.clone()).filter(|key| key.kind.word() != "Overlay").collect();
                let Some(key) = keys.get(chance.below(keys.len().max(1) as u64) as usize) else { continue };
                next.remove(key);
                changed.insert(key.clone());
                continue;
            }
            for resource in read(&document(&mut chance, has_providers)).unwrap() {
                changed.insert(resource.key.clone());
                next.put(resource);
            }
        }
        let (updated, expected) = (plan.update(&next, &changed), whole(&next));
        assert_eq!(updated.is_ok(), expected.is_ok(), "seed {seed}, step {step}: {:?}", updated.err());
        let (Ok((updated, touched)), Ok(expected)) = (updated, expected) else { continue };
        let documents: BTreeMap<_, _> = updated.documents().map(|(name, one)| (name.clone(), one.clone())).collect();
        assert_eq!(documents, expected, "seed {seed}, step {step}, after {changed:?}");
        for name in plan.documents().map(|(name, _)| name).chain(documents.keys()) {
            let is_other = plan.document(name) != updated.document(name);
            assert_eq!(touched.contains_key(name), is_other, "seed {seed}, step {step}: {name}");
        }
        (plan, catalog) = (updated, next);
        taken += 1;
    }
    taken
}

#[test]
fn a_change_comes_to_what_all_of_it_comes_to() {
    let taken: usize = (0..24).map(|seed| walk(seed, seed % 2 == 1)).sum();
    assert!(taken > 24 * 40, "{taken} changes were taken");
}

/// A new device affects itself and the node that it dials.
#[test]
fn a_device_more_touches_itself_and_its_neighbour() {
    let mut text = "kind: Overlay\nname: x\n---\n\
         {kind: Node, name: hub, role: standalone, address: \"192.0.2.1:9443\", links: server}\n---\n\
         {kind: Node, name: server, address: \"192.0.2.2:9443\"}\n---\n\
         {kind: Service, name: APP, at: {node: server, http: \"127.0.0.1:1\"}, for: everyone}\n"
        .to_owned();
    for number in 0..200 {
        text += &format!("---\n{{kind: Node, name: d{number}, links: hub, apps: {{bind: 127.0.0.1:8080}}}}\n");
    }
    let mut catalog = super::catalog(&text);
    let all = catalog.iter().map(|resource| resource.key.clone()).collect();
    let (plan, touched) = Plan::default().update(&catalog, &all).unwrap();
    assert_eq!(touched.len(), 202);
    for resource in read("{kind: Node, name: more, links: hub, apps: {bind: 127.0.0.1:8080}}").unwrap() {
        catalog.put(resource);
    }
    let (_, touched) = plan.update(&catalog, &BTreeSet::from(["Node/more".parse().unwrap()])).unwrap();
    assert_eq!(touched.keys().map(Name::as_str).collect::<Vec<_>>(), ["more"]);
}
