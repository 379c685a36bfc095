//! Returns unused memory of the allocator to the system.
//!
//! In: a call after much memory was freed. Never: the choice of an allocator, which the binary makes.

/// Returns free memory to the system. On its own, mimalloc does so only while threads allocate, and after a reload all
/// threads may be idle. The call takes milliseconds, so call it rarely. It has no effect in a program with another
/// allocator.
#[allow(unsafe_code)]
pub fn return_free() {
    // SAFETY: the function takes no pointer, touches only free memory, and may be called by any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
