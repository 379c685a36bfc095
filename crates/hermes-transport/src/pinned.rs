//! Large futures on the heap, built where they stay.
//!
//! In: how a future is made. Out: the future in a box of its own.

use std::future::Future;
use std::pin::Pin;

/// Makes a future in its box. `Box::pin` makes it on the stack and then copies all of it, kilobytes in which hardly anything is set at
/// first.
pub fn pinned<F: Future>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    Box::into_pin(Box::write(Box::new_uninit(), make()))
}
