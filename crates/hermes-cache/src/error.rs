//! Errors of a shared fetch, whose response several clients read.

use std::error::Error as StdError;
use std::sync::Arc;

/// The reason why a reader of a shared fetch receives no more bytes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FetchError {
    /// The origin, or the connection to it, failed. The value is the error of the caller that fetched.
    #[error("{0}")]
    Origin(Arc<dyn StdError + Send + Sync>),
    /// The fetching task was dropped before it received the head of the response.
    #[error("the shared fetch was abandoned; try again")]
    Abandoned,
    /// The reader was so slow that other readers waited for it, and the response is too large to be stored.
    #[error("this client read so slowly that other clients waited, and the response is too large for the cache")]
    TooSlow,
}

impl FetchError {
    /// Wraps an error of the caller.
    pub fn origin(error: impl StdError + Send + Sync + 'static) -> Self {
        Self::Origin(Arc::new(error))
    }
}
