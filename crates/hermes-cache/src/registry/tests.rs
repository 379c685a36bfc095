//! The cache of a session, while the configuration changes.

use std::path::Path;

use super::*;

fn snapshot(route: &str) -> Snapshot {
    let document = format!(
        "{{node: edge, listeners: [{{name: in, bind: '127.0.0.1:0', protocol: http}}], routes: [{{name: all, {route}}}], \
         upstreams: [{{name: a, protocol: h1, endpoints: ['127.0.0.1:1']}}, {{name: b, protocol: h1, endpoints: ['127.0.0.1:1']}}]}}"
    );
    hermes_model::check(&document, Path::new(".")).unwrap().snapshot
}

#[test]
fn a_session_of_another_document_has_the_cache_only_where_that_means_the_same() {
    let (caches, metrics) = (CacheRegistry::default(), |_: &Arc<str>| CacheMetrics::default());
    let before = snapshot("upstream: a, cache: {}");
    caches.follow(&before, &metrics);
    let first = caches.of(&before.routes[0]).unwrap();
    // The same configuration again, and one that does not exist yet.
    let same = snapshot("upstream: a, cache: {}, timeout: {progress: 1s}");
    let other = snapshot("upstream: b, cache: {}");
    assert!(Arc::ptr_eq(&caches.of(&same.routes[0]).unwrap(), &first));
    assert!(caches.of(&other.routes[0]).is_none());
    caches.follow(&same, &metrics);
    assert!(Arc::ptr_eq(&caches.of(&same.routes[0]).unwrap(), &first));
    assert!(Arc::ptr_eq(&caches.of(&before.routes[0]).unwrap(), &first));
    caches.follow(&other, &metrics);
    assert!(caches.of(&before.routes[0]).is_none());
    assert!(!Arc::ptr_eq(&caches.of(&other.routes[0]).unwrap(), &first));
    let without = snapshot("upstream: b");
    caches.follow(&without, &metrics);
    assert!(caches.of(&other.routes[0]).is_none() && caches.of(&without.routes[0]).is_none());
}
