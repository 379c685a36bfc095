//! Passes interim responses (RFC 9110, section 15.2) from an upstream to the client.
//!
//! In: interim responses of an upstream. Out: the same responses, for the client's listener, and the permission to send
//! a body that waits for `100 Continue`. A full queue drops further responses, which are only hints.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use http::Response;

/// The queue of interim responses, and the permission to send a body that waits for `100 Continue`. The fields are
/// thread-safe although one worker uses them, because hyper requires a callback that is `Send` and `Sync`.
#[derive(Default)]
pub struct Interim {
    responses: std::sync::Mutex<Vec<Response<()>>>,
    continued: AtomicBool,
    waker: AtomicWaker,
}

/// The maximum number of interim responses that wait for a slow client.
const MAX_INTERIM: usize = 16;

impl Interim {
    /// Queues an interim response of the upstream. `100 Continue` is not queued: it permits the body.
    pub fn push(&self, mut response: Response<()>) {
        if response.status() == http::StatusCode::CONTINUE {
            self.allow_body();
            return;
        }
        // An interim response must not have this field (RFC 9110, section 8.6). HTTP/2 peers reset the stream for it.
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        if let Ok(mut responses) = self.responses.lock()
            && responses.len() < MAX_INTERIM
        {
            responses.push(response);
        }
        self.waker.wake();
    }

    /// Permits the request body. Called when the upstream has sent `100 Continue` or a final response.
    pub fn allow_body(&self) {
        self.continued.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Removes and returns the queued responses.
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
