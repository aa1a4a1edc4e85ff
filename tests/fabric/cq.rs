// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Completion queues.
//!
//! Lock order: queue pair's send queue → its or another's receive queue → shared receive queue →
//! completion queue. The handler is never called with a lock held: whoever pushes completions collects the handlers to
//! call in [`Kicks`], and runs them when it has let go of everything.

use crate::{
    fault::Fault,
    glue::{
        Channel,
        QpHandle, //
    },
    hca::Hca,
    qp::Qp, //
};
use core::mem::ManuallyDrop;
use kernel::{
    interrupt::LocalInterruptDisabled,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        SpinLockIrq, //
    },
};

/// How a request ended; the numbers are `ib_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Status(pub(crate) u32);

impl Status {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const LOC_LEN_ERR: Self = Self(1);
    pub(crate) const LOC_QP_OP_ERR: Self = Self(2);
    pub(crate) const LOC_PROT_ERR: Self = Self(4);
    pub(crate) const WR_FLUSH_ERR: Self = Self(5);
    pub(crate) const REM_INV_REQ_ERR: Self = Self(9);
    pub(crate) const REM_OP_ERR: Self = Self(11);
    pub(crate) const RETRY_EXC_ERR: Self = Self(12);
    pub(crate) const RNR_RETRY_EXC_ERR: Self = Self(13);
}

/// What kind of request it was; the numbers are `ib_wc_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct WcOpcode(pub(crate) u32);

impl WcOpcode {
    pub(crate) const SEND: Self = Self(0);
    pub(crate) const RDMA_WRITE: Self = Self(1);
    pub(crate) const LSO: Self = Self(10);
    pub(crate) const RECV: Self = Self(1 << 7);
}

/// Flags of a completion; the numbers are `ib_wc_flags`.
pub(crate) const WC_GRH: u32 = 1;
pub(crate) const WC_WITH_IMM: u32 = 2;
pub(crate) const WC_IP_CSUM_OK: u32 = 8;

/// A completion, laid out as the front of an `ib_wc`, see `glue::poll_cq`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: Status,
    pub(crate) opcode: WcOpcode,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) qp: QpHandle,
    pub(crate) imm: u32,
    pub(crate) src_qp: u32,
    pub(crate) slid: u32,
    pub(crate) flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
    pub(crate) port: u32,
}

impl Wc {
    #[inline(always)]
    pub(crate) const fn new(qp: QpHandle, wr_id: u64, status: Status, opcode: WcOpcode) -> Self {
        Self {
            wr_id,
            status,
            opcode,
            vendor_err: 0,
            byte_len: 0,
            qp,
            imm: 0,
            src_qp: 0,
            slid: 0,
            flags: 0,
            pkey_index: 0,
            sl: 0,
            dlid_path_bits: 0,
            port: 1,
        }
    }
}

/// Which queue of a queue pair a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Send,
    Recv,
}

/// Whose a completion is, and how many slots polling it gives back.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    /// As [`Cq::enroll`] says.
    pub(crate) seat: u32,
    pub(crate) side: Side,
    pub(crate) slots: u16,
}

/// A completion and its owner.
struct Entry {
    wc: Wc,
    owner: Owner,
}

impl Entry {
    const EMPTY: Self = Self {
        wc: Wc::new(QpHandle::NONE, 0, Status::SUCCESS, WcOpcode::SEND),
        owner: Owner {
            seat: 0,
            side: Side::Send,
            slots: 0,
        },
    };
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Next,
}

struct Ring {
    entries: KVVec<Entry>,
    /// The queue pairs that complete here. What they have completed is purged before they leave.
    seats: KVec<Option<Arc<Qp>>>,
    head: usize,
    len: usize,
    armed: Armed,
    dead: bool,
}

impl Ring {
    /// The entry at the head, which is free from now on, and its queue pair.
    #[inline(always)]
    fn pop(&mut self) -> Option<(&Entry, Option<&Arc<Qp>>)> {
        if self.len == 0 {
            return None;
        }
        let entry = self.entries.get(self.head)?;
        let next = self.head.wrapping_add(1);
        self.head = if next == self.entries.len() { 0 } else { next };
        self.len -= 1;
        let qp = self.seats.get(entry.owner.seat as usize);
        Some((entry, qp.and_then(Option::as_ref)))
    }

    /// A free entry at the end, if there is room.
    #[inline(always)]
    fn push(&mut self) -> Option<&mut Entry> {
        let size = self.entries.len();
        if self.len == size {
            return None;
        }
        let at = self.head.wrapping_add(self.len);
        let at = if at >= size { at - size } else { at };
        self.len = self.len.wrapping_add(1);
        self.entries.get_mut(at)
    }
}

/// A completion queue.
#[pin_data]
pub(crate) struct Cq {
    hca: Arc<Hca>,
    #[pin]
    ring: SpinLockIrq<Ring>,
    #[pin]
    channel: Channel,
    moderation: Atomic<u32>,
}

impl Cq {
    pub(crate) fn new(
        hca: Arc<Hca>,
        entries: u32,
        channel: impl PinInit<Channel>,
    ) -> Result<Arc<Self>> {
        let mut ring = KVVec::with_capacity(entries as usize, GFP_KERNEL)?;
        for _ in 0..entries {
            ring.push(Entry::EMPTY, GFP_KERNEL)?;
        }
        let cq = Arc::pin_init(
            pin_init!(Self {
                hca,
                ring <- new_spinlock_irq!(Ring {
                    entries: ring,
                    seats: KVec::new(),
                    head: 0,
                    len: 0,
                    armed: Armed::No,
                    dead: false,
                }, "ibf_cq"),
                channel <- channel,
                moderation: Atomic::new(0),
            }),
            GFP_KERNEL,
        )?;
        cq.hca.objects.cqs.fetch_add(1, Relaxed);
        Ok(cq)
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// What is left when the CQ is destroyed.
    pub(crate) fn retire(&self) {
        let left = {
            let mut ring = self.ring.lock();
            ring.dead = true;
            ring.len = 0;
            (
                core::mem::take(&mut ring.entries),
                core::mem::take(&mut ring.seats),
            )
        };
        drop(left);
        self.hca.objects.cqs.fetch_sub(1, Relaxed);
    }

    /// A queue pair will complete here; returns its seat.
    pub(crate) fn enroll(&self, qp: &Arc<Qp>) -> Result<u32> {
        let mut ring = self.ring.lock();
        let seat = match ring.seats.iter().position(Option::is_none) {
            Some(seat) => seat,
            None => {
                ring.seats.push(None, GFP_ATOMIC)?;
                ring.seats.len() - 1
            }
        };
        if let Some(free) = ring.seats.get_mut(seat) {
            *free = Some(qp.clone());
        }
        Ok(seat as u32)
    }

    /// A queue pair whose completions were purged, and that completes nothing more, leaves.
    pub(crate) fn dismiss(&self, seat: u32) {
        let mut ring = self.ring.lock();
        let qp = ring.seats.get_mut(seat as usize).and_then(Option::take);
        drop(ring);
        drop(qp);
    }

    /// Kept, and without effect.
    pub(crate) fn moderate(&self, count: u16, period: u16) {
        self.moderation
            .store(u32::from(count) << 16 | u32::from(period), Relaxed);
    }

    /// Gives out up to `count` completions.
    #[inline]
    pub(crate) fn poll(&self, count: usize, mut give: impl FnMut(&Wc)) -> usize {
        let mut ring = self.ring.lock();
        let mut given = 0;
        while given < count {
            let Some((entry, qp)) = ring.pop() else { break };
            if let Some(qp) = qp {
                qp.give_back(entry.owner);
                give(&entry.wc);
                given += 1;
            }
        }
        given
    }

    /// Asks for one call of the handler; says whether there are completions already.
    pub(crate) fn arm(&self, solicited: bool) -> bool {
        let mut ring = self.ring.lock();
        if !solicited {
            ring.armed = Armed::Next;
        } else if ring.armed == Armed::No {
            ring.armed = Armed::Solicited;
        }
        ring.len != 0
    }

    /// Adds a completion of `qp`.
    #[inline(always)]
    pub(crate) fn push(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        qp: &Qp,
        wc: &Wc,
        owner: Owner,
        solicited: bool,
        kicks: &mut Kicks,
    ) {
        let mut ring = self.ring.lock_with(irq);
        if ring.dead {
            return;
        }
        let Some(entry) = ring.push() else {
            // As hardware does: the queue is broken for good.
            ring.dead = true;
            drop(ring);
            self.overflow();
            return;
        };
        entry.wc = *wc;
        entry.owner = owner;
        let wanted = match ring.armed {
            Armed::No => return,
            Armed::Next => true,
            Armed::Solicited => solicited || wc.status != Status::SUCCESS,
        };
        if wanted {
            ring.armed = Armed::No;
            drop(ring);
            self.call_later(qp, kicks);
        }
    }

    #[inline(never)]
    fn call_later(self: &Arc<Self>, qp: &Qp, kicks: &mut Kicks) {
        if qp.fault(Fault::LoseCqEvent).is_none() {
            kicks.add(self);
        }
    }

    #[cold]
    fn overflow(&self) {
        self.hca.fabric().anomalies.cq_overflow.hit();
        pr_err!("ibf{}: completion queue overflow\n", self.hca.slot());
        self.channel.fail();
    }

    /// Takes all completions of a queue pair off, which is being reset or destroyed.
    pub(crate) fn purge(&self, qp: &Arc<Qp>) {
        let mut ring = self.ring.lock();
        for _ in 0..ring.len {
            let Some((entry, owner)) = ring.pop() else {
                break;
            };
            match owner {
                None => continue,
                Some(owner) if Arc::ptr_eq(owner, qp) => {
                    qp.give_back(entry.owner);
                    continue;
                }
                Some(_) => {}
            }
            let (wc, owner) = (entry.wc, entry.owner);
            // There is room: one was taken off.
            if let Some(entry) = ring.push() {
                *entry = Entry { wc, owner };
            }
        }
    }

    fn kick(&self) {
        self.channel.notify(self.hca.interrupts());
    }
}

/// What is to be done when all locks are dropped, by [`Kicks::run`]. Until then it must not be
/// forgotten: there is nothing to drop afterwards, which no packet has to find out.
pub(crate) struct Kicks(ManuallyDrop<Option<Todo>>);

#[derive(Default)]
struct Todo {
    cqs: [Option<Arc<Cq>>; Kicks::SIZE],
    count: usize,
    /// Both ends of a connection may break.
    failed: [Option<Arc<Qp>>; 2],
}

impl Kicks {
    const SIZE: usize = 4;

    #[inline]
    pub(crate) fn new() -> Self {
        Self(ManuallyDrop::new(None))
    }

    /// The handler of `cq` is to be called.
    fn add(&mut self, cq: &Arc<Cq>) {
        let todo = self.0.get_or_insert_default();
        match todo.cqs.get_mut(todo.count) {
            Some(slot) => {
                *slot = Some(cq.clone());
                todo.count += 1;
            }
            // By interrupt: that needs no context.
            None => cq.channel.notify(true),
        }
    }

    /// `qp` is to go to the error state.
    pub(crate) fn fail(&mut self, qp: &Arc<Qp>) {
        let [first, second] = &mut self.0.get_or_insert_default().failed;
        if first.is_none() {
            *first = Some(qp.clone());
        } else {
            *second = Some(qp.clone());
        }
    }

    /// Does it.
    #[inline]
    pub(crate) fn run(&mut self) {
        if self.0.is_some() {
            self.run_slow();
        }
    }

    #[inline(never)]
    fn run_slow(&mut self) {
        while let Some(todo) = self.0.take() {
            for cq in todo.cqs.into_iter().flatten() {
                cq.kick();
            }
            for qp in todo.failed.into_iter().flatten() {
                qp.fail(self);
            }
        }
    }
}
