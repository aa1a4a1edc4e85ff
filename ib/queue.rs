// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The queues of a queue pair, with the buffers that are posted to them.
//!
//! A buffer belongs to its queue from the moment it is posted until the completion that names it,
//! or until the queue pair was reset. Requests carry a [`WrId`]; a completion that names no posted
//! request is refused.
//!
//! Sends: [`SendQueue`] posts, under the transmit lock, [`SendCompleter`] takes back, in NAPI; they
//! share no lock. Requests are chained until [`SendQueue::flush`], and only the last of a chain is
//! signalled: sends of one queue pair complete in order. There are two kinds of send queue, of
//! [`Datagram`] and of [`Connected`] queue pairs; many may share a completion queue, whose
//! completions [`Wc::queue`](super::cq::Wc::queue) tells apart.
//!
//! Receives of a datagram queue pair: a [`RecvQueue`] has two pieces of memory per slot, a small one for what comes in
//! front (the 40 bytes of the global route header, the protocol's own header) and a page.

use super::{
    ah::Ah,
    device::Device,
    pd::Pd,
    qp::{
        self,
        Qp, //
    },
    QKey,
    Qpn, //
};
use crate::{
    bindings,
    net::{
        page_pool::{
            Page,
            PagePool, //
        },
        skb::{
            Offload,
            Skb,
            MAX_FRAGS, //
        }, //
    },
    ring::{
        Cursor,
        WrId, //
    },
    sync::spsc, //
};
use core::{
    marker::PhantomData,
    mem,
    ptr, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// Pieces of memory of one packet: its linear part and its fragments.
const PIECES: usize = MAX_FRAGS + 1;

/// Idle receive slots that are worth posting, at most.
const RECV_CHAIN: u32 = 16;

const TO_DEVICE: bindings::dma_data_direction = bindings::dma_data_direction::DMA_TO_DEVICE;
pub(super) const FROM_DEVICE: bindings::dma_data_direction =
    bindings::dma_data_direction::DMA_FROM_DEVICE;

type Sges = [bindings::ib_sge; PIECES];

/// A slot of the send ring: a packet mapped for sending, or nothing.
///
/// # Invariants
///
/// The first `pieces` of `addresses` and `lens` are the mappings, by the live `device`, of the
/// last `head` bytes of the linear part of `skb`, if that is not 0, and of its fragments in order. Without `skb` there are
/// none.
struct Slot {
    skb: Option<Skb>,
    device: *mut bindings::ib_device,
    head: u32,
    bytes: u32,
    pieces: u32,
    addresses: [u64; PIECES],
    lens: [u32; PIECES],
}

// SAFETY: A mapped packet may be unmapped on any CPU.
unsafe impl Send for Slot {}

impl Slot {
    fn new(device: &Device) -> Self {
        // INVARIANT: Nothing is mapped.
        Self {
            skb: None,
            device: device.as_raw(),
            head: 0,
            bytes: 0,
            pieces: 0,
            addresses: [0; PIECES],
            lens: [0; PIECES],
        }
    }

    /// Takes in `skb`, maps it but for the first `front` bytes of its linear part, and writes its
    /// pieces to `sges`; returns how many there are.
    #[inline(always)]
    fn fill(&mut self, skb: Skb, front: usize, lkey: u32, sges: &mut Sges) -> Result<u32, Skb> {
        let head = skb.head().get(front..).unwrap_or_default();
        let data = head.as_ptr().cast_mut().cast();
        let len = head.len();
        self.head = len as u32;
        self.bytes = skb.len() as u32;
        let mut pieces = 0;
        let mut whole = true;
        if len != 0 {
            // SAFETY: The device is live, `len` bytes of the linear part are at `data`.
            let address = unsafe { bindings::ib_dma_map_single(self.device, data, len, TO_DEVICE) };
            whole = self.note(&mut pieces, address, len, lkey, sges);
        }
        for frag in skb.frags() {
            if !whole {
                break;
            }
            let (page, offset, len) = frag.raw();
            // SAFETY: The device is live, the fragment lies in the page.
            let address =
                unsafe { bindings::ib_dma_map_page(self.device, page, offset, len, TO_DEVICE) };
            whole = self.note(&mut pieces, address, len, lkey, sges);
        }
        // INVARIANT: The mappings are those of this packet.
        self.pieces = pieces as u32;
        // The slot was empty: there is nothing to drop.
        mem::forget(self.skb.replace(skb));
        if whole {
            return Ok(self.pieces);
        }
        match self.take() {
            Some(skb) => Err(skb),
            // Cannot be: the packet was just put in.
            None => Ok(0),
        }
    }

    /// Notes a mapping as number `at`; false if it failed or is one too many.
    #[inline(always)]
    fn note(
        &mut self,
        at: &mut usize,
        address: u64,
        len: usize,
        lkey: u32,
        sges: &mut Sges,
    ) -> bool {
        // SAFETY: The device is live.
        if unsafe { bindings::ib_dma_mapping_error(self.device, address) } != 0 || *at >= PIECES {
            return false;
        }
        self.addresses[*at] = address;
        self.lens[*at] = len as u32;
        sges[*at] = bindings::ib_sge {
            addr: address,
            length: len as u32,
            lkey,
        };
        *at += 1;
        true
    }

    /// Unmaps the packet and gives it out.
    #[inline]
    fn take(&mut self) -> Option<Skb> {
        let skb = self.skb.take()?;
        let pieces = (self.pieces as usize).min(PIECES);
        let mut mapped = self.addresses[..pieces].iter().zip(&self.lens[..pieces]);
        if self.head != 0 {
            if let Some((&address, &len)) = mapped.next() {
                // SAFETY: By the type invariant this is the mapping of the linear part.
                unsafe {
                    bindings::ib_dma_unmap_single(self.device, address, len as usize, TO_DEVICE)
                };
            }
        }
        for (&address, &len) in mapped {
            // SAFETY: By the type invariant this is the mapping of a fragment.
            unsafe { bindings::ib_dma_unmap_page(self.device, address, len as usize, TO_DEVICE) };
        }
        // INVARIANT: Nothing is mapped any more.
        self.pieces = 0;
        Some(skb)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Follows how far a send queue has come.
#[derive(Clone)]
pub(crate) struct SendProgress(spsc::Watch<Slot>);

impl SendProgress {
    /// Where the next send will be.
    pub(crate) fn head(&self) -> u32 {
        self.0.head()
    }

    /// Whether all sends before `position` are done.
    pub(crate) fn passed(&self, position: u32) -> bool {
        self.0.passed(position)
    }

    /// How many sends are not done.
    pub(crate) fn outstanding(&self) -> u32 {
        self.0.outstanding()
    }
}

/// Makes the two ends of a send queue of `entries`, a power of two; `index` tells it from the
/// others that share its completion queue.
///
/// The completer goes where the handler of the send completion queue finds it before there is a
/// queue pair; the other end gets its queue pair by [`SendHalf::with`].
pub(crate) fn send_queue<K: Kind>(
    device: &Arc<Device>,
    entries: u32,
    index: u16,
) -> Result<(SendHalf<K>, SendCompleter<K>)> {
    let (producer, consumer) = spsc::ring(entries, || Slot::new(device))?;
    Ok((
        SendHalf {
            ring: producer,
            index,
            kind: PhantomData,
        },
        SendCompleter {
            ring: consumer,
            life: WrId::life_of(index, 0),
            index,
            kind: PhantomData,
            _device: device.clone(),
        },
    ))
}

/// A send queue without its queue pair.
pub(crate) struct SendHalf<K: Kind> {
    ring: spsc::Producer<Slot>,
    index: u16,
    kind: PhantomData<K>,
}

impl<K: Kind> SendHalf<K> {
    /// Completes the queue. The queue pair keeps the memory of what is posted to it.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the queue pair is of the other kind.
    /// - `EBUSY`: it has a send queue already.
    pub(crate) fn with(self, qp: Arc<Qp>) -> Result<SendQueue<K>> {
        if qp.kind() != K::QP {
            return Err(EINVAL);
        }
        let mut requests = KVVec::with_capacity(K::CHAIN, GFP_KERNEL)?;
        for _ in 0..K::CHAIN {
            requests.push(pin_init::zeroed(), GFP_KERNEL)?;
        }
        qp.keep(KBox::new(self.ring.watch(), GFP_KERNEL)?)?;
        Ok(SendQueue {
            ring: self.ring,
            requests,
            max_sge: qp.max_send_sge().clamp(1, PIECES),
            chained: 0,
            life: WrId::life_of(self.index, 0),
            index: self.index,
            lkey: qp.pd().lkey(),
            qp,
        })
    }
}

mod kind {
    //! What a send queue of one kind has of its own; sealed.

    /// # Safety
    ///
    /// `Wr` has a `struct ib_send_wr` at its start.
    pub(crate) unsafe trait Kind: 'static {
        /// The work request.
        type Wr: pin_init::Zeroable;
        /// Where a packet goes.
        type To<'a>;
        /// Whose queue it is.
        const QP: super::qp::Kind;
        /// Sends chained before they are posted.
        const CHAIN: usize;
        /// Whether the hardware fills in checksums, and cuts.
        const OFFLOADS: bool;

        fn address(wr: &mut Self::Wr, to: &Self::To<'_>);

        /// Has the packet cut into segments of `mss` bytes, with `header` in front of each. The
        /// header must live until the request is posted, and that has returned.
        fn cut(_wr: &mut Self::Wr, _header: &[u8], _mss: u32) {}
    }
}
use kind::Kind;

/// The send queue of a datagram queue pair.
pub(crate) struct Datagram;

// SAFETY: An `ib_ud_wr` starts so.
unsafe impl Kind for Datagram {
    type Wr = bindings::ib_ud_wr;
    type To<'a> = Destination<'a>;
    const QP: qp::Kind = qp::Kind::Datagram;
    const CHAIN: usize = 16;
    const OFFLOADS: bool = true;

    #[inline(always)]
    fn address(wr: &mut bindings::ib_ud_wr, to: &Destination<'_>) {
        wr.ah = to.ah.as_raw();
        wr.remote_qpn = to.qpn.0;
        wr.remote_qkey = to.qkey.0;
    }

    #[inline(always)]
    fn cut(wr: &mut bindings::ib_ud_wr, header: &[u8], mss: u32) {
        wr.header = header.as_ptr().cast_mut().cast();
        wr.hlen = header.len() as i32;
        wr.mss = mss as i32;
    }
}

/// The send queue of a connected queue pair: packets go to its peer.
pub(crate) struct Connected;

// SAFETY: It is one.
unsafe impl Kind for Connected {
    type Wr = bindings::ib_send_wr;
    type To<'a> = Peer;
    const QP: qp::Kind = qp::Kind::Connected;
    const CHAIN: usize = 4;
    const OFFLOADS: bool = false;

    #[inline(always)]
    fn address(_wr: &mut bindings::ib_send_wr, _to: &Peer) {}
}

/// A work request and its scatter list.
struct Request<W> {
    send: W,
    sges: Sges,
}

// SAFETY: Both fields are.
unsafe impl<W: Zeroable> Zeroable for Request<W> {}

/// The end of a send queue that posts.
pub(crate) struct SendQueue<K: Kind = Datagram> {
    // Dropped before the ring: a queue pair that was not reset may still read the packets, which go
    // with the ring if the completer is gone.
    qp: Arc<Qp>,
    ring: spsc::Producer<Slot>,
    requests: KVVec<Request<K::Wr>>,
    /// Pieces of a packet that the queue pair gathers.
    max_sge: usize,
    chained: usize,
    life: u32,
    lkey: u32,
    index: u16,
}

// SAFETY: The requests hold pointers only while a chain is built, to memory that the queue owns or
// that the caller keeps (see `push`).
unsafe impl<K: Kind> Send for SendQueue<K> {}

/// Where a datagram goes.
pub(crate) struct Destination<'a> {
    pub(crate) ah: &'a Ah,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: QKey,
}

/// Where a packet goes that is sent on a connection.
pub(crate) struct Peer;

/// Why a packet was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The ring is full.
    Full,
    /// No memory to make it fit, or to map it.
    Memory,
    /// It cannot be cut into segments.
    Malformed,
}

impl<K: Kind> SendQueue<K> {
    /// Follows the queue.
    pub(crate) fn progress(&self) -> SendProgress {
        SendProgress(self.ring.watch())
    }

    /// Free entries.
    #[inline]
    pub(crate) fn room(&mut self) -> u32 {
        self.ring.room()
    }

    /// Whether there is no free entry; cheaper than [`Self::room`].
    #[inline]
    pub(crate) fn is_full(&mut self) -> bool {
        self.ring.is_full()
    }

    /// Appends a packet to the chain. It is posted by the next [`Self::flush`], which happens here
    /// when the chain is long.
    ///
    /// A datagram: the address handle's reaper watches this queue, so the handle lives until the send is done,
    /// even if it is dropped right after this call.
    ///
    /// # Errors
    ///
    /// The packet comes back, and why.
    #[inline(always)]
    pub(crate) fn push(&mut self, mut skb: Skb, to: &K::To<'_>) -> Result<(), (Skb, Refused)> {
        let mut offload = Offload::Nothing;
        if K::OFFLOADS && skb.wants_offload() {
            offload = match skb.offload() {
                Ok(offload) => offload,
                Err(EPROTO) => return Err((skb, Refused::Malformed)),
                Err(_) => return Err((skb, Refused::Memory)),
            };
        }
        let linearize = skb.is_complex() || skb.frag_count() >= self.max_sge;
        if linearize && skb.linearize().is_err() {
            return Err((skb, Refused::Memory));
        }
        let id = WrId {
            life: self.life,
            position: self.ring.position(),
        };
        let (Some(request), Some(mut vacant)) =
            (self.requests.get_mut(self.chained), self.ring.vacant())
        else {
            return Err((skb, Refused::Full));
        };
        let Request { send, sges } = request;
        let (opcode, flags, front) = match offload {
            Offload::Nothing => (bindings::ib_wr_opcode_IB_WR_SEND, 0, 0),
            Offload::Checksum => (
                bindings::ib_wr_opcode_IB_WR_SEND,
                bindings::ib_send_flags_IB_SEND_IP_CSUM,
                0,
            ),
            Offload::Segments { header, mss } => {
                // It lives as long as the packet, which the ring keeps until it is sent.
                let front = skb.head().get(..header).unwrap_or_default();
                K::cut(send, front, mss);
                (
                    bindings::ib_wr_opcode_IB_WR_LSO,
                    bindings::ib_send_flags_IB_SEND_IP_CSUM,
                    front.len(),
                )
            }
        };
        let pieces = vacant
            .slot()
            .fill(skb, front, self.lkey, sges)
            .map_err(|skb| (skb, Refused::Memory))?;
        K::address(send, to);
        // CAST: By the contract of `Kind`.
        let wr = ptr::from_mut(send).cast::<bindings::ib_send_wr>();
        // SAFETY: `send` is borrowed, and by the contract of `Kind` starts with a request.
        let wr = unsafe { &mut *wr };
        wr.__bindgen_anon_1.wr_id = id.encode();
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = pieces as i32;
        wr.opcode = opcode;
        wr.send_flags = flags;
        wr.next = ptr::null_mut();
        vacant.push();
        self.chained += 1;
        Ok(())
    }

    /// Whether the chain must be posted before another packet can be pushed.
    #[inline]
    pub(crate) fn chain_is_full(&self) -> bool {
        self.chained == K::CHAIN
    }

    /// Whether something is chained.
    #[inline]
    pub(crate) fn is_chained(&self) -> bool {
        self.chained != 0
    }

    /// Posts the chain, the last request signalled; returns how many requests it had.
    ///
    /// # Errors
    ///
    /// The queue pair refused, and some of the requests will never complete. Their buffers stay in
    /// the queue: the queue pair must be reset.
    #[inline(always)]
    pub(crate) fn flush(&mut self) -> Result<usize> {
        let count = self.chained;
        if count == 0 {
            return Ok(0);
        }
        self.chained = 0;
        let requests = self.requests.as_mut_ptr();
        // The request at an index that is below their number.
        let wr = |at: usize| {
            // SAFETY: Callers pass an index that is below the number of requests.
            let send = unsafe { &raw mut (*requests.add(at)).send };
            // CAST: By the contract of `Kind`.
            send.cast::<bindings::ib_send_wr>()
        };
        for at in 1..count {
            // SAFETY: `at` and the one before are below the number of requests.
            unsafe { (*wr(at - 1)).next = wr(at) };
        }
        // SAFETY: `count` is not 0, and not above the number of requests.
        unsafe { (*wr(count - 1)).send_flags |= bindings::ib_send_flags_IB_SEND_SIGNALED };
        let mut bad = ptr::null();
        let qp = self.qp.as_raw();
        #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
        if super::fake::REFUSED_SENDS.strikes(qp as usize) {
            return Err(ENOMEM);
        }
        // SAFETY: The queue pair and its device are live.
        let post = unsafe { (*(*qp).device).ops.post_send }.ok_or(EOPNOTSUPP)?;
        // SAFETY: The requests are complete and chained, the buffers belong to the ring until
        // they complete, and the handles live as long (see `push`).
        to_result(unsafe { post(qp, wr(0), &mut bad) })?;
        Ok(count)
    }

    /// The queue pair refuses the next chain.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn refuse_sends(&self) {
        super::fake::REFUSED_SENDS.prepare(self.qp.as_raw() as usize);
    }

    /// Starts a new life of the queue pair: the chain is dropped.
    pub(crate) fn begin(&mut self, life: u32) {
        self.chained = 0;
        self.life = WrId::life_of(self.index, life);
    }
}

/// The end of a send queue that takes back what is done.
///
/// Its kind keeps the code of datagrams apart, so that it is inlined as if there were no other.
pub(crate) struct SendCompleter<K: Kind = Datagram> {
    ring: spsc::Consumer<Slot>,
    life: u32,
    index: u16,
    kind: PhantomData<K>,
    // Dropped after the ring, whose packets it unmaps.
    _device: Arc<Device>,
}

/// What completions gave back.
#[derive(Clone, Copy, Default)]
pub(crate) struct Completed {
    pub(crate) packets: u32,
    pub(crate) bytes: u32,
    /// Bytes of the packet that the completion named.
    pub(crate) last_bytes: u32,
}

impl<K: Kind> SendCompleter<K> {
    /// Takes back all sends up to the one that `id` names; `None` if it names none. `budget` is
    /// NAPI's.
    // A function of its own, as its loop wants all registers.
    #[inline(never)]
    pub(crate) fn complete(&mut self, id: u64, budget: usize) -> Option<Completed> {
        self.complete_with(id, |skb| skb.consume(budget))
    }

    /// As [`Self::complete`], with the packets given to `each`.
    #[inline(always)]
    pub(crate) fn complete_with(
        &mut self,
        id: u64,
        mut each: impl FnMut(Skb),
    ) -> Option<Completed> {
        let id = WrId::decode(id);
        if id.life != self.life {
            return None;
        }
        let ahead = id.position.wrapping_sub(self.ring.position());
        let mut done = Completed::default();
        let found = self.ring.take(ahead.checked_add(1)?, |slot| {
            done.packets = done.packets.wrapping_add(1);
            done.bytes = done.bytes.wrapping_add(slot.bytes);
            done.last_bytes = slot.bytes;
            if let Some(skb) = slot.take() {
                each(skb);
            }
        });
        found.then_some(done)
    }

    /// Free entries.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        self.ring.room()
    }

    /// Takes back everything, after the queue pair was reset, and starts a new life; returns how
    /// many packets were lost.
    pub(crate) fn begin(&mut self, life: u32) -> u32 {
        self.life = WrId::life_of(self.index, life);
        let lost = self.ring.len();
        self.ring.take(lost, |slot| drop(slot.take()));
        lost
    }
}

/// Bytes between the front pieces of two slots.
const FRONT_STRIDE: usize = 64;

/// Front pieces in a block.
const FRONTS: usize = Page::SIZE / FRONT_STRIDE;

/// A page's worth of front pieces, mapped.
///
/// # Invariants
///
/// `address` is the mapping of `bytes` by the live `device`.
struct FrontBlock {
    bytes: KBox<[u8; Page::SIZE]>,
    address: u64,
    device: *mut bindings::ib_device,
}

impl FrontBlock {
    fn new(device: &Device) -> Result<Self> {
        let mut bytes = KBox::new([0u8; Page::SIZE], GFP_KERNEL)?;
        let device = device.as_raw();
        // SAFETY: The device is live, and the block is that long.
        let address = unsafe {
            bindings::ib_dma_map_single(device, bytes.as_mut_ptr().cast(), Page::SIZE, FROM_DEVICE)
        };
        // SAFETY: The device is live.
        if unsafe { bindings::ib_dma_mapping_error(device, address) } != 0 {
            return Err(ENOMEM);
        }
        // INVARIANT: As just mapped.
        Ok(Self {
            bytes,
            address,
            device,
        })
    }
}

impl Drop for FrontBlock {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this is the mapping of the block.
        unsafe {
            bindings::ib_dma_unmap_single(self.device, self.address, Page::SIZE, FROM_DEVICE)
        };
    }
}

/// A slot of the receive ring: its request, which names the front piece and the page.
struct RecvSlot {
    wr: bindings::ib_recv_wr,
    sges: [bindings::ib_sge; 2],
    page: Option<Page>,
}

/// A receive queue and its buffers, with a front piece of `FRONT` bytes (64 at most) in each slot.
///
/// Receives of a datagram queue pair complete in the order in which they were posted, so what is
/// posted is a stretch of a ring, whose requests are chained for ever.
///
/// # Invariants
///
/// - The slots never move. Each request has the address of its slot's scatter list, and of the
///   next slot's request, the first slot being next to the last one. The first entry of the list is
///   the slot's front piece in `fronts`, the second one the slot's page, if there is one.
/// - The slots of positions in `tail..head` are posted, no others; they have a page. There are
///   `slots.len()` at most, which is a power of two, of which `cursor` is made.
pub(crate) struct RecvQueue<const FRONT: usize> {
    slots: KVVec<RecvSlot>,
    cursor: Cursor,
    head: u32,
    tail: u32,
    life: u32,
    /// Idle slots that are worth a doorbell.
    worth: u32,
    fronts: KVVec<FrontBlock>,
    pool: PagePool,
    pd: Arc<Pd>,
}

// SAFETY: The buffers may be used and unmapped on any CPU.
unsafe impl<const FRONT: usize> Send for RecvQueue<FRONT> {}

impl<const FRONT: usize> RecvQueue<FRONT> {
    /// Makes a queue of `entries` slots, a power of two.
    pub(crate) fn new(pd: Arc<Pd>, entries: u32) -> Result<Self> {
        const { assert!(FRONT <= FRONT_STRIDE) };
        if !entries.is_power_of_two() {
            return Err(EINVAL);
        }
        let count = entries as usize;
        let mut fronts = KVVec::with_capacity(count.div_ceil(FRONTS), GFP_KERNEL)?;
        for _ in 0..count.div_ceil(FRONTS) {
            fronts.push(FrontBlock::new(pd.device())?, GFP_KERNEL)?;
        }
        let mut slots = KVVec::with_capacity(count, GFP_KERNEL)?;
        for at in 0..count {
            let piece = |addr, length: usize| bindings::ib_sge {
                addr,
                length: length as u32,
                lkey: pd.lkey(),
            };
            let front = fronts[at / FRONTS].address + (at % FRONTS * FRONT_STRIDE) as u64;
            let slot = RecvSlot {
                wr: bindings::ib_recv_wr {
                    num_sge: 2,
                    ..pin_init::zeroed()
                },
                sges: [piece(front, FRONT), piece(0, Page::SIZE)],
                page: None,
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        let base = slots.as_mut_ptr();
        for at in 0..count {
            // INVARIANT: The vector has its last size, so the slots stay.
            // SAFETY: Both places are below `count`.
            unsafe {
                (*base.add(at)).wr.sg_list = (&raw mut (*base.add(at)).sges).cast();
                (*base.add(at)).wr.next = &raw mut (*base.add((at + 1) % count)).wr;
            }
        }
        // So that positions wrap soon, everywhere and always.
        let start = 0u32.wrapping_sub(entries);
        // INVARIANT: Nothing is posted.
        Ok(Self {
            cursor: Cursor::of_len(count),
            slots,
            head: start,
            tail: start,
            life: 0,
            worth: (entries / 8).clamp(1, RECV_CHAIN),
            fronts,
            pool: pd.device().page_pool(entries)?,
            pd,
        })
    }

    #[inline]
    fn slot(&mut self, position: u32) -> &mut RecvSlot {
        let at = self.cursor.slot(position);
        &mut self.slots[at]
    }

    /// A page for the slot, the one it has or a new one.
    #[inline]
    fn equip(&mut self, position: u32, may_sleep: bool) -> bool {
        self.slot(position).page.is_some() || self.equip_anew(position, may_sleep)
    }

    #[cold]
    fn equip_anew(&mut self, position: u32, may_sleep: bool) -> bool {
        let Some(page) = self.pool.alloc(may_sleep) else {
            return false;
        };
        let address = self.pool.address(&page);
        let slot = self.slot(position);
        // INVARIANT: The list names the page.
        slot.sges[1].addr = address;
        slot.page = Some(page);
        true
    }

    /// Posts the idle slots for which there are pages, once there are enough of them; returns for
    /// how many there was no page. Atomic context is allowed.
    ///
    /// # Errors
    ///
    /// The queue pair refused; the slots stay idle.
    #[inline]
    pub(crate) fn post(&mut self, qp: &Qp) -> Result<usize> {
        if self.idle() < self.worth {
            return Ok(0);
        }
        self.post_with(qp, false)
    }

    /// Posts all idle slots for which there are pages, in process context; otherwise as
    /// [`Self::post`].
    pub(crate) fn fill(&mut self, qp: &Qp) -> Result<usize> {
        self.post_with(qp, true)
    }

    fn post_with(&mut self, qp: &Qp, may_sleep: bool) -> Result<usize> {
        let idle = self.idle();
        let mut count = 0;
        while count < idle && self.equip(self.head.wrapping_add(count), may_sleep) {
            count += 1;
        }
        if count == 0 {
            return Ok(idle as usize);
        }
        let first: *const bindings::ib_recv_wr = &raw const self.slot(self.head).wr;
        let last = &raw mut self.slot(self.head.wrapping_add(count - 1)).wr;
        // SAFETY: `last` points at the request of a slot.
        let behind = unsafe { (*last).next };
        // SAFETY: As above. INVARIANT: The chain is made whole again below.
        unsafe { (*last).next = ptr::null_mut() };
        let raw = qp.as_raw();
        let mut bad = ptr::null();
        // SAFETY: The queue pair and its device are live.
        let status = match unsafe { (*(*raw).device).ops.post_recv } {
            // SAFETY: By the type invariants the requests are complete and chained; the buffers
            // belong to this queue, which lives in the handler of the queue pair's receive
            // completion queue.
            Some(post) => to_result(unsafe { post(raw, first, &mut bad) }),
            None => {
                bad = first;
                Err(EOPNOTSUPP)
            }
        };
        // SAFETY: As above.
        unsafe { (*last).next = behind };
        let accepted = match status {
            Ok(()) => count,
            Err(_) => (0..count)
                .find(|&at| ptr::eq(&raw const self.slot(self.head.wrapping_add(at)).wr, bad))
                .unwrap_or(0),
        };
        // INVARIANT: These were posted, and have pages.
        self.head = self.head.wrapping_add(accepted);
        status?;
        Ok((idle - count) as usize)
    }

    /// The oldest slot that is posted, if `id` names it; it is no longer posted then.
    #[inline]
    pub(crate) fn take(&mut self, id: u64) -> Option<Received<'_, FRONT>> {
        let at = self.cursor.slot(self.tail);
        if self.tail == self.head || id != self.id(at).encode() {
            return None;
        }
        // INVARIANT: It is not posted any more.
        self.tail = self.tail.wrapping_add(1);
        let slot = self.slots.get_mut(at)?;
        let block = &self.fronts.get(at / FRONTS)?.bytes;
        let front = &block[at % FRONTS * FRONT_STRIDE..][..FRONT_STRIDE];
        let device = self.pd.device().as_raw();
        let received = Received {
            slot,
            // SAFETY: `FRONT` is at most `FRONT_STRIDE`, checked in `new`.
            front: unsafe { &*front.as_ptr().cast() },
            pool: &mut self.pool,
            device,
            // SAFETY: The device is live.
            sync: unsafe { bindings::ib_dma_need_sync(device) },
        };
        received.sync_front();
        Some(received)
    }

    /// Whether `id` is of the present life.
    pub(crate) fn is_of_this_life(&self, id: u64) -> bool {
        WrId::decode(id).life == self.life
    }

    /// What the request of the slot at an index is called.
    #[inline]
    fn id(&self, at: usize) -> WrId {
        WrId {
            life: self.life,
            position: at as u32,
        }
    }

    /// Takes back all slots, after the queue pair was reset, and starts a new life.
    pub(crate) fn begin(&mut self, life: u32) {
        // INVARIANT: Nothing is posted any more.
        self.head = self.tail;
        self.life = WrId::life_of(0, life);
        for at in 0..self.slots.len() {
            let id = self.id(at).encode();
            self.slots[at].wr.__bindgen_anon_1.wr_id = id;
        }
    }

    /// Gives the pages of idle slots back.
    pub(crate) fn release(&mut self) {
        for count in 0..self.idle() {
            self.slot(self.head.wrapping_add(count)).page = None;
        }
    }

    fn idle(&self) -> u32 {
        self.cursor.room(self.head, self.tail)
    }

    /// Slots that wait for a datagram.
    pub(crate) fn waiting(&self) -> usize {
        self.head.wrapping_sub(self.tail) as usize
    }
}

/// A slot that a datagram was written to. Dropping it makes the slot idle.
///
/// # Invariants
///
/// The slot is not posted, and will not be for as long as this lives; its page is of `pool`, which
/// is the live `device`'s. `front` is the slot's front piece. `sync` says whether the memory is to
/// be handed to the CPU and back.
pub(crate) struct Received<'a, const FRONT: usize> {
    slot: &'a mut RecvSlot,
    front: &'a [u8; FRONT],
    pool: &'a mut PagePool,
    device: *mut bindings::ib_device,
    sync: bool,
}

impl<const FRONT: usize> Received<'_, FRONT> {
    /// Gives the front piece to the CPU.
    #[inline]
    fn sync_front(&self) {
        if self.sync {
            self.sync_for_cpu(0, FRONT);
        }
    }

    /// Gives the first `len` bytes of the slot's piece number `piece` to the CPU.
    #[cold]
    fn sync_for_cpu(&self, piece: usize, len: usize) {
        let piece = &self.slot.sges[piece];
        let len = len.min(piece.length as usize);
        // SAFETY: By the type invariants this is the mapping of the piece.
        unsafe { bindings::ib_dma_sync_single_for_cpu(self.device, piece.addr, len, FROM_DEVICE) };
    }

    /// What came in front.
    #[inline]
    pub(crate) fn front(&self) -> &[u8; FRONT] {
        self.front
    }

    /// The first `len` bytes of the page, fewer if it is shorter.
    #[inline]
    pub(crate) fn body(&self, len: usize) -> &[u8] {
        if self.sync {
            self.sync_for_cpu(1, len);
        }
        match &self.slot.page {
            Some(page) => &page.bytes()[..len.min(Page::SIZE)],
            None => &[],
        }
    }

    /// Swaps the page, to which `len` bytes were written, for a new one; `None`, and the page
    /// stays, when memory is out.
    #[inline]
    pub(crate) fn take_page(&mut self, len: usize) -> Option<Page> {
        let fresh = self.pool.alloc(false)?;
        if self.sync {
            self.sync_for_cpu(1, len);
        }
        // INVARIANT: The list names the page.
        self.slot.sges[1].addr = self.pool.address(&fresh);
        self.slot.page.replace(fresh)
    }

    /// Gives all to the device.
    #[cold]
    fn sync_for_device(&self) {
        for piece in &self.slot.sges {
            let len = piece.length as usize;
            // SAFETY: By the type invariants these are the mappings of the front piece and of a
            // page, and as long.
            unsafe {
                bindings::ib_dma_sync_single_for_device(self.device, piece.addr, len, FROM_DEVICE)
            };
        }
    }
}

impl<const FRONT: usize> Drop for Received<'_, FRONT> {
    #[inline]
    fn drop(&mut self) {
        if self.sync {
            self.sync_for_device();
        }
    }
}
