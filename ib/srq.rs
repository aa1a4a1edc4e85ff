// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Receive queues of connected queue pairs, shared by many of them or a queue pair's own, and the
//! pages that are posted to them.
//!
//! [`Srq`] is what queue pairs receive from; it owns all buffers, which live until it is destroyed
//! after the last of its queue pairs. [`SharedQueue`], of which there is one for each [`Srq`], posts
//! and takes back; it belongs to the handler of the receive completion queue, and needs no lock.
//!
//! A slot is as many pages as the longest message needs, and a request that names them, made once.
//! Requests carry a [`WrId`]; a completion that names no posted request is refused. Some providers
//! lose the request that a queue pair has begun to fill when it dies: [`SharedQueue::audit`] finds
//! such slots and posts spare ones instead. A lost slot's pages stay where they are, as the device
//! may still write to them; when there are no spare slots any more a new queue, for new queue
//! pairs, is the way out.
//!
//! A device without shared receive queues needs a queue of the same slots for each queue pair:
//! [`SharedQueue::own`], and [`SharedQueue::attach`] once the queue pair was made.

use super::{
    device::Device,
    pd::Pd,
    qp::Qp,
    queue::FROM_DEVICE, //
};
use crate::{
    bindings,
    net::{
        page_pool::{
            Page,
            PagePool, //
        },
        skb::{
            NewSkb,
            MAX_FRAGS, //
        }, //
    },
    ring::{
        Cursor,
        WrId, //
    },
};
use core::{
    cell::UnsafeCell,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::Full,
            AtomicFlag, //
        },
        Arc, //
    },
};

/// Receives posted at once.
const CHAIN: usize = 8;

/// Pages that the pool caches, at most.
const POOL_PAGES: u32 = 4096;

/// Sizes of a receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    /// Messages that it holds.
    pub(crate) entries: u32,
    /// Slots beyond these, for lost ones.
    pub(crate) spare: u32,
    /// Bytes of the longest message, a multiple of the page size.
    pub(crate) message: usize,
}

impl Shape {
    /// The shape nearest to what is asked for that `device` has: fewer entries, fewer spare ones,
    /// shorter messages.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP`: the device has no shared receive queues.
    pub(crate) fn within(device: &Device, entries: u32, message: usize) -> Result<Self> {
        let room = device.max_srq_wr();
        let sges = device.max_srq_sge() as usize;
        if !device.has_srq() || room == 0 || sges == 0 {
            return Err(EOPNOTSUPP);
        }
        let entries = entries.clamp(1, room);
        let pages = message.div_ceil(Page::SIZE).clamp(1, sges.min(MAX_FRAGS));
        Ok(Self {
            entries,
            spare: (entries / 4).max(8).min(room - entries),
            message: pages * Page::SIZE,
        })
    }

    /// The same for a queue pair's own receive queue.
    pub(crate) fn within_own(device: &Device, entries: u32, message: usize) -> Self {
        let sges = (device.max_recv_sge() as usize).max(1);
        let pages = message.div_ceil(Page::SIZE).clamp(1, sges.min(MAX_FRAGS));
        Self {
            entries: entries.clamp(1, device.max_qp_wr().max(1)),
            spare: 0,
            message: pages * Page::SIZE,
        }
    }

    pub(super) fn pages(&self) -> usize {
        (self.message / Page::SIZE).clamp(1, MAX_FRAGS)
    }

    pub(super) fn slots(&self) -> u32 {
        self.entries.saturating_add(self.spare)
    }
}

/// The pages of all slots, and where new ones come from.
struct Store {
    pages: KVVec<Option<Page>>,
    pool: PagePool,
}

/// A shared receive queue, or what belongs to a queue pair's own one.
///
/// # Invariants
///
/// - `raw`, if there is one, is a live shared receive queue of `pd` that this object owns. Without
///   it one queue pair at most has a reference to this object.
/// - `store` belongs to the one [`SharedQueue`] that has a reference to this object, and, when
///   there is none, to `drop`.
pub(crate) struct Srq {
    raw: Option<NonNull<bindings::ib_srq>>,
    shape: Shape,
    /// A queue pair was made that this is the own queue of.
    taken: AtomicFlag,
    store: UnsafeCell<Store>,
    pd: Arc<Pd>,
}

// SAFETY: The queue may be used from any thread, C serialises what needs it; by the type invariants
// the store has one owner at a time, and its pages may be used on any CPU.
unsafe impl Send for Srq {}

// SAFETY: As above.
unsafe impl Sync for Srq {}

impl Srq {
    /// The shared receive queue; `None` if it is to be a queue pair's own.
    pub(super) fn as_raw(&self) -> Option<*mut bindings::ib_srq> {
        self.raw.map(NonNull::as_ptr)
    }

    /// What there is room for in it.
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes it for a queue pair; only one may have it as its own.
    pub(super) fn take(&self) -> Result {
        match self.raw.is_none() && self.taken.xchg(true, Full) {
            true => Err(EBUSY),
            false => Ok(()),
        }
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let Some(raw) = self.as_raw() else {
            return;
        };
        // SAFETY: By the type invariants the queue is ours; queue pairs hold a reference to `self`,
        // so none uses it. The pages go afterwards.
        let status = unsafe { bindings::ib_destroy_srq_user(raw, ptr::null_mut()) };
        if status != 0 {
            pr_err!("destroying a shared receive queue failed: {}\n", status);
        }
    }
}

/// What a slot is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In `idle` or `spare`.
    Idle,
    /// Posted as number `since`. `overtaken`: an audit found that later ones had completed.
    Posted { since: u32, overtaken: bool },
    /// Posted, and given up.
    Lost,
}

/// What an audit found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Audit {
    /// Slots that this audit gave up.
    pub(crate) lost: u32,
    /// Slots given up for which there was no spare one any more.
    pub(crate) missing: u32,
}

/// Who has which slot.
///
/// # Invariants
///
/// - A slot that is [`State::Idle`] is in `idle` or in `spare`, once, or with a [`Received`]; the
///   lists have room for all slots.
/// - `lost` is the number of slots that are [`State::Lost`].
struct Ledger {
    states: KVVec<State>,
    idle: KVVec<u32>,
    spare: KVVec<u32>,
    entries: usize,
    lost: u32,
    /// Number of the next post.
    next: u32,
    /// Number of the latest post that has completed.
    newest: u32,
}

impl Ledger {
    fn new(entries: u32, spares: u32) -> Result<Self> {
        let slots = entries.saturating_add(spares);
        let mut states = KVVec::with_capacity(slots as usize, GFP_KERNEL)?;
        let mut idle = KVVec::with_capacity(slots as usize, GFP_KERNEL)?;
        let mut spare = KVVec::with_capacity(slots as usize, GFP_KERNEL)?;
        for slot in 0..slots {
            states.push(State::Idle, GFP_KERNEL)?;
            match slot < entries {
                true => idle.push(slot, GFP_KERNEL)?,
                false => spare.push(slot, GFP_KERNEL)?,
            }
        }
        Ok(Self {
            states,
            idle,
            spare,
            entries: entries as usize,
            lost: 0,
            next: 1,
            newest: 0,
        })
    }

    /// The last idle slot was posted.
    #[inline]
    fn post(&mut self) {
        let Some(slot) = self.idle.pop() else {
            return;
        };
        if let Some(state) = self.states.get_mut(slot as usize) {
            *state = State::Posted {
                since: self.next,
                overtaken: false,
            };
            self.next = self.next.wrapping_add(1);
        }
    }

    /// A posted slot completed; `None` if it is not posted, else whether it had been given up.
    #[inline]
    fn take(&mut self, slot: usize) -> Option<bool> {
        let state = self.states.get_mut(slot)?;
        let late = match *state {
            State::Idle => return None,
            State::Lost => {
                self.lost = self.lost.saturating_sub(1);
                true
            }
            State::Posted { since, .. } => {
                if Cursor::reached(since, self.newest) {
                    self.newest = since;
                }
                false
            }
        };
        *state = State::Idle;
        Some(late)
    }

    /// What was taken is free again.
    #[inline]
    fn give(&mut self, slot: usize, late: bool) {
        let list = match late && self.active() > self.entries {
            true => &mut self.spare,
            false => &mut self.idle,
        };
        // INVARIANT: The slot is in no list; there is room for all slots.
        let _ = list.push_within_capacity(slot as u32);
    }

    fn audit(&mut self) -> Audit {
        let mut found = Audit::default();
        for state in self.states.iter_mut() {
            let State::Posted { since, overtaken } = *state else {
                continue;
            };
            if since == self.newest || !Cursor::reached(self.newest, since) {
                continue;
            }
            if !overtaken {
                *state = State::Posted {
                    since,
                    overtaken: true,
                };
                continue;
            }
            *state = State::Lost;
            found.lost += 1;
            self.lost += 1;
            if let Some(slot) = self.spare.pop() {
                // INVARIANT: From one list to the other; there is room for all slots.
                let _ = self.idle.push_within_capacity(slot);
            }
        }
        found.missing = self.entries.saturating_sub(self.active()) as u32;
        found
    }

    /// Slots that are neither lost nor spare.
    fn active(&self) -> usize {
        self.states
            .len()
            .saturating_sub(self.spare.len())
            .saturating_sub(self.lost as usize)
    }

    /// Slots that are posted and not lost.
    fn waiting(&self) -> usize {
        self.active().saturating_sub(self.idle.len())
    }
}

/// The end of a receive queue that posts and takes back.
///
/// # Invariants
///
/// - A slot whose state is not [`State::Idle`] is posted.
/// - There is a request for each slot of the ledger. It has the address of its slot's stretch of
///   `sges`, each entry of which names the page of the same place in the store, if there is one. The
///   vectors never move. A request without entries is of a slot that has not all its pages.
/// - This is the only `SharedQueue` with a reference to `srq`.
/// - `qp`, if there is one, has a reference to `srq`, which is its own queue.
pub(crate) struct SharedQueue {
    srq: Arc<Srq>,
    qp: Option<Arc<Qp>>,
    /// Nothing is posted any more.
    retired: bool,
    shape: Shape,
    ledger: Ledger,
    life: u32,
    wrs: KVVec<bindings::ib_recv_wr>,
    sges: KVVec<bindings::ib_sge>,
}

// SAFETY: The requests' pointers are to memory that the queue owns.
unsafe impl Send for SharedQueue {}

impl SharedQueue {
    /// Makes a shared receive queue, empty. `index` tells its requests from those of other queues
    /// with the same completion queue, `life` from those of earlier queues with that index. Sleeps.
    ///
    /// # Errors
    ///
    /// - `EOPNOTSUPP`: the device has none.
    /// - `ENOMEM`, or of the provider.
    pub(crate) fn new(pd: Arc<Pd>, shape: Shape, index: u16, life: u32) -> Result<Self> {
        if !pd.device().has_srq() {
            return Err(EOPNOTSUPP);
        }
        Self::make(pd, shape, index, life, true)
    }

    /// Makes the own receive queue of a queue pair that is still to be made, empty; otherwise as
    /// [`Self::new`].
    pub(crate) fn own(pd: Arc<Pd>, shape: Shape, index: u16, life: u32) -> Result<Self> {
        Self::make(pd, shape, index, life, false)
    }

    fn make(pd: Arc<Pd>, shape: Shape, index: u16, life: u32, shared: bool) -> Result<Self> {
        let (count, width) = (shape.slots() as usize, shape.pages());
        let mut pages = KVVec::with_capacity(count * width, GFP_KERNEL)?;
        let mut sges = KVVec::with_capacity(count * width, GFP_KERNEL)?;
        for _ in 0..count * width {
            pages.push(None, GFP_KERNEL)?;
            let sge = bindings::ib_sge {
                addr: 0,
                length: Page::SIZE as u32,
                lkey: pd.lkey(),
            };
            sges.push(sge, GFP_KERNEL)?;
        }
        let life = WrId::life_of(index, life);
        let mut wrs = KVVec::with_capacity(count, GFP_KERNEL)?;
        for slot in 0..count {
            let id = WrId {
                life,
                position: slot as u32,
            };
            let mut wr = bindings::ib_recv_wr {
                sg_list: &raw mut sges[slot * width],
                ..pin_init::zeroed()
            };
            wr.__bindgen_anon_1.wr_id = id.encode();
            wrs.push(wr, GFP_KERNEL)?;
        }
        let ledger = Ledger::new(shape.entries, shape.spare)?;
        let store = Store {
            pages,
            pool: pd
                .device()
                .page_pool((count * width).min(POOL_PAGES as usize) as u32)?,
        };
        let raw = match shared {
            true => Some(Self::make_raw(&pd, shape)?),
            false => None,
        };
        // INVARIANT: It was just made, nobody else has it, and the `SharedQueue` made below is the
        // only one.
        let srq = Arc::new(
            Srq {
                raw,
                shape,
                taken: AtomicFlag::new(false),
                store: UnsafeCell::new(store),
                pd,
            },
            GFP_KERNEL,
        )?;
        Ok(Self {
            srq,
            qp: None,
            retired: false,
            shape,
            ledger,
            life,
            wrs,
            sges,
        })
    }

    fn make_raw(pd: &Pd, shape: Shape) -> Result<NonNull<bindings::ib_srq>> {
        let mut attr = bindings::ib_srq_init_attr {
            attr: bindings::ib_srq_attr {
                max_wr: shape.slots(),
                max_sge: shape.pages() as u32,
                srq_limit: 0,
            },
            srq_type: bindings::ib_srq_type_IB_SRQT_BASIC,
            ..pin_init::zeroed()
        };
        // SAFETY: The domain is live, and owned by the object that will own the queue; callers saw
        // that the device has the operation.
        let raw = unsafe {
            bindings::ib_create_srq_user(pd.as_raw(), &mut attr, ptr::null_mut(), ptr::null_mut())
        };
        NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)
    }

    /// Names the queue pair whose own queue this is.
    ///
    /// # Errors
    ///
    /// `EINVAL`: it receives from another one.
    pub(crate) fn attach(&mut self, qp: Arc<Qp>) -> Result {
        if self.srq.raw.is_some() || !qp.receives_from(&self.srq) {
            return Err(EINVAL);
        }
        // INVARIANT: As just seen.
        self.qp = Some(qp);
        Ok(())
    }

    /// Posts nothing any more: the queue pair has failed, and would flush it at once.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
    }

    /// Whether nothing is posted, nor will be.
    pub(crate) fn is_over(&self) -> bool {
        self.retired && self.waiting() == 0
    }

    /// What queue pairs receive from.
    pub(crate) fn srq(&self) -> &Arc<Srq> {
        &self.srq
    }

    /// The sizes that it has.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Pages for the slot, those it has and new ones.
    #[inline]
    fn equip(&mut self, slot: usize, may_sleep: bool) -> bool {
        self.wrs[slot].num_sge != 0 || self.equip_anew(slot, may_sleep)
    }

    #[cold]
    fn equip_anew(&mut self, slot: usize, may_sleep: bool) -> bool {
        let width = self.shape.pages();
        let own = slot * width..(slot + 1) * width;
        // SAFETY: By the type invariant the store is ours alone, and we are borrowed.
        let Store { pages, pool } = unsafe { &mut *self.srq.store.get() };
        let pages = pages[own.clone()].iter_mut();
        for (page, sge) in pages.zip(&mut self.sges[own]) {
            if page.is_some() {
                continue;
            }
            let Some(fresh) = pool.alloc(may_sleep) else {
                return false;
            };
            // INVARIANT: The list names the page.
            sge.addr = pool.address(&fresh);
            *page = Some(fresh);
        }
        // INVARIANT: It has all its pages.
        self.wrs[slot].num_sge = width as i32;
        true
    }

    /// Posts the idle slots for which there are pages, once there are a few; returns for how many
    /// there were none. Atomic context is allowed.
    ///
    /// # Errors
    ///
    /// The provider refused; the slots stay idle.
    #[inline]
    pub(crate) fn post(&mut self) -> Result<usize> {
        if self.ledger.idle.len() < CHAIN.min(self.ledger.entries / 4) {
            return Ok(0);
        }
        self.post_with(false)
    }

    /// Posts all idle slots, in process context; otherwise as [`Self::post`].
    pub(crate) fn fill(&mut self) -> Result<usize> {
        self.post_with(true)
    }

    fn post_with(&mut self, may_sleep: bool) -> Result<usize> {
        if self.retired {
            return Ok(0);
        }
        loop {
            let idle = self.ledger.idle.len();
            let mut count = 0;
            while count < idle.min(CHAIN)
                && self.equip(self.ledger.idle[idle - 1 - count] as usize, may_sleep)
            {
                count += 1;
            }
            if count == 0 {
                return Ok(idle);
            }
            let base = self.wrs.as_mut_ptr();
            let mut first = ptr::null_mut();
            for &slot in &self.ledger.idle[idle - count..] {
                // SAFETY: By the type invariants there is a request for each slot.
                let wr = unsafe { base.add(slot as usize) };
                // SAFETY: As above.
                unsafe { (*wr).next = first };
                first = wr;
            }
            let mut bad = ptr::null();
            let status = match (self.srq.as_raw(), &self.qp) {
                (Some(raw), _) => {
                    // SAFETY: The queue and its device are live.
                    let post = unsafe { (*(*raw).device).ops.post_srq_recv }.ok_or(EOPNOTSUPP)?;
                    // SAFETY: The requests are complete and chained; the pages belong to `srq`,
                    // which keeps those of posted slots until it is destroyed.
                    to_result(unsafe { post(raw, first, &mut bad) })
                }
                (None, Some(qp)) => {
                    let raw = qp.as_raw();
                    // SAFETY: The queue pair and its device are live.
                    let post = unsafe { (*(*raw).device).ops.post_recv }.ok_or(EOPNOTSUPP)?;
                    // SAFETY: As above; by the type invariants the queue pair keeps `srq` until it
                    // is destroyed.
                    to_result(unsafe { post(raw, first, &mut bad) })
                }
                (None, None) => return Err(EINVAL),
            };
            let accepted = match status {
                Ok(()) => count,
                Err(_) => (0..count)
                    .find(|&at| {
                        let slot = self.ledger.idle[idle - 1 - at] as usize;
                        ptr::eq(&raw const self.wrs[slot], bad)
                    })
                    .unwrap_or(0),
            };
            for _ in 0..accepted {
                // INVARIANT: The slots were taken from the end, in this order.
                self.ledger.post();
            }
            status?;
        }
    }

    /// The slot that `id` names, no longer posted; `None` if it names none.
    #[inline]
    pub(crate) fn take(&mut self, id: u64) -> Option<Received<'_>> {
        let id = WrId::decode(id);
        let slot = id.position as usize;
        if id.life != self.life {
            return None;
        }
        let late = self.ledger.take(slot)?;
        let device = self.srq.pd.device().as_raw();
        Some(Received {
            queue: self,
            slot,
            late,
            read: false,
            // SAFETY: The device is live.
            sync: unsafe { bindings::ib_dma_need_sync(device) },
        })
    }

    /// Gives up posted slots that have been overtaken since the last audit, and makes spare ones
    /// idle instead.
    ///
    /// Requests are used in the order in which they were posted, so one that is overtaken is being
    /// filled, or lost. Call this when connections have died, and not more often than a message can
    /// take, retries included. Should a slot complete after all it is taken as any other.
    pub(crate) fn audit(&mut self) -> Audit {
        self.ledger.audit()
    }

    /// Loses all that is posted, as if queue pairs had died with it.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn lose_all(&mut self) {
        for state in self.ledger.states.iter_mut() {
            if matches!(state, State::Posted { .. }) {
                *state = State::Lost;
                self.ledger.lost += 1;
            }
        }
    }

    /// Whether `id` is of this queue, and not of one that had its index before.
    #[inline]
    pub(crate) fn is_of_this_life(&self, id: u64) -> bool {
        WrId::decode(id).life == self.life
    }

    /// Slots that wait for a message.
    pub(crate) fn waiting(&self) -> usize {
        self.ledger.waiting()
    }

    /// Slots given up.
    pub(crate) fn lost(&self) -> u32 {
        self.ledger.lost
    }
}

/// A slot that a message was written to. Dropping it makes the slot idle.
///
/// # Invariants
///
/// The slot has all its pages, and is not posted. `sync` says whether the memory is to be handed to
/// the CPU and back.
pub(crate) struct Received<'a> {
    queue: &'a mut SharedQueue,
    slot: usize,
    /// It had been given up, and replaced.
    late: bool,
    /// The first page was read.
    read: bool,
    sync: bool,
}

impl Received<'_> {
    /// The first page, and where the device finds it.
    fn first(&self) -> Option<(&Page, u64)> {
        let at = self.slot * self.queue.shape.pages();
        // SAFETY: By the queue's invariant the store is its alone, and it is borrowed.
        let store = unsafe { &*self.queue.srq.store.get() };
        Some((
            store.pages.get(at)?.as_ref()?,
            self.queue.sges.get(at)?.addr,
        ))
    }

    /// The first `len` bytes, fewer beyond the first page.
    #[inline]
    pub(crate) fn head(&mut self, len: usize) -> &[u8] {
        self.read = true;
        let len = len.min(Page::SIZE);
        let Some((page, address)) = self.first() else {
            return &[];
        };
        if self.sync {
            sync_for_cpu(self.queue.srq.pd.device(), address, len);
        }
        &page.bytes()[..len]
    }

    /// Appends the first `len` bytes without the first `skip` (less than a page) to `skb`, page by
    /// page, and gets new pages for the slot.
    ///
    /// False when memory is out, or if the message is longer than the slot: `skb` is incomplete,
    /// and the slot has all its pages.
    #[inline]
    pub(crate) fn attach(&mut self, skb: &mut NewSkb, skip: usize, len: usize) -> bool {
        let width = self.queue.shape.pages();
        if len > width * Page::SIZE || skip >= len.min(Page::SIZE) {
            return false;
        }
        let from = self.slot * width;
        let used = from..from + len.div_ceil(Page::SIZE);
        let SharedQueue { srq, sges, .. } = &mut *self.queue;
        // SAFETY: By the queue's invariant the store is its alone, and it is borrowed.
        let Store { pages, pool } = unsafe { &mut *srq.store.get() };
        let (Some(pages), Some(sges)) = (pages.get_mut(used.clone()), sges.get_mut(used)) else {
            return false;
        };
        let (mut offset, mut left) = (skip, len - skip);
        for (page, sge) in pages.iter_mut().zip(sges) {
            let Some(fresh) = pool.alloc(false) else {
                return false;
            };
            let part = left.min(Page::SIZE - offset);
            if self.sync {
                sync_for_cpu(srq.pd.device(), sge.addr, offset + part);
            }
            // INVARIANT: The list names the page.
            sge.addr = pool.address(&fresh);
            let Some(full) = page.replace(fresh) else {
                return false;
            };
            if !skb.add_part(full, offset, part) {
                return false;
            }
            left -= part;
            offset = 0;
        }
        self.read = false;
        true
    }

    /// Gives what was read to the device again.
    #[cold]
    fn sync_for_device(&self) {
        let Some((_, address)) = self.first() else {
            return;
        };
        let device = self.queue.srq.pd.device().as_raw();
        // SAFETY: The device is live, and by the queue's invariant this is the mapping of a page.
        unsafe {
            bindings::ib_dma_sync_single_for_device(device, address, Page::SIZE, FROM_DEVICE)
        };
    }
}

/// Gives the first `len` bytes of the page at `address`, at most all, to the CPU.
#[cold]
fn sync_for_cpu(device: &Device, address: u64, len: usize) {
    // SAFETY: The device is live; callers have the page, mapped at that address.
    unsafe { bindings::ib_dma_sync_single_for_cpu(device.as_raw(), address, len, FROM_DEVICE) };
}

impl Drop for Received<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.read && self.sync {
            self.sync_for_device();
        }
        self.queue.ledger.give(self.slot, self.late);
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_srq)]
mod tests {
    use super::*;

    fn post_all(ledger: &mut Ledger) {
        while !ledger.idle.is_empty() {
            ledger.post();
        }
    }

    fn complete(ledger: &mut Ledger, slot: usize) -> Option<bool> {
        let late = ledger.take(slot)?;
        ledger.give(slot, late);
        Some(late)
    }

    #[test]
    fn only_posted_slots_complete() -> Result {
        let mut ledger = Ledger::new(4, 2)?;
        assert_eq!(ledger.waiting(), 0);
        assert_eq!(complete(&mut ledger, 3), None);
        post_all(&mut ledger);
        assert_eq!(ledger.waiting(), 4);
        assert_eq!(complete(&mut ledger, 3), Some(false));
        for slot in [3, 4, 5, 6, usize::MAX] {
            assert_eq!(complete(&mut ledger, slot), None);
        }
        assert_eq!(ledger.waiting(), 3);
        Ok(())
    }

    #[test]
    fn what_is_overtaken_twice_is_lost() -> Result {
        let none = Audit::default();
        let lost = |lost, missing| Audit { lost, missing };
        let mut ledger = Ledger::new(4, 2)?;
        // Posted in the order 3, 2, 1, 0.
        post_all(&mut ledger);
        assert_eq!(complete(&mut ledger, 2), Some(false));
        assert_eq!(ledger.audit(), none);
        assert_eq!(ledger.audit(), lost(1, 0));
        assert_eq!(ledger.audit(), none);
        assert_eq!(ledger.waiting(), 2);
        // Slot 5 is there for 3.
        post_all(&mut ledger);
        assert_eq!(ledger.waiting(), 4);
        // 3 comes after all: then it is a spare one.
        assert_eq!(complete(&mut ledger, 3), Some(true));
        assert_eq!(ledger.lost, 0);
        assert!(ledger.idle.is_empty());
        assert_eq!(ledger.waiting(), 4);
        // 0 and 1 are lost, for which 3 and 4 are there, and then these and 2.
        assert_eq!(complete(&mut ledger, 5), Some(false));
        assert_eq!(ledger.audit(), none);
        assert_eq!(ledger.audit(), lost(2, 0));
        post_all(&mut ledger);
        assert_eq!(ledger.waiting(), 4);
        assert_eq!(complete(&mut ledger, 5), Some(false));
        assert_eq!(ledger.audit(), none);
        assert_eq!(ledger.audit(), lost(3, 3));
        post_all(&mut ledger);
        assert_eq!(ledger.waiting(), 1);
        // A late one is used at once while some are missing.
        assert_eq!(complete(&mut ledger, 0), Some(true));
        post_all(&mut ledger);
        assert_eq!(ledger.waiting(), 2);
        assert_eq!(ledger.audit(), lost(0, 2));
        Ok(())
    }

    #[test]
    fn an_audit_survives_the_wrap() -> Result {
        let mut ledger = Ledger::new(2, 1)?;
        ledger.next = u32::MAX;
        ledger.newest = u32::MAX - 1;
        post_all(&mut ledger);
        // The second one's number is 0.
        assert_eq!(complete(&mut ledger, 0), Some(false));
        assert_eq!(ledger.audit().lost, 0);
        assert_eq!(ledger.audit().lost, 1);
        Ok(())
    }
}
