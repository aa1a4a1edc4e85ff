// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Owned work queues and cancellation, on top of `kernel::workqueue`.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use crate::bindings;
use core::{
    ops::Deref,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    workqueue::{
        HasDelayedWork,
        Queue,
        Work,
        WorkItem, //
    },
};

/// An ordered work queue of one's own.
///
/// Dropping it runs what is queued and waits; it must not be dropped by one of its own items.
/// Delayed items whose timer is pending are not waited for: cancel them first.
///
/// # Invariants
///
/// The pointer is a live work queue that this object owns.
pub(crate) struct OwnedQueue(NonNull<bindings::workqueue_struct>);

// SAFETY: A work queue may be used and destroyed from any thread.
unsafe impl Send for OwnedQueue {}

// SAFETY: All operations on a work queue are thread-safe.
unsafe impl Sync for OwnedQueue {}

impl OwnedQueue {
    /// Makes a queue that runs one item at a time, in order, also while memory is being reclaimed.
    /// Its items must not wait for a queue that does not.
    pub(crate) fn new_ordered(name: &CStr) -> Result<Self> {
        Self::make(name, true)
    }

    /// As [`Self::new_ordered`], for what memory does not depend on: its items may wait for any
    /// other queue, as those must that unregister a network device.
    pub(crate) fn new_unhurried(name: &CStr) -> Result<Self> {
        Self::make(name, false)
    }

    fn make(name: &CStr, reclaims: bool) -> Result<Self> {
        // SAFETY: `name` is a C string; the callee copies it.
        let queue = unsafe { bindings::alloc_ordered_workqueue(name.as_char_ptr(), reclaims) };
        // INVARIANT: The queue was just made, and nobody else has it.
        Ok(Self(NonNull::new(queue).ok_or(ENOMEM)?))
    }
}

impl Deref for OwnedQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: By the type invariant the queue is live for as long as `self`.
        unsafe { Queue::from_raw(self.0.as_ptr()) }
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this object owns the live queue.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// Takes an item off its queue or stops its timer, or waits until it has run.
///
/// Sleeps. Must not be called from the item itself, nor with a lock that the item takes.
pub(crate) fn cancel_delayed_sync<T, const ID: u64>(item: &Arc<T>)
where
    T: HasDelayedWork<T, ID> + WorkItem<ID, Pointer = Arc<T>>,
{
    let raw = Arc::as_ptr(item).cast_mut();
    // SAFETY: `raw` points into a live `Arc`.
    let work = unsafe { T::raw_get_work(raw) };
    // SAFETY: `work` points at a field of a live object.
    let work = unsafe { Work::raw_get(work) };
    // SAFETY: By the contract of `HasDelayedWork` the work is the `work` field of a delayed work.
    let delayed = unsafe { kernel::container_of!(work, bindings::delayed_work, work) };
    // SAFETY: The delayed work was initialised when the object was made.
    let cancelled = unsafe { bindings::cancel_delayed_work_sync(delayed) };
    if cancelled {
        // SAFETY: The queue held a reference that `run` would have taken over; the item was taken
        // off before it ran, so the reference is ours.
        drop(unsafe { Arc::from_raw(raw.cast_const()) });
    }
}
