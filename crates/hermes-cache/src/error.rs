//! Errors of a fetch that several clients read.

use std::error::Error as StdError;
use std::sync::Arc;

/// The reason why a reader of a fetch gets no more bytes; it is the same for all readers.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FetchError {
    /// The origin, or the connection to it, failed. This is the caller's own error.
    #[error("{0}")]
    Origin(Arc<dyn StdError + Send + Sync>),
    /// The task that fetched was dropped before the head of the response came.
    #[error("the shared fetch was abandoned; try again")]
    Abandoned,
    /// The reader was so slow that other readers waited for it, and the response is too large to be stored.
    #[error("other clients waited for this one, and the response is too large for the cache")]
    TooSlow,
}

impl FetchError {
    /// Wraps an error of the caller.
    pub fn origin(error: impl StdError + Send + Sync + 'static) -> Self {
        Self::Origin(Arc::new(error))
    }
}
