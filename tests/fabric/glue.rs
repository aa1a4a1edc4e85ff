// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Where the fabric meets C: the table of verbs, the containers of the objects that ib_core
//! allocates, the memory that consumers post, and a few kernel services.
//!
//! The only file of the fabric with unsafe code. An object of ib_core's is a [`Container`]: the
//! C structure first, then an `Arc` of ours. A callback borrows the `Arc` in its first line and
//! leaves everything else to safe code.
//!
//! Posted memory: a consumer promises by posting that the memory of a request is its own and
//! stays until the completion. [`Sge`] is that promise; the queue pair code drops it before it
//! pushes the completion, and under the lock of the queue that it was posted to.

#[path = "bindings/mod.rs"]
mod bindings;

use crate::{
    cq::{
        Cq,
        Kicks,
        Wc, //
    },
    hca::{
        Hca,
        HcaConfig, //
    },
    mad::{
        Mad,
        Reaction, //
    },
    port::Event,
    qp::{
        rc,
        Kind,
        Modify,
        Opcode,
        Qp,
        QpConfig,
        State,
        SEND_IP_CSUM, //
    },
    srq::Srq,
    ud::{
        Address,
        Route, //
    },
};
use core::{
    marker::PhantomData,
    mem::{
        offset_of,
        size_of, //
    },
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    interrupt::local_interrupt_disable,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Arc,
        Mutex, //
    },
    types::Opaque,
    workqueue::{
        HasDelayedWork,
        HasWork,
        Queue,
        Work,
        WorkItem, //
    },
};

/// Length of a GID's table and of the P_Key table of a port.
pub(crate) const GIDS: usize = 8;
pub(crate) const PKEYS: usize = 64;

// Posted memory.

/// A piece of memory that a consumer has posted. It is the consumer's until posted and after the
/// completion; in between it is ours.
pub(crate) struct Sge {
    at: *mut u8,
    len: u32,
    lkey: u32,
}

// SAFETY: Posted memory may be read and written on any CPU.
unsafe impl Send for Sge {}

impl Sge {
    pub(crate) const EMPTY: Self = Self {
        at: ptr::null_mut(),
        len: 0,
        lkey: 0,
    };

    #[inline]
    fn new(raw: &bindings::ib_sge, physical: bool) -> Self {
        let at = if physical {
            // SAFETY: Arithmetic; whether there is memory is the consumer's promise.
            unsafe { bindings::phys_to_virt(raw.addr) }.cast()
        } else {
            raw.addr as *mut u8
        };
        Self {
            at,
            len: raw.length,
            lkey: raw.lkey,
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }
}

/// Walks through the memory of a request.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    sges: &'a [Sge],
    offset: usize,
}

impl<'a> Cursor<'a> {
    #[inline]
    pub(crate) fn new(sges: &'a [Sge]) -> Self {
        Self { sges, offset: 0 }
    }

    /// The next stretch of at most `len` bytes.
    #[inline]
    fn stretch(&mut self, len: usize) -> Option<(*mut u8, usize)> {
        loop {
            let (first, rest) = self.sges.split_first()?;
            let left = first.len() - self.offset;
            if left == 0 {
                self.sges = rest;
                self.offset = 0;
                continue;
            }
            let take = left.min(len);
            let at = first.at.wrapping_add(self.offset);
            self.offset += take;
            return Some((at, take));
        }
    }

    /// Writes bytes, as far as there is room.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some((to, len)) = self.stretch(bytes.len()) else {
                return;
            };
            let (now, later) = bytes.split_at(len);
            // SAFETY: The consumer posted these `len` bytes for writing, and for nothing else.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), to, len) };
            bytes = later;
        }
    }

    /// Writes as many bytes as a global route header has, as far as there is room.
    #[inline(always)]
    pub(crate) fn write_header(&mut self, bytes: &[u8; 40]) {
        match self.sges.first() {
            Some(first) if self.offset == 0 && first.len() >= bytes.len() => {
                self.offset = bytes.len();
                // SAFETY: The consumer posted at least these bytes for writing, and for nothing
                // else.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), first.at, bytes.len()) };
            }
            _ => {
                let (mut to, bytes) = (*self, *bytes);
                to.write(&bytes);
                *self = to;
            }
        }
    }

    /// Reads bytes, as far as there are any; returns how many.
    pub(crate) fn read(&mut self, mut bytes: &mut [u8]) -> usize {
        let mut total = 0;
        while !bytes.is_empty() {
            let Some((from, len)) = self.stretch(bytes.len()) else {
                break;
            };
            let (now, later) = bytes.split_at_mut(len);
            // SAFETY: The consumer posted these `len` bytes for reading.
            unsafe { ptr::copy_nonoverlapping(from.cast_const(), now.as_mut_ptr(), len) };
            bytes = later;
            total += len;
        }
        total
    }

    /// Copies `len` bytes from another request's memory, as far as both have any.
    #[inline(always)]
    pub(crate) fn copy_from(&mut self, from: &mut Cursor<'_>, len: usize) {
        if let ([to, ..], [source, ..]) = (self.sges, from.sges) {
            if to.len().wrapping_sub(self.offset) >= len
                && source.len().wrapping_sub(from.offset) >= len
                && self.offset <= to.len()
                && from.offset <= source.len()
            {
                let (to, source) = (
                    to.at.wrapping_add(self.offset),
                    source.at.wrapping_add(from.offset),
                );
                self.offset += len;
                from.offset += len;
                // SAFETY: The consumers posted these bytes for reading and for writing, and what
                // is posted for writing is posted for nothing else.
                unsafe { ptr::copy_nonoverlapping(source.cast_const(), to, len) };
                return;
            }
        }
        // With copies, so that the above may keep both in registers.
        let (mut to, mut source) = (*self, *from);
        to.copy_pieces(&mut source, len);
        (*self, *from) = (to, source);
    }

    #[inline(never)]
    fn copy_pieces(&mut self, from: &mut Cursor<'_>, mut len: usize) {
        while len != 0 {
            let Some((source, have)) = from.stretch(len) else {
                return;
            };
            let mut done = 0;
            while done < have {
                let Some((to, room)) = self.stretch(have - done) else {
                    return;
                };
                // SAFETY: The consumers posted these bytes for reading and for writing, and what is
                // posted for writing is posted for nothing else.
                unsafe {
                    ptr::copy_nonoverlapping(source.wrapping_add(done).cast_const(), to, room)
                };
                done += room;
            }
            len -= have;
        }
    }
}

// Requests as C posts them.

/// A send request.
pub(crate) struct SendWr<'a> {
    raw: &'a bindings::ib_send_wr,
    physical: bool,
}

impl SendWr<'_> {
    #[inline]
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: Both members of the union are 64 bits wide.
        unsafe { self.raw.__bindgen_anon_1.wr_id }
    }

    /// The datagram part if all there is to do is to send the data as it is, from a queue pair of
    /// that kind.
    #[inline(always)]
    pub(crate) fn plain(&self, kind: Kind) -> Option<DatagramWr<'_>> {
        let immediate = bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM;
        let plain = [bindings::ib_wr_opcode_IB_WR_SEND, immediate].contains(&self.raw.opcode);
        if kind != Kind::Ud || !plain || self.flags() & SEND_IP_CSUM != 0 {
            return None;
        }
        self.parts(kind).1
    }

    /// Immediate data, if there is any.
    #[inline]
    pub(crate) fn immediate(&self) -> Option<u32> {
        let immediate = bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM;
        (self.raw.opcode == immediate).then(|| self.imm())
    }

    /// The memory if it is in one piece.
    #[inline(always)]
    pub(crate) fn one_piece(&self) -> Option<Sge> {
        one_piece(self.raw.sg_list, self.raw.num_sge, self.physical)
    }

    /// The memory, kept in `room` if that is enough for it.
    pub(crate) fn pieces<'b>(&self, room: &'b mut [Sge]) -> Option<&'b [Sge]> {
        pieces(self.raw_sges(), self.physical, room)
    }

    /// What a queue pair of that kind is to do, and the datagram part if there is one.
    #[inline]
    pub(crate) fn parts(&self, kind: Kind) -> (Opcode, Option<DatagramWr<'_>>) {
        let opcode = match self.raw.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => Opcode::Send,
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM => Opcode::SendImm,
            bindings::ib_wr_opcode_IB_WR_LSO => Opcode::Lso,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => return (Opcode::RdmaWrite, None),
            _ => return (Opcode::Other, None),
        };
        if kind == Kind::Rc {
            return (opcode, None);
        }
        // CAST: `wr` is the first field.
        let ud: *const bindings::ib_ud_wr = ptr::from_ref(self.raw).cast();
        // SAFETY: A consumer posts `ib_ud_wr` for these opcodes to a queue pair for datagrams.
        (opcode, Some(DatagramWr(unsafe { &*ud })))
    }

    #[inline]
    pub(crate) fn flags(&self) -> u32 {
        self.raw.send_flags as u32
    }

    /// Immediate data as it goes over the wire.
    #[inline]
    pub(crate) fn imm(&self) -> u32 {
        // SAFETY: Both members of the union are 32 bits wide.
        unsafe { self.raw.ex.imm_data }
    }

    #[inline]
    fn raw_sges(&self) -> &[bindings::ib_sge] {
        raw_sges(self.raw.sg_list, self.raw.num_sge)
    }

    #[inline]
    pub(crate) fn sge_count(&self) -> usize {
        self.raw_sges().len()
    }

    #[inline]
    pub(crate) fn sges(&self) -> impl Iterator<Item = Sge> + '_ {
        let physical = self.physical;
        self.raw_sges()
            .iter()
            .map(move |sge| Sge::new(sge, physical))
    }
}

/// The datagram part of a send request.
pub(crate) struct DatagramWr<'a>(&'a bindings::ib_ud_wr);

impl DatagramWr<'_> {
    /// The address. To be copied: the handle may go once the request is posted.
    #[inline]
    pub(crate) fn address(&self) -> Option<&Address> {
        if self.0.ah.is_null() {
            return None;
        }
        let ah: *const Container<bindings::ib_ah, Ah> = self.0.ah.cast_const().cast();
        // SAFETY: A consumer posts handles of this device, which `create_ah` filled.
        Some(&unsafe { &*ah }.inner.as_ref()?.0)
    }

    #[inline]
    pub(crate) fn qpn(&self) -> u32 {
        self.0.remote_qpn
    }

    #[inline]
    pub(crate) fn qkey(&self) -> u32 {
        self.0.remote_qkey
    }

    #[inline]
    pub(crate) fn pkey_index(&self) -> u16 {
        self.0.pkey_index
    }

    #[inline]
    pub(crate) fn mss(&self) -> usize {
        usize::try_from(self.0.mss).unwrap_or(0)
    }

    /// The header of a large send.
    #[inline]
    pub(crate) fn header(&self) -> &[u8] {
        let len = usize::try_from(self.0.hlen).unwrap_or(0);
        if len == 0 || self.0.header.is_null() {
            return &[];
        }
        // SAFETY: The consumer's header is `hlen` bytes long while the request is being posted.
        unsafe { core::slice::from_raw_parts(self.0.header.cast_const().cast(), len) }
    }
}

/// A receive request.
pub(crate) struct RecvWr<'a> {
    raw: &'a bindings::ib_recv_wr,
    physical: bool,
}

impl RecvWr<'_> {
    #[inline]
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: Both members of the union are 64 bits wide.
        unsafe { self.raw.__bindgen_anon_1.wr_id }
    }

    #[inline]
    pub(crate) fn sge_count(&self) -> usize {
        raw_sges(self.raw.sg_list, self.raw.num_sge).len()
    }

    #[inline]
    pub(crate) fn sges(&self) -> impl Iterator<Item = Sge> + '_ {
        let physical = self.physical;
        raw_sges(self.raw.sg_list, self.raw.num_sge)
            .iter()
            .map(move |sge| Sge::new(sge, physical))
    }

    /// The memory if it is in one piece.
    #[inline(always)]
    pub(crate) fn one_piece(&self) -> Option<Sge> {
        one_piece(self.raw.sg_list, self.raw.num_sge, self.physical)
    }

    /// The memory, kept in `room` if that is enough for it.
    pub(crate) fn pieces<'b>(&self, room: &'b mut [Sge]) -> Option<&'b [Sge]> {
        let list = raw_sges(self.raw.sg_list, self.raw.num_sge);
        pieces(list, self.physical, room)
    }
}

#[inline(always)]
fn one_piece(list: *mut bindings::ib_sge, count: c_int, physical: bool) -> Option<Sge> {
    if count != 1 {
        return None;
    }
    // SAFETY: The list of a request has `num_sge` entries while the request is being posted.
    let raw = unsafe { list.as_ref()? };
    Some(Sge::new(raw, physical))
}

#[inline(never)]
fn pieces<'a>(list: &[bindings::ib_sge], physical: bool, room: &'a mut [Sge]) -> Option<&'a [Sge]> {
    let pieces = room.get_mut(..list.len())?;
    for (slot, raw) in pieces.iter_mut().zip(list) {
        *slot = Sge::new(raw, physical);
    }
    Some(pieces)
}

#[inline]
fn raw_sges<'a>(list: *mut bindings::ib_sge, count: c_int) -> &'a [bindings::ib_sge] {
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 || list.is_null() {
        return &[];
    }
    // SAFETY: The list of a request has `num_sge` entries while the request is being posted; the
    // callers borrow the result no longer than the request.
    unsafe { core::slice::from_raw_parts(list.cast_const(), count) }
}

// Containers.

/// An object that ib_core allocates, zeroed, with room for ours.
#[repr(C)]
struct Container<B, T> {
    base: B,
    inner: Option<Arc<T>>,
}

/// Our part of an object.
///
/// # Safety
///
/// `base` is the first field of a live `Container<B, T>` whose `inner` nobody writes meanwhile.
#[inline]
unsafe fn inner_of<'a, B, T>(base: *mut B) -> Result<&'a Arc<T>> {
    // SAFETY: As this function requires.
    let container = unsafe { &*base.cast_const().cast::<Container<B, T>>() };
    container.inner.as_ref().ok_or(EINVAL)
}

/// Puts our part in.
///
/// # Safety
///
/// `base` is the first field of a `Container<B, T>` that nobody else reaches yet.
unsafe fn put_inner<B, T>(base: *mut B, inner: Arc<T>) {
    // SAFETY: As this function requires.
    unsafe { (*base.cast::<Container<B, T>>()).inner = Some(inner) };
}

/// Takes our part out.
///
/// # Safety
///
/// `base` is the first field of a `Container<B, T>` that nobody else reaches any more.
unsafe fn take_inner<B, T>(base: *mut B) -> Option<Arc<T>> {
    // SAFETY: As this function requires.
    unsafe { (*base.cast::<Container<B, T>>()).inner.take() }
}

/// A protection domain is a key.
pub(crate) struct Pd {
    pub(crate) lkey: u32,
}

/// An address handle is an address.
struct Ah(Address);

/// The memory region of all memory.
struct Mr {
    base: bindings::ib_mr,
    hca: Arc<Hca>,
}

/// A queue pair as completions name it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct QpHandle(*mut bindings::ib_qp);

impl QpHandle {
    pub(crate) const NONE: Self = Self(ptr::null_mut());
}

// SAFETY: A number to us; only C follows it.
unsafe impl Send for QpHandle {}
// SAFETY: As above.
unsafe impl Sync for QpHandle {}

/// What a queue pair tells its consumer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QpEvent {
    /// It takes no more buffers from its shared receive queue.
    LastWqe,
    /// It broke by itself.
    Fatal,
}

impl QpEvent {
    pub(crate) fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// Calls the event handler of a queue pair.
///
/// # Invariants
///
/// While `closed` is false the queue pair is live.
#[pin_data]
pub(crate) struct Notifier {
    qp: QpHandle,
    #[pin]
    closed: Mutex<bool>,
}

impl Notifier {
    /// Of a queue pair that is being made.
    pub(crate) fn new(qp: QpHandle) -> impl PinInit<Self> {
        // INVARIANT: A handle is made when its queue pair is; `destroy_qp` closes the notifier.
        pin_init!(Self {
            qp,
            closed <- new_mutex!(false, "ibf_qp_events"),
        })
    }

    /// Calls the handler. Sleeps; no lock may be held.
    pub(crate) fn notify(&self, what: QpEvent) {
        let closed = self.closed.lock();
        if *closed {
            return;
        }
        // SAFETY: By the type invariant the queue pair is live as long as we hold the lock.
        let qp = unsafe { &*self.qp.0 };
        let mut event: bindings::ib_event = pin_init::zeroed();
        event.device = qp.device;
        event.element.qp = self.qp.0;
        event.event = match what {
            QpEvent::LastWqe => bindings::ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED,
            QpEvent::Fatal => bindings::ib_event_type_IB_EVENT_QP_FATAL,
        };
        if let Some(handler) = qp.event_handler {
            // SAFETY: The handler of a live queue pair, in process context.
            unsafe { handler(&mut event, qp.qp_context) };
        }
    }

    /// No calls from now on. Sleeps.
    fn close(&self) {
        *self.closed.lock() = true;
    }
}

// Completion handlers.

/// How deep completion handlers are nested, by CPU.
static DEPTH: [Atomic<u32>; 64] = [const { Atomic::new(0) }; 64];

/// Calls the completion handler of a CQ: at most one call for each arming.
///
/// # Invariants
///
/// While `closed` is false the CQ is live. `close` returns only when no call runs and none will.
#[pin_data]
#[repr(C)]
pub(crate) struct Channel {
    #[pin]
    work: Opaque<bindings::irq_work>,
    cq: *mut bindings::ib_cq,
    closed: Atomic<bool>,
    failed: Atomic<bool>,
    users: Atomic<i32>,
}

// SAFETY: Handlers may be called on any CPU.
unsafe impl Send for Channel {}
// SAFETY: All fields that change are atomic, or the kernel's.
unsafe impl Sync for Channel {}

impl Channel {
    fn new(cq: *mut bindings::ib_cq) -> impl PinInit<Self> {
        pin_init!(Self {
            work <- Opaque::ffi_init(|work: *mut bindings::irq_work| {
                // SAFETY: `work` is valid for writes.
                unsafe { bindings::init_irq_work(work, Some(Self::interrupt)) }
            }),
            cq,
            closed: Atomic::new(false),
            failed: Atomic::new(false),
            users: Atomic::new(0),
        })
    }

    /// Calls the handler now if that is allowed here, otherwise soon. No lock may be held.
    pub(crate) fn notify(&self, interrupts: bool) {
        // SAFETY: Reads a register.
        if interrupts || unsafe { bindings::irqs_disabled() } || depth().load(Relaxed) != 0 {
            return self.raise();
        }
        // SAFETY: Interrupts are on, so this is a context that may do so.
        unsafe { bindings::local_bh_disable() };
        self.call();
        // SAFETY: Pairs with the above.
        unsafe { bindings::local_bh_enable() };
    }

    /// Tells the consumer that the CQ is broken.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Relaxed);
        self.raise();
    }

    /// Calls the handler from an interrupt on this CPU.
    fn raise(&self) {
        self.users.fetch_add(1, Full);
        if !self.closed.load(Relaxed) {
            // SAFETY: The work was initialised, and is not freed before `close` has waited.
            unsafe { bindings::irq_work_queue(self.work.get()) };
        }
        self.users.fetch_sub(1, Full);
    }

    /// Bottom halves or interrupts are off.
    fn call(&self) {
        self.users.fetch_add(1, Full);
        if !self.closed.load(Relaxed) {
            let depth = depth();
            depth.add(1, Relaxed);
            // SAFETY: By the type invariant the CQ is live. ib_core set its handler before it
            // handed the CQ out.
            unsafe {
                if let Some(handler) = (*self.cq).comp_handler {
                    handler(self.cq, (*self.cq).cq_context);
                }
            }
            depth.fetch_sub(1, Relaxed);
        }
        self.users.fetch_sub(1, Full);
    }

    /// # Safety
    ///
    /// Called by C with the `work` of a live `Channel`.
    unsafe extern "C" fn interrupt(work: *mut bindings::irq_work) {
        // CAST: `work` is the first field, and `Opaque` has the layout of its content.
        // SAFETY: As C promises; `close` waits for this.
        let this = unsafe { &*work.cast_const().cast::<Self>() };
        if this.failed.xchg(false, Relaxed) {
            this.report();
        }
        this.call();
    }

    fn report(&self) {
        self.users.fetch_add(1, Full);
        if !self.closed.load(Relaxed) {
            // SAFETY: By the type invariant the CQ is live.
            let cq = unsafe { &*self.cq };
            let mut event: bindings::ib_event = pin_init::zeroed();
            event.device = cq.device;
            event.element.cq = self.cq;
            event.event = bindings::ib_event_type_IB_EVENT_CQ_ERR;
            if let Some(handler) = cq.event_handler {
                // SAFETY: The handler of a live CQ, any context.
                unsafe { handler(&mut event, cq.cq_context) };
            }
        }
        self.users.fetch_sub(1, Full);
    }

    /// No calls from now on. Sleeps.
    fn close(&self) {
        self.closed.xchg(true, Full);
        while self.users.fetch_add(0, Full) != 0 {
            kernel::time::delay::fsleep(kernel::time::Delta::from_micros(10));
        }
        // SAFETY: The work was initialised, and nobody queues it any more.
        unsafe { bindings::irq_work_sync(self.work.get()) };
    }
}

/// The nesting on this CPU.
fn depth() -> &'static Atomic<u32> {
    // SAFETY: Reads a number.
    let cpu = unsafe { bindings::raw_smp_processor_id() } as usize;
    &DEPTH[cpu % DEPTH.len()]
}

// The device.

/// What events are sent through: open while clients may get some.
///
/// # Invariants
///
/// A device inside is registered.
pub(crate) struct Gate(Option<NonNull<bindings::ib_device>>);

// SAFETY: Events may be dispatched from any thread.
unsafe impl Send for Gate {}

impl Gate {
    pub(crate) const CLOSED: Self = Self(None);

    /// Tells clients, later. Any context.
    pub(crate) fn dispatch(&self, event: Event) {
        let code = match event {
            Event::GidChange => bindings::ib_event_type_IB_EVENT_GID_CHANGE,
            Event::PkeyChange => bindings::ib_event_type_IB_EVENT_PKEY_CHANGE,
            Event::LidChange => bindings::ib_event_type_IB_EVENT_LID_CHANGE,
            Event::SmChange => bindings::ib_event_type_IB_EVENT_SM_CHANGE,
            Event::ClientReregister => bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
            Event::PortErr => bindings::ib_event_type_IB_EVENT_PORT_ERR,
            Event::PortActive => bindings::ib_event_type_IB_EVENT_PORT_ACTIVE,
        };
        self.send(code);
    }

    /// Tells clients that the device is broken for good.
    pub(crate) fn dispatch_fatal(&self) {
        self.send(bindings::ib_event_type_IB_EVENT_DEVICE_FATAL);
    }

    fn send(&self, code: bindings::ib_event_type) {
        let Some(device) = self.0 else { return };
        let mut raw: bindings::ib_event = pin_init::zeroed();
        raw.device = device.as_ptr();
        raw.element.port_num = 1;
        raw.event = code;
        // SAFETY: By the type invariant the device is registered; the callee copies the event.
        unsafe { bindings::ib_dispatch_event(&raw) };
    }
}

/// A registered device. Dropping it unregisters it, which waits for its clients.
///
/// # Invariants
///
/// Both devices are live and registered; `device` is the first field of a `Container` with a HCA.
pub(crate) struct Device {
    device: NonNull<bindings::ib_device>,
    parent: NonNull<bindings::platform_device>,
}

// SAFETY: A device may be unregistered from any thread.
unsafe impl Send for Device {}

impl Device {
    /// Makes the HCA known to its users.
    pub(crate) fn register(hca: Arc<Hca>, name: &CStr) -> Result<Self> {
        let mut info: bindings::platform_device_info = pin_init::zeroed();
        info.name = c"ibf".as_char_ptr();
        info.id = c_int::from(hca.slot());
        // SAFETY: The info is complete; the callee copies it.
        let parent = unsafe { bindings::platform_device_register_full(&info) };
        let parent = kernel::error::from_err_ptr(parent)?;
        let parent = NonNull::new(parent).ok_or(ENOMEM)?;
        Self::register_child(hca, name, parent).inspect_err(|_| {
            // SAFETY: The platform device is registered, and nobody uses it.
            unsafe { bindings::platform_device_unregister(parent.as_ptr()) };
        })
    }

    fn register_child(
        hca: Arc<Hca>,
        name: &CStr,
        parent: NonNull<bindings::platform_device>,
    ) -> Result<Self> {
        // SAFETY: The platform device is live.
        let parent_device = unsafe { &raw mut (*parent.as_ptr()).dev };
        // SAFETY: As above.
        to_result(unsafe { bindings::dma_coerce_mask_and_coherent(parent_device, u64::MAX) })?;
        // SAFETY: Any size that contains an `ib_device` is allowed.
        let device =
            unsafe { bindings::ib_alloc_device(size_of::<Container<bindings::ib_device, Hca>>()) };
        let device = NonNull::new(device).ok_or(ENOMEM)?;
        let raw = device.as_ptr();
        let ops = ops();
        let dma = if hca.config().physical {
            parent_device
        } else {
            ptr::null_mut()
        };
        // SAFETY: The device is live and nobody else has it yet.
        unsafe {
            put_inner(raw, hca.clone());
            (*raw).node_type = bindings::RDMA_NODE_IB_CA;
            (*raw).phys_port_cnt = 1;
            (*raw).num_comp_vectors = c_int::from(hca.config().vectors);
            (*raw).node_guid = hca.node_guid().to_be();
            (*raw).local_dma_lkey = 0;
            (*raw).__bindgen_anon_1.dev.as_mut().parent = parent_device;
            for (to, from) in (*raw).node_desc.iter_mut().zip(hca.node_desc()) {
                *to = from as c_char;
            }
            bindings::ib_set_device_ops(raw, &ops);
        }
        // SAFETY: The device has its operations; the name is a C string without a `%`.
        let registered =
            to_result(unsafe { bindings::ib_register_device(raw, name.as_char_ptr(), dma) });
        if let Err(error) = registered {
            *hca.gate().lock() = Gate::CLOSED;
            // SAFETY: The device is not registered, so nobody else has it.
            unsafe {
                drop(take_inner::<_, Hca>(raw));
                bindings::ib_dealloc_device(raw);
            }
            return Err(error);
        }
        // INVARIANT: Registered just now.
        Ok(Self { device, parent })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let raw = self.device.as_ptr();
        // SAFETY: By the type invariant.
        if let Ok(hca) = unsafe { inner_of::<_, Hca>(raw) } {
            *hca.gate().lock() = Gate::CLOSED;
        }
        // SAFETY: By the type invariant the device is registered. Afterwards there are neither
        // clients nor objects, so nobody calls an operation.
        unsafe {
            bindings::ib_unregister_device(raw);
            drop(take_inner::<_, Hca>(raw));
            bindings::ib_dealloc_device(raw);
            bindings::platform_device_unregister(self.parent.as_ptr());
        }
    }
}

// The verbs.

/// `$body` with our part of an object; an error is a negative number.
macro_rules! status {
    ($body:expr) => {{
        #[allow(clippy::redundant_closure_call)]
        let result: Result = (|| $body)();
        match result {
            Ok(()) => 0,
            Err(error) => error.to_errno(),
        }
    }};
}

/// The HCA of a device.
///
/// # Safety
///
/// `device` is one of ours, with its HCA put in.
unsafe fn hca_of<'a>(device: *mut bindings::ib_device) -> Result<&'a Arc<Hca>> {
    // SAFETY: As this function requires; the HCA stays as long as operations are called.
    unsafe { inner_of(device) }
}

fn ops() -> bindings::ib_device_ops {
    bindings::ib_device_ops {
        owner: kernel::module::this_module::<crate::LocalModule>().as_ptr(),
        driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        poll_cq: Some(poll_cq),
        req_notify_cq: Some(req_notify_cq),
        process_mad: Some(process_mad),
        query_device: Some(query_device),
        modify_device: Some(modify_device),
        get_dev_fw_str: Some(get_dev_fw_str),
        query_port: Some(query_port),
        modify_port: Some(modify_port),
        get_port_immutable: Some(get_port_immutable),
        rdma_netdev_get_params: Some(rdma_netdev_get_params),
        query_gid: Some(query_gid),
        query_pkey: Some(query_pkey),
        disassociate_ucontext: Some(disassociate_ucontext),
        alloc_pd: Some(alloc_pd),
        dealloc_pd: Some(dealloc_pd),
        create_ah: Some(create_ah),
        query_ah: Some(query_ah),
        destroy_ah: Some(destroy_ah),
        post_srq_recv: Some(post_srq_recv),
        create_srq: Some(create_srq),
        modify_srq: Some(modify_srq),
        query_srq: Some(query_srq),
        destroy_srq: Some(destroy_srq),
        create_qp: Some(create_qp),
        modify_qp: Some(modify_qp),
        query_qp: Some(query_qp),
        destroy_qp: Some(destroy_qp),
        create_cq: Some(create_cq),
        modify_cq: Some(modify_cq),
        destroy_cq: Some(destroy_cq),
        get_dma_mr: Some(get_dma_mr),
        reg_user_mr: Some(reg_user_mr),
        dereg_mr: Some(dereg_mr),
        attach_mcast: Some(attach_mcast),
        detach_mcast: Some(detach_mcast),
        enable_driver: Some(enable_driver),
        size_ib_ah: size_of::<Container<bindings::ib_ah, Ah>>(),
        size_ib_cq: size_of::<Container<bindings::ib_cq, Cq>>(),
        size_ib_pd: size_of::<Container<bindings::ib_pd, Pd>>(),
        size_ib_qp: size_of::<Container<bindings::ib_qp, Qp>>(),
        size_ib_srq: size_of::<Container<bindings::ib_srq, Srq>>(),
        ..pin_init::zeroed()
    }
}

/// # Safety
///
/// Called by ib_core with a live device.
unsafe extern "C" fn enable_driver(device: *mut bindings::ib_device) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe { hca_of(device) }.map(|hca| {
        // INVARIANT: The device is registered; the gate is closed before it is not any more.
        *hca.gate().lock() = Gate(NonNull::new(device));
    }))
}

/// # Safety
///
/// Called by ib_core with a live device and room for the answer.
unsafe extern "C" fn query_device(
    device: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, attr) = unsafe { (hca_of(device), &mut *attr) };
    status!({
        let hca = hca?;
        let config = hca.config();
        *attr = pin_init::zeroed();
        attr.fw_ver = 1;
        attr.sys_image_guid = hca.system_guid().to_be();
        attr.max_mr_size = u64::MAX;
        attr.page_size_cap = 4096;
        attr.vendor_id = HcaConfig::VENDOR;
        attr.vendor_part_id = 1;
        attr.hw_ver = 1;
        attr.max_qp = 1 << 14;
        attr.max_qp_wr = HcaConfig::MAX_WR;
        attr.max_send_sge = u32::from(config.max_send_sge);
        attr.max_recv_sge = u32::from(HcaConfig::MAX_RECV_SGE);
        if config.srq {
            attr.max_srq = 1 << 10;
            attr.max_srq_wr = HcaConfig::MAX_WR;
            attr.max_srq_sge = u32::from(config.max_srq_sge);
        }
        attr.max_cq = 1 << 14;
        attr.max_cqe = HcaConfig::MAX_CQE;
        attr.max_mr = 1 << 14;
        attr.max_pd = 1 << 14;
        attr.max_mcast_grp = 1 << 12;
        attr.max_mcast_qp_attach = 64;
        attr.max_total_mcast_qp_attach = 1 << 14;
        attr.max_ah = c_int::MAX as u32;
        attr.max_pkeys = PKEYS as u16;
        attr.local_ca_ack_delay = 15;
        attr.device_cap_flags = 0;
        if config.csum {
            attr.device_cap_flags |= bindings::ib_device_cap_flags_IB_DEVICE_UD_IP_CSUM as u64;
        }
        if config.tso {
            attr.kernel_cap_flags |= u64::from(bindings::ib_kernel_cap_flags_IBK_UD_TSO);
        }
        if config.mcast_lb {
            attr.kernel_cap_flags |=
                u64::from(bindings::ib_kernel_cap_flags_IBK_BLOCK_MULTICAST_LOOPBACK);
        }
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live device and what is to be changed.
unsafe extern "C" fn modify_device(
    device: *mut bindings::ib_device,
    mask: c_int,
    modify: *mut bindings::ib_device_modify,
) -> c_int {
    const NODE_DESC: u32 = bindings::ib_device_modify_flags_IB_DEVICE_MODIFY_NODE_DESC;

    // SAFETY: As C promises.
    let (hca, modify) = unsafe { (hca_of(device), &*modify) };
    status!({
        let hca = hca?;
        if mask as u32 & !NODE_DESC != 0 {
            return Err(EOPNOTSUPP);
        }
        if mask as u32 & NODE_DESC != 0 {
            let mut text = [0u8; 64];
            for (to, from) in text.iter_mut().zip(modify.node_desc) {
                *to = from;
            }
            hca.set_node_desc(&text);
            // SAFETY: The device is live; sysfs serialises writers.
            unsafe { (*device).node_desc = modify.node_desc };
        }
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with room for `IB_FW_VERSION_NAME_MAX` bytes.
unsafe extern "C" fn get_dev_fw_str(_device: *mut bindings::ib_device, text: *mut c_char) {
    let version = c"1.0";
    // SAFETY: There is room for more than these bytes.
    unsafe {
        ptr::copy(
            version.as_char_ptr(),
            text,
            version.to_bytes_with_nul().len(),
        )
    };
}

/// # Safety
///
/// Called by ib_core with a live device and room for the answer.
unsafe extern "C" fn query_port(
    device: *mut bindings::ib_device,
    _port: u32,
    attr: *mut bindings::ib_port_attr,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, attr) = unsafe { (hca_of(device), &mut *attr) };
    status!({
        let view = hca?.port()?;
        attr.state = u32::from(view.state);
        attr.phys_state = view.phys_state;
        attr.max_mtu = u32::from(view.max_mtu);
        attr.active_mtu = u32::from(view.active_mtu);
        attr.phys_mtu = 128 << view.active_mtu;
        attr.gid_tbl_len = GIDS as c_int;
        attr.pkey_tbl_len = PKEYS as u16;
        attr.port_cap_flags = view.cap_mask;
        attr.max_msg_sz = 1 << 30;
        attr.qkey_viol_cntr = u32::from(view.qkey_violations);
        attr.bad_pkey_cntr = u32::from(view.pkey_violations);
        attr.subnet_prefix = view.gid_prefix;
        attr.lid = u32::from(view.lid);
        attr.lmc = view.lmc;
        attr.sm_lid = u32::from(view.sm_lid);
        attr.sm_sl = view.sm_sl;
        attr.subnet_timeout = view.subnet_timeout;
        attr.max_vl_num = 1;
        attr.active_width = view.width;
        attr.active_speed = u16::from(view.speed);
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live device and what is to be changed.
unsafe extern "C" fn modify_port(
    device: *mut bindings::ib_device,
    _port: u32,
    _mask: c_int,
    modify: *mut bindings::ib_port_modify,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, modify) = unsafe { (hca_of(device), &*modify) };
    status!({
        hca?.modify_cap_mask(modify.set_port_cap_mask, modify.clr_port_cap_mask);
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live device and room for the answer.
unsafe extern "C" fn get_port_immutable(
    _device: *mut bindings::ib_device,
    _port: u32,
    immutable: *mut bindings::ib_port_immutable,
) -> c_int {
    // SAFETY: As C promises.
    let immutable = unsafe { &mut *immutable };
    immutable.pkey_tbl_len = PKEYS as c_int;
    immutable.gid_tbl_len = GIDS as c_int;
    immutable.core_cap_flags = bindings::RDMA_CORE_PORT_IBA_IB;
    immutable.max_mad_size = size_of::<Mad>() as u32;
    0
}

/// Keeps the stock ib_ipoib away from a HCA that is not for it.
///
/// # Safety
///
/// Called by ib_core with a live device.
unsafe extern "C" fn rdma_netdev_get_params(
    device: *mut bindings::ib_device,
    _port: u32,
    _type: bindings::rdma_netdev_t,
    _params: *mut bindings::rdma_netdev_alloc_params,
) -> c_int {
    // SAFETY: As C promises.
    status!(match unsafe { hca_of(device) }?.config().stock {
        true => Err(EOPNOTSUPP),
        false => Err(ENODEV),
    })
}

/// # Safety
///
/// Called by ib_core with a live device and room for the answer.
unsafe extern "C" fn query_gid(
    device: *mut bindings::ib_device,
    _port: u32,
    index: c_int,
    gid: *mut bindings::ib_gid,
) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe {
        let found = hca_of(device)?.gid(usize::try_from(index).map_err(|_| EINVAL)?)?;
        (*gid).raw = found;
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live device and room for the answer.
unsafe extern "C" fn query_pkey(
    device: *mut bindings::ib_device,
    _port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe {
        *pkey = hca_of(device)?.pkey(usize::from(index))?;
        Ok(())
    })
}

/// There are no user contexts, but moving a device to another namespace asks for this operation.
///
/// # Safety
///
/// None.
unsafe extern "C" fn disassociate_ucontext(_context: *mut bindings::ib_ucontext) {}

/// # Safety
///
/// Called by ib_core; the MADs are 256 bytes each and do not overlap.
unsafe extern "C" fn process_mad(
    device: *mut bindings::ib_device,
    _flags: c_int,
    _port: u32,
    _wc: *const bindings::ib_wc,
    _grh: *const bindings::ib_grh,
    input: *const bindings::ib_mad,
    output: *mut bindings::ib_mad,
    _output_size: *mut usize,
    _pkey_index: *mut u16,
) -> c_int {
    // CAST: `Mad` is 256 bytes.
    // SAFETY: As C promises.
    let (hca, input, output) = unsafe {
        (
            hca_of(device),
            &*input.cast::<Mad>(),
            &mut *output.cast::<Mad>(),
        )
    };
    let Ok(hca) = hca else {
        return bindings::ib_mad_result_IB_MAD_RESULT_FAILURE as c_int;
    };
    let success = bindings::ib_mad_result_IB_MAD_RESULT_SUCCESS;
    *output = *input;
    let result = match hca.process_mad(output) {
        Reaction::Pass => success,
        Reaction::Reply => success | bindings::ib_mad_result_IB_MAD_RESULT_REPLY,
        Reaction::Consumed => success | bindings::ib_mad_result_IB_MAD_RESULT_CONSUMED,
    };
    result as c_int
}

/// # Safety
///
/// Called by ib_core with a new PD.
unsafe extern "C" fn alloc_pd(pd: *mut bindings::ib_pd, _udata: *mut bindings::ib_udata) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe {
        let pd_inner = hca_of((*pd).device)?.alloc_pd()?;
        put_inner(pd, pd_inner);
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a PD that nobody uses any more.
unsafe extern "C" fn dealloc_pd(
    pd: *mut bindings::ib_pd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    unsafe {
        drop(take_inner::<_, Pd>(pd));
        if let Ok(hca) = hca_of((*pd).device) {
            hca.objects.pds.fetch_sub(1, Relaxed);
        }
    }
    0
}

/// # Safety
///
/// Called by ib_core with a live PD.
unsafe extern "C" fn get_dma_mr(pd: *mut bindings::ib_pd, _access: c_int) -> *mut bindings::ib_mr {
    let make = || -> Result<*mut bindings::ib_mr> {
        // SAFETY: As C promises.
        let (hca, lkey) = unsafe { (hca_of((*pd).device)?, inner_of::<_, Pd>(pd)?.lkey) };
        hca.verb(crate::fault::Fault::GetDmaMr)?;
        let mut mr = KBox::new(
            Mr {
                base: pin_init::zeroed(),
                hca: hca.clone(),
            },
            GFP_KERNEL,
        )?;
        hca.objects.mrs.fetch_add(1, Relaxed);
        mr.base.lkey = lkey;
        mr.base.rkey = lkey;
        Ok(KBox::into_raw(mr).cast())
    };
    match make() {
        Ok(mr) => mr,
        Err(error) => error.to_ptr(),
    }
}

/// # Safety
///
/// None.
unsafe extern "C" fn reg_user_mr(
    _pd: *mut bindings::ib_pd,
    _start: u64,
    _length: u64,
    _address: u64,
    _access: c_int,
    _dmah: *mut bindings::ib_dmah,
    _udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    EOPNOTSUPP.to_ptr()
}

/// # Safety
///
/// Called by ib_core with a region of `get_dma_mr` that nobody uses any more.
unsafe extern "C" fn dereg_mr(mr: *mut bindings::ib_mr, _udata: *mut bindings::ib_udata) -> c_int {
    const { assert!(offset_of!(Mr, base) == 0) };
    // SAFETY: As C promises; `base` is at the start.
    let mr = unsafe { KBox::from_raw(mr.cast::<Mr>()) };
    mr.hca.objects.mrs.fetch_sub(1, Relaxed);
    0
}

/// # Safety
///
/// Called by ib_core with a new address handle and its attributes.
unsafe extern "C" fn create_ah(
    ah: *mut bindings::ib_ah,
    init: *mut bindings::rdma_ah_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, attr, sleepable) = unsafe {
        (
            hca_of((*ah).device),
            &*(*init).ah_attr,
            (*init).flags & bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE != 0,
        )
    };
    status!({
        let hca = hca?;
        hca.verb(crate::fault::Fault::CreateAh)?;
        let gfp = if sleepable { GFP_KERNEL } else { GFP_ATOMIC };
        let inner = Arc::new(Ah(address_of(attr)?), gfp)?;
        hca.objects.ahs.fetch_add(1, Relaxed);
        // SAFETY: As C promises, nobody else has the handle.
        unsafe { put_inner(ah, inner) };
        Ok(())
    })
}

fn address_of(attr: &bindings::rdma_ah_attr) -> Result<Address> {
    if attr.port_num != 1 {
        return Err(EINVAL);
    }
    // SAFETY: The attributes of an InfiniBand port are those of the union's `ib`.
    let ib = unsafe { attr.__bindgen_anon_1.ib };
    let route = if u32::from(attr.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0 {
        if usize::from(attr.grh.sgid_index) >= GIDS {
            return Err(EINVAL);
        }
        Some(Route {
            // SAFETY: All members of the union are 16 bytes of numbers.
            dgid: unsafe { attr.grh.dgid.raw },
            flow_label: attr.grh.flow_label,
            sgid_index: attr.grh.sgid_index,
            hop_limit: attr.grh.hop_limit,
            traffic_class: attr.grh.traffic_class,
        })
    } else {
        None
    };
    Ok(Address {
        dlid: ib.dlid,
        path_bits: ib.src_path_bits,
        sl: attr.sl,
        static_rate: attr.static_rate,
        route,
    })
}

/// # Safety
///
/// Called by ib_core with a live address handle and room for the answer.
unsafe extern "C" fn query_ah(
    ah: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_attr,
) -> c_int {
    // SAFETY: As C promises.
    let (inner, sgid_attr, attr) = unsafe { (inner_of::<_, Ah>(ah), (*ah).sgid_attr, &mut *attr) };
    status!({
        let address = &inner?.0;
        attr.sl = address.sl;
        attr.static_rate = address.static_rate;
        attr.port_num = 1;
        attr.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB;
        attr.__bindgen_anon_1.ib = bindings::ib_ah_attr {
            dlid: address.dlid,
            src_path_bits: address.path_bits,
        };
        attr.ah_flags = 0;
        if let Some(route) = &address.route {
            attr.ah_flags = bindings::ib_ah_flags_IB_AH_GRH as u8;
            attr.grh.sgid_attr = sgid_attr;
            attr.grh.dgid.raw = route.dgid;
            attr.grh.flow_label = route.flow_label;
            attr.grh.sgid_index = route.sgid_index;
            attr.grh.hop_limit = route.hop_limit;
            attr.grh.traffic_class = route.traffic_class;
        }
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with an address handle that nobody uses any more.
unsafe extern "C" fn destroy_ah(ah: *mut bindings::ib_ah, _flags: u32) -> c_int {
    // SAFETY: As C promises.
    unsafe {
        drop(take_inner::<_, Ah>(ah));
        if let Ok(hca) = hca_of((*ah).device) {
            hca.objects.ahs.fetch_sub(1, Relaxed);
        }
    }
    0
}

/// # Safety
///
/// Called by ib_core with a new shared receive queue and its attributes.
unsafe extern "C" fn create_srq(
    srq: *mut bindings::ib_srq,
    init: *mut bindings::ib_srq_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, init) = unsafe { (hca_of((*srq).device), &mut *init) };
    status!({
        let hca = hca?;
        hca.verb(crate::fault::Fault::CreateSrq)?;
        if init.srq_type != bindings::ib_srq_type_IB_SRQT_BASIC {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: ib_core checked that the domain belongs to this device; it outlives the queue.
        let pd = unsafe { inner_of::<_, Pd>((*srq).pd)?.clone() };
        let inner = Srq::new(hca.clone(), pd, init.attr.max_wr, init.attr.max_sge)?;
        (init.attr.max_wr, init.attr.max_sge) = inner.size();
        // SAFETY: As C promises, nobody else has the queue.
        unsafe { put_inner(srq, inner) };
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live shared receive queue and what is to be changed.
unsafe extern "C" fn modify_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
    mask: bindings::ib_srq_attr_mask,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    let (inner, attr) = unsafe { (inner_of::<_, Srq>(srq), &*attr) };
    status!(match mask {
        bindings::ib_srq_attr_mask_IB_SRQ_LIMIT => inner?.set_limit(attr.srq_limit),
        _ => Err(EOPNOTSUPP),
    })
}

/// # Safety
///
/// Called by ib_core with a live shared receive queue and room for the answer.
unsafe extern "C" fn query_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
) -> c_int {
    // SAFETY: As C promises.
    let (inner, attr) = unsafe { (inner_of::<_, Srq>(srq), &mut *attr) };
    status!(inner.map(|srq| {
        (attr.max_wr, attr.max_sge) = srq.size();
        attr.srq_limit = srq.limit();
    }))
}

/// # Safety
///
/// Called by ib_core with a shared receive queue that no queue pair uses any more.
unsafe extern "C" fn destroy_srq(
    srq: *mut bindings::ib_srq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    if let Some(inner) = unsafe { take_inner::<_, Srq>(srq) } {
        inner.retire();
    }
    0
}

/// # Safety
///
/// Called by a consumer with a live shared receive queue and a list of requests.
unsafe extern "C" fn post_srq_recv(
    srq: *mut bindings::ib_srq,
    list: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: As C promises.
    let inner = match unsafe { inner_of::<_, Srq>(srq) } {
        Ok(inner) => inner,
        Err(error) => return error.to_errno(),
    };
    let physical = inner.hca().config().physical;
    let mut at = list;
    let mut result = 0;
    let irq = local_interrupt_disable();
    // SAFETY: As C promises the list ends with a null pointer.
    while let Some(raw) = unsafe { at.as_ref() } {
        if let Err(error) = inner.post(&irq, &RecvWr { raw, physical }) {
            // SAFETY: There is room for the request that failed.
            unsafe { *bad = at };
            result = error.to_errno();
            break;
        }
        at = raw.next;
    }
    let waiting = inner.waiting(&irq);
    drop(irq);
    for sender in waiting {
        sender.wake();
    }
    result
}

/// # Safety
///
/// Called by ib_core with a new CQ and its attributes.
unsafe extern "C" fn create_cq(
    cq: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: As C promises.
    let (hca, attr) = unsafe { (hca_of((*cq).device), &*attr) };
    status!({
        let hca = hca?;
        hca.verb(crate::fault::Fault::CreateCq)?;
        if attr.cqe == 0 || attr.cqe > HcaConfig::MAX_CQE {
            return Err(EINVAL);
        }
        let inner = Cq::new(hca.clone(), attr.cqe, Channel::new(cq))?;
        // SAFETY: As C promises, nobody else has the CQ.
        unsafe {
            (*cq).cqe = attr.cqe as c_int;
            put_inner(cq, inner);
        }
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a live CQ.
unsafe extern "C" fn modify_cq(cq: *mut bindings::ib_cq, count: u16, period: u16) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe { inner_of::<_, Cq>(cq) }.map(|cq| cq.moderate(count, period)))
}

/// # Safety
///
/// Called by ib_core with a CQ that no queue pair uses any more.
unsafe extern "C" fn destroy_cq(
    cq: *mut bindings::ib_cq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    unsafe {
        if let Ok(inner) = inner_of::<_, Cq>(cq) {
            inner.channel().close();
            inner.retire();
        }
        drop(take_inner::<_, Cq>(cq));
    }
    0
}

/// # Safety
///
/// Called by a consumer with a live CQ and room for `count` completions.
unsafe extern "C" fn poll_cq(
    cq: *mut bindings::ib_cq,
    count: c_int,
    wcs: *mut bindings::ib_wc,
) -> c_int {
    // SAFETY: As C promises.
    let Ok(inner) = (unsafe { inner_of::<_, Cq>(cq) }) else {
        return 0;
    };
    let count = usize::try_from(count).unwrap_or(0);
    let mut at = wcs;
    inner.poll(count, |wc: &Wc| {
        // SAFETY: `poll` calls this at most `count` times, and `Wc` is the front of an `ib_wc`, see
        // below.
        unsafe { at.cast::<Wc>().write(*wc) };
        at = at.wrapping_add(1);
    }) as c_int
}

// `Wc` is laid out as the front of an `ib_wc`.
const _: () = {
    use core::mem::offset_of;
    type Raw = bindings::ib_wc;
    assert!(offset_of!(Raw, __bindgen_anon_1) == offset_of!(Wc, wr_id));
    assert!(offset_of!(Raw, status) == offset_of!(Wc, status));
    assert!(offset_of!(Raw, opcode) == offset_of!(Wc, opcode));
    assert!(offset_of!(Raw, vendor_err) == offset_of!(Wc, vendor_err));
    assert!(offset_of!(Raw, byte_len) == offset_of!(Wc, byte_len));
    assert!(offset_of!(Raw, qp) == offset_of!(Wc, qp));
    assert!(offset_of!(Raw, ex) == offset_of!(Wc, imm));
    assert!(offset_of!(Raw, src_qp) == offset_of!(Wc, src_qp));
    assert!(offset_of!(Raw, slid) == offset_of!(Wc, slid));
    assert!(offset_of!(Raw, wc_flags) == offset_of!(Wc, flags));
    assert!(offset_of!(Raw, pkey_index) == offset_of!(Wc, pkey_index));
    assert!(offset_of!(Raw, sl) == offset_of!(Wc, sl));
    assert!(offset_of!(Raw, dlid_path_bits) == offset_of!(Wc, dlid_path_bits));
    assert!(offset_of!(Raw, port_num) == offset_of!(Wc, port));
    assert!(size_of::<Wc>() <= size_of::<Raw>() && align_of::<Wc>() <= align_of::<Raw>());
};

/// # Safety
///
/// Called by a consumer with a live CQ.
unsafe extern "C" fn req_notify_cq(
    cq: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    // SAFETY: As C promises.
    let Ok(inner) = (unsafe { inner_of::<_, Cq>(cq) }) else {
        return EINVAL.to_errno();
    };
    let solicited = flags & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
        == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
    let report = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;
    c_int::from(inner.arm(solicited) && report)
}

/// # Safety
///
/// Called by ib_core with a new queue pair and its attributes.
unsafe extern "C" fn create_qp(
    qp: *mut bindings::ib_qp,
    init: *mut bindings::ib_qp_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    const LSO: u32 = CREATE_LSO;
    const BLOCK: u32 = bindings::ib_qp_create_flags_IB_QP_CREATE_BLOCK_MULTICAST_LOOPBACK as u32;
    const NETIF: u32 = bindings::ib_qp_create_flags_IB_QP_CREATE_NETIF_QP as u32;

    // SAFETY: As C promises.
    let (hca, init) = unsafe { (hca_of((*qp).device), &mut *init) };
    status!({
        let hca = hca?;
        hca.verb(crate::fault::Fault::CreateQp)?;
        let kind = match init.qp_type {
            bindings::ib_qp_type_IB_QPT_SMI => Kind::Smi,
            bindings::ib_qp_type_IB_QPT_GSI => Kind::Gsi,
            bindings::ib_qp_type_IB_QPT_UD => Kind::Ud,
            bindings::ib_qp_type_IB_QPT_RC => Kind::Rc,
            _ => return Err(EOPNOTSUPP),
        };
        let config = hca.config();
        let mut allowed = 0;
        if config.tso {
            allowed |= LSO;
        }
        if config.mcast_lb {
            allowed |= BLOCK;
        }
        if config.flow_steering {
            allowed |= NETIF;
        }
        if kind == Kind::Rc {
            allowed = 0;
        }
        if init.create_flags & !allowed != 0 || (kind != Kind::Rc && !init.srq.is_null()) {
            return Err(EOPNOTSUPP);
        }
        if init.send_cq.is_null() || init.recv_cq.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: ib_core checked that the objects belong to this device; they outlive the QP.
        let (pd, send_cq, recv_cq) = unsafe {
            (
                inner_of::<_, Pd>((*qp).pd)?.clone(),
                inner_of::<_, Cq>(init.send_cq)?.clone(),
                inner_of::<_, Cq>(init.recv_cq)?.clone(),
            )
        };
        let srq = match init.srq.is_null() {
            true => None,
            // SAFETY: As above.
            false => Some(unsafe { inner_of::<_, Srq>(init.srq)?.clone() }),
        };
        let inner = Qp::new(
            hca.clone(),
            QpConfig {
                handle: QpHandle(qp),
                kind,
                pd,
                send_cq,
                recv_cq,
                srq,
                send_slots: init.cap.max_send_wr,
                recv_slots: init.cap.max_recv_wr,
                send_sges: init.cap.max_send_sge,
                recv_sges: init.cap.max_recv_sge,
                signal_all: init.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
                lso: init.create_flags & LSO != 0,
                block_loopback: init.create_flags & BLOCK != 0,
            },
        )?;
        init.cap.max_inline_data = 0;
        // SAFETY: As C promises, nobody else has the queue pair.
        unsafe {
            (*qp).qp_num = inner.number();
            put_inner(qp, inner);
        }
        Ok(())
    })
}

fn state_of(raw: bindings::ib_qp_state) -> Result<State> {
    Ok(match raw {
        bindings::ib_qp_state_IB_QPS_RESET => State::Reset,
        bindings::ib_qp_state_IB_QPS_INIT => State::Init,
        bindings::ib_qp_state_IB_QPS_RTR => State::Rtr,
        bindings::ib_qp_state_IB_QPS_RTS => State::Rts,
        bindings::ib_qp_state_IB_QPS_SQD => State::Sqd,
        bindings::ib_qp_state_IB_QPS_SQE => State::Sqe,
        bindings::ib_qp_state_IB_QPS_ERR => State::Err,
        _ => return Err(EINVAL),
    })
}

fn raw_state(state: State) -> bindings::ib_qp_state {
    match state {
        State::Reset | State::Dead => bindings::ib_qp_state_IB_QPS_RESET,
        State::Init => bindings::ib_qp_state_IB_QPS_INIT,
        State::Rtr => bindings::ib_qp_state_IB_QPS_RTR,
        State::Rts => bindings::ib_qp_state_IB_QPS_RTS,
        State::Sqd => bindings::ib_qp_state_IB_QPS_SQD,
        State::Sqe => bindings::ib_qp_state_IB_QPS_SQE,
        State::Err => bindings::ib_qp_state_IB_QPS_ERR,
    }
}

/// Whether a queue pair may go from one state to another with these attributes.
pub(crate) fn transition_ok(from: State, to: State, kind: Kind, mask: u32) -> bool {
    let kind = match kind {
        Kind::Smi => bindings::ib_qp_type_IB_QPT_SMI,
        Kind::Gsi => bindings::ib_qp_type_IB_QPT_GSI,
        Kind::Ud => bindings::ib_qp_type_IB_QPT_UD,
        Kind::Rc => bindings::ib_qp_type_IB_QPT_RC,
    };
    // SAFETY: Looks into a table.
    unsafe { bindings::ib_modify_qp_is_ok(raw_state(from), raw_state(to), kind, mask) }
}

/// # Safety
///
/// Called by ib_core with a live queue pair and its attributes.
unsafe extern "C" fn modify_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    let (inner, attr) = unsafe { (inner_of::<_, Qp>(qp), &*attr) };
    let mask = mask as u32;
    let has = |bit: bindings::ib_qp_attr_mask| mask & bit != 0;
    status!({
        inner?.modify(&Modify {
            mask,
            from: match has(bindings::ib_qp_attr_mask_IB_QP_CUR_STATE) {
                true => Some(state_of(attr.cur_qp_state)?),
                false => None,
            },
            to: match has(bindings::ib_qp_attr_mask_IB_QP_STATE) {
                true => Some(state_of(attr.qp_state)?),
                false => None,
            },
            qkey: has(bindings::ib_qp_attr_mask_IB_QP_QKEY).then_some(attr.qkey),
            pkey_index: has(bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX).then_some(attr.pkey_index),
            port: has(bindings::ib_qp_attr_mask_IB_QP_PORT).then_some(attr.port_num),
            rc: connection_of(attr, mask)?,
        })
    })
}

/// What is said of a connection.
fn connection_of(attr: &bindings::ib_qp_attr, mask: u32) -> Result<rc::Attributes> {
    let has = |bit: bindings::ib_qp_attr_mask| mask & bit != 0;
    if has(bindings::ib_qp_attr_mask_IB_QP_ALT_PATH | bindings::ib_qp_attr_mask_IB_QP_PATH_MIG_STATE)
    {
        return Err(EOPNOTSUPP);
    }
    Ok(rc::Attributes {
        address: match has(bindings::ib_qp_attr_mask_IB_QP_AV) {
            true => Some(address_of(&attr.ah_attr)?),
            false => None,
        },
        path_mtu: match has(bindings::ib_qp_attr_mask_IB_QP_PATH_MTU) {
            true => Some(u8::try_from(attr.path_mtu)?),
            false => None,
        },
        peer: has(bindings::ib_qp_attr_mask_IB_QP_DEST_QPN).then_some(attr.dest_qp_num),
        min_rnr_timer: has(bindings::ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER)
            .then_some(attr.min_rnr_timer),
        timeout: has(bindings::ib_qp_attr_mask_IB_QP_TIMEOUT).then_some(attr.timeout),
        retry_count: has(bindings::ib_qp_attr_mask_IB_QP_RETRY_CNT).then_some(attr.retry_cnt),
        rnr_retry: has(bindings::ib_qp_attr_mask_IB_QP_RNR_RETRY).then_some(attr.rnr_retry),
    })
}

/// # Safety
///
/// Called by ib_core with a live queue pair and room for the answer.
unsafe extern "C" fn query_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    _mask: c_int,
    init: *mut bindings::ib_qp_init_attr,
) -> c_int {
    // SAFETY: As C promises.
    let (inner, qp, attr, init) = unsafe { (inner_of::<_, Qp>(qp), &*qp, &mut *attr, &mut *init) };
    status!({
        let view = inner?.view();
        attr.qp_state = raw_state(view.state);
        attr.cur_qp_state = raw_state(view.state);
        attr.qkey = view.qkey;
        attr.pkey_index = view.pkey_index;
        attr.dest_qp_num = view.peer;
        attr.port_num = 1;
        attr.cap.max_send_wr = view.send_slots;
        attr.cap.max_recv_wr = view.recv_slots;
        attr.cap.max_send_sge = view.send_sges;
        attr.cap.max_recv_sge = view.recv_sges;
        init.cap = attr.cap;
        init.qp_type = qp.qp_type;
        init.qp_context = qp.qp_context;
        init.event_handler = qp.event_handler;
        init.send_cq = qp.send_cq;
        init.recv_cq = qp.recv_cq;
        init.srq = qp.srq;
        init.port_num = 1;
        Ok(())
    })
}

/// # Safety
///
/// Called by ib_core with a queue pair that nobody uses any more.
unsafe extern "C" fn destroy_qp(
    qp: *mut bindings::ib_qp,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: As C promises.
    if let Some(inner) = unsafe { take_inner::<_, Qp>(qp) } {
        inner.notifier().close();
        inner.destroy();
    }
    0
}

/// # Safety
///
/// Called by a consumer with a live queue pair and a list of requests.
unsafe extern "C" fn post_send(
    qp: *mut bindings::ib_qp,
    list: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: As C promises.
    let inner = match unsafe { inner_of::<_, Qp>(qp) } {
        Ok(inner) => inner,
        Err(error) => return error.to_errno(),
    };
    let physical = inner.hca().config().physical;
    let mut at = list;
    let mut result = 0;
    let mut kicks = Kicks::new();
    let irq = local_interrupt_disable();
    let mut sends = inner.sends(&irq, &mut kicks);
    // SAFETY: As C promises the list ends with a null pointer.
    while let Some(raw) = unsafe { at.as_ref() } {
        if let Err(error) = sends.post(&SendWr { raw, physical }) {
            // SAFETY: There is room for the request that failed.
            unsafe { *bad = at };
            result = error.to_errno();
            break;
        }
        at = raw.next;
    }
    drop(sends);
    drop(irq);
    kicks.run();
    result
}

/// # Safety
///
/// Called by a consumer with a live queue pair and a list of requests.
unsafe extern "C" fn post_recv(
    qp: *mut bindings::ib_qp,
    list: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: As C promises.
    let inner = match unsafe { inner_of::<_, Qp>(qp) } {
        Ok(inner) => inner,
        Err(error) => return error.to_errno(),
    };
    let physical = inner.hca().config().physical;
    let mut at = list;
    let mut result = 0;
    let mut kicks = Kicks::new();
    let irq = local_interrupt_disable();
    let mut recvs = inner.recvs(&irq, &mut kicks);
    // SAFETY: As C promises the list ends with a null pointer.
    while let Some(raw) = unsafe { at.as_ref() } {
        if let Err(error) = recvs.post(&RecvWr { raw, physical }) {
            // SAFETY: There is room for the request that failed.
            unsafe { *bad = at };
            result = error.to_errno();
            break;
        }
        at = raw.next;
    }
    let waiter = recvs.waiter();
    drop(recvs);
    drop(irq);
    kicks.run();
    if let Some(sender) = waiter {
        sender.wake();
    }
    result
}

/// # Safety
///
/// Called by ib_core with a live queue pair and a group.
unsafe extern "C" fn attach_mcast(
    qp: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    lid: u16,
) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe { inner_of::<_, Qp>(qp)?.attach((*gid).raw, lid) })
}

/// # Safety
///
/// Called by ib_core with a live queue pair and a group.
unsafe extern "C" fn detach_mcast(
    qp: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    lid: u16,
) -> c_int {
    // SAFETY: As C promises.
    status!(unsafe { inner_of::<_, Qp>(qp)?.detach((*gid).raw, lid) })
}

// Time and work queues.

/// Nanoseconds since the system started.
pub(crate) fn now() -> u64 {
    // SAFETY: Reads a clock; always safe to call.
    unsafe { bindings::ktime_get() }.unsigned_abs()
}

/// An ordered work queue of one's own. Dropping it waits for what is queued.
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
    pub(crate) fn new_ordered(name: &CStr) -> Result<Self> {
        // SAFETY: `name` is a C string; the callee copies it.
        let queue = unsafe { bindings::alloc_ordered_workqueue(name.as_char_ptr()) };
        // INVARIANT: The queue was just made, and nobody else has it.
        Ok(Self(NonNull::new(queue).ok_or(ENOMEM)?))
    }

    /// Waits until everything that is queued now has run. Sleeps.
    pub(crate) fn flush(&self) {
        // SAFETY: By the type invariant the queue is live.
        unsafe { bindings::__flush_workqueue(self.0.as_ptr()) };
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

/// Waits until an item that may be queued has run. Sleeps.
pub(crate) fn flush<T, const ID: u64>(item: &Arc<T>)
where
    T: HasWork<T, ID> + WorkItem<ID, Pointer = Arc<T>>,
{
    // SAFETY: `item` is live.
    let work = unsafe { T::raw_get_work(Arc::as_ptr(item).cast_mut()) };
    // SAFETY: `work` points at a field of a live object, initialised with it.
    unsafe { bindings::flush_work(Work::raw_get(work)) };
}

/// Stops the timer of an item, takes it off its queue, or waits until it has run. Sleeps.
pub(crate) fn cancel_delayed<T, const ID: u64>(item: &Arc<T>)
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
    if unsafe { bindings::cancel_delayed_work_sync(delayed) } {
        // SAFETY: The queue held a reference that `run` would have taken over; the item was taken
        // off before it ran, so the reference is ours.
        drop(unsafe { Arc::from_raw(raw.cast_const()) });
    }
}

/// What a consumer's objects are like.
pub(crate) struct Shape {
    /// Requests that each queue takes.
    pub(crate) slots: u32,
    /// Completions that each completion queue takes.
    pub(crate) completions: u32,
    /// Places in the buffer, and bytes of each.
    pub(crate) places: usize,
    pub(crate) bytes: usize,
    pub(crate) qkey: u32,
    /// Whether the queue pair sends large packets.
    pub(crate) lso: bool,
}

/// A send, right or wrong.
pub(crate) struct Posting<'a> {
    pub(crate) opcode: Opcode,
    /// As in `ib_send_flags`, without "signaled".
    pub(crate) flags: u32,
    /// The place in the buffer, which is the number of the request too, and how much of it.
    pub(crate) place: usize,
    pub(crate) len: usize,
    /// How often that is posted in one request.
    pub(crate) pieces: usize,
    /// Changes the key of the memory.
    pub(crate) key: u32,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    /// For large sends.
    pub(crate) header: &'a [u8],
    pub(crate) mss: u16,
}

/// A completion as its consumer sees it.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) place: usize,
    pub(crate) status: u32,
    pub(crate) len: usize,
}

/// How often the handlers of a completion queue were called.
pub(crate) struct Calls {
    completion: Atomic<u32>,
    error: Atomic<u32>,
}

/// # Safety
///
/// Called by a provider; the context of the queue is a live `Calls`.
unsafe extern "C" fn count_completion(_cq: *mut bindings::ib_cq, context: *mut c_void) {
    // SAFETY: As the caller promises.
    let calls = unsafe { &*context.cast_const().cast::<Calls>() };
    calls.completion.add(1, Relaxed);
}

/// # Safety
///
/// Called by a provider; the context of the queue is a live `Calls`.
unsafe extern "C" fn count_error(_event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: As the caller promises.
    let calls = unsafe { &*context.cast_const().cast::<Calls>() };
    calls.error.add(1, Relaxed);
}

/// A memory region that its consumer forgot to give back.
///
/// # Invariants
///
/// The region is one of `get_dma_mr`, and nobody uses it.
pub(crate) struct Forgotten(NonNull<bindings::ib_mr>);

// SAFETY: A region may be given back from any thread.
unsafe impl Send for Forgotten {}

impl Drop for Forgotten {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { dereg_mr(self.0.as_ptr(), ptr::null_mut()) };
    }
}

/// The consumer's side of the verbs, for the null client: one UD queue pair, one completion queue
/// for each direction, one buffer.
///
/// # Invariants
///
/// All objects are live, on the same device, and owned by this one. `buffer` is mapped at `dma`
/// and has `places` times `bytes` bytes.
pub(crate) struct Consumer<'a> {
    device: *mut bindings::ib_device,
    pd: *mut bindings::ib_pd,
    send_cq: *mut bindings::ib_cq,
    recv_cq: *mut bindings::ib_cq,
    qp: *mut bindings::ib_qp,
    ah: *mut bindings::ib_ah,
    buffer: KVec<u8>,
    places: usize,
    bytes: usize,
    qkey: u32,
    dma: u64,
    verbs: Verbs,
    calls: [KBox<Calls>; 2],
    _device: PhantomData<&'a Device>,
}

/// The verbs that are called for every packet.
#[derive(Clone, Copy)]
struct Verbs {
    post_send: PostSend,
    post_recv: PostRecv,
    poll: Poll,
}

type PostSend = unsafe extern "C" fn(
    *mut bindings::ib_qp,
    *const bindings::ib_send_wr,
    *mut *const bindings::ib_send_wr,
) -> c_int;
type PostRecv = unsafe extern "C" fn(
    *mut bindings::ib_qp,
    *const bindings::ib_recv_wr,
    *mut *const bindings::ib_recv_wr,
) -> c_int;
type Poll = unsafe extern "C" fn(*mut bindings::ib_cq, c_int, *mut bindings::ib_wc) -> c_int;

/// Verbs that do nothing, and say that all went well.
const HOLLOW: Verbs = Verbs {
    post_send: hollow_send,
    post_recv: hollow_recv,
    poll: hollow_poll,
};

/// # Safety
///
/// None.
unsafe extern "C" fn hollow_send(
    _qp: *mut bindings::ib_qp,
    _list: *const bindings::ib_send_wr,
    _bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    0
}

/// # Safety
///
/// None.
unsafe extern "C" fn hollow_recv(
    _qp: *mut bindings::ib_qp,
    _list: *const bindings::ib_recv_wr,
    _bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    0
}

/// # Safety
///
/// None.
unsafe extern "C" fn hollow_poll(
    _cq: *mut bindings::ib_cq,
    count: c_int,
    _wc: *mut bindings::ib_wc,
) -> c_int {
    count
}

/// Pieces of memory that a wrong request has.
const MAX_PIECES: usize = 2;

const CREATE_LSO: u32 = bindings::ib_qp_create_flags_IB_QP_CREATE_IPOIB_UD_LSO as u32;

impl Calls {
    fn new() -> Result<KBox<Self>> {
        let none = Self {
            completion: Atomic::new(0),
            error: Atomic::new(0),
        };
        Ok(KBox::new(none, GFP_KERNEL)?)
    }
}

impl<'a> Consumer<'a> {
    /// Makes a queue pair that cannot do anything yet.
    pub(crate) fn new(device: &'a Device, shape: &Shape) -> Result<Self> {
        let device = device.device.as_ptr();
        // SAFETY: The device is live, and keeps its operations.
        let ops = unsafe { &(*device).ops };
        let verbs = Verbs {
            post_send: ops.post_send.ok_or(EINVAL)?,
            post_recv: ops.post_recv.ok_or(EINVAL)?,
            poll: ops.poll_cq.ok_or(EINVAL)?,
        };
        // INVARIANT: What there is not is a null pointer, which `drop` leaves alone.
        let mut this = Self {
            device,
            pd: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            qp: ptr::null_mut(),
            ah: ptr::null_mut(),
            buffer: KVec::from_elem(0, shape.places * shape.bytes, GFP_KERNEL)?,
            places: shape.places,
            bytes: shape.bytes,
            qkey: shape.qkey,
            dma: 0,
            verbs,
            calls: [Calls::new()?, Calls::new()?],
            _device: PhantomData,
        };
        let name = crate::NAME.as_char_ptr();
        let cq_attr = bindings::ib_cq_init_attr {
            cqe: shape.completions,
            ..pin_init::zeroed()
        };
        use kernel::error::from_err_ptr;
        // SAFETY: The device is live, as all objects that were made from it before.
        unsafe {
            this.pd = from_err_ptr(bindings::__ib_alloc_pd(device, 0, name))?;
            for (cq, calls) in [&mut this.send_cq, &mut this.recv_cq]
                .into_iter()
                .zip(&this.calls)
            {
                *cq = from_err_ptr(bindings::__ib_create_cq(
                    device,
                    Some(count_completion),
                    Some(count_error),
                    ptr::from_ref::<Calls>(calls).cast_mut().cast(),
                    &cq_attr,
                    name,
                ))?;
            }
        }
        let mut init = bindings::ib_qp_init_attr {
            send_cq: this.send_cq,
            recv_cq: this.recv_cq,
            cap: bindings::ib_qp_cap {
                max_send_wr: shape.slots,
                max_recv_wr: shape.slots,
                max_send_sge: 1,
                max_recv_sge: 1,
                ..pin_init::zeroed()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
            qp_type: bindings::ib_qp_type_IB_QPT_UD,
            create_flags: if shape.lso { CREATE_LSO } else { 0 },
            ..pin_init::zeroed()
        };
        // SAFETY: The objects are live. The boxes of the handlers' context outlive the queues.
        this.qp = unsafe { from_err_ptr(bindings::ib_create_qp_kernel(this.pd, &mut init, name))? };
        // SAFETY: The buffer is there, and stays.
        unsafe {
            this.dma = bindings::ib_dma_map_single(
                device,
                this.buffer.as_mut_ptr().cast(),
                this.buffer.len(),
                bindings::dma_data_direction::DMA_BIDIRECTIONAL,
            );
            if bindings::ib_dma_mapping_error(device, this.dma) != 0 {
                this.dma = 0;
                return Err(ENOMEM);
            }
        }
        Ok(this)
    }

    /// Has the queue pair change its state, with all attributes that this takes.
    pub(crate) fn modify(&self, to: State) -> Result {
        use bindings::{
            ib_qp_attr_mask_IB_QP_PKEY_INDEX as PKEY_INDEX,
            ib_qp_attr_mask_IB_QP_PORT as PORT,
            ib_qp_attr_mask_IB_QP_QKEY as QKEY,
            ib_qp_attr_mask_IB_QP_SQ_PSN as SQ_PSN,
            ib_qp_attr_mask_IB_QP_STATE as STATE, //
        };
        let mask = match to {
            State::Init => PKEY_INDEX | PORT | QKEY,
            State::Rts => SQ_PSN,
            _ => 0,
        };
        let mut attr = bindings::ib_qp_attr {
            qp_state: raw_state(to),
            qkey: self.qkey,
            port_num: 1,
            ..pin_init::zeroed()
        };
        // SAFETY: The queue pair is live.
        to_result(unsafe { bindings::ib_modify_qp(self.qp, &mut attr, (STATE | mask) as c_int) })
    }

    /// Makes the queue pair send and receive.
    pub(crate) fn start(&self) -> Result {
        self.modify(State::Init)?;
        self.modify(State::Rtr)?;
        self.modify(State::Rts)
    }

    /// Asks what one asks a port.
    pub(crate) fn look(&self) -> Result {
        let mut port: bindings::ib_port_attr = pin_init::zeroed();
        let mut gid: bindings::ib_gid = pin_init::zeroed();
        let mut pkey = 0;
        // SAFETY: The device is live, and keeps its operations; there is room for the answers.
        unsafe {
            to_result(bindings::ib_query_port(self.device, 1, &mut port))?;
            let query = (*self.device).ops.query_gid.ok_or(EINVAL)?;
            to_result(query(self.device, 1, 0, &mut gid))?;
            to_result(bindings::ib_query_pkey(self.device, 1, 0, &mut pkey))
        }
    }

    /// Attaches the queue pair to a group, and detaches it if `detach`. Otherwise ib_core does not
    /// know, which would not let it be destroyed.
    pub(crate) fn attach(&self, mgid: [u8; 16], mlid: u16, detach: bool) -> Result {
        let mut gid: bindings::ib_gid = pin_init::zeroed();
        gid.raw = mgid;
        // SAFETY: The queue pair is live, its device keeps its operations.
        unsafe {
            if !detach {
                let attach = (*self.device).ops.attach_mcast.ok_or(EINVAL)?;
                return to_result(attach(self.qp, &mut gid, mlid));
            }
            to_result(bindings::ib_attach_mcast(self.qp, &mut gid, mlid))?;
            to_result(bindings::ib_detach_mcast(self.qp, &mut gid, mlid))
        }
    }

    /// Takes a memory region of the device that ib_core does not know of.
    pub(crate) fn forget(&self) -> Result<Forgotten> {
        // SAFETY: The device and the domain are live.
        let region = unsafe {
            let make = (*self.device).ops.get_dma_mr.ok_or(EINVAL)?;
            kernel::error::from_err_ptr(make(self.pd, 0))?
        };
        // INVARIANT: Made just now, and nobody else has it.
        Ok(Forgotten(NonNull::new(region).ok_or(ENOMEM)?))
    }

    /// Asks for a call of the handler.
    pub(crate) fn arm(&self, recv: bool) -> Result {
        let flags = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP;
        // SAFETY: The queue is live, its device keeps its operations.
        unsafe {
            let request = (*self.device).ops.req_notify_cq.ok_or(EINVAL)?;
            to_result(request(self.cq(recv), flags))
        }
    }

    /// How often the handler was called.
    pub(crate) fn calls(&self, recv: bool) -> u32 {
        self.calls[usize::from(recv)].completion.load(Relaxed)
    }

    /// How often a queue has said that it is broken.
    pub(crate) fn errors(&self, recv: bool) -> u32 {
        self.calls[usize::from(recv)].error.load(Relaxed)
    }

    fn cq(&self, recv: bool) -> *mut bindings::ib_cq {
        if recv {
            self.recv_cq
        } else {
            self.send_cq
        }
    }

    /// A place of the buffer. What is in a place that is posted changes any time.
    pub(crate) fn place(&mut self, place: usize) -> &mut [u8] {
        let first = place * self.bytes;
        self.buffer
            .get_mut(first..first + self.bytes)
            .unwrap_or_default()
    }

    /// Some of a place.
    fn piece(&self, place: usize, len: usize) -> Result<bindings::ib_sge> {
        if place >= self.places || len > self.bytes {
            return Err(EINVAL);
        }
        Ok(bindings::ib_sge {
            addr: self.dma + (place * self.bytes) as u64,
            length: len as u32,
            // SAFETY: By the type invariants the domain is live.
            lkey: unsafe { (*self.pd).local_dma_lkey },
        })
    }

    /// Posts the first `len` bytes of a place for receiving, `pieces` times in one request, with a
    /// key that is changed by `key`.
    pub(crate) fn post_place(&self, place: usize, len: usize, pieces: usize, key: u32) -> Result {
        let mut sges = [self.piece(place, len)?; MAX_PIECES];
        sges[0].lkey ^= key;
        let mut wr = bindings::ib_recv_wr {
            sg_list: sges.as_mut_ptr(),
            num_sge: pieces.min(MAX_PIECES) as c_int,
            ..pin_init::zeroed()
        };
        wr.__bindgen_anon_1.wr_id = place as u64;
        let mut bad = ptr::null();
        // SAFETY: The queue pair is live, the buffer is there until it is destroyed.
        to_result(unsafe { (self.verbs.post_recv)(self.qp, &wr, &mut bad) })
    }

    /// Sends.
    pub(crate) fn post(&self, posting: &Posting<'_>) -> Result {
        let mut sges = [self.piece(posting.place, posting.len)?; MAX_PIECES];
        sges[0].lkey ^= posting.key;
        let mut header = KVec::new();
        header.extend_from_slice(posting.header, GFP_KERNEL)?;
        let mut wr = bindings::ib_ud_wr {
            wr: bindings::ib_send_wr {
                sg_list: sges.as_mut_ptr(),
                num_sge: posting.pieces.min(MAX_PIECES) as c_int,
                opcode: match posting.opcode {
                    Opcode::Lso => bindings::ib_wr_opcode_IB_WR_LSO,
                    _ => bindings::ib_wr_opcode_IB_WR_SEND,
                },
                send_flags: (posting.flags | crate::qp::SEND_SIGNALED) as c_int,
                ..pin_init::zeroed()
            },
            ah: self.ah,
            header: header.as_mut_ptr().cast(),
            hlen: header.len() as c_int,
            mss: c_int::from(posting.mss),
            remote_qpn: posting.qpn,
            remote_qkey: posting.qkey,
            ..pin_init::zeroed()
        };
        wr.wr.__bindgen_anon_1.wr_id = posting.place as u64;
        let mut bad = ptr::null();
        // SAFETY: The queue pair and the handle are live, the buffer is there until both are gone.
        to_result(unsafe { (self.verbs.post_send)(self.qp, &wr.wr, &mut bad) })
    }

    /// A completion, of a send or of a receive, if there is one.
    pub(crate) fn completion(&self, recv: bool) -> Option<Completion> {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        // SAFETY: The queue is live, and there is room for one completion.
        let count = unsafe { (self.verbs.poll)(self.cq(recv), 1, &mut wc) };
        (count == 1).then_some(Completion {
            // SAFETY: Both members of the union are 64 bits wide.
            place: unsafe { wc.__bindgen_anon_1.wr_id } as usize,
            status: wc.status,
            len: wc.byte_len as usize,
        })
    }

    pub(crate) fn qpn(&self) -> u32 {
        // SAFETY: By the type invariants the queue pair is live.
        unsafe { (*self.qp).qp_num }
    }

    /// All sends go there from now on.
    pub(crate) fn aim(&mut self, dlid: u16) -> Result {
        let mut attr: bindings::rdma_ah_attr = pin_init::zeroed();
        attr.port_num = 1;
        attr.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB;
        attr.__bindgen_anon_1.ib.dlid = dlid;
        // SAFETY: The domain is live.
        let ah = unsafe {
            bindings::rdma_create_ah(
                self.pd,
                &mut attr,
                bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE,
            )
        };
        self.ah = kernel::error::from_err_ptr(ah)?;
        Ok(())
    }

    #[inline]
    fn sge(&self, len: usize) -> bindings::ib_sge {
        bindings::ib_sge {
            addr: self.dma,
            length: len.min(self.buffer.len()) as u32,
            // SAFETY: By the type invariants the domain is live.
            lkey: unsafe { (*self.pd).local_dma_lkey },
        }
    }

    /// Posts the whole buffer for receiving.
    #[inline]
    pub(crate) fn post_recv(&mut self) -> Result {
        let mut sge = self.sge(self.buffer.len());
        let wr = bindings::ib_recv_wr {
            sg_list: &mut sge,
            num_sge: 1,
            ..pin_init::zeroed()
        };
        let mut bad = ptr::null();
        // SAFETY: The queue pair is live, the buffer is there until it is destroyed.
        match unsafe { (self.verbs.post_recv)(self.qp, &wr, &mut bad) } {
            0 => Ok(()),
            _ => Err(EIO),
        }
    }

    /// Sends the first `len` bytes of the buffer.
    #[inline]
    pub(crate) fn post_send(&mut self, len: usize, qpn: u32, qkey: u32) -> Result {
        if self.ah.is_null() {
            return Err(EINVAL);
        }
        let mut sge = self.sge(len);
        let wr = bindings::ib_ud_wr {
            wr: bindings::ib_send_wr {
                sg_list: &mut sge,
                num_sge: 1,
                opcode: bindings::ib_wr_opcode_IB_WR_SEND,
                send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
                ..pin_init::zeroed()
            },
            ah: self.ah,
            remote_qpn: qpn,
            remote_qkey: qkey,
            ..pin_init::zeroed()
        };
        let mut bad = ptr::null();
        // SAFETY: The queue pair and the handle are live, the buffer is there until both are gone.
        match unsafe { (self.verbs.post_send)(self.qp, &wr.wr, &mut bad) } {
            0 => Ok(()),
            _ => Err(EIO),
        }
    }

    /// Whether there is a completion, of a send or of a receive, and it is a good one.
    #[inline]
    pub(crate) fn poll(&mut self, recv: bool) -> Result<bool> {
        let cq = if recv { self.recv_cq } else { self.send_cq };
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        // SAFETY: The queue is live, and there is room for one completion.
        let count = unsafe { (self.verbs.poll)(cq, 1, &mut wc) };
        if count != 0 && wc.status != bindings::ib_wc_status_IB_WC_SUCCESS {
            return Err(EIO);
        }
        Ok(count != 0)
    }

    /// Calls nothing for packets from now on, to see what the caller takes.
    pub(crate) fn hollow(&mut self) {
        self.verbs = HOLLOW;
    }

    /// Copies the first `len` bytes to another one's buffer, as the fabric does.
    #[inline]
    pub(crate) fn copy_to(&self, other: &mut Consumer<'_>, len: usize) {
        let whole = |buffer: *const u8, len: usize| Sge {
            at: buffer.cast_mut(),
            len: len as u32,
            lkey: 0,
        };
        let from = [whole(self.buffer.as_ptr(), self.buffer.len())];
        let to = [whole(other.buffer.as_mut_ptr(), other.buffer.len())];
        Cursor::new(&to).copy_from(&mut Cursor::new(&from), len);
    }
}

impl Drop for Consumer<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; whatever uses an object goes before it.
        unsafe {
            if !self.qp.is_null() {
                bindings::ib_destroy_qp_user(self.qp, ptr::null_mut());
            }
            if !self.ah.is_null() {
                bindings::rdma_destroy_ah_user(self.ah, 0, ptr::null_mut());
            }
            for cq in [self.send_cq, self.recv_cq] {
                if !cq.is_null() {
                    bindings::ib_destroy_cq_user(cq, ptr::null_mut());
                }
            }
            if self.dma != 0 {
                bindings::ib_dma_unmap_single(
                    self.device,
                    self.dma,
                    self.buffer.len(),
                    bindings::dma_data_direction::DMA_BIDIRECTIONAL,
                );
            }
            if !self.pd.is_null() {
                bindings::ib_dealloc_pd_user(self.pd, ptr::null_mut());
            }
        }
    }
}
