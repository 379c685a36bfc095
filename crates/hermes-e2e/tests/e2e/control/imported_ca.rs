//! An imported CA: an intermediate below an organisation's root replaces the overlay's CA.

use std::path::PathBuf;
use std::process::Command;

use http::Method;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType, date_time_ymd,
};

use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::trusted;
use hermes_testkit::control::{ControllerFixture, until};

/// What an organisation has.
struct Organisation {
    root: String,
    issuer: Issuer<'static, KeyPair>,
}

fn authority(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::OrganizationName, "Example Org");
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    params
}

impl Organisation {
    fn new() -> Self {
        let (params, key) = (authority("Example Root"), KeyPair::generate().unwrap());
        let root = params.self_signed(&key).unwrap().pem();
        Self { root, issuer: Issuer::new(params, key) }
    }

    /// An authority below it, and its key.
    fn issue(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

fn write(fixture: &ControllerFixture, certificate: &str, key: &str) -> Files {
    let files = Files { certificate: fixture.state("import.pem"), key: fixture.state("import.key") };
    std::fs::write(&files.certificate, certificate).unwrap();
    std::fs::write(&files.key, key).unwrap();
    files
}

fn import(files: &Files) -> [&str; 6] {
    let (certificate, key) = (files.certificate.to_str().unwrap(), files.key.to_str().unwrap());
    ["ca", "import", "--certificate", certificate, "--key", key]
}

#[tokio::test]
async fn an_organisations_authority_takes_over() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    let more = "---\n{kind: Node, name: third, links: server}\n---\n{kind: Node, name: fourth, links: server}\n";
    fixture.hermes_ok(&["apply", "-f", "-"], &(fixture.documents(7001) + more));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    let token = fixture.token("third");
    let organisation = Organisation::new();
    let (certificate, key) = organisation.issue(&authority("Example Overlay CA"));
    let output = fixture.hermes_ok(&import(&write(&fixture, &(certificate + &organisation.root), &key)), "");
    assert!(output.contains("Example Overlay CA") && output.contains("below the root"), "{output}");
    let finished = || fixture.hermes(&["ca", "finish"], "").status.success();
    until("it is finished", finished).await;
    // Nodes trust the root, and show what is between.
    for node in ["laptop", "server"] {
        until("it trusts the root alone", || trusted(&fixture.state(node)) == (1, true)).await;
        let ca = std::fs::read_to_string(fixture.state(node).join("ca.pem")).unwrap();
        assert_eq!(ca, organisation.root.replace("\r\n", "\n"));
    }
    fixture.until_answers("APP", "one").await;
    let _third = fixture.node("third", Some(&token));
    let _fourth = fixture.node("fourth", Some(&fixture.token("fourth")));
    until("all run", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 4).await;
    // And back to one of the controller's own.
    fixture.hermes_ok(&["ca", "rotate"], "");
    until("it is finished", finished).await;
    fixture.until_answers("APP", "one").await;
    until("it trusts one", || trusted(&fixture.state("laptop")) == (1, true)).await;
}

#[tokio::test]
async fn a_ca_that_cannot_sign_is_rejected() {
    let fixture = ControllerFixture::new().await;
    let organisation = Organisation::new();
    let root = &organisation.root;
    let (good, key) = organisation.issue(&authority("Good CA"));
    let other = KeyPair::generate().unwrap().serialize_pem();
    let with = |change: &dyn Fn(&mut CertificateParams)| {
        let mut params = authority("Bad CA");
        change(&mut params);
        let (certificate, key) = organisation.issue(&params);
        (certificate + root, key)
    };
    let (over, over_key) = with(&|params| params.not_after = date_time_ymd(2020, 1, 1));
    let (early, early_key) = with(&|params| params.not_before = date_time_ymd(2070, 1, 1));
    let (leaf, leaf_key) = with(&|params| params.is_ca = IsCa::ExplicitNoCa);
    let (mute, mute_key) = with(&|params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]);
    let stranger = Organisation::new().root;
    let whole = good.clone() + root;
    for (certificate, key, words) in [
        (&whole, &other, "does not match the first certificate"),
        (&over, &over_key, "has expired"),
        (&early, &early_key, "is not valid before"),
        (&leaf, &leaf_key, "is not a CA certificate"),
        (&mute, &mute_key, "may not sign certificates"),
        (&good, &key, "add the certificates above it, up to the root"),
        (&(good.clone() + &stranger), &key, "is not signed by the next certificate"),
        (&(root.clone() + &good), &key, "is not signed by the next certificate"),
        (&"no certificate".to_owned(), &key, "found 0 certificates"),
        (&whole, &"no key".to_owned(), "invalid key"),
    ] {
        let output = fixture.refused(&import(&write(&fixture, certificate, key)), "");
        assert!(output.contains(words), "{words}: {output}");
        assert!(!output.contains("PRIVATE"), "{output}");
    }
    let shown = fixture.hermes_ok(&["ca", "show"], "");
    assert!(!shown.contains("is to sign"), "{shown}");
    let audit = hermes_testkit::control::audit(&fixture.state("controller"));
    assert!(audit.contains("\"what\":\"ca-import\"") && !audit.contains("PRIVATE"), "{audit}");
}

/// A root of its own that `openssl` makes.
fn made(fixture: &ControllerFixture, key: &[&str], subject: &str) -> Files {
    let files = Files { certificate: fixture.state("made.pem"), key: fixture.state("made.key") };
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-nodes", "-days", "30", "-newkey"]).args(key).args(["-subj", subject]);
    command.arg("-keyout").arg(&files.key).arg("-out").arg(&files.certificate);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    files
}

#[tokio::test]
async fn an_authority_with_another_kind_of_key_takes_over() {
    let fixture = ControllerFixture::new().await;
    let ec = ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let output = fixture.refused(&import(&made(&fixture, &ec, "/DC=com/DC=example/CN=Example CA")), "");
    assert!(output.contains("an attribute occurs twice"), "{output}");
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    fixture.hermes_ok(&import(&made(&fixture, &["rsa:2048"], "/O=Example Org/CN=Example RSA CA")), "");
    until("it is finished", || fixture.hermes(&["ca", "finish"], "").status.success()).await;
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
}

/// An operator's file with another certificate, whose key its maker has, and who signed it behind it.
fn forged(fixture: &ControllerFixture, name: &str, issuer: &Issuer<'static, KeyPair>, above: &str) -> OperatorClient {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI("hermes:operator/root".try_into().unwrap())];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, issuer).unwrap().pem() + above;
    let text = std::fs::read_to_string(fixture.state("controller/operator.json")).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
    (file["certificate"], file["key"]) = (certificate.into(), key.serialize_pem().into());
    std::fs::write(fixture.state(name), file.to_string()).unwrap();
    OperatorClient::new(&fixture.state(name))
}

/// Nodes trust the organisation's root; whoever may change everything is one whom this authority has made that.
#[tokio::test]
async fn nobody_else_makes_operators_below_a_root_and_no_former_authority_does() {
    let fixture = ControllerFixture::new().await;
    let organisation = Organisation::new();
    let issue = |name: &str| {
        let (params, key) = (authority(name), KeyPair::generate().unwrap());
        let certificate = params.signed_by(&key, &organisation.issuer).unwrap().pem();
        (certificate, key.serialize_pem(), Issuer::new(params, key))
    };
    let (own, key, signer) = issue("Overlay CA");
    let (sibling, _, other) = issue("Sibling CA");
    fixture.hermes_ok(&import(&write(&fixture, &(own.clone() + &organisation.root), &key)), "");
    let finish = || fixture.hermes(&["ca", "finish"], "").status.success();
    until("it is finished", finish).await;
    let ask = async |mut operator: OperatorClient| operator.ask(Method::GET, "/v1/documents", "").await;
    let status = |answer: Result<(u16, serde_json::Value), String>| answer.map_or(0, |(status, _)| status);
    fixture.hermes_ok(&["node", "list"], "");
    assert_eq!(status(ask(forged(&fixture, "its own", &signer, &own)).await), 401, "nobody was given this one");
    for (name, issuer, above) in [("root", &organisation.issuer, &String::new()), ("sibling", &other, &sibling)] {
        assert_eq!(status(ask(forged(&fixture, name, issuer, above)).await), 0, "{name}");
    }
    fixture.hermes_ok(&["ca", "rotate"], "");
    until("it is finished", finish).await;
    fixture.hermes_ok(&["node", "list"], "");
    let (status, output) = ask(forged(&fixture, "former", &signer, &own)).await.unwrap();
    assert!(status == 401 && output["detail"].as_str().unwrap().contains("was revoked"), "{status} {output}");
}
