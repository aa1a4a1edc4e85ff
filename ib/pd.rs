// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Protection domains.

use super::device::Device;
use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A protection domain.
///
/// # Invariants
///
/// `raw` is a live protection domain of `device` that this object owns.
pub(crate) struct Pd {
    raw: NonNull<bindings::ib_pd>,
    device: Arc<Device>,
}

// SAFETY: Protection domains may be used from any thread; C serialises what needs it.
unsafe impl Send for Pd {}

// SAFETY: As above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes a protection domain. Sleeps.
    pub(crate) fn new(device: Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: The device is live; the name is a static string.
        let raw = unsafe { bindings::__ib_alloc_pd(device.as_raw(), 0, c"ipoib_rs".as_char_ptr()) };
        let raw = NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: It was just made, and nobody else has it.
        Ok(Arc::new(Self { raw, device }, GFP_KERNEL)?)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.raw.as_ptr()
    }

    /// The key that covers all memory.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: By the type invariant the object is live; the key is fixed.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the object is ours; those who use it hold a reference to
        // `self`, so nobody does.
        unsafe { bindings::ib_dealloc_pd_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
