//! Documents, validation, snapshots and the one pure decision of Hermes.
//!
//! In: the text of a node document, and the facts of a session.
//! Out: every problem of the document with its path, or a `Snapshot`; and a `Decision`.
//! Never: I/O, time, randomness, async.
