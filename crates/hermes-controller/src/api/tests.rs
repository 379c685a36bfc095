//! Tests that the audit log has each action of an operator, successful or failed.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Method, StatusCode};
use tokio::sync::Semaphore;
use tower::Service as _;

use super::router;
use crate::audit::Audit;
use crate::controller::{Controller, now};
use crate::push::{Peer, Push};
use crate::state::{Change, Commit, Operator};
use crate::store::{BaseState, LogRead, Revision, Sqlite, Store, StoreError};

/// A store that makes a change only when it receives a permit, and then reports the outcome.
struct Gated {
    store: Sqlite,
    permits: Semaphore,
    asked: Semaphore,
}

impl Store for Gated {
    fn base(&self) -> BoxFuture<'_, Result<Option<BaseState>, StoreError>> {
        self.store.base()
    }

    fn read(&self, after: Revision) -> BoxFuture<'_, Result<LogRead, StoreError>> {
        self.store.read(after)
    }

    fn append(&self, after: Revision, bytes: Bytes) -> BoxFuture<'_, Result<Revision, StoreError>> {
        Box::pin(async move {
            self.asked.add_permits(1);
            self.permits.acquire().await.unwrap().forget();
            self.store.append(after, bytes).await
        })
    }

    fn changed(&self, after: Revision) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.changed(after)
    }

    fn compact(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.compact(base)
    }

    fn begin(&self, base: BaseState) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.begin(base)
    }
}

struct Fixture {
    directory: tempfile::TempDir,
    store: Arc<Gated>,
    router: axum::Router,
}

impl Fixture {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(directory.path()).unwrap();
        let root = Operator { key: "k".to_owned(), name: "root".parse().unwrap(), provider: None, until: u64::MAX };
        let commit = Commit { at: now(), by: "test".to_owned(), changes: vec![Change::Operator(root)] };
        store.append(0, serde_json::to_vec(&commit).unwrap().into()).await.unwrap();
        let store = Arc::new(Gated { store, permits: Semaphore::new(0), asked: Semaphore::new(0) });
        let controller = Arc::new(Controller::start(store.clone()).await.unwrap());
        let audit = Arc::new(Audit::open(directory.path()).unwrap());
        let router = router(controller.clone(), Push::new(controller, audit.clone()), audit);
        Self { directory, store, router }
    }

    fn ask(&self, method: Method, path: &str, body: &str) -> impl Future<Output = StatusCode> + Send + use<> {
        let uris = vec!["hermes:operator/root".to_owned()];
        let peer = Arc::new(Peer { uris, key: "k".to_owned(), until: i64::MAX, ..Peer::default() });
        let request = http::Request::builder().method(method).uri(path).extension(peer);
        let request = request.header("content-type", "application/json").body(Body::from(body.to_owned())).unwrap();
        let mut router = self.router.clone();
        async move { router.call(request).await.unwrap().status() }
    }

    fn lines(&self) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.directory.path().join("audit.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Resets a request while the store makes its change. Returns the next line of the audit log.
    async fn reset(&self, method: Method, path: &str, body: &str) -> serde_json::Value {
        let before = self.lines().len();
        let mut asking = tokio::task::JoinSet::new();
        asking.spawn(self.ask(method, path, body));
        self.store.asked.acquire().await.unwrap().forget();
        asking.abort_all();
        assert!(asking.join_next().await.unwrap().unwrap_err().is_cancelled());
        self.store.permits.add_permits(1);
        let written = async {
            while self.lines().len() == before {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), written).await.expect("no line in the audit log");
        self.lines().pop().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_whose_client_resets_its_stream_is_audited() {
    let fixture = Fixture::new().await;
    let documents = "{kind: Overlay, name: x}\n---\n{kind: Node, name: a, role: standalone}\n";
    let line = fixture.reset(Method::POST, "/v1/apply", documents).await;
    assert_eq!((&line["what"], &line["revision"]), (&"apply".into(), &2.into()), "{line}");
    assert_eq!(line["by"], "operator/root");
    let line = fixture.reset(Method::DELETE, "/v1/documents/Node/a", "").await;
    assert_eq!((&line["what"], &line["revision"]), (&"delete".into(), &3.into()), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_actions_of_operators_are_audited() {
    let fixture = Fixture::new().await;
    fixture.store.permits.add_permits(100);
    let operator = r#"{"name": "ann", "request": "AAAA", "life": 60}"#;
    let encoded = r#"{"name": "ann", "request": "?", "life": 60}"#;
    let actions = [
        (Method::DELETE, "/v1/nodes/a", "", "revoke"),
        (Method::POST, "/v1/tokens", r#"{"node": "a"}"#, "token"),
        (Method::POST, "/v1/tokens", r#"{"node": "a", "life": 0}"#, "token"),
        (Method::POST, "/v1/rollout", "", "finish"),
        (Method::DELETE, "/v1/rollout", "", "cancel"),
        (Method::POST, "/v1/operators", operator, "operator"),
        (Method::POST, "/v1/operators", encoded, "operator"),
        (Method::POST, "/v1/certificate", r#"{"request": "AAAA"}"#, "operator-renew"),
        (Method::DELETE, "/v1/operators/ann", "", "dismiss"),
    ];
    for (method, path, body, what) in actions {
        let before = fixture.lines().len();
        let status = fixture.ask(method, path, body).await;
        assert!(status.is_client_error() || status.is_server_error(), "{what}: {status}");
        let lines = fixture.lines();
        assert_eq!(lines.len(), before + 1, "{what} {body}: {status}");
        let line = lines.last().unwrap();
        assert!(line["what"] == what && line["by"] == "operator/root" && line["refused"].is_string(), "{line}");
    }
}
