//! Detaches short responses from their connection, so that the connection can serve other requests.
//!
//! In: a response that may be sent to the client later. Out: the same response, with its content if the content is
//! short. Otherwise the content is dropped, together with all header fields that describe it.

use std::time::Duration;

use http::header::{
    ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_TYPE, ETAG,
    HeaderName, LAST_MODIFIED, TRAILER,
};
use http::{HeaderValue, Response};
use http_body_util::{BodyExt as _, Limited};

use super::Body;

/// The maximum length, in bytes, of content that is read into memory. Longer content is dropped.
const MAX_KEPT_BYTES: usize = 16 << 10;
/// The timeout for reading the content. Until then, the connection cannot serve other requests.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Header fields that describe the content, besides `Content-Length`.
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
    /// Detaches a response from its connection. Content that is too long, or does not arrive in time, is dropped.
    pub async fn small(response: Response<Self>) -> Response<Self> {
        let (mut head, body) = response.into_parts();
        let collected = tokio::time::timeout(READ_TIMEOUT, Limited::new(body, MAX_KEPT_BYTES).collect()).await;
        if let Ok(Ok(collected)) = collected {
            return Response::from_parts(head, Body::Full(collected.to_bytes()));
        }
        OF_CONTENT.iter().for_each(|name| drop(head.headers.remove(name)));
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        Response::from_parts(head, Body::Empty)
    }
}
