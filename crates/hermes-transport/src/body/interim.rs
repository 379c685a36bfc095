//! Interim responses (RFC 9110, section 15.2), on their way from an upstream to the client.
//!
//! In: interim responses of an upstream. Out: the same, for the client's listener; and the permission to send a body
//! that waits for `100 Continue`. Bounded: beyond the limit they are dropped, because they are only hints.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use http::Response;

/// Interim responses, and the permission to send a body that waits for `100 Continue`. Atomics, although only one
/// worker uses it: a callback of hyper shares it.
#[derive(Default)]
pub struct Interim {
    responses: std::sync::Mutex<Vec<Response<()>>>,
    continued: AtomicBool,
    waker: AtomicWaker,
}

/// The limit of interim responses that wait for a slow client.
const MAX_INTERIM: usize = 16;

impl Interim {
    /// Queues an interim response of the upstream.
    pub fn push(&self, mut response: Response<()>) {
        if response.status() == http::StatusCode::CONTINUE {
            self.allow_body();
            return;
        }
        // Interim responses have no content (RFC 9110, section 8.6), and HTTP/2 peers reset the stream for this field.
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        if let Ok(mut responses) = self.responses.lock()
            && responses.len() < MAX_INTERIM
        {
            responses.push(response);
        }
        self.waker.wake();
    }

    /// Permits the body: 100 or a final status came.
    pub fn allow_body(&self) {
        self.continued.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Takes the queued responses.
    pub fn take(&self) -> Vec<Response<()>> {
        self.responses.lock().map(|mut responses| std::mem::take(&mut *responses)).unwrap_or_default()
    }

    pub(super) fn poll_allowed(&self, cx: &Context<'_>) -> Poll<()> {
        if self.continued.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        self.waker.register(cx.waker());
        if self.continued.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}
