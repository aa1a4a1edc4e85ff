// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Queue pairs: states, queues, flushing.
//!
//! Lock order: `modify` → send queue → groups → receive queue (one's own or another's) → shared
//! receive queue → subnet → completion queue. Nobody takes a send queue while it holds anything but
//! `modify`.
//!
//! A slot is in use from posting until its completion was polled, as in hardware; an unsignalled
//! send goes with the next signalled one.
//!
//! A destroyed queue pair is dead: whoever still holds it finds no queues.

#[path = "rc.rs"]
pub(crate) mod rc;

use crate::{
    cq::{
        Cq,
        Kicks,
        Owner,
        Side,
        Status,
        Wc,
        WcOpcode,
        WC_GRH,
        WC_IP_CSUM_OK,
        WC_WITH_IMM, //
    },
    fault::Fault,
    glue::{
        self,
        transition_ok,
        Cursor,
        Notifier,
        Pd,
        QpEvent,
        QpHandle,
        RecvWr,
        SendWr,
        Sge,
        PKEYS, //
    },
    hca::{
        Did,
        Hca,
        HcaConfig, //
    },
    srq::Srq,
    ud::{
        self,
        Address,
        Header,
        Lost,
        Payload,
        Request, //
    },
};
use core::slice;
use kernel::{
    interrupt::{
        local_interrupt_disable,
        LocalInterruptDisabled, //
    },
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        SpinLockGuard,
        SpinLockIrq, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// Kinds of queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Smi,
    Gsi,
    Ud,
    Rc,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Reset,
    Init,
    Rtr,
    Rts,
    Sqd,
    Sqe,
    Err,
    /// Destroyed.
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opcode {
    Send,
    SendImm,
    Lso,
    RdmaWrite,
    Other,
}

impl Opcode {
    fn completion(self) -> WcOpcode {
        match self {
            Self::Send | Self::SendImm | Self::Other => WcOpcode::SEND,
            Self::Lso => WcOpcode::LSO,
            Self::RdmaWrite => WcOpcode::RDMA_WRITE,
        }
    }
}

/// Flags of a send; the numbers are `ib_send_flags`.
pub(crate) const SEND_SIGNALED: u32 = 2;
pub(crate) const SEND_SOLICITED: u32 = 4;
pub(crate) const SEND_IP_CSUM: u32 = 16;

/// The longest header of a large send.
pub(crate) const MAX_HEADER: usize = 192;

/// What a queue pair is made of.
pub(crate) struct QpConfig {
    pub(crate) handle: QpHandle,
    pub(crate) kind: Kind,
    pub(crate) pd: Arc<Pd>,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    /// In place of a receive queue of its own.
    pub(crate) srq: Option<Arc<Srq>>,
    pub(crate) send_slots: u32,
    pub(crate) recv_slots: u32,
    pub(crate) send_sges: u32,
    pub(crate) recv_sges: u32,
    pub(crate) signal_all: bool,
    pub(crate) lso: bool,
    pub(crate) block_loopback: bool,
}

/// What is to change.
pub(crate) struct Modify {
    pub(crate) mask: u32,
    pub(crate) from: Option<State>,
    pub(crate) to: Option<State>,
    pub(crate) qkey: Option<u32>,
    pub(crate) pkey_index: Option<u16>,
    pub(crate) port: Option<u32>,
    pub(crate) rc: rc::Attributes,
}

/// What a queue pair says of itself.
pub(crate) struct View {
    pub(crate) state: State,
    pub(crate) qkey: u32,
    pub(crate) pkey_index: u16,
    /// The other end of a connection.
    pub(crate) peer: u32,
    pub(crate) send_slots: u32,
    pub(crate) recv_slots: u32,
    pub(crate) send_sges: u32,
    pub(crate) recv_sges: u32,
}

/// A send that waits to be executed.
#[derive(Clone, Copy)]
pub(crate) struct SendWqe {
    pub(crate) wr_id: u64,
    pub(crate) opcode: Opcode,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) address: Address,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) pkey_index: u16,
    pub(crate) mss: u16,
    pub(crate) header_len: u16,
    sges: u16,
    fault: Option<u8>,
}

impl SendWqe {
    fn request(&self) -> Request<'_> {
        Request {
            opcode: self.opcode,
            flags: self.flags,
            imm: self.imm,
            address: &self.address,
            qpn: self.qpn,
            qkey: self.qkey,
            pkey_index: self.pkey_index,
            mss: self.mss,
        }
    }

    const EMPTY: Self = Self {
        wr_id: 0,
        opcode: Opcode::Other,
        flags: 0,
        imm: 0,
        address: Address::NONE,
        qpn: 0,
        qkey: 0,
        pkey_index: 0,
        mss: 0,
        header_len: 0,
        sges: 0,
        fault: None,
    };
}

/// What is left of a send when it completes.
struct Done {
    wr_id: u64,
    flags: u32,
    opcode: Opcode,
}

/// The send queue: requests posted and not executed yet.
pub(crate) struct Sq {
    pub(crate) state: State,
    pub(crate) qkey: u32,
    pub(crate) pkey_index: u16,
    wqes: KVVec<SendWqe>,
    sges: KVVec<Sge>,
    headers: KVVec<[u8; MAX_HEADER]>,
    /// For packets that are put together before they go.
    scratch: KVVec<u8>,
    flow: Option<ud::Flow>,
    head: usize,
    len: usize,
    /// Slots of executed sends whose completions were suppressed.
    silent: u32,
    /// Whether the executor knows that there is something to do.
    scheduled: bool,
    rc: rc::Sender,
}

impl Sq {
    fn pop(&mut self) {
        self.head += 1;
        if self.head == self.wqes.len() {
            self.head = 0;
        }
        self.len -= 1;
    }
}

#[derive(Clone, Copy)]
struct RecvWqe {
    wr_id: u64,
    /// Bytes of its memory, or none if that is not the queue pair's.
    room: u32,
    /// Where in the queue's list its memory is.
    first: u32,
    sges: u16,
}

/// The receive queue: buffers posted and not filled yet.
struct Rq {
    state: State,
    qkey: u32,
    pkey_index: u16,
    wqes: KVVec<RecvWqe>,
    sges: KVVec<Sge>,
    head: usize,
    len: usize,
    /// Events, as bits, that the consumer is to be told of.
    events: u32,
    rc: rc::Receiver,
}

/// A queue pair.
#[pin_data]
pub(crate) struct Qp {
    handle: QpHandle,
    number: u32,
    kind: Kind,
    hca: Arc<Hca>,
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    send_slots: u32,
    recv_slots: u32,
    send_sges: u32,
    recv_sges: u32,
    signal_all: bool,
    lso: bool,
    pub(crate) block_loopback: bool,
    sends_used: Atomic<u32>,
    recvs_used: Atomic<u32>,
    /// Whose completions are its, see [`Cq::enroll`].
    send_seat: Atomic<u32>,
    recv_seat: Atomic<u32>,
    /// As in the receive queue, for those who look before they take its lock.
    pkey_index: Atomic<u32>,
    #[pin]
    modify: SpinLockIrq<()>,
    #[pin]
    sq: SpinLockIrq<Sq>,
    #[pin]
    rq: SpinLockIrq<Rq>,
    #[pin]
    notifier: Notifier,
    #[pin]
    work: Work<Qp, 1>,
}

impl_has_work! {
    impl HasWork<Qp, 1> for Qp { self.work }
}

impl WorkItem<1> for Qp {
    type Pointer = Arc<Self>;

    /// Tells the consumer what has happened.
    fn run(this: Arc<Self>) {
        let events = core::mem::take(&mut this.rq.lock().events);
        for event in [QpEvent::LastWqe, QpEvent::Fatal] {
            if events & event.bit() != 0 {
                this.notifier.notify(event);
            }
        }
    }
}

impl Qp {
    pub(crate) fn new(hca: Arc<Hca>, config: QpConfig) -> Result<Arc<Self>> {
        let send_sges = config.send_sges.max(1);
        let recv_sges = config.recv_sges.max(1);
        // The MAD layer takes two for granted.
        let most_sges = match config.kind {
            Kind::Smi | Kind::Gsi => HcaConfig::MAX_SEND_SGE,
            Kind::Ud | Kind::Rc => hca.config().max_send_sge,
        };
        if config.send_slots > HcaConfig::MAX_WR
            || config.recv_slots > HcaConfig::MAX_WR
            || send_sges > u32::from(most_sges)
            || recv_sges > u32::from(HcaConfig::MAX_RECV_SGE)
        {
            return Err(EINVAL);
        }
        let (sends, recvs) = (config.send_slots as usize, config.recv_slots as usize);
        let sq = Sq {
            state: State::Reset,
            qkey: 0,
            pkey_index: 0,
            wqes: KVVec::from_elem(SendWqe::EMPTY, sends, GFP_KERNEL)?,
            sges: empty_sges(sends * send_sges as usize)?,
            headers: match config.lso {
                true => KVVec::from_elem([0; MAX_HEADER], sends, GFP_KERNEL)?,
                false => KVVec::new(),
            },
            scratch: match config.kind {
                Kind::Rc => KVVec::new(),
                Kind::Smi | Kind::Gsi | Kind::Ud => KVVec::from_elem(0, ud::SCRATCH, GFP_KERNEL)?,
            },
            flow: None,
            head: 0,
            len: 0,
            silent: 0,
            scheduled: false,
            rc: rc::Sender::NEW,
        };
        let rq = Rq {
            state: State::Reset,
            qkey: 0,
            pkey_index: 0,
            wqes: empty_recvs(recvs, recv_sges)?,
            sges: empty_sges(recvs * recv_sges as usize)?,
            head: 0,
            len: 0,
            events: 0,
            rc: rc::Receiver::NEW,
        };
        let number = hca.number_for(config.kind)?;
        let notifier = Notifier::new(config.handle);
        let qp = Arc::pin_init(
            pin_init!(Self {
                handle: config.handle,
                number,
                kind: config.kind,
                hca,
                pd: config.pd,
                send_cq: config.send_cq,
                recv_cq: config.recv_cq,
                srq: config.srq,
                send_slots: config.send_slots,
                recv_slots: config.recv_slots,
                send_sges,
                recv_sges,
                signal_all: config.signal_all,
                lso: config.lso,
                block_loopback: config.block_loopback,
                sends_used: Atomic::new(0),
                recvs_used: Atomic::new(0),
                send_seat: Atomic::new(0),
                recv_seat: Atomic::new(0),
                pkey_index: Atomic::new(0),
                modify <- new_spinlock_irq!((), "ibf_qp_modify"),
                sq <- new_spinlock_irq!(sq, "ibf_sq"),
                rq <- new_spinlock_irq!(rq, "ibf_rq"),
                notifier <- notifier,
                work <- new_work!("ibf_qp_events"),
            }),
            GFP_KERNEL,
        )?;
        qp.send_seat.store(qp.send_cq.enroll(&qp)?, Relaxed);
        let placed = qp.recv_cq.enroll(&qp).and_then(|seat| {
            qp.recv_seat.store(seat, Relaxed);
            qp.hca.add_qp(&qp).inspect_err(|_| qp.recv_cq.dismiss(seat))
        });
        if let Err(error) = placed {
            qp.send_cq.dismiss(qp.send_seat.load(Relaxed));
            return Err(error);
        }
        qp.hca.objects.qps.fetch_add(1, Relaxed);
        Ok(qp)
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.pd.lkey
    }

    #[inline]
    pub(crate) fn pkey_index(&self) -> u16 {
        self.pkey_index.load(Relaxed) as u16
    }

    /// Slots whose completions were polled.
    #[inline]
    pub(crate) fn give_back(&self, owner: Owner) {
        let slots = u32::from(owner.slots);
        match (owner.side, &self.srq) {
            (Side::Send, _) => drop(self.sends_used.fetch_sub(slots, Relaxed)),
            (Side::Recv, None) => drop(self.recvs_used.fetch_sub(slots, Relaxed)),
            (Side::Recv, Some(srq)) => srq.give_back(slots),
        }
    }

    /// Of a completion that frees `slots` of the send queue.
    #[inline(always)]
    fn sender(&self, slots: u32) -> Owner {
        Owner {
            seat: self.send_seat.load(Relaxed),
            side: Side::Send,
            // At most `HcaConfig::MAX_WR`.
            slots: slots as u16,
        }
    }

    /// Of a completion of a receive.
    #[inline(always)]
    fn receiver(&self) -> Owner {
        Owner {
            seat: self.recv_seat.load(Relaxed),
            side: Side::Recv,
            slots: 1,
        }
    }

    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Tells the consumer of an event, later. Not of a queue pair that is dead: its destruction
    /// waits for what was told before.
    fn raise(self: &Arc<Self>, rq: &mut Rq, event: QpEvent) {
        rq.events |= event.bit();
        // Refused if queued already, which is as good.
        let _ = self.hca.fabric().events().enqueue::<_, 1>(self.clone());
    }

    pub(crate) fn view(&self) -> View {
        let sq = self.sq.lock();
        View {
            state: sq.state,
            qkey: sq.qkey,
            pkey_index: sq.pkey_index,
            peer: sq.rc.peer(),
            send_slots: self.send_slots,
            recv_slots: self.recv_slots,
            send_sges: self.send_sges,
            recv_sges: self.recv_sges,
        }
    }

    pub(crate) fn modify(self: &Arc<Self>, modify: &Modify) -> Result {
        if modify.port.is_some_and(|port| port != 1)
            || modify
                .pkey_index
                .is_some_and(|index| usize::from(index) >= PKEYS)
            || !modify.rc.sound()
        {
            return Err(EINVAL);
        }
        if let Some(state) = modify.to {
            let fault = match state {
                State::Reset => Some(Fault::ModifyQpReset),
                State::Init => Some(Fault::ModifyQpInit),
                State::Rtr => Some(Fault::ModifyQpRtr),
                State::Rts => Some(Fault::ModifyQpRts),
                State::Err => Some(Fault::ModifyQpErr),
                State::Sqd | State::Sqe | State::Dead => None,
            };
            if let Some(fault) = fault {
                self.hca.verb(fault)?;
            }
        }
        let mut kicks = Kicks::new();
        let irq = local_interrupt_disable();
        let result = self.modify_locked(&irq, modify, &mut kicks);
        drop(irq);
        if modify.to == Some(State::Reset) && result.is_ok() {
            self.purge();
        }
        kicks.run();
        result
    }

    fn modify_locked(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        modify: &Modify,
        kicks: &mut Kicks,
    ) -> Result {
        let _modify = self.modify.lock_with(irq);
        let mut sq = self.sq.lock_with(irq);
        let mut rq = self.rq.lock_with(irq);
        let now = sq.state;
        if modify.from.is_some_and(|from| from != now) {
            return Err(EINVAL);
        }
        let next = modify.to.unwrap_or(now);
        if !transition_ok(now, next, self.kind, modify.mask) {
            // The stock driver tries this one when it stops what it never started.
            if (now, next) != (State::Reset, State::Err) {
                self.hca.fabric().anomalies.bad_transition.hit();
            }
            return Err(EINVAL);
        }
        if let Some(qkey) = modify.qkey {
            sq.qkey = qkey;
            rq.qkey = qkey;
        }
        if let Some(index) = modify.pkey_index {
            sq.pkey_index = index;
            rq.pkey_index = index;
            self.pkey_index.store(u32::from(index), Relaxed);
            // The ways of datagrams to this queue pair end here.
            drop(self.hca.fabric().net().lock_with(irq));
        }
        sq.state = next;
        rq.state = next;
        self.modify_connection(&mut sq, &mut rq, modify, next);
        match next {
            State::Reset => {
                sq.len = 0;
                sq.silent = 0;
                rq.len = 0;
            }
            State::Err if now != State::Err => {
                self.flush_sends(irq, &mut sq, kicks);
                self.flush_recvs(irq, &mut rq, kicks);
                self.tell_last(&mut rq);
            }
            State::Rts => {
                if self.kind == Kind::Rc && now == State::Rtr {
                    self.hca.connected.add(1, Relaxed);
                }
                if sq.len != 0 {
                    self.schedule(&mut sq);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Forgets all completions; afterwards all slots are free.
    fn purge(self: &Arc<Self>) {
        self.send_cq.purge(self);
        self.recv_cq.purge(self);
        self.sends_used.store(0, Relaxed);
        self.recvs_used.store(0, Relaxed);
    }

    /// To the error state, as hardware does by itself.
    pub(crate) fn fail(self: &Arc<Self>, kicks: &mut Kicks) {
        let irq = local_interrupt_disable();
        let _modify = self.modify.lock_with(&irq);
        let mut sq = self.sq.lock_with(&irq);
        let mut rq = self.rq.lock_with(&irq);
        if matches!(sq.state, State::Reset | State::Dead) {
            return;
        }
        sq.state = State::Err;
        rq.state = State::Err;
        self.flush_sends(&irq, &mut sq, kicks);
        self.flush_recvs(&irq, &mut rq, kicks);
        self.tell_last(&mut rq);
    }

    /// As [`Self::fail`], by itself, and the consumer is told.
    pub(crate) fn break_down(self: &Arc<Self>) {
        let mut kicks = Kicks::new();
        self.fail(&mut kicks);
        kicks.run();
        let mut rq = self.rq.lock();
        if rq.state == State::Err {
            self.raise(&mut rq, QpEvent::Fatal);
        }
    }

    /// Nothing is sent, received or completed from now on.
    pub(crate) fn destroy(self: Arc<Self>) {
        self.hca.remove_qp(&self);
        let left = {
            let irq = local_interrupt_disable();
            let mut sq = self.sq.lock_with(&irq);
            let mut rq = self.rq.lock_with(&irq);
            sq.state = State::Dead;
            rq.state = State::Dead;
            sq.len = 0;
            rq.len = 0;
            (
                rq.rc.take_waiter(),
                core::mem::take(&mut sq.wqes),
                core::mem::take(&mut sq.sges),
                core::mem::take(&mut sq.headers),
                core::mem::take(&mut sq.scratch),
                sq.flow.take(),
                core::mem::take(&mut rq.wqes),
                core::mem::take(&mut rq.sges),
            )
        };
        drop(left);
        glue::flush::<Self, 1>(&self);
        self.purge();
        self.send_cq.dismiss(self.send_seat.load(Relaxed));
        self.recv_cq.dismiss(self.recv_seat.load(Relaxed));
        self.hca.objects.qps.fetch_sub(1, Relaxed);
    }

    pub(crate) fn attach(self: &Arc<Self>, mgid: [u8; 16], mlid: u16) -> Result {
        self.hca.verb(Fault::AttachMcast)?;
        if self.kind != Kind::Ud {
            return Err(EINVAL);
        }
        if self
            .hca
            .groups()
            .lock()
            .attach(mgid, mlid, self.clone(), Arc::ptr_eq)?
        {
            self.hca.objects.attached.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    pub(crate) fn detach(self: &Arc<Self>, mgid: [u8; 16], mlid: u16) -> Result {
        let found = self
            .hca
            .groups()
            .lock()
            .detach(mgid, mlid, |qp| Arc::ptr_eq(qp, self));
        if !found {
            return Err(EINVAL);
        }
        self.hca.objects.attached.fetch_sub(1, Relaxed);
        Ok(())
    }

    // Sending.

    /// Begins to post sends.
    #[inline]
    pub(crate) fn sends<'a>(
        self: &'a Arc<Self>,
        irq: &'a LocalInterruptDisabled,
        kicks: &'a mut Kicks,
    ) -> Sends<'a> {
        Sends {
            qp: self,
            sq: self.sq.lock_with(irq),
            irq,
            kicks,
        }
    }

    /// A chance for a fault. None strikes the queue pairs of the MAD layer, whose users nobody
    /// tests here: there are filters for MADs.
    #[inline(always)]
    pub(crate) fn fault(&self, fault: Fault) -> Option<u32> {
        if !self.hca.faulty() || matches!(self.kind, Kind::Smi | Kind::Gsi) {
            return None;
        }
        self.hca.fault(fault)
    }

    /// A chance for posting to fail.
    #[inline]
    fn refuse(&self, fault: Fault) -> Result {
        match self.fault(fault) {
            None => Ok(()),
            Some(errno) => Err(Hca::error_of(errno)),
        }
    }

    /// Tells the executor that there is something to do.
    fn schedule(self: &Arc<Self>, sq: &mut Sq) {
        if !sq.scheduled {
            sq.scheduled = true;
            self.hca.schedule(self);
        }
    }

    /// Has the executor look at the send queue.
    pub(crate) fn resume(self: &Arc<Self>) {
        self.schedule(&mut self.sq.lock());
    }

    /// Executes what is posted; called by the executor.
    #[inline(never)]
    pub(crate) fn execute(self: &Arc<Self>) {
        let mut kicks = Kicks::new();
        let irq = local_interrupt_disable();
        let mut sq = self.sq.lock_with(&irq);
        sq.scheduled = false;
        self.run(&irq, &mut sq, &mut kicks);
        drop(sq);
        drop(irq);
        kicks.run();
    }

    #[inline(never)]
    fn run(self: &Arc<Self>, irq: &LocalInterruptDisabled, sq: &mut Sq, kicks: &mut Kicks) {
        if self.kind == Kind::Rc {
            return self.run_messages(irq, sq, kicks);
        }
        while sq.len != 0 && sq.state == State::Rts {
            if self.fault(Fault::StallSend).is_some() {
                return;
            }
            let Some(wqe) = sq.wqes.get(sq.head) else {
                return;
            };
            let at = sq.head * self.send_sges as usize;
            let sges = sq
                .sges
                .get(at..at + usize::from(wqe.sges))
                .unwrap_or_default();
            if self.kind == Kind::Ud && !self.hca.wire_takes(sges.iter().map(Sge::len).sum()) {
                return;
            }
            let header = sq
                .headers
                .get(sq.head)
                .and_then(|header| header.get(..usize::from(wqe.header_len)))
                .unwrap_or_default();
            let status = match wqe.fault {
                Some(status) => Status(u32::from(status)),
                None => ud::send(
                    self,
                    irq,
                    wqe.request(),
                    sq.qkey,
                    sq.pkey_index,
                    sges,
                    header,
                    &mut sq.scratch,
                    &mut sq.flow,
                    kicks,
                ),
            };
            let done = Done {
                wr_id: wqe.wr_id,
                flags: wqe.flags,
                opcode: wqe.opcode,
            };
            sq.pop();
            self.executed(irq, sq, done, status, kicks);
        }
    }

    /// A send was executed.
    #[inline(always)]
    fn executed(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        sq: &mut Sq,
        done: Done,
        status: Status,
        kicks: &mut Kicks,
    ) {
        self.complete_send(irq, sq, done, status, kicks);
        if status != Status::SUCCESS {
            // A datagram queue pair only stops sending.
            sq.state = State::Sqe;
            self.flush_sends(irq, sq, kicks);
        }
    }

    /// Completes a send that is not in the queue any more.
    #[inline(always)]
    fn complete_send(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        sq: &mut Sq,
        done: Done,
        status: Status,
        kicks: &mut Kicks,
    ) {
        sq.silent = sq.silent.wrapping_add(1);
        if status == Status::SUCCESS && !self.signal_all && done.flags & SEND_SIGNALED == 0 {
            return;
        }
        let slots = core::mem::take(&mut sq.silent);
        let wc = Wc::new(self.handle, done.wr_id, status, done.opcode.completion());
        self.send_cq
            .push(irq, self, &wc, self.sender(slots), false, kicks);
    }

    fn flush_sends(self: &Arc<Self>, irq: &LocalInterruptDisabled, sq: &mut Sq, kicks: &mut Kicks) {
        while sq.len != 0 {
            let Some(wqe) = sq.wqes.get(sq.head) else {
                return;
            };
            let done = Done {
                wr_id: wqe.wr_id,
                flags: wqe.flags,
                opcode: wqe.opcode,
            };
            sq.pop();
            self.complete_send(irq, sq, done, Status::WR_FLUSH_ERR, kicks);
        }
    }

    // Receiving.

    /// Begins to post receives.
    #[inline]
    pub(crate) fn recvs<'a>(
        self: &'a Arc<Self>,
        irq: &'a LocalInterruptDisabled,
        kicks: &'a mut Kicks,
    ) -> Recvs<'a> {
        Recvs {
            qp: self,
            rq: self.rq.lock_with(irq),
            irq,
            kicks,
        }
    }

    fn flush_recvs(self: &Arc<Self>, irq: &LocalInterruptDisabled, rq: &mut Rq, kicks: &mut Kicks) {
        while rq.len != 0 {
            let Some(wqe) = rq.pop() else { return };
            let flushed = Status::WR_FLUSH_ERR;
            let wc = Wc::new(self.handle, wqe.wr_id, flushed, WcOpcode::RECV);
            self.recv_cq
                .push(irq, self, &wc, self.receiver(), false, kicks);
        }
    }

    /// As [`Self::receive`], for those whose instructions nobody counts.
    #[inline(never)]
    pub(crate) fn receive_any(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        header: &Header,
        payload: &Payload<'_>,
        kicks: &mut Kicks,
    ) -> Result<(), Lost> {
        self.receive(irq, header, payload, false, kicks)
    }

    /// A datagram has come, whose P_Key may have been looked at.
    #[inline(always)]
    pub(crate) fn receive(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        header: &Header,
        payload: &Payload<'_>,
        pkey_seen: bool,
        kicks: &mut Kicks,
    ) -> Result<(), Lost> {
        let mut guard = self.rq.lock_with(irq);
        let rq = &mut *guard;
        if !matches!(rq.state, State::Rtr | State::Rts | State::Sqd | State::Sqe) {
            return Err(Lost::State);
        }
        let mut pkey_index = rq.pkey_index;
        match self.kind {
            Kind::Smi => {
                if header.src_qp != 0 {
                    return Err(Lost::Kind);
                }
                pkey_index = 0;
            }
            Kind::Gsi => {
                if header.qkey != rq.qkey {
                    return Err(Lost::QKey);
                }
                pkey_index = self.hca.find_pkey(irq, header.pkey).ok_or(Lost::PKey)?;
            }
            Kind::Ud => {
                if header.qkey != rq.qkey {
                    return Err(Lost::QKey);
                }
                if !pkey_seen && !self.hca.pkey_matches(irq, pkey_index, header.pkey) {
                    return Err(Lost::PKey);
                }
            }
            Kind::Rc => return Err(Lost::Kind),
        }
        self.fill(irq, rq, header, payload, pkey_index, false, kicks)
    }

    /// As [`Self::receive`], of a datagram that goes where others went before; nothing is checked
    /// of what would have ended that.
    #[inline(always)]
    fn receive_known(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        header: &Header,
        payload: &Payload<'_>,
        kicks: &mut Kicks,
    ) -> Result<(), Lost> {
        let mut guard = self.rq.lock_with(irq);
        let rq = &mut *guard;
        if !matches!(rq.state, State::Rtr | State::Rts | State::Sqd | State::Sqe) {
            return Err(Lost::State);
        }
        if header.qkey != rq.qkey {
            return Err(Lost::QKey);
        }
        let pkey_index = rq.pkey_index;
        self.fill(irq, rq, header, payload, pkey_index, true, kicks)
    }

    /// Fills a buffer.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn fill(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        rq: &mut Rq,
        header: &Header,
        payload: &Payload<'_>,
        pkey_index: u16,
        known: bool,
        kicks: &mut Kicks,
    ) -> Result<(), Lost> {
        let wqe = rq.pop().ok_or(Lost::NoBuffer)?;
        let sges = rq.memory(&wqe);
        let mut wc = Wc::new(self.handle, wqe.wr_id, Status::SUCCESS, WcOpcode::RECV);
        let len = ud::GRH.wrapping_add(payload.len());
        if (wqe.room as usize) < len {
            wc.status = self.unfit(sges);
        } else if let Some(status) = (!known).then(|| self.fault(Fault::RecvStatus)).flatten() {
            wc.status = Status(status);
        } else {
            let mut to = Cursor::new(sges);
            match &header.grh {
                Some(grh) => {
                    to.write_header(grh);
                    wc.flags |= WC_GRH;
                }
                // Nothing may be read there.
                None => to.write_header(&[0xa5; ud::GRH]),
            }
            payload.copy_to(&mut to);
        }
        wc.byte_len = len as u32;
        wc.src_qp = header.src_qp;
        wc.slid = u32::from(header.slid);
        wc.sl = header.sl;
        wc.pkey_index = pkey_index;
        wc.dlid_path_bits = header.path_bits;
        if let Some(imm) = header.imm {
            wc.flags |= WC_WITH_IMM;
            wc.imm = imm;
        }
        if header.csum_ok && self.hca.config().csum {
            wc.flags |= WC_IP_CSUM_OK;
            self.hca.did(Did::ChecksumOk);
        }
        let owner = self.receiver();
        self.recv_cq
            .push(irq, self, &wc, owner, header.solicited, kicks);
        if wc.status != Status::SUCCESS {
            kicks.fail(self);
        }
        Ok(())
    }

    /// Why a buffer does not take a datagram.
    #[cold]
    fn unfit(&self, sges: &[Sge]) -> Status {
        let anomalies = &self.hca.fabric().anomalies;
        if sges.iter().any(|sge| sge.lkey() != self.pd.lkey) {
            anomalies.bad_lkey.hit();
            return Status::LOC_PROT_ERR;
        }
        anomalies.short_buffer.hit();
        Status::LOC_LEN_ERR
    }
}

fn empty_sges(count: usize) -> Result<KVVec<Sge>> {
    let mut sges = KVVec::with_capacity(count, GFP_KERNEL)?;
    for _ in 0..count {
        sges.push(Sge::EMPTY, GFP_KERNEL)?;
    }
    Ok(sges)
}

/// Receives to be, each with its part of the list of memory.
fn empty_recvs(count: usize, sges: u32) -> Result<KVVec<RecvWqe>> {
    let mut wqes = KVVec::with_capacity(count, GFP_KERNEL)?;
    for at in 0..count as u32 {
        let wqe = RecvWqe {
            wr_id: 0,
            room: 0,
            first: at * sges,
            sges: 0,
        };
        wqes.push(wqe, GFP_KERNEL)?;
    }
    Ok(wqes)
}

impl Rq {
    /// The buffer at the head.
    #[inline(always)]
    fn pop(&mut self) -> Option<RecvWqe> {
        if self.len == 0 {
            return None;
        }
        let wqe = *self.wqes.get(self.head)?;
        let next = self.head.wrapping_add(1);
        self.head = if next == self.wqes.len() { 0 } else { next };
        self.len -= 1;
        Some(wqe)
    }

    /// The memory of a buffer.
    #[inline(always)]
    fn memory(&self, wqe: &RecvWqe) -> &[Sge] {
        let first = wqe.first as usize;
        let end = first.wrapping_add(usize::from(wqe.sges));
        self.sges.get(first..end).unwrap_or_default()
    }
}

/// The place after the last of `len` from `head` on, in a ring of `size`.
#[inline]
fn tail(head: usize, len: usize, size: usize) -> usize {
    let at = head.wrapping_add(len);
    if at >= size {
        at - size
    } else {
        at
    }
}

/// Sends being posted, under the lock of the send queue.
pub(crate) struct Sends<'a> {
    qp: &'a Arc<Qp>,
    sq: SpinLockGuard<'a, Sq>,
    irq: &'a LocalInterruptDisabled,
    kicks: &'a mut Kicks,
}

impl Sends<'_> {
    #[inline(always)]
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result {
        match self.post_known(wr) {
            Some(()) => Ok(()),
            None => self.post_any(wr),
        }
    }

    /// Sends a datagram at once if it goes where another went before, with nothing to be looked at
    /// that was not looked at then.
    #[inline(always)]
    fn post_known(&mut self, wr: &SendWr<'_>) -> Option<()> {
        let qp = self.qp;
        let sq = &mut *self.sq;
        let datagram = wr.plain(qp.kind)?;
        let address = datagram.address()?;
        let flow = sq.flow.as_ref()?;
        if !flow.is_plain(qp, address, datagram.qpn())
            || sq.state != State::Rts
            || sq.len != 0
            || qp.sends_used.load(Relaxed) >= qp.send_slots
        {
            return None;
        }
        let sge;
        let sges = match wr.one_piece() {
            Some(piece) => {
                sge = piece;
                slice::from_ref(&sge)
            }
            None => {
                // No slot is in use.
                let room = sq.sges.get_mut(..qp.send_sges as usize)?;
                wr.pieces(room)?
            }
        };
        let mut len = 0usize;
        for sge in sges {
            if sge.lkey() != qp.pd.lkey {
                return None;
            }
            len = len.wrapping_add(sge.len());
        }
        let flags = wr.flags();
        let qkey = match datagram.qkey() {
            own if own >> 31 != 0 => sq.qkey,
            other => other,
        };
        if len > flow.mtu() {
            return None;
        }
        let solicited = flags & SEND_SOLICITED != 0;
        let header = flow.header(qp, address, qkey, solicited, wr.immediate());
        flow.count(len);
        qp.sends_used.add(1, Relaxed);
        let receiver = flow.receiver();
        let payload = Payload::Posted(sges, len);
        if let Err(why) = receiver.receive_known(self.irq, &header, &payload, self.kicks) {
            receiver.hca.lose(why);
        }
        let done = Done {
            wr_id: wr.wr_id(),
            flags,
            opcode: Opcode::Send,
        };
        qp.complete_send(self.irq, sq, done, Status::SUCCESS, self.kicks);
        Some(())
    }

    #[inline(never)]
    fn post_any(&mut self, wr: &SendWr<'_>) -> Result {
        let qp = self.qp;
        let sq = &mut *self.sq;
        let anomalies = &qp.hca.fabric().anomalies;
        qp.refuse(Fault::FailPostSend)?;
        let flush = match sq.state {
            State::Rts | State::Sqd => false,
            State::Err | State::Sqe => true,
            State::Reset | State::Init | State::Rtr | State::Dead => {
                anomalies.wrong_state.hit();
                return Err(EINVAL);
            }
        };
        if qp.sends_used.load(Relaxed) >= qp.send_slots {
            anomalies.over_post.hit();
            return Err(ENOMEM);
        }
        let count = wr.sge_count();
        if count > qp.send_sges as usize {
            anomalies.too_many_sges.hit();
            return Err(EINVAL);
        }
        let (opcode, datagram) = wr.parts(qp.kind);
        let done = Done {
            wr_id: wr.wr_id(),
            flags: wr.flags(),
            opcode,
        };
        if flush {
            qp.sends_used.add(1, Relaxed);
            qp.complete_send(self.irq, sq, done, Status::WR_FLUSH_ERR, self.kicks);
            return Ok(());
        }
        if qp.kind == Kind::Rc {
            return self.post_message(wr, &done, count);
        }
        let datagram = datagram.ok_or(EOPNOTSUPP)?;
        let address = datagram.address().ok_or(EINVAL)?;
        let at = tail(sq.head, sq.len, sq.wqes.len());
        let first = at * qp.send_sges as usize;
        let sges = sq.sges.get_mut(first..first + count).ok_or(EINVAL)?;
        for (slot, sge) in sges.iter_mut().zip(wr.sges()) {
            *slot = sge;
        }
        let at_once = sq.len == 0
            && sq.state == State::Rts
            && opcode != Opcode::Lso
            && !qp.hca.deferred()
            && !qp.hca.faulty();
        if at_once {
            qp.sends_used.add(1, Relaxed);
            let request = Request {
                opcode,
                flags: done.flags,
                imm: wr.imm(),
                address,
                qpn: datagram.qpn() & 0xff_ffff,
                qkey: datagram.qkey(),
                pkey_index: datagram.pkey_index(),
                mss: 0,
            };
            let status = ud::send(
                qp,
                self.irq,
                request,
                sq.qkey,
                sq.pkey_index,
                sges,
                &[],
                &mut sq.scratch,
                &mut sq.flow,
                self.kicks,
            );
            qp.executed(self.irq, sq, done, status, self.kicks);
            return Ok(());
        }
        let wqe = sq.wqes.get_mut(at).ok_or(EINVAL)?;
        *wqe = SendWqe {
            wr_id: done.wr_id,
            opcode,
            flags: done.flags,
            imm: wr.imm(),
            address: *address,
            qpn: datagram.qpn() & 0xff_ffff,
            qkey: datagram.qkey(),
            pkey_index: datagram.pkey_index(),
            mss: 0,
            header_len: 0,
            sges: count as u16,
            fault: qp.fault(Fault::SendStatus).map(|status| status as u8),
        };
        if opcode == Opcode::Lso {
            let header = datagram.header();
            let room = sq.headers.get_mut(at).ok_or_else(|| {
                anomalies.lso_without_flag.hit();
                EINVAL
            })?;
            room.get_mut(..header.len())
                .ok_or(EINVAL)?
                .copy_from_slice(header);
            wqe.header_len = header.len() as u16;
            wqe.mss = u16::try_from(datagram.mss()).map_err(|_| EINVAL)?;
        }
        qp.sends_used.add(1, Relaxed);
        sq.len += 1;
        if qp.hca.deferred() {
            qp.schedule(sq);
        } else {
            qp.run(self.irq, sq, self.kicks);
        }
        Ok(())
    }
}

/// Receives being posted, under the lock of the receive queue.
pub(crate) struct Recvs<'a> {
    qp: &'a Arc<Qp>,
    rq: SpinLockGuard<'a, Rq>,
    irq: &'a LocalInterruptDisabled,
    kicks: &'a mut Kicks,
}

impl Recvs<'_> {
    /// A sender that waits for a receive, if there is one now. To be woken with no lock held.
    #[inline]
    pub(crate) fn waiter(&mut self) -> Option<Arc<Qp>> {
        match self.rq.len {
            0 => None,
            _ => self.rq.rc.take_waiter(),
        }
    }

    #[inline]
    pub(crate) fn post(&mut self, wr: &RecvWr<'_>) -> Result {
        let qp = self.qp;
        let rq = &mut *self.rq;
        let anomalies = &qp.hca.fabric().anomalies;
        qp.refuse(Fault::FailPostRecv)?;
        if qp.srq.is_some() {
            return Err(EINVAL);
        }
        if matches!(rq.state, State::Reset | State::Dead) {
            anomalies.wrong_state.hit();
            return Err(EINVAL);
        }
        if qp.recvs_used.load(Relaxed) >= qp.recv_slots {
            anomalies.over_post.hit();
            return Err(ENOMEM);
        }
        let at = tail(rq.head, rq.len, rq.wqes.len());
        let wqe = rq.wqes.get_mut(at).ok_or(EINVAL)?;
        let first = wqe.first as usize;
        let (count, room, ours) = match wr.one_piece() {
            Some(piece) => {
                let slot = rq.sges.get_mut(first).ok_or(EINVAL)?;
                let (room, ours) = (piece.len() as u32, piece.lkey() == qp.pd.lkey);
                *slot = piece;
                (1, room, ours)
            }
            None => {
                let room = rq.sges.get_mut(first..).ok_or(EINVAL)?;
                let pieces = room.get_mut(..qp.recv_sges as usize).ok_or(EINVAL)?;
                let Some(pieces) = wr.pieces(pieces) else {
                    anomalies.too_many_sges.hit();
                    return Err(EINVAL);
                };
                let room = pieces.iter().map(Sge::len).sum::<usize>();
                let ours = pieces.iter().all(|sge| sge.lkey() == qp.pd.lkey);
                (pieces.len(), u32::try_from(room).unwrap_or(u32::MAX), ours)
            }
        };
        wqe.wr_id = wr.wr_id();
        wqe.room = if ours { room } else { 0 };
        wqe.sges = count as u16;
        qp.recvs_used.add(1, Relaxed);
        rq.len = rq.len.wrapping_add(1);
        if rq.state == State::Err {
            qp.flush_recvs(self.irq, rq, self.kicks);
        }
        Ok(())
    }
}
