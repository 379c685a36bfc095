//! Users, and groups of users.

use hermes_model::document::scalar::OneOrMany;
use serde::{Deserialize, Serialize};

use super::name::Name;

/// The content of a document of `kind: User`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct User {
    /// Nodes that may claim this user.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub nodes: OneOrMany<Name>,
}

/// The content of a document of `kind: Group`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Group {
    /// The members: users of the same provider.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub users: OneOrMany<Name>,
}
