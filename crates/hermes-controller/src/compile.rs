//! Compiles overlay documents to a document for each node.
//!
//! In: a catalog. Out: what each node runs: whom it lets in, what it does with which name, whom it dials; with the same checks
//! as `hermes check`. The same catalog gives the same documents, byte for byte.
//! Never: more than a node needs. It learns of a service only where it is on the way of somebody who may use it, of a user only
//! where that user's sessions come by, and of other nodes only those beside it.
//!
//! A service has one way from each node where its users are: the fewest links, over standalone nodes, to the nearest places
//! where it lives; where several neighbours are equally near, all of them are endpoints of one upstream.

mod assemble;
mod way;

use std::collections::BTreeMap;

use hermes_model::Problem;
use hermes_model::document::Document;

use crate::catalog::{Catalog, Owner};
use crate::document::{App, Fault, Key, Kind, Name};

/// Files of a node's identity, beside its document.
pub const IDENTITY: [&str; 3] = ["node.pem", "node.key", "ca.pem"];

/// What the overlay's documents mean for its nodes.
///
/// # Errors
/// Every problem: of references, and of what they come to at a node.
pub fn compile(catalog: &Catalog) -> Result<BTreeMap<Name, Document>, Vec<Fault>> {
    let faults = catalog.check();
    if !faults.is_empty() {
        return Err(faults);
    }
    let ways = way::Ways::of(catalog);
    let mut documents = BTreeMap::new();
    let mut faults = Vec::new();
    for (name, node) in catalog.nodes() {
        let document = assemble::document(catalog, &ways, name, node);
        if let Err(problems) = hermes_model::check::check_document(document.clone(), std::path::Path::new(".")) {
            let key = Key { kind: Kind::Node, provider: None, name: name.clone() };
            faults.extend(problems.into_iter().map(|problem| of_node(&key, problem)));
        }
        documents.insert(name.clone(), document);
    }
    if faults.is_empty() { Ok(documents) } else { Err(faults) }
}

/// Something that is wrong with what a node would get.
fn of_node(key: &Key, Problem { path, message }: Problem) -> Fault {
    Fault::of(key, "", format!("its document would be refused: {}", Problem { path, message }))
}

/// What a user is called between nodes.
pub(crate) fn user_on_the_wire(owner: &Owner, name: &Name) -> String {
    match owner {
        Some(provider) => format!("{provider}/{name}"),
        None => name.to_string(),
    }
}

/// Whose the sessions of an app are, between nodes. `None`: nobody's.
///
/// # Errors
/// The user is not on that node, or is to be said.
pub(crate) fn user_of_app(catalog: &Catalog, node: &Name, app: &App) -> Result<Option<String>, String> {
    let here: Vec<_> = catalog.users().filter(|(_, user)| user.nodes.iter().any(|one| one == node)).collect();
    let wire = |key: &Key| user_on_the_wire(&key.provider, &key.name);
    match &app.user {
        Some(user) => {
            let is_meant = |key: &Key| key.name == user.name && key.provider == user.provider;
            let found = here.iter().find(|(key, _)| is_meant(key));
            found
                .map(|(key, _)| Some(wire(key)))
                .ok_or_else(|| format!("user {user} is not on this node; add {node} to the user's nodes"))
        }
        None if here.len() > 1 => {
            let names: Vec<_> = here.iter().map(|(key, _)| wire(key)).collect();
            Err(format!("say whose sessions these are; write user: one of {}", names.join(", ")))
        }
        None => Ok(here.first().map(|(key, _)| wire(key))),
    }
}

#[cfg(test)]
mod tests;
