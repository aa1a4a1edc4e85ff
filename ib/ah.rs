// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Address handles.
//!
//! A handle may be destroyed only after the last send that named it has completed. Dropping an
//! [`Ah`] therefore hands it to its [`Reaper`], with the send queue's position at that moment; the
//! reaper destroys it, in process context, once the queue has come past.

use super::{
    pd::Pd,
    queue::SendProgress,
    Gid,
    PortNum, //
};
use crate::{
    bindings,
    sync::lock::{
        new_spinlock_bh,
        SpinLockBh, //
    }, //
};
use core::{
    mem,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// How to reach a port or a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Attr {
    pub(crate) gid: Gid,
    /// Whether datagrams carry a global route header, made of the fields up to `flow_label`.
    pub(crate) global: bool,
    /// Own entry of the GID table.
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) flow_label: u32,
    pub(crate) sl: u8,
    /// LID of the next port, low bits of the own LID, and static rate (an `enum ib_rate`), on
    /// InfiniBand.
    pub(crate) dlid: u16,
    pub(crate) path_bits: u8,
    pub(crate) rate: u8,
    /// Ethernet address of the next hop, on RoCE.
    pub(crate) dmac: [u8; 6],
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
impl Attr {
    /// The attributes of a RoCE port's handle.
    fn read(raw: &bindings::rdma_ah_attr) -> Self {
        Self {
            // SAFETY: All bytes of the union are plain data.
            gid: Gid(unsafe { raw.grh.dgid.raw }),
            global: u32::from(raw.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0,
            sgid_index: raw.grh.sgid_index,
            hop_limit: raw.grh.hop_limit,
            traffic_class: raw.grh.traffic_class,
            flow_label: raw.grh.flow_label,
            sl: raw.sl,
            // SAFETY: All bytes of the union are plain data.
            dmac: unsafe { raw.__bindgen_anon_1.roce.dmac },
            ..Self::default()
        }
    }
}

/// A handle's memory, which becomes a member of the reaper's list.
struct Node {
    raw: NonNull<bindings::ib_ah>,
    /// What the core was given.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    given: Attr,
    reaper: Option<Arc<Reaper>>,
    /// Where the send queue was when the handle was dropped.
    retired_at: u32,
    next: Option<KBox<Node>>,
}

// SAFETY: Handles may be used and destroyed from any thread.
unsafe impl Send for Node {}

/// An address handle.
///
/// # Invariants
///
/// The node is there until the handle is dropped, and its `raw` is live.
pub(crate) struct Ah(Option<KBox<Node>>, NonNull<bindings::ib_ah>);

// SAFETY: Handles may be used and destroyed from any thread.
unsafe impl Send for Ah {}

// SAFETY: A shared handle only names a destination.
unsafe impl Sync for Ah {}

impl Ah {
    /// Makes a handle for sends from `port`. Sleeps.
    pub(crate) fn new(reaper: &Arc<Reaper>, port: PortNum, attr: &Attr) -> Result<Self> {
        let pd = &reaper.pd;
        let mut raw_attr: bindings::rdma_ah_attr = pin_init::zeroed();
        // SAFETY: The device is live; C checks nothing, but `PortNum`s come from it.
        raw_attr.type_ = unsafe { bindings::rdma_ah_find_type(pd.device().as_raw(), port.0) };
        raw_attr.port_num = port.0;
        raw_attr.sl = attr.sl;
        raw_attr.static_rate = attr.rate;
        if attr.global {
            raw_attr.ah_flags = bindings::ib_ah_flags_IB_AH_GRH as u8;
            raw_attr.grh.dgid.raw = attr.gid.0;
            raw_attr.grh.sgid_index = attr.sgid_index;
            raw_attr.grh.hop_limit = attr.hop_limit;
            raw_attr.grh.traffic_class = attr.traffic_class;
            raw_attr.grh.flow_label = attr.flow_label;
        }
        if raw_attr.type_ == bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE {
            raw_attr.__bindgen_anon_1.roce.dmac = attr.dmac;
        } else {
            raw_attr.__bindgen_anon_1.ib = bindings::ib_ah_attr {
                dlid: attr.dlid,
                src_path_bits: attr.path_bits,
            };
        }
        let mut node = KBox::new(
            Node {
                raw: NonNull::dangling(),
                #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
                given: Attr::read(&raw_attr),
                reaper: Some(reaper.clone()),
                retired_at: 0,
                next: None,
            },
            GFP_KERNEL,
        )?;
        let flags = bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE;
        // SAFETY: The domain is live, and the reaper that owns it outlives the handle.
        let raw = unsafe { bindings::rdma_create_ah(pd.as_raw(), &mut raw_attr, flags) };
        node.raw = NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)?;
        let raw = node.raw;
        // INVARIANT: The node is there with a live handle.
        Ok(Self(Some(node), raw))
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.1.as_ptr()
    }

    /// The attributes with which the handle was asked for.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn given(&self) -> Option<Attr> {
        self.0.as_ref().map(|node| node.given)
    }

    /// What the provider made of the attributes.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn query(&self) -> Result<Attr> {
        let mut raw: bindings::rdma_ah_attr = pin_init::zeroed();
        // SAFETY: By the type invariant the handle is live.
        to_result(unsafe { bindings::rdma_query_ah(self.as_raw(), &mut raw) })?;
        let attr = Attr::read(&raw);
        // SAFETY: The query took a reference to the entry of the GID table, which is ours.
        unsafe { bindings::rdma_destroy_ah_attr(&mut raw) };
        Ok(attr)
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        let Some(mut node) = self.0.take() else {
            return;
        };
        if let Some(reaper) = node.reaper.take() {
            node.retired_at = reaper.progress.head();
            reaper.take(node);
        }
    }
}

/// Destroys the address handles of a send queue when it is done with them.
#[pin_data(PinnedDrop)]
pub(crate) struct Reaper {
    #[pin]
    retired: SpinLockBh<Option<KBox<Node>>>,
    progress: SendProgress,
    pd: Arc<Pd>,
}

impl Reaper {
    /// For handles used with the queue that `progress` watches.
    pub(crate) fn new(pd: Arc<Pd>, progress: SendProgress) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                retired <- new_spinlock_bh!(None, c"ib::ah::Reaper"),
                progress,
                pd,
            }),
            GFP_KERNEL,
        )
    }

    fn take(&self, mut node: KBox<Node>) {
        let mut retired = self.retired.lock();
        node.next = retired.take();
        *retired = Some(node);
    }

    /// Destroys the handles that no posted send names; returns how many are left. Sleeps.
    pub(crate) fn reap(&self) -> usize {
        let mut list = mem::take(&mut *self.retired.lock());
        let mut left = 0;
        while let Some(mut node) = list {
            list = node.next.take();
            if self.progress.passed(node.retired_at) {
                Self::destroy(&node);
            } else {
                left += 1;
                self.take(node);
            }
        }
        left
    }

    fn destroy(node: &Node) {
        let flags = bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE;
        // SAFETY: The handle is live and ours, and no posted send names it.
        let status = to_result(unsafe {
            bindings::rdma_destroy_ah_user(node.raw.as_ptr(), flags, core::ptr::null_mut())
        });
        if let Err(error) = status {
            pr_err!("destroying an address handle failed: {:?}\n", error);
        }
    }
}

#[pinned_drop]
impl PinnedDrop for Reaper {
    fn drop(self: Pin<&mut Self>) {
        // Handles hold a reference to the reaper until they retire, and the owner resets the queue
        // pair before it lets go of the reaper: no send is posted any more.
        let mut list = mem::take(&mut *self.retired.lock());
        while let Some(mut node) = list {
            list = node.next.take();
            Self::destroy(&node);
        }
    }
}
