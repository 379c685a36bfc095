//! Properties of what a controller reads: overlay documents, tokens, keys of documents.
//!
//! In: texts of any kind. Out: nothing, or a panic. Beside the fuzz targets the controller's own tests include this file, and
//! replay the corpus: the crate of the fuzz targets is not built with a whole controller for that.

use hermes_controller::catalog::Catalog;
use hermes_controller::compile::compile;
use hermes_controller::document::{Fault, Key, read};
use hermes_controller::token::Ticket;

/// Refused documents have faults, each with a sentence. Accepted ones are the same when they are shown and read again; and
/// what they come to at each node was checked as `hermes check` does, or has faults.
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

/// A token that is read says what it was, and proves itself and nothing else. The name of a document is read as it is shown.
pub fn token(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(ticket) = text.parse::<Ticket>() {
        assert_eq!(ticket.reveal(), text.trim());
        assert!(ticket.proves(&ticket.digest()) && !ticket.proves("") && !ticket.proves(&ticket.id));
        assert!(!format!("{ticket:?}").contains(&ticket.reveal()), "its secret is shown");
    }
    if let Ok(key) = text.parse::<Key>() {
        assert_eq!(key.to_string().parse(), Ok(key));
    }
}
