//! Responses before the final one (RFC 9110, 15.2), on their way from an upstream to the client.
//!
//! In: what came from upstream. Out: the same, for whoever answers the client; and the permission to
//! send a body that waits for `100 Continue`. Bounded: hints that find no room are dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use http::Response;

/// Responses before the final one, and the permission to send a body that waits for `100 Continue`.
/// Shared with a callback of hyper's, hence atomics though one worker uses it.
#[derive(Default)]
pub(crate) struct Interim {
    responses: std::sync::Mutex<Vec<Response<()>>>,
    continued: AtomicBool,
    waker: AtomicWaker,
}

/// Interim responses that wait for a slow client; more are dropped, they are only hints.
const MAX_INTERIM: usize = 16;

impl Interim {
    /// An interim response came from upstream.
    pub(crate) fn push(&self, mut response: Response<()>) {
        if response.status() == http::StatusCode::CONTINUE {
            self.allow_body();
            return;
        }
        // It has none (RFC 9110, 8.6), and HTTP/2 peers refuse the stream for it.
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        if let Ok(mut responses) = self.responses.lock()
            && responses.len() < MAX_INTERIM
        {
            responses.push(response);
        }
        self.waker.wake();
    }

    /// The body may be sent: 100, or a final status.
    pub(crate) fn allow_body(&self) {
        self.continued.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Takes what has come.
    pub(crate) fn take(&self) -> Vec<Response<()>> {
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
