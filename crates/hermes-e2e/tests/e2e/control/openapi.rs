//! The REST API is what its description says: each path and method, and all that is in their answers.

use std::collections::BTreeSet;
use std::path::Path;

use http::Method;
use serde_json::Value;

use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::{ControllerFixture, until};

/// Read when the test runs, so that a change of it compiles no test anew.
fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

struct Description(Value);

impl Description {
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.strip_prefix('#').unwrap()).unwrap(),
            None => schema,
        }
    }

    /// The schema of this answer.
    fn answer<'a>(&'a self, operation: &'a Value, status: u16) -> &'a Value {
        let responses = &operation["responses"];
        let response = responses.get(status.to_string()).unwrap_or(&responses["default"]);
        let content = self.resolved(response)["content"].as_object().unwrap();
        &content.values().next().unwrap()["schema"]
    }

    /// That a value is what the schema says, and has nothing that it does not.
    fn assert_fits(&self, schema: &Value, value: &Value, at: &str) {
        let schema = self.resolved(schema);
        let word = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let types: Vec<_> = match &schema["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect(),
        };
        assert!(types.is_empty() || types.contains(&word), "{at}: {value} is none of {types:?}");
        if let Some(words) = schema["enum"].as_array() {
            assert!(words.contains(value), "{at}: {value} is none of {words:?}");
        }
        for (number, item) in value.as_array().into_iter().flatten().enumerate() {
            self.assert_fits(&schema["items"], item, &format!("{at}[{number}]"));
        }
        let Some(object) = value.as_object() else { return };
        for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            assert!(object.contains_key(key), "{at} has no {key}: {value}");
        }
        for (key, value) in object {
            let at = format!("{at}.{key}");
            match (schema["properties"].get(key), &schema["additionalProperties"]) {
                (Some(schema), _) => self.assert_fits(schema, value, &at),
                (None, Value::Bool(true)) => {}
                (None, other @ Value::Object(_)) => self.assert_fits(other, value, &at),
                _ => panic!("{at} is not described: {value}"),
            }
        }
    }
}

/// `METHOD PATH` of all that the program serves.
fn served() -> BTreeSet<String> {
    let mut served = BTreeSet::new();
    for route in text("crates/hermes-controller/src/api.rs").split(".route(\"").skip(1) {
        let (path, rest) = route.split_once('"').unwrap();
        let handlers = rest.split('\n').next().unwrap();
        for method in ["get", "post", "delete"] {
            let is_there = [format!(" {method}("), format!(".{method}(")].iter().any(|call| handlers.contains(&**call));
            if is_there {
                served.insert(format!("{} {}", method.to_uppercase(), path.replace("{*key}", "{key}")));
            }
        }
    }
    served
}

/// Sends a request. The controller switches to a new CA by itself: a request to finish that meets the switch is a conflict,
/// and is sent again.
async fn ask(client: &mut OperatorClient, method: &Method, path: &str, text: &str) -> (u16, Value) {
    for _ in 0..50 {
        let (status, answer) = client.ask(method.clone(), path, text).await.unwrap();
        if (path, status) != ("/v1/authority/finish?force=true", 409) {
            return (status, answer);
        }
    }
    panic!("{path} met the switch fifty times");
}

#[tokio::test]
async fn the_api_matches_its_openapi_description() {
    let description = Description(serde_saphyr::from_str(&text("docs/reference/openapi.yaml")).unwrap());
    let mut described = BTreeSet::new();
    for (path, operations) in description.0["paths"].as_object().unwrap() {
        let methods = operations.as_object().unwrap().keys().filter(|key| *key != "parameters");
        described.extend(methods.map(|method| format!("{} {path}", method.to_uppercase())));
    }
    assert_eq!(described, served());

    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    until("it runs", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 1).await;
    let mut operator_client = OperatorClient::new(&fixture.state("controller/operator.json"));
    let waves = "kind: Overlay\nname: test\nrollout: {settle: 1h}\n";
    let changed = |idle: u32| {
        format!(
            "{waves}---\n{{kind: Node, name: server, address: \"{0}\", bind: \"{0}\", drain: {idle}s}}\n",
            fixture.socket(9443)
        )
    };
    let request = rcgen::CertificateParams::default().serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap();
    let operator = |request: &str| format!("{{\"name\": \"ann\", \"request\": \"{request}\", \"life\": 60}}");
    let base64 = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, request.der());
    let file = std::fs::read_to_string(fixture.state("controller/operator.json")).unwrap();
    let file: Value = serde_json::from_str(&file).unwrap();
    let key = rcgen::KeyPair::from_pem(file["key"].as_str().unwrap()).unwrap();
    let own = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    let own = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, own.der());
    let own = format!("{{\"request\": \"{own}\"}}");
    let others = format!("{{\"request\": \"{base64}\"}}");
    let mut requests = BTreeSet::new();
    for (method, path, template, text, expected) in [
        (Method::POST, "/v1/apply?dry-run=true", "/v1/apply", changed(5), 200),
        (Method::POST, "/v1/apply", "/v1/apply", "kind: Node".to_owned(), 422),
        (Method::POST, "/v1/apply?wait=5000&now=true", "/v1/apply", changed(6), 200),
        (Method::GET, "/v1/documents", "/v1/documents", String::new(), 200),
        (Method::GET, "/v1/documents?kind=nothing", "/v1/documents", String::new(), 400),
        (Method::GET, "/v1/documents/Node/server", "/v1/documents/{key}", String::new(), 200),
        (Method::GET, "/v1/documents/Node/other", "/v1/documents/{key}", String::new(), 404),
        (Method::DELETE, "/v1/documents/Service/APP", "/v1/documents/{key}", String::new(), 200),
        (Method::POST, "/v1/rollout", "/v1/rollout", String::new(), 200),
        (Method::GET, "/v1/nodes", "/v1/nodes", String::new(), 200),
        (Method::GET, "/v1/nodes/server", "/v1/nodes/{name}", String::new(), 200),
        (Method::POST, "/v1/apply", "/v1/apply", changed(7), 200),
        (Method::DELETE, "/v1/rollout", "/v1/rollout", String::new(), 200),
        (Method::POST, "/v1/apply", "/v1/apply", changed(8), 200),
        (Method::GET, "/v1/rollout", "/v1/rollout", String::new(), 200),
        (Method::POST, "/v1/apply", "/v1/apply", changed(9), 409),
        (Method::POST, "/v1/rollout", "/v1/rollout", String::new(), 200),
        (Method::POST, "/v1/rollout", "/v1/rollout", String::new(), 404),
        (Method::GET, "/v1/backup", "/v1/backup", String::new(), 200),
        (Method::GET, "/v1/restored", "/v1/restored", String::new(), 200),
        (Method::POST, "/v1/restored", "/v1/restored", String::new(), 200),
        (Method::POST, "/v1/tokens", "/v1/tokens", "{\"node\": \"laptop\"}".to_owned(), 200),
        (Method::POST, "/v1/operators", "/v1/operators", operator(&base64), 200),
        (Method::POST, "/v1/operators", "/v1/operators", operator("?"), 400),
        (Method::GET, "/v1/operators", "/v1/operators", String::new(), 200),
        (Method::DELETE, "/v1/operators/ann", "/v1/operators/{name}", String::new(), 200),
        (Method::DELETE, "/v1/operators/ann", "/v1/operators/{name}", String::new(), 404),
        (Method::DELETE, "/v1/operators/root", "/v1/operators/{name}", String::new(), 403),
        (Method::POST, "/v1/certificate", "/v1/certificate", own, 200),
        (Method::POST, "/v1/certificate", "/v1/certificate", others, 403),
        (Method::GET, "/v1/authority", "/v1/authority", String::new(), 200),
        (Method::POST, "/v1/authority/finish", "/v1/authority/finish", String::new(), 409),
        (Method::POST, "/v1/authority", "/v1/authority", "{}".to_owned(), 422),
        (Method::POST, "/v1/authority", "/v1/authority", String::new(), 200),
        (Method::POST, "/v1/authority", "/v1/authority", String::new(), 409),
        (Method::POST, "/v1/authority/finish?force=true", "/v1/authority/finish", String::new(), 200),
        (Method::POST, "/v1/authority", "/v1/authority", String::new(), 200),
        (Method::DELETE, "/v1/authority", "/v1/authority", String::new(), 200),
        (Method::DELETE, "/v1/nodes/server", "/v1/nodes/{name}", String::new(), 200),
    ] {
        let (status, answer) = ask(&mut operator_client, &method, path, &text).await;
        assert_eq!(status, expected, "{method} {path}: {answer}");
        let operation = &description.0["paths"][template][method.as_str().to_lowercase()];
        description.assert_fits(description.answer(operation, status), &answer, &format!("{method} {path}"));
        requests.insert(format!("{method} {template}"));
    }
    assert_eq!(requests, described);
}
