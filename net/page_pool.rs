// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Recycled receive pages.
//!
//! C header: [`include/net/page_pool/helpers.h`](srctree/include/net/page_pool/helpers.h)

use crate::bindings;
use core::{
    mem::ManuallyDrop,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::prelude::*;

/// A pool of pages for one receive ring.
///
/// # Invariants
///
/// The pointer is a live page pool that this object owns; it maps its pages if `mapped`.
pub(crate) struct PagePool {
    pool: NonNull<bindings::page_pool>,
    mapped: bool,
}

// SAFETY: Ownership of a pool may move between threads; allocation takes `&mut self`.
unsafe impl Send for PagePool {}

impl PagePool {
    /// Makes a pool that caches up to about `size` pages.
    ///
    /// The pool does not map its pages: an RDMA device may have DMA operations of its own.
    pub(crate) fn new(size: u32) -> Result<Self> {
        Self::make(size, ptr::null_mut())
    }

    /// As [`Self::new`], with pages that are mapped for `device` to write to, once and for as long
    /// as they belong to the pool. Before the CPU reads what the device wrote it must be synced.
    ///
    /// # Safety
    ///
    /// `device` is a live device that does DMA.
    pub(crate) unsafe fn new_mapped(size: u32, device: NonNull<bindings::device>) -> Result<Self> {
        Self::make(size, device.as_ptr())
    }

    /// `device` is null, or as [`Self::new_mapped`] wants it.
    fn make(size: u32, device: *mut bindings::device) -> Result<Self> {
        let mapped = !device.is_null();
        let mut params = bindings::page_pool_params::default();
        // SAFETY: The union has one member only, which is plain data.
        let fast = unsafe { params.__bindgen_anon_1.fast.as_mut() };
        fast.pool_size = size;
        fast.nid = bindings::NUMA_NO_NODE;
        if mapped {
            fast.dev = device;
            fast.dma_dir = bindings::dma_data_direction::DMA_FROM_DEVICE;
            fast.max_len = Page::SIZE as u32;
            params.__bindgen_anon_2.slow.flags =
                bindings::PP_FLAG_DMA_MAP | bindings::PP_FLAG_DMA_SYNC_DEV;
        }
        // SAFETY: `params` is valid; the callee copies it, and takes a reference to the device.
        let pool = unsafe { bindings::page_pool_create(&params) };
        let pool = NonNull::new(kernel::error::from_err_ptr(pool)?).ok_or(ENOMEM)?;
        // INVARIANT: The pool was just made, and nobody else has it.
        Ok(Self { pool, mapped })
    }

    /// Where the device of [`Self::new_mapped`] finds a page of this pool; without one, its address.
    #[inline]
    pub(crate) fn address(&self, page: &Page) -> u64 {
        if self.mapped {
            // SAFETY: The page is live, and a page of a pool with mappings.
            unsafe { bindings::page_pool_get_dma_addr(page.as_raw()) }
        } else {
            page.bytes().as_ptr() as u64
        }
    }

    /// A page; atomic context is allowed unless the caller may sleep.
    #[inline]
    pub(crate) fn alloc(&mut self, may_sleep: bool) -> Option<Page> {
        let gfp = match may_sleep {
            true => bindings::GFP_KERNEL,
            false => bindings::GFP_ATOMIC,
        } | bindings::__GFP_NOWARN;
        // SAFETY: The pool is live, and `&mut self` makes us its only allocator.
        let page = unsafe { bindings::page_pool_alloc_page(self.pool.as_ptr(), gfp) };
        // INVARIANT: The page is fresh from the pool.
        Some(Page {
            page: NonNull::new(page)?,
            pool: self.pool,
        })
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the pool is ours. It goes away when its last page has
        // come back.
        unsafe { bindings::page_pool_destroy(self.pool.as_ptr()) };
    }
}

/// A page of a pool; dropping it gives it back.
///
/// # Invariants
///
/// `page` is a page of `pool`, and this object has the only reference. A pool outlives its pages.
pub(crate) struct Page {
    page: NonNull<bindings::page>,
    pool: NonNull<bindings::page_pool>,
}

// SAFETY: A page may be given back from any context.
unsafe impl Send for Page {}

impl Page {
    /// Bytes in a page.
    pub(crate) const SIZE: usize = kernel::page::PAGE_SIZE;

    #[inline]
    pub(crate) fn as_raw(&self) -> *mut bindings::page {
        self.page.as_ptr()
    }

    /// The page's bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8; Self::SIZE] {
        // SAFETY: The page is live, and not from high memory, so it has an address.
        let address = unsafe { bindings::page_address(self.as_raw()) };
        // SAFETY: A page has that many bytes, and by the type invariant nobody else has it.
        unsafe { &*address.cast() }
    }

    /// Gives the page away: whoever has it next returns it to the pool.
    #[inline]
    pub(crate) fn into_raw(self) -> *mut bindings::page {
        ManuallyDrop::new(self).page.as_ptr()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the page is the live pool's and the reference is ours.
        // `false`: the context may be any.
        unsafe { bindings::page_pool_put_page(self.pool.as_ptr(), self.as_raw(), false) };
    }
}
