//! A response that was read off its connection, which others need.
//!
//! In: a response that may be wanted later. Out: the same one, with its content where that is small, and without where not:
//! then nothing is said of a content either.

use std::time::Duration;

use http::header::{
    ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_TYPE, ETAG,
    HeaderName, LAST_MODIFIED, TRAILER,
};
use http::{HeaderValue, Response};
use http_body_util::{BodyExt as _, Limited};

use super::Body;

/// What is kept of a content; of what is larger the head.
const KEPT: usize = 16 << 10;
/// How long that may take: the connection is held up by it.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// What is said of a content that is not there.
const OF_CONTENT: [HeaderName; 12] = [
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    CONTENT_LOCATION,
    CONTENT_TYPE,
    ETAG,
    LAST_MODIFIED,
    ACCEPT_RANGES,
    TRAILER,
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-md5"),
];

impl Body {
    /// The same response, off its connection.
    pub(crate) async fn small(response: Response<Self>) -> Response<Self> {
        let (mut head, body) = response.into_parts();
        let collected = tokio::time::timeout(READ_WITHIN, Limited::new(body, KEPT).collect()).await;
        if let Ok(Ok(collected)) = collected {
            return Response::from_parts(head, Body::Full(collected.to_bytes()));
        }
        OF_CONTENT.iter().for_each(|name| drop(head.headers.remove(name)));
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        Response::from_parts(head, Body::Empty)
    }
}
