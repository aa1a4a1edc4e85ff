// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A spinlock that also keeps softirqs of this CPU out.
//!
//! For data shared between process context and softirq: a plain spinlock taken in process context
//! deadlocks when a softirq on the same CPU wants it.
//!
//! C header: [`include/linux/spinlock.h`](srctree/include/linux/spinlock.h)

use crate::bindings;
use kernel::{
    prelude::*,
    sync::lock::{
        Backend,
        Lock, //
    },
};

/// Creates a [`SpinLockBh`] initialiser with a lock class of its own.
macro_rules! new_spinlock_bh {
    ($inner:expr, $name:literal) => {
        $crate::sync::lock::SpinLockBh::new($inner, $name, kernel::static_lock_class!())
    };
}
pub(crate) use new_spinlock_bh;

/// A spinlock taken with softirqs disabled.
///
/// May be taken in process and softirq context, not in hard interrupt context.
pub(crate) type SpinLockBh<T> = Lock<T, SpinLockBhBackend>;

/// The `spin_lock_bh` lock backend.
pub(crate) struct SpinLockBhBackend;

// SAFETY: The C spinlock ensures mutual exclusion; `relock` is the default that calls `lock`.
unsafe impl Backend for SpinLockBhBackend {
    type State = bindings::spinlock_t;
    type GuardState = ();

    #[inline]
    unsafe fn init(ptr: *mut Self::State, name: *const c_char, key: *mut bindings::lock_class_key) {
        // SAFETY: By the requirements of this function `ptr` is valid for writes, `name` and `key`
        // are valid indefinitely.
        unsafe { bindings::__spin_lock_init(ptr, name, key) }
    }

    #[inline]
    unsafe fn lock(ptr: *mut Self::State) -> Self::GuardState {
        // SAFETY: By the requirements of this function `ptr` was initialised by `init`.
        unsafe { bindings::spin_lock_bh(ptr) }
    }

    #[inline]
    unsafe fn try_lock(ptr: *mut Self::State) -> Option<Self::GuardState> {
        // SAFETY: By the requirements of this function `ptr` was initialised by `init`.
        (unsafe { bindings::spin_trylock_bh(ptr) } != 0).then_some(())
    }

    #[inline]
    unsafe fn unlock(ptr: *mut Self::State, (): &Self::GuardState) {
        // SAFETY: By the requirements of this function the caller owns the lock.
        unsafe { bindings::spin_unlock_bh(ptr) }
    }

    #[inline]
    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: By the requirements of this function `ptr` was initialised by `init`.
        unsafe { bindings::spin_assert_is_held(ptr) }
    }
}
