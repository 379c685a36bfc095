//! At each phase of a rotation, everybody who trusts one CA of the overlay accepts all its members.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hermes_net::tls::{Roots, chains_to};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

use super::super::{ApplyError, Controller, RequestKey};
use crate::ca::Ca;
use crate::ca::Seal;
use crate::ca::Subject;
use crate::store::{Sqlite, Store};

async fn begin(directory: &std::path::Path) -> Controller {
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(directory).unwrap());
    let controller = Controller::start(store).await.unwrap();
    controller.authority().await.unwrap();
    controller
}

/// When the rotation entered its phase.
fn since(controller: &Controller) -> u64 {
    controller.view().state.rotation.as_ref().map_or(0, |rotation| rotation.since)
}

/// A complete rotation.
async fn follow(controller: &Controller, next: Ca) {
    controller.rotate("x", next).await.unwrap();
    controller.switch("x", since(controller)).await.unwrap();
    controller.retire("x", since(controller), false).await.unwrap();
}

fn next() -> Ca {
    Ca::generate(SystemTime::now()).unwrap()
}

/// A certificate with its chain, and the CAs that its holder trusts.
fn issued(controller: &Controller) -> (String, String) {
    let request = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
    let (overlay, node) = ("x".parse().unwrap(), "a".parse().unwrap());
    let subject = Subject::Node { overlay: &overlay, node: &node, role: hermes_model::snapshot::Role::Dependent };
    let issued = controller.sign(request.der(), &subject, Duration::from_secs(60)).unwrap();
    (issued.certificate, issued.authorities)
}

/// True if the first party accepts the second one's certificate.
fn believes((_, trusted): &(String, String), (shown, _): &(String, String)) -> bool {
    let ders = crate::ca::blocks(shown).unwrap().into_iter().map(Into::into).collect::<Vec<_>>();
    chains_to(&Roots::from_pem(trusted.as_bytes()).unwrap(), &ders).is_ok()
}

fn all_believe(members: &[(String, String)]) {
    for one in members {
        for other in members {
            assert!(believes(one, other));
        }
    }
}

#[tokio::test]
async fn members_believe_each_other_at_each_step() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    let before = issued(&controller);
    assert!(matches!(controller.retire("x", since(&controller), true).await, Err(ApplyError::NotReady(_))));
    controller.rotate("x", next()).await.unwrap();
    assert!(matches!(controller.rotate("x", next()).await, Err(ApplyError::NotReady(_))));
    assert!(matches!(controller.retire("x", since(&controller), false).await, Err(ApplyError::NotReady(_))));
    let announced = issued(&controller);
    all_believe(&[before.clone(), announced.clone()]);
    controller.switch("x", since(&controller)).await.unwrap();
    let revision = controller.switch("x", since(&controller)).await.unwrap();
    assert_eq!(revision, controller.view().state.revision, "once is enough");
    let switched = issued(&controller);
    // A node that was disconnected since before the rotation accepts the others.
    all_believe(&[announced.clone(), switched.clone()]);
    assert!(believes(&before, &switched));
    controller.retire("x", since(&controller), false).await.unwrap();
    let after = issued(&controller);
    all_believe(&[switched.clone(), after.clone()]);
    assert!(!believes(&after, &before) && !believes(&after, &announced));
    // The certificate of the controller's server.
    let trust = controller.view().state.trust().unwrap();
    let own = issued(&controller).0.split_inclusive("-----END CERTIFICATE-----\n").next().unwrap().to_owned();
    assert!(believes(&before, &(own + &trust.shown, String::new())));
}

#[tokio::test]
async fn who_was_away_for_several_rotations_finds_the_controller_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    let before = issued(&controller);
    for _ in 0..4 {
        follow(&controller, next()).await;
    }
    let trust = controller.view().state.trust().unwrap();
    let own = issued(&controller).0;
    assert!(!believes(&before, &(own.clone(), String::new())));
    assert!(believes(&before, &(own + &trust.shown, String::new())));
}

#[tokio::test]
async fn what_is_taken_back_leaves_nobody_behind() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    let before = issued(&controller);
    assert!(matches!(controller.cancel_rotation("x").await, Err(ApplyError::NotReady(_))));
    controller.rotate("x", next()).await.unwrap();
    controller.cancel_rotation("x").await.unwrap();
    assert_eq!(issued(&controller).1, before.1);
    controller.rotate("x", next()).await.unwrap();
    controller.switch("x", since(&controller)).await.unwrap();
    let switched = issued(&controller);
    controller.cancel_rotation("x").await.unwrap();
    let back = issued(&controller);
    all_believe(&[switched, back.clone()]);
    assert!(believes(&before, &back));
    controller.retire("x", since(&controller), false).await.unwrap();
    let after = issued(&controller);
    all_believe(&[before.clone(), after.clone()]);
    assert_eq!(after.1, before.1);
}

#[tokio::test]
async fn a_store_is_sealed_from_its_first_start_with_a_seal() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    let controller = begin(directory.path()).await;
    let key = controller.view().state.authority.as_ref().unwrap().key.lines().nth(1).unwrap().to_owned();
    let files = || {
        let found = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        let ours = found.filter(|path| path.to_string_lossy().contains("controller.db"));
        ours.flat_map(|path| std::fs::read(path).unwrap()).collect::<Vec<u8>>()
    };
    let has_key = || files().windows(key.len()).any(|window| window == key.as_bytes());
    assert!(has_key());
    controller.rotate("x", next()).await.unwrap();
    drop(controller);
    let controller = begin(directory.path()).await;
    controller.unlock(Some(Seal::create(&one).unwrap())).await.unwrap();
    assert!(controller.view().state.authorities().all(Ca::is_sealed));
    assert!(!has_key(), "what was there before is there no more");
    controller.switch("x", since(&controller)).await.unwrap();
    issued(&controller);
    controller.retire("x", since(&controller), false).await.unwrap();
    controller.rotate("x", next()).await.unwrap();
    assert!(controller.view().state.authorities().all(Ca::is_sealed));
    assert!(!String::from_utf8(controller.backup()).unwrap().contains("PRIVATE KEY"));
    drop(controller);
    for (seal, words) in [(None, "--seal-file"), (Some(Seal::create(&other).unwrap()), "another file")] {
        let controller = begin(directory.path()).await;
        let refused = controller.unlock(seal).await.unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    let controller = begin(directory.path()).await;
    controller.unlock(Seal::read(&one).unwrap()).await.unwrap();
    issued(&controller);
}

/// An organisation's CA, with another CA between it and the root.
fn imported() -> Ca {
    let params = |name: &str| {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let key = || KeyPair::generate().unwrap();
    let root = CertifiedIssuer::self_signed(params("root"), key()).unwrap();
    let middle = CertifiedIssuer::signed_by(params("middle"), key(), &root).unwrap();
    let own = key();
    let certificate = params("own").signed_by(&own, &middle).unwrap().pem() + &middle.pem() + &root.pem();
    Ca::import(&certificate, &own.serialize_pem(), SystemTime::now()).unwrap()
}

#[tokio::test]
async fn an_organisations_authority_comes_and_goes_without_a_gap() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    let before = issued(&controller);
    controller.rotate("x", imported()).await.unwrap();
    let announced = issued(&controller);
    controller.switch("x", since(&controller)).await.unwrap();
    let switched = issued(&controller);
    all_believe(&[announced, switched.clone()]);
    assert!(believes(&before, &switched));
    controller.retire("x", since(&controller), false).await.unwrap();
    let under = issued(&controller);
    all_believe(&[switched, under.clone()]);
    assert!(!believes(&under, &before));
    controller.rotate("x", next()).await.unwrap();
    let announced = issued(&controller);
    controller.switch("x", since(&controller)).await.unwrap();
    let switched = issued(&controller);
    all_believe(&[announced.clone(), switched.clone()]);
    assert!(believes(&under, &switched) && believes(&announced, &under));
    controller.retire("x", since(&controller), false).await.unwrap();
    let after = issued(&controller);
    all_believe(&[switched, after.clone()]);
    assert!(!believes(&after, &under));
    let shown = (after.0.clone() + &controller.view().state.trust().unwrap().shown, String::new());
    assert!(believes(&before, &shown) && believes(&under, &shown));
}

/// A CA below an organisation's root, with a modified certificate.
fn below(change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
    let root_key = KeyPair::generate().unwrap();
    let mut root = CertificateParams::default();
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    root.distinguished_name.push(DnType::CommonName, "root");
    let root_pem = root.self_signed(&root_key).unwrap().pem();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "below");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    change(&mut params);
    let certificate = params.signed_by(&key, &rcgen::Issuer::new(root, root_key)).unwrap().pem();
    (certificate + &root_pem, key.serialize_pem())
}

#[tokio::test]
async fn what_would_fail_at_the_end_is_refused_at_the_beginning() {
    let now = SystemTime::now();
    let import = |(certificates, key): (String, String)| Ca::import(&certificates, &key, now);
    import(below(|_| {})).unwrap();
    let clients = |params: &mut CertificateParams| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    };
    assert!(import(below(clients)).is_err(), "nobody would believe it a server");
    let elsewhere = |params: &mut CertificateParams| {
        let only = rcgen::GeneralSubtree::DnsName("example.com".to_owned());
        let (permitted_subtrees, excluded_subtrees) = (vec![only], Vec::new());
        params.name_constraints = Some(rcgen::NameConstraints { permitted_subtrees, excluded_subtrees });
    };
    assert!(import(below(elsewhere)).is_err(), "controllers have other names");
    // A CA with path length 0 can be used and rotated; disconnected nodes then enrol again.
    let last = |params: &mut CertificateParams| {
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    };
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    for next in [import(below(last)).unwrap(), next()] {
        follow(&controller, next).await;
    }
}

#[tokio::test]
async fn what_was_looked_at_is_what_ends() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    controller.rotate("x", next()).await.unwrap();
    let looked_at = since(&controller);
    controller.cancel_rotation("x").await.unwrap();
    controller.rotate("x", next()).await.unwrap();
    let other = looked_at.wrapping_sub(1);
    assert!(matches!(controller.retire("x", other, true).await, Err(ApplyError::NotReady(_))));
    let revision = controller.view().state.revision;
    assert_eq!(controller.switch("x", other).await.unwrap(), revision);
}

/// A request that waits during the caller's dismissal is refused.
#[tokio::test]
async fn who_was_dismissed_makes_nobody_an_operator() {
    let directory = tempfile::tempdir().unwrap();
    let controller = begin(directory.path()).await;
    let request = |key: &KeyPair| CertificateParams::default().serialize_request(key).unwrap().der().to_vec();
    let digest = |key: &KeyPair| crate::digest::key_digest(&rcgen::PublicKeyData::subject_public_key_info(key));
    let (root, joe, life) = ("root".parse().unwrap(), "joe".parse().unwrap(), Duration::from_secs(60));
    let (root_key, joe_key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    controller.make_operator(("controller", None), &request(&root_key), (&root, None), life).await.unwrap();
    controller.make_operator(("controller", None), &request(&joe_key), (&joe, None), life).await.unwrap();
    let (root_digest, joe_digest) = (digest(&root_key), digest(&joe_key));
    let by_root = RequestKey { key: &root_digest, name: &root, provider: None };
    let by_joe = RequestKey { key: &joe_digest, name: &joe, provider: None };
    controller.dismiss("operator/root", by_root, (&joe, None)).await.unwrap();
    let renewed = controller.renew_operator("operator/joe", &request(&joe_key), by_joe, life).await;
    let made = KeyPair::generate().unwrap();
    let made = controller.make_operator(("operator/joe", Some(by_joe)), &request(&made), (&joe, None), life).await;
    let dismissed = controller.dismiss("operator/joe", by_joe, (&root, None)).await;
    for refused in [renewed.err(), made.err(), dismissed.err()] {
        assert!(refused.is_some_and(|refused| refused.to_string().contains("no longer an operator")));
    }
}
