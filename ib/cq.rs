// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Completion queues polled by NAPI.
//!
//! A [`NapiCq`] is a completion queue and a NAPI context in one: an event of the queue schedules
//! the context, whose poll function owns the handler's data while it runs. While NAPI is disabled
//! the data can be had with the instance lock of the network device.
//!
//! The size of a completion queue is fixed. One that needs more room later, for more queue pairs, is
//! [extended](NapiCq::extend): by a second queue that the same context polls.

use super::{
    device::Device,
    Gid,
    QpId, //
};
use crate::{
    bindings,
    net::{
        device::{
            self as netdev,
            Locked,
            UnregisteredDevice,
            Users, //
        },
        skb::{
            NewSkb,
            Skb, //
        }, //
    },
    ring::WrId, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        Arc,
        SetOnce, //
    },
    types::Opaque, //
};

/// Completions taken from a queue at once.
const BATCH: usize = 16;

/// Handles the completions of a queue.
pub(crate) trait Poll: Send + 'static {
    /// Whose network device it is.
    type Driver: netdev::Driver;

    /// Takes completions from `cq`, no more than `budget` that deliver a packet, and returns how
    /// many did. Softirq context.
    fn poll(
        &mut self,
        dev: &netdev::Device<Self::Driver>,
        napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize;
}

/// A completion.
#[repr(transparent)]
pub(crate) struct Wc(bindings::ib_wc);

/// How a work request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    Success,
    /// The queue pair left the state in which it works.
    Flushed,
    Error(u32),
}

impl Wc {
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        // SAFETY: Requests posted by `queue` carry a number, never a pointer.
        unsafe { self.0.__bindgen_anon_1.wr_id }
    }

    /// Which of the queues that share the completion queue the request was posted to.
    #[inline]
    pub(crate) fn queue(&self) -> u16 {
        WrId::decode(self.id()).queue()
    }

    /// The queue pair of the request.
    #[inline]
    pub(crate) fn qp(&self) -> QpId {
        QpId(self.0.qp as usize)
    }

    #[inline]
    pub(crate) fn status(&self) -> Status {
        match self.0.status {
            bindings::ib_wc_status_IB_WC_SUCCESS => Status::Success,
            bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR => Status::Flushed,
            other => Status::Error(other),
        }
    }

    /// Bytes received, the 40 bytes in front of a datagram included.
    #[inline]
    pub(crate) fn byte_len(&self) -> usize {
        self.0.byte_len as usize
    }

    /// The sender's queue pair.
    #[inline]
    pub(crate) fn src_qp(&self) -> u32 {
        self.0.src_qp
    }

    /// Whether the checksums of a packet over IPv4 were found right.
    #[inline]
    pub(crate) fn is_verified(&self) -> bool {
        self.0.wc_flags as u32 & bindings::ib_wc_flags_IB_WC_IP_CSUM_OK != 0
    }

    /// Whether the bytes in front of the datagram are a global route header with 16-byte
    /// addresses.
    #[inline]
    pub(crate) fn has_grh(&self) -> bool {
        let flags = self.0.wc_flags as u32;
        let typed = flags & bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE != 0;
        flags & bindings::ib_wc_flags_IB_WC_GRH != 0
            && !(typed
                && u32::from(self.0.network_hdr_type)
                    == bindings::rdma_network_type_RDMA_NETWORK_IPV4)
    }
}

/// The source and destination in a global route header of at least 40 bytes.
#[inline]
pub(crate) fn grh_gids(grh: &[u8]) -> Option<(Gid, Gid)> {
    let source = grh.get(8..24)?.try_into().ok()?;
    let destination = grh.get(24..40)?.try_into().ok()?;
    Some((Gid(source), Gid(destination)))
}

/// The NAPI context, during a poll.
#[derive(Clone, Copy)]
pub(crate) struct Napi<'a>(NonNull<bindings::napi_struct>, PhantomData<&'a ()>);

impl Napi<'_> {
    /// A buffer with room for `len` bytes; `None` when memory is out.
    #[inline]
    pub(crate) fn alloc_skb(self, len: usize) -> Option<NewSkb> {
        // SAFETY: The context is live and polling.
        let skb = unsafe { bindings::napi_alloc_skb(self.0.as_ptr(), len as u32) };
        // SAFETY: The buffer was just made.
        NonNull::new(skb).map(|skb| unsafe { NewSkb::from_raw(skb) })
    }

    /// Hands a packet to the stack, merged with others of its flow.
    #[inline]
    pub(crate) fn receive(self, skb: Skb) {
        // SAFETY: The context is live and polling; the buffer is given away.
        unsafe { bindings::napi_gro_receive(self.0.as_ptr(), skb.into_raw()) };
    }
}

/// The queue, during a poll.
pub(crate) struct Completions<'a> {
    cq: NonNull<bindings::ib_cq>,
    extension: Option<NonNull<bindings::ib_cq>>,
    batch: &'a mut [bindings::ib_wc; BATCH],
}

impl Completions<'_> {
    /// The next completions, at most `max`, and whether there may be more.
    #[inline]
    pub(crate) fn next(&mut self, max: usize) -> (&[Wc], bool) {
        let max = max.min(BATCH);
        let mut count = Self::poll(self.cq, &mut self.batch[..max]);
        if let Some(extension) = self.extension {
            count += Self::poll(extension, &mut self.batch[count..max]);
        }
        // SAFETY: `Wc` has the layout of a completion, of which `count` were written.
        let batch = unsafe { core::slice::from_raw_parts(self.batch.as_ptr().cast(), count) };
        // Fewer than asked for: the queue was empty. What came since is seen when it is armed.
        (batch, count == max && max != 0)
    }

    /// Polls a queue, and returns how many completions there were.
    #[inline(always)]
    fn poll(cq: NonNull<bindings::ib_cq>, room: &mut [bindings::ib_wc]) -> usize {
        let cq = cq.as_ptr();
        // SAFETY: The queue is live, and so is its device.
        let poll = unsafe { (*(*cq).device).ops.poll_cq };
        let count = match poll {
            // SAFETY: `room` is for so many completions; NAPI makes us the only poller.
            Some(poll) => unsafe { poll(cq, room.len() as i32, room.as_mut_ptr()) },
            None => 0,
        };
        usize::try_from(count).unwrap_or(0).min(room.len())
    }
}

/// A completion queue of C, which may be used from any thread.
#[derive(Clone, Copy)]
struct RawCq(NonNull<bindings::ib_cq>);

// SAFETY: C serialises what needs it.
unsafe impl Send for RawCq {}

// SAFETY: As above.
unsafe impl Sync for RawCq {}

/// A completion queue and its NAPI context.
///
/// # Invariants
///
/// - `raw`, and `extension` if there is one, are live completion queues of `device` that this object
///   owns, with the address of this object as context.
/// - `napi` is in the list of the C device at `dev`, which is live for as long as `users` is held.
/// - `handler` and `batch` belong to the poll function while NAPI is enabled, and to the holder of
///   the instance lock otherwise; `enabled` belongs to the holder of the instance lock.
#[pin_data(PinnedDrop)]
pub(crate) struct NapiCq<H: Poll> {
    #[pin]
    napi: Opaque<bindings::napi_struct>,
    raw: NonNull<bindings::ib_cq>,
    extension: SetOnce<RawCq>,
    handler: UnsafeCell<H>,
    batch: UnsafeCell<[bindings::ib_wc; BATCH]>,
    enabled: UnsafeCell<bool>,
    dev: NonNull<bindings::net_device>,
    users: Option<Arc<Users>>,
    device: Arc<Device>,
}

// SAFETY: By the type invariants the inner data has one owner at a time.
unsafe impl<H: Poll> Send for NapiCq<H> {}

// SAFETY: As above.
unsafe impl<H: Poll> Sync for NapiCq<H> {}

impl<H: Poll> NapiCq<H> {
    /// Makes a queue of at least `entries` completions, served by `vector` (modulo their number).
    ///
    /// NAPI starts disabled. Sleeps.
    pub(crate) fn new(
        dev: &UnregisteredDevice<H::Driver>,
        device: Arc<Device>,
        entries: u32,
        vector: u32,
        handler: H,
    ) -> Result<Arc<Self>> {
        let (dev, users) = dev.attach_point();
        Self::make(dev, users, device, entries, vector, handler)
    }

    /// As [`Self::new`], for the network device of `other`, which may be registered meanwhile. The
    /// instance lock must not be held.
    pub(crate) fn beside<S: Poll<Driver = H::Driver>>(
        other: &NapiCq<S>,
        device: Arc<Device>,
        entries: u32,
        vector: u32,
        handler: H,
    ) -> Result<Arc<Self>> {
        let users = other.users.clone();
        Self::make(other.dev, users, device, entries, vector, handler)
    }

    /// `users` keeps the C device at `dev`, which is of `H::Driver`.
    fn make(
        dev: NonNull<bindings::net_device>,
        users: Option<Arc<Users>>,
        device: Arc<Device>,
        entries: u32,
        vector: u32,
        handler: H,
    ) -> Result<Arc<Self>> {
        Arc::pin_init(
            try_pin_init!(&this in Self {
                napi: pin_init::zeroed(),
                // SAFETY: The context outlives the queue, and no event comes before the queue is
                // armed.
                raw: unsafe { Self::make_raw(&device, entries, vector, this.as_ptr())? },
                extension: SetOnce::new(),
                handler: UnsafeCell::new(handler),
                batch: UnsafeCell::new(pin_init::zeroed()),
                enabled: UnsafeCell::new(false),
                dev,
                users,
                device,
                _: {
                    // SAFETY: `users` keeps the C device; the context is zeroed and pinned, and
                    // `drop` takes it out of the list.
                    unsafe {
                        bindings::netdev_lock(dev.as_ptr());
                        bindings::netif_napi_add_weight_locked(
                            dev.as_ptr(),
                            (*this.as_ptr()).napi.get(),
                            Some(Self::poll_callback),
                            bindings::NAPI_POLL_WEIGHT as i32,
                        );
                        bindings::netdev_unlock(dev.as_ptr());
                    }
                },
            }? Error),
            GFP_KERNEL,
        )
    }

    /// # Safety
    ///
    /// There is an object at `context` for as long as the queue, when an event comes.
    unsafe fn make_raw(
        device: &Device,
        entries: u32,
        vector: u32,
        context: *mut Self,
    ) -> Result<NonNull<bindings::ib_cq>> {
        let attr = bindings::ib_cq_init_attr {
            cqe: entries,
            comp_vector: vector % device.vectors(),
            flags: 0,
        };
        // SAFETY: The device is live, the caller sees to the context, and the name is a static
        // string.
        let raw = unsafe {
            bindings::__ib_create_cq(
                device.as_raw(),
                Some(Self::event_callback),
                None,
                context.cast(),
                &attr,
                c"ipoib_rs".as_char_ptr(),
            )
        };
        NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)
    }

    /// Adds room for `entries` completions, of queue pairs that are made from now on. Once; nothing
    /// if that was done before. Sleeps.
    pub(crate) fn extend(self: &Arc<Self>, entries: u32, vector: u32) -> Result {
        if self.extension.as_ref().is_some() {
            return Ok(());
        }
        let context = Arc::as_ptr(self).cast_mut();
        // SAFETY: The queue is destroyed before this object goes.
        let raw = unsafe { Self::make_raw(&self.device, entries, vector, context)? };
        if !self.extension.populate(RawCq(raw)) {
            // SAFETY: It was just made, and nobody else has it.
            unsafe { bindings::ib_destroy_cq_user(raw.as_ptr(), ptr::null_mut()) };
            return Ok(());
        }
        // A poll arms it from now on, once an event has come; nothing completes to it yet.
        Self::arm_raw(raw);
        Ok(())
    }

    /// Where queue pairs complete to that are made once it was extended.
    pub(super) fn as_raw_extension(&self) -> *mut bindings::ib_cq {
        let raw = self.extension.as_ref().map_or(self.raw, |cq| cq.0);
        raw.as_ptr()
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.raw.as_ptr()
    }

    /// The next event of the queue is lost.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn lose_event(&self) {
        super::fake::LOST_EVENT.prepare(self.raw.as_ptr() as usize);
    }

    /// Lets NAPI run, and takes what has completed so far. Nothing if it is enabled already, or if
    /// `locked` is another device's.
    pub(crate) fn enable(&self, locked: &mut Locked<'_, H::Driver>) {
        if !locked.is_of(self.dev.as_ptr()) {
            return;
        }
        // SAFETY: The instance lock, which owns the flag, is held.
        let enabled = unsafe { &mut *self.enabled.get() };
        if core::mem::replace(enabled, true) {
            return;
        }
        // SAFETY: The context is in the device's list and disabled, the instance lock is held.
        unsafe { bindings::napi_enable_locked(self.napi.get()) };
        // The poll arms the queue when it finds no more.
        self.look();
    }

    /// Waits for a running poll and keeps NAPI from running. Sleeps.
    pub(crate) fn disable(&self, locked: &mut Locked<'_, H::Driver>) {
        if !locked.is_of(self.dev.as_ptr()) {
            return;
        }
        // SAFETY: The instance lock, which owns the flag, is held.
        let enabled = unsafe { &mut *self.enabled.get() };
        if core::mem::replace(enabled, false) {
            // SAFETY: The context is in the device's list and enabled, the instance lock is held.
            unsafe { bindings::napi_disable_locked(self.napi.get()) };
        }
    }

    /// Polls, if NAPI is enabled, as if an event had come: one may have been lost. From a thread.
    pub(crate) fn look(&self) {
        // SAFETY: The context is live, and is not scheduled while it is disabled. Softirqs run when
        // they are enabled, not at the next interrupt.
        unsafe {
            bindings::local_bh_disable();
            bindings::napi_schedule(self.napi.get());
            bindings::local_bh_enable();
        }
    }

    /// The handler and the queue, while NAPI is disabled.
    pub(crate) fn quiet<'a>(
        &'a self,
        locked: &'a mut Locked<'_, H::Driver>,
    ) -> Option<(&'a mut H, Completions<'a>)> {
        // SAFETY: The instance lock, which owns the flag, is held if the device is the right one.
        if !locked.is_of(self.dev.as_ptr()) || unsafe { *self.enabled.get() } {
            return None;
        }
        // SAFETY: NAPI is disabled, so by the type invariants the data belongs to the holder of
        // the instance lock, and `locked` stays borrowed.
        let (handler, batch) = unsafe { (&mut *self.handler.get(), &mut *self.batch.get()) };
        Some((
            handler,
            Completions {
                cq: self.raw,
                extension: self.extension.as_ref().map(|cq| cq.0),
                batch,
            },
        ))
    }

    /// # Safety
    ///
    /// Called by C with the address of a live `Self`, in any context.
    unsafe extern "C" fn event_callback(_cq: *mut bindings::ib_cq, context: *mut c_void) {
        // SAFETY: The queue is destroyed before `Self` is dropped.
        let this = unsafe { &*context.cast::<Self>() };
        #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
        if super::fake::LOST_EVENT.strikes(this.raw.as_ptr() as usize) {
            return;
        }
        // SAFETY: The context is live; scheduling is safe in any context.
        unsafe { bindings::napi_schedule(this.napi.get()) };
    }

    /// # Safety
    ///
    /// Called by C with the `napi` of a live `Self`, enabled and not polled elsewhere.
    unsafe extern "C" fn poll_callback(napi: *mut bindings::napi_struct, budget: c_int) -> c_int {
        // CAST: `Opaque` has the layout of its content.
        let opaque = napi.cast::<Opaque<bindings::napi_struct>>();
        // SAFETY: `napi` is a field of `Self`.
        let this = unsafe { &*kernel::container_of!(opaque, Self, napi) };
        // SAFETY: By the type invariants the device is live; NAPI is only enabled once it is
        // registered, with the data of `H::Driver`.
        let dev = unsafe { netdev::Device::<H::Driver>::from_raw(this.dev.as_ptr()) };
        // SAFETY: NAPI is enabled, so by the type invariants the data belongs to this function.
        let (handler, batch) = unsafe { (&mut *this.handler.get(), &mut *this.batch.get()) };
        let mut completions = Completions {
            cq: this.raw,
            extension: this.extension.as_ref().map(|cq| cq.0),
            batch,
        };
        let context = Napi(
            // SAFETY: C gives a live context.
            unsafe { NonNull::new_unchecked(napi) },
            PhantomData,
        );
        let limit = usize::try_from(budget).unwrap_or(0);
        let done = handler.poll(dev, context, &mut completions, limit) as c_int;
        if done < budget {
            // SAFETY: The context is polling, and the handler is done.
            let complete = unsafe { bindings::napi_complete_done(napi, done) };
            if complete && this.arm() {
                // SAFETY: The context is live.
                unsafe { bindings::napi_schedule(napi) };
            }
        }
        done
    }

    /// Asks for an event at the next completion; true if one may have been missed.
    fn arm(&self) -> bool {
        let missed = Self::arm_raw(self.raw);
        match self.extension.as_ref() {
            Some(cq) => Self::arm_raw(cq.0) || missed,
            None => missed,
        }
    }

    #[inline]
    fn arm_raw(raw: NonNull<bindings::ib_cq>) -> bool {
        let flags = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP
            | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        // SAFETY: By the type invariants the queue is live.
        unsafe { bindings::ib_req_notify_cq(raw.as_ptr(), flags) > 0 }
    }
}

#[pinned_drop]
impl<H: Poll> PinnedDrop for NapiCq<H> {
    fn drop(self: Pin<&mut Self>) {
        let dev = self.dev.as_ptr();
        // SAFETY: By the type invariants the C device is live; nobody else has `self`.
        unsafe {
            bindings::netdev_lock(dev);
            if *self.enabled.get() {
                bindings::napi_disable_locked(self.napi.get());
            }
            bindings::netdev_unlock(dev);
        }
        // SAFETY: By the type invariants the queue is ours; queue pairs hold a reference to `self`,
        // so none uses it, and NAPI does not poll it. No event comes afterwards.
        unsafe { bindings::ib_destroy_cq_user(self.raw.as_ptr(), ptr::null_mut()) };
        if let Some(cq) = self.extension.as_ref() {
            // SAFETY: As above.
            unsafe { bindings::ib_destroy_cq_user(cq.0.as_ptr(), ptr::null_mut()) };
        }
        // SAFETY: As above.
        unsafe {
            bindings::netdev_lock(dev);
            bindings::__netif_napi_del_locked(self.napi.get());
            bindings::netdev_unlock(dev);
        }
        // Readers of the device's list may still look at the context.
        crate::net::synchronize_expedited();
    }
}
