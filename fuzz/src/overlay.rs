//! Properties of the controller's inputs: overlay documents, tokens, keys of documents.
//!
//! In: texts of any kind. Out: nothing, or a panic. The controller's own tests include this file, too, and replay the
//! corpus, so that the crate of the fuzz targets does not need a controller for that.

use hermes_controller::catalog::Catalog;
use hermes_controller::compile::compile;
use hermes_controller::document::{Fault, Key, read};
use hermes_controller::token::EnrolmentToken;

/// Rejected documents have faults, each with a message. Accepted ones stay the same when they are printed and parsed
/// again. The compiled document of each node passes `hermes check`, or has faults.
pub fn overlay_document(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let resources = match read(text) {
        Ok(resources) => resources,
        Err(faults) => return told(&faults),
    };
    let mut catalog = Catalog::default();
    for resource in resources {
        let shown = serde_json::to_string(&resource).unwrap_or_else(|error| panic!("{}: {error}", resource.key));
        match read(&shown) {
            Ok(again) => assert!(again.len() == 1 && again[0] == resource, "{shown}"),
            Err(faults) => panic!("what is shown is refused: {faults:?}\n{shown}"),
        }
        assert_eq!(resource.key.to_string().parse(), Ok(resource.key.clone()));
        catalog.put(resource);
    }
    match compile(&catalog) {
        Ok(documents) => assert_eq!(documents.len(), catalog.nodes().count()),
        Err(faults) => told(&faults),
    }
}

fn told(faults: &[Fault]) {
    assert!(!faults.is_empty());
    assert!(faults.iter().all(|fault| !fault.problem.message.is_empty()), "{faults:?}");
}

/// A parsed token prints as it was, and authenticates only itself. The name of a document parses in its printed form.
pub fn token(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(ticket) = text.parse::<EnrolmentToken>() {
        assert_eq!(ticket.reveal(), text.trim());
        assert!(ticket.proves(&ticket.digest()) && !ticket.proves("") && !ticket.proves(&ticket.id));
        assert!(!format!("{ticket:?}").contains(&ticket.reveal()), "its secret is shown");
    }
    if let Ok(key) = text.parse::<Key>() {
        assert_eq!(key.to_string().parse(), Ok(key));
    }
}
