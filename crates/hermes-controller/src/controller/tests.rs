//! Changes are atomic and serialised, and reach the nodes that they concern.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;

use super::follow::COMPACT_INTERVAL;
use super::{ApplyError, Controller, Request};
use crate::control::{Order, Report, Revocation};
use crate::document::{Name, read};
use crate::store::{BaseState, LogRead, Revision, Sqlite, Store, StoreError};

const OVERLAY: &str = "\
kind: Overlay
name: x
---
{kind: Node, name: a, links: hub, apps: {bind: 127.0.0.1:8080}}
---
{kind: Node, name: hub, role: standalone, address: \"192.0.2.1:9443\", links: [one, two]}
---
{kind: Node, name: one, address: \"192.0.2.2:9443\"}
---
{kind: Node, name: two, address: \"192.0.2.3:9443\"}
---
{kind: User, name: ann, nodes: a}
---
{kind: Service, name: A, at: {node: one, http: \"127.0.0.1:80\"}, for: {users: ann}}
";
const MOVED: &str = "{kind: Service, name: A, at: {node: one, http: \"127.0.0.1:81\"}, for: {users: ann}}";

fn documents(of: &Controller) -> Vec<(Name, Bytes)> {
    of.view().plan.documents().map(|(name, document)| (name.clone(), document.clone())).collect()
}

async fn begin(directory: &Path) -> (Arc<dyn Store>, Controller) {
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(directory).unwrap());
    (store.clone(), Controller::start(store).await.unwrap())
}

fn put(text: &str) -> Request {
    Request { by: "operator".to_owned(), put: read(text).unwrap(), ..Request::default() }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_controller_that_is_behind_a_node_reads_its_store_before_it_tells_it_anything() {
    let directory = tempfile::tempdir().unwrap();
    let (store, first) = begin(directory.path()).await;
    first.apply(&put(OVERLAY)).await.unwrap();
    // The second controller does not follow the store.
    let second = Controller::start(store).await.unwrap();
    let revision = first.apply(&put(MOVED)).await.unwrap().revision;
    second.catch_up_with(revision - 1).await.unwrap();
    assert_ne!(documents(&second), documents(&first), "it knows no later revision yet, and nobody asked for one");
    second.catch_up_with(revision).await.unwrap();
    assert_eq!(documents(&second), documents(&first));
}

/// A store whose log can be replaced while a controller runs.
struct Replaced {
    store: std::sync::Mutex<Arc<dyn Store>>,
}

impl Replaced {
    fn now(&self) -> Arc<dyn Store> {
        self.store.lock().unwrap().clone()
    }
}

impl Store for Replaced {
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>> {
        Box::pin(async { self.now().base().await })
    }
    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>> {
        Box::pin(async move { self.now().read(after).await })
    }
    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>> {
        Box::pin(async move { self.now().append(after, bytes).await })
    }
    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.now().changed(after).await })
    }
    fn compact(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { self.now().compact(base).await })
    }
    fn begin(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { self.now().begin(base).await })
    }
}

#[tokio::test]
async fn a_lost_store_stays_lost_until_a_restart() {
    let [first, second] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    let (original, _) = begin(first.path()).await;
    let store = Arc::new(Replaced { store: std::sync::Mutex::new(original) });
    let controller = Controller::start(store.clone()).await.unwrap();
    controller.apply(&put(OVERLAY)).await.unwrap();
    let (other, writer) = begin(second.path()).await;
    *store.store.lock().unwrap() = other;
    assert!(matches!(controller.catch_up().await, Err(StoreError::Lost(1))));
    // Another history has reached the revision that this controller has read.
    writer.apply(&put(&OVERLAY.replace(":80\"", ":82\""))).await.unwrap();
    assert!(matches!(controller.catch_up().await, Err(StoreError::Lost(1))));
    let refused = controller.apply(&put(MOVED)).await.unwrap_err();
    assert!(matches!(refused, ApplyError::Store(StoreError::Lost(1))), "{refused}");
    assert_eq!(writer.view().state.revision, 1, "nothing is written into the other history");
}

#[tokio::test]
async fn an_entry_that_was_read_before_its_append_ended_is_settled() {
    let directory = tempfile::tempdir().unwrap();
    let (store, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    controller.apply(&put(MOVED)).await.unwrap();
    let LogRead::Entries(entries) = store.read(1).await.unwrap() else { panic!("entry 2 is gone") };
    controller.outcomes.add("joe", 2, &entries[0].bytes);
    controller.outcomes.add("ann", 2, &Bytes::from_static(b"another change"));
    controller.settle_next().await.unwrap();
    let settled = controller.settled().await;
    let made: Vec<_> = settled.iter().map(|one| (&*one.by, one.revision, one.is_made)).collect();
    assert_eq!(made, [("joe", 2, Some(true)), ("ann", 2, Some(false))]);
    assert_eq!(controller.view().state.revision, 2, "no entry is appended for them");
}

#[tokio::test]
async fn a_change_concerns_whom_it_touches() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    let mut one = controller.watch(&name("one"));
    assert_eq!(one.borrow_and_update().given.document, None);
    let outcome = controller.apply(&put(OVERLAY)).await.unwrap();
    assert_eq!((outcome.revision, outcome.created.len(), outcome.nodes.len()), (1, 7, 4));
    assert!(one.has_changed().unwrap() && one.borrow_and_update().given.document.is_some());
    let mut hub = controller.watch(&name("hub"));
    let outcome = controller.apply(&put(MOVED)).await.unwrap();
    assert_eq!(outcome.changed.iter().map(ToString::to_string).collect::<Vec<_>>(), ["Service/A"]);
    assert_eq!(outcome.nodes.keys().collect::<Vec<_>>(), [&name("one")]);
    assert!(one.has_changed().unwrap() && !hub.has_changed().unwrap());
    assert_eq!((one.borrow_and_update().given.since, hub.borrow_and_update().given.since), (2, 1));
    // Repeating the change changes nothing.
    let outcome = controller.apply(&put(MOVED)).await.unwrap();
    assert_eq!((outcome.revision, outcome.nodes.len(), one.has_changed().unwrap()), (2, 0, false));
}

#[tokio::test]
async fn what_is_wrong_or_dry_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let wrong = put("{kind: Node, name: late}\n---\n{kind: User, name: eve, nodes: nowhere}");
    let refused = controller.apply(&wrong).await.unwrap_err();
    assert!(refused.to_string().contains("User/eve: nodes[0]: unknown node nowhere"), "{refused}");
    let dry = Request { is_dry: true, ..put(MOVED) };
    let outcome = controller.apply(&dry).await.unwrap();
    assert_eq!((outcome.revision, outcome.nodes.len()), (1, 1));
    let delete = |key: &str| Request { delete: vec![key.parse().unwrap()], ..Request::default() };
    let refused = controller.apply(&delete("Node/one")).await.unwrap_err();
    assert!(refused.to_string().contains("Service/A: at[0].node: unknown node one"), "{refused}");
    assert!(matches!(controller.apply(&delete("Node/gone")).await, Err(ApplyError::Absent(_))));
    assert_eq!(controller.view().state.revision, 1);
    // A document can be deleted together with all documents that name it.
    let outcome = controller.apply(&delete("Node/two")).await;
    assert!(outcome.is_err(), "hub links to it");
    let mut whole = put("{kind: Node, name: hub, role: standalone, address: \"192.0.2.1:9443\", links: one}");
    whole.delete.push("Node/two".parse().unwrap());
    let outcome = controller.apply(&whole).await.unwrap();
    assert_eq!(outcome.nodes.get(&name("two")), Some(&None));
}

#[tokio::test]
async fn who_knows_an_older_revision_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let knowing = |revision| Request { since: Some(revision), ..put(MOVED) };
    let refused = controller.apply(&knowing(0)).await.unwrap_err();
    assert!(matches!(refused, ApplyError::Conflict { since: 0, found: 1, .. }), "{refused}");
    controller.apply(&knowing(1)).await.unwrap();
    assert_eq!(controller.apply(&knowing(1)).await.unwrap().revision, 2, "it is so already");
    let back = Request { since: Some(1), ..put(OVERLAY) };
    assert!(controller.apply(&back).await.unwrap_err().to_string().contains("Service/A changed in revision 2"));
}

/// Two controllers on one store, as with etcd: each sees the other's changes, and neither overwrites a change that it
/// has not seen.
#[tokio::test]
async fn two_controllers_agree() {
    let directory = tempfile::tempdir().unwrap();
    let (store, one) = begin(directory.path()).await;
    let two = Arc::new(Controller::start(store).await.unwrap());
    let mut following = JoinSet::new();
    following.spawn({
        let two = two.clone();
        async move { two.follow().await }
    });
    let mut watched = two.watch(&name("one"));
    one.apply(&put(OVERLAY)).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), watched.wait_for(|watched| watched.given.document.is_some()))
        .await
        .unwrap()
        .unwrap();
    let user = |number: usize| put(&format!("{{kind: User, name: u{number}, nodes: one}}"));
    for number in 0..20 {
        let by = if number % 2 == 0 { &one } else { &*two };
        by.apply(&user(number)).await.unwrap();
    }
    one.apply(&put(MOVED)).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), watched.wait_for(|watched| watched.given.since >= 22))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(documents(&one), documents(&two));
    following.shutdown().await;
}

/// After a restart the state and its revision are the same, read from the log or from a base.
#[tokio::test]
async fn a_restart_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    controller.apply(&put(MOVED)).await.unwrap();
    let (before, given) = (controller.view(), documents(&controller));
    drop(controller);
    let (store, controller) = begin(directory.path()).await;
    assert_eq!(store.base().await.unwrap(), None);
    assert_eq!(documents(&controller), given);
    let after = controller.view();
    assert_eq!((after.state.base(), after.state.changed.size()), (before.state.base(), before.state.changed.size()));
    for number in 0..COMPACT_INTERVAL {
        let node = format!("{{kind: User, name: u, nodes: [{}]}}", if number % 2 == 0 { "one" } else { "one, hub" });
        controller.apply(&put(&node)).await.unwrap();
    }
    let before = controller.view();
    drop((controller, store));
    let (store, controller) = begin(directory.path()).await;
    assert!(store.base().await.unwrap().is_some_and(|base| base.revision == COMPACT_INTERVAL));
    let after = controller.view();
    assert_eq!((after.state.base(), after.state.revision), (before.state.base(), before.state.revision));
}

mod enrolment {
    //! Enrolment tokens are for one node, once.

    use std::time::Duration;

    use rcgen::{CertificateParams, KeyPair};

    use super::{OVERLAY, begin, name, put};
    use crate::controller::Controller;
    use crate::token::EnrolmentToken;

    const LIFE: Duration = Duration::from_secs(600);

    fn request() -> Vec<u8> {
        let key = KeyPair::generate().unwrap();
        CertificateParams::default().serialize_request(&key).unwrap().der().to_vec()
    }

    async fn refused(controller: &Controller, ticket: &EnrolmentToken, request: &[u8]) -> String {
        controller.enrol(ticket, request).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn a_token_is_used_once() {
        let directory = tempfile::tempdir().unwrap();
        let (_, controller) = begin(directory.path()).await;
        assert!(controller.create_token("operator", &name("a"), LIFE).await.is_err(), "there is no such node yet");
        controller.apply(&put(OVERLAY)).await.unwrap();
        let ticket = controller.create_token("operator", &name("a"), LIFE).await.unwrap();
        let (mine, other) = (request(), request());
        assert!(refused(&controller, &ticket, &mine[1..]).await.contains("PKCS #10"), "what is no request uses none");
        let (node, first) = controller.enrol(&ticket, &mine).await.unwrap();
        assert_eq!((node, controller.view().state.tokens.size()), (name("a"), 0));
        // Repeats the request, as if the answer was lost.
        let revision = controller.view().state.revision;
        let (_, again) = controller.enrol(&ticket, &mine).await.unwrap();
        assert_eq!((again.authorities, controller.view().state.revision), (first.authorities, revision));
        assert!(refused(&controller, &ticket, &other).await.contains("used"));
        let foreign = EnrolmentToken::generate(ticket.pin).unwrap();
        assert!(refused(&controller, &foreign, &other).await.contains("of another overlay"));
        assert!(controller.renew(&name("a"), &mine).is_ok());
        for (node, key) in [("a", &other), ("one", &mine)] {
            assert!(controller.renew(&name(node), key).unwrap_err().to_string().contains("another key"));
        }
        controller.expel("operator", &name("a")).await.unwrap();
        assert!(controller.renew(&name("a"), &mine).is_err());
        assert!(
            refused(&controller, &ticket, &mine).await.contains("used"),
            "who was expelled does not come back by it"
        );
    }

    #[tokio::test]
    async fn a_token_expires() {
        let directory = tempfile::tempdir().unwrap();
        let (_, controller) = begin(directory.path()).await;
        controller.apply(&put(OVERLAY)).await.unwrap();
        let ticket = controller.create_token("operator", &name("a"), Duration::ZERO).await.unwrap();
        assert!(refused(&controller, &ticket, &request()).await.contains("expired"));
        // Deleting a node deletes its tokens: a later node of the same name has none.
        let old = controller.create_token("operator", &name("two"), LIFE).await.unwrap();
        let hub = "{kind: Node, name: hub, role: standalone, address: \"192.0.2.1:9443\", links: one}";
        let mut without = put(hub);
        without.delete.push("Node/two".parse().unwrap());
        controller.apply(&without).await.unwrap();
        controller.apply(&put(OVERLAY)).await.unwrap();
        assert!(refused(&controller, &old, &request()).await.contains("used, revoked"));
        // Creating a token removes expired ones.
        controller.create_token("operator", &name("a"), LIFE).await.unwrap();
        assert_eq!(controller.view().state.tokens.size(), 1);
    }

    /// If two nodes use one token at two controllers at once, one of them enrols.
    #[tokio::test]
    async fn one_token_makes_one_node_of_two() {
        let directory = tempfile::tempdir().unwrap();
        let (store, one) = begin(directory.path()).await;
        let two = Controller::start(store).await.unwrap();
        one.apply(&put(OVERLAY)).await.unwrap();
        for _ in 0..20 {
            let ticket = one.create_token("operator", &name("a"), LIFE).await.unwrap();
            let (mine, other) = (request(), request());
            let (a, b) = tokio::join!(one.enrol(&ticket, &mine), two.enrol(&ticket, &other));
            assert!(a.is_ok() != b.is_ok(), "{a:?} {b:?}");
        }
    }
}

/// A request for a certificate for this key.
fn request(key: &rcgen::KeyPair) -> Vec<u8> {
    rcgen::CertificateParams::default().serialize_request(key).unwrap().der().to_vec()
}

#[tokio::test]
async fn who_knew_what_is_deleted_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (store, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let service = "Service/A".parse().unwrap();
    controller.apply(&Request { delete: vec![service], ..Request::default() }).await.unwrap();
    let back = Request { since: Some(1), ..put(MOVED) };
    let again = Controller::start(store).await.unwrap();
    for controller in [&controller, &again] {
        let refused = controller.apply(&Request { is_dry: true, ..back.clone() }).await.unwrap_err();
        assert!(matches!(refused, ApplyError::Conflict { since: 1, found: 2, .. }), "{refused}");
    }
    controller.apply(&Request { since: Some(2), ..back }).await.unwrap();
}

/// A key in another encoding than the certificate's would not be found by its revocation.
#[tokio::test]
async fn a_key_is_known_as_its_certificate_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let ticket = controller.create_token("operator", &name("one"), Duration::from_secs(60)).await.unwrap();
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let usual = request(&key);
    // Adds a NULL parameter to the key's algorithm and signs again; the enclosing lengths grow by two.
    let algorithm = [0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];
    let at = usual.windows(7).position(|bytes| bytes == algorithm).unwrap();
    let info = usual.windows(2).position(|bytes| bytes == [0x02, 0x01]).unwrap() - 2;
    let length = usize::from(usual[info + 1]);
    let mut inner = usual[info..info + 2 + length].to_vec();
    let key_at = at - info;
    inner.splice(key_at..key_at + 7, [0x30, 0x07, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x05, 0x00]);
    (inner[1], inner[key_at - 1]) = (inner[1] + 2, inner[key_at - 1] + 2);
    let signature = rcgen::SigningKey::sign(&key, &inner).unwrap();
    let rest = [&algorithm[..], &[0x03, 0x41, 0x00], &signature].concat();
    let whole = [&inner[..], &rest].concat();
    let odd = [&[0x30, 0x81, u8::try_from(whole.len()).unwrap()], &whole[..]].concat();
    let refused = controller.enrol(&ticket, &odd).await.unwrap_err();
    assert!(refused.to_string().contains("unsupported key encoding"), "{refused}");
    // The token is still valid, and the usual encoding is accepted.
    controller.enrol(&ticket, &usual).await.unwrap();
}

#[tokio::test]
async fn a_revoked_key_is_believed_again_for_its_own_node_alone_and_as_long_as_it_may_be_shown() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    let lives = |life: &str| put(&OVERLAY.replace("name: x\n", &format!("name: x\ncertificate-lifetime: {life}\n")));
    controller.apply(&lives("30d")).await.unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let enrol = async |node: &str| {
        let ticket = controller.create_token("operator", &name(node), Duration::from_secs(60)).await.unwrap();
        controller.enrol(&ticket, &request(&key)).await
    };
    enrol("one").await.unwrap();
    controller.apply(&lives("1h")).await.unwrap();
    controller.expel("operator", &name("one")).await.unwrap();
    let until = controller.view().state.catalog.revoked().next().unwrap().until;
    assert!(until > super::now() + 29 * 24 * 3600 * 1000, "it may have a certificate for thirty days");
    let refused = enrol("two").await.unwrap_err();
    assert!(refused.to_string().contains("belonged to another node and is revoked"), "{refused}");
    enrol("one").await.unwrap();
    assert_eq!(controller.view().state.catalog.revoked().count(), 0);
}

#[tokio::test]
async fn a_later_revision_counts_from_a_member_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let ticket = controller.create_token("operator", &name("one"), Duration::from_secs(60)).await.unwrap();
    controller.enrol(&ticket, &request(&rcgen::KeyPair::generate().unwrap())).await.unwrap();
    let key = controller.view().state.members.get(&name("one")).unwrap().key.clone();
    let proof = controller.with_history(Order { revision: 100, ..Order::default() }).proof;
    let report = Report { latest: 100, proof, ..Report::default() };
    let one = name("one");
    for stranger in [None, Some((&one, "another key"))] {
        controller.recall(stranger, &report).await.unwrap();
        assert_eq!(controller.view().state.behind, 0, "{stranger:?}");
    }
    controller.recall(Some((&one, &key)), &report).await.unwrap();
    assert_eq!(controller.view().state.behind, 100);
}

#[tokio::test]
async fn revocations_that_are_known_take_no_room_from_those_that_are_lost() {
    let [first, second] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    let (_, controller) = begin(first.path()).await;
    controller.apply(&put(OVERLAY)).await.unwrap();
    let ticket = controller.create_token("operator", &name("one"), Duration::from_secs(60)).await.unwrap();
    controller.enrol(&ticket, &request(&rcgen::KeyPair::generate().unwrap())).await.unwrap();
    let key = controller.view().state.members.get(&name("one")).unwrap().key.clone();
    let backup = controller.backup();
    controller.expel("operator", &name("one")).await.unwrap();
    let document = Bytes::from(crate::digest::key_name(&key));
    let lost = controller.with_history(Order { document, ..Order::default() }).revoked;
    assert_eq!(lost.len(), 1);
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(second.path()).unwrap());
    Controller::restore(&*store, &backup).await.unwrap();
    let restored = Controller::start(store).await.unwrap();
    let over = Revocation { key: "another".to_owned(), until: 1, ..Revocation::default() };
    let revoked = std::iter::repeat_n(over, 600).chain(lost).collect();
    restored.recall(None, &Report { revoked, ..Report::default() }).await.unwrap();
    let view = restored.view();
    assert_eq!(view.state.catalog.revoked().map(|one| &one.key).collect::<Vec<_>>(), [&key]);
    assert!(view.state.members.get(&name("one")).is_none());
}

#[tokio::test]
async fn what_has_no_bound_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    for life in ["0s", "3000000d"] {
        let wrong = OVERLAY.replace("name: x\n", &format!("name: x\ncertificate-lifetime: {life}\n"));
        let refused = controller.apply(&put(&wrong)).await.unwrap_err();
        assert!(refused.to_string().contains("certificate-lifetime: out of range; expected 1s to 366d"), "{refused}");
    }
    let theirs = |bytes: usize| {
        format!(
            "{}---\n{{kind: Service, provider: acme, name: B, at: {{node: one, http: \"127.0.0.1:1\"}}, for: everyone, rewrite: \
             {{set-headers: {{x: {}}}}}}}",
            OVERLAY
                .replace("name: x\n", "name: x\nproviders: {acme: {}}\n")
                .replace("{kind: Node, name: one,", "{kind: Node, name: one, providers: acme,")
                .replace("{kind: User, name: ann,", "{kind: User, provider: acme, name: ann,")
                .replace("{kind: Service, name: A,", "{kind: Service, provider: acme, name: A,")
                .replace("{kind: Node, name: a,", "{kind: Node, name: a, providers: acme,"),
            "y".repeat(bytes)
        )
    };
    let refused = controller.apply(&put(&theirs(300 << 10))).await.unwrap_err();
    assert!(refused.to_string().contains("at most 262144 for a provider's document"), "{refused}");
    controller.apply(&put(&theirs(3 << 10))).await.unwrap();
}

/// A provider that applies repeatedly during rollouts does not block other owners.
#[tokio::test]
async fn providers_have_turns_where_changes_go_out_in_waves() {
    let directory = tempfile::tempdir().unwrap();
    let (_, controller) = begin(directory.path()).await;
    let overlay = "kind: Overlay\nname: x\nproviders: {acme: {}, bella: {}, carla: {}}\nrollout: {first: 1, growth: 1, settle: 1h}\n---\n\
        {kind: Node, name: one, address: \"192.0.2.2:9443\", providers: [acme, bella, carla], apps: {bind: 127.0.0.1:8080, user: acme/u}}\n";
    let service = |provider: &str, port: u16| Request {
        by: format!("provider/{provider}/joe"),
        ..put(&format!(
            "{{kind: User, provider: {provider}, name: u, nodes: one}}\n---\n\
             {{kind: Service, provider: {provider}, name: A, at: {{node: one, http: \"127.0.0.1:{port}\"}}, for: everyone}}"
        ))
    };
    let all = format!("{overlay}---\n{{kind: User, provider: acme, name: u, nodes: one}}\n");
    controller.apply(&Request { is_now: true, ..put(&all) }).await.unwrap();
    let finish = async || {
        let of = controller.view().state.rollout.as_ref().unwrap().of;
        controller.finish("operator/root", of).await.unwrap();
    };
    controller.apply(&service("acme", 1)).await.unwrap();
    for provider in ["carla", "bella", "carla"] {
        assert!(matches!(controller.apply(&service(provider, 1)).await, Err(ApplyError::Busy(_))));
    }
    finish().await;
    // Waiting owners come first, in order. A turn is refused only if another owner waits.
    assert!(matches!(controller.apply(&service("acme", 2)).await, Err(ApplyError::Turn)));
    assert!(matches!(controller.apply(&service("bella", 2)).await, Err(ApplyError::Turn)));
    controller.apply(&service("carla", 2)).await.unwrap();
    finish().await;
    assert!(matches!(controller.apply(&service("acme", 2)).await, Err(ApplyError::Turn)));
    controller.apply(&service("bella", 2)).await.unwrap();
    assert!(matches!(controller.apply(&service("acme", 2)).await, Err(ApplyError::Busy(_))));
    finish().await;
    controller.apply(&service("acme", 2)).await.unwrap();
    finish().await;
    controller.apply(&service("acme", 3)).await.unwrap();
}
