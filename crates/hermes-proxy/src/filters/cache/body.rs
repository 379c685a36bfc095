//! The body of a response from a cache, either stored or still arriving.
//!
//! In: stored content or a flight (a shared fetch in progress), and the requested range. Out: chunks.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use hermes_cache::content::Content;
use hermes_cache::error::FetchError;
use hermes_cache::flight::FlightReader;
use hermes_transport::body::BoxedBody;
use hermes_transport::error::Error;

/// The error for a response that another request was fetching.
fn fetch_error(error: FetchError) -> Error {
    match &error {
        FetchError::Origin(own) => match own.downcast_ref::<Error>() {
            Some(own) => own.clone(),
            None => Error::Internal(error.to_string()),
        },
        FetchError::Abandoned => Error::Internal(error.to_string()),
        FetchError::TooSlow => Error::Limit("a client that others waited for, of an answer too large to be kept"),
    }
}

/// The body of a response from a cache.
pub(crate) enum CachedBody {
    /// The content is stored.
    Kept { content: Arc<Content>, rest: Range<u64> },
    /// The content is arriving. `left`: remaining bytes, if known.
    Coming { reader: FlightReader, left: Option<u64> },
}

impl BoxedBody for CachedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            Self::Kept { rest, .. } if rest.is_empty() => Poll::Ready(None),
            Self::Kept { content, rest } => {
                let Some(mut bytes) = content.slice(rest.start) else {
                    return Poll::Ready(Some(Err(Error::Internal("the cache has a gap".to_owned()))));
                };
                bytes.truncate((rest.end - rest.start).min(bytes.len() as u64) as usize);
                rest.start += bytes.len() as u64;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Self::Coming { reader, left } => reader.poll(cx).map(|next| {
                next.map(|bytes| {
                    let bytes = bytes.map_err(fetch_error)?;
                    if let Some(left) = left {
                        *left = left.saturating_sub(bytes.len() as u64);
                    }
                    Ok(Frame::data(bytes))
                })
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Kept { rest, .. } => rest.is_empty(),
            Self::Coming { left, .. } => *left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Kept { rest, .. } => SizeHint::with_exact(rest.end.saturating_sub(rest.start)),
            Self::Coming { left, .. } => left.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}
