//! Returns unused memory of the allocator to the system.
//!
//! In: a call after much memory was freed. Never: the choice of an allocator, which is the binary's.

/// Returns free memory to the system. The allocator does so only while its threads allocate, and after a reload all may
/// be idle. Takes milliseconds, so call it rarely. No effect in a program with another allocator.
#[allow(unsafe_code)]
pub fn return_free() {
    // SAFETY: the function takes no pointer, touches only free memory, and may be called by any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
