//! Memory that the allocator keeps for later, although nothing uses it.
//!
//! In: the moment after much was freed. Out: that memory, returned to the system. Never: the choice of an allocator,
//! which is the program's.

/// Returns free memory to the system. The allocator does so only while its threads allocate, and after a reload all
/// may be idle. Takes milliseconds: for rare events alone. No effect in a program with another allocator.
#[allow(unsafe_code)]
pub fn return_free() {
    // SAFETY: the function takes no pointer, touches only free memory, and may be called by any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
