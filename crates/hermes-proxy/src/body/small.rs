//! A response that was read off its connection, which others need.
//!
//! In: a response that may be wanted later. Out: the same one, with its content where that is small, and without where not.

use std::time::Duration;

use http::header::CONTENT_LENGTH;
use http::{HeaderValue, Response};
use http_body_util::{BodyExt as _, Limited};

use super::Body;

/// What is kept of a content; of what is larger the head.
const KEPT: usize = 16 << 10;
/// How long that may take: the connection is held up by it.
const READ_WITHIN: Duration = Duration::from_secs(2);

impl Body {
    /// The same response, off its connection.
    pub(crate) async fn small(response: Response<Self>) -> Response<Self> {
        let (mut head, body) = response.into_parts();
        let collected = tokio::time::timeout(READ_WITHIN, Limited::new(body, KEPT).collect()).await;
        if let Ok(Ok(collected)) = collected {
            return Response::from_parts(head, Body::Full(collected.to_bytes()));
        }
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        Response::from_parts(head, Body::Empty)
    }
}
