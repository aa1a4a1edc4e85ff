// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Reliable connections, message by message: a message is in the memory of its receiver, or its
//! sender knows why not.
//!
//! A part of the queue pair. The sender holds its send queue, and one after the other the subnet
//! and the peer's receive queue. Nobody takes a second send queue: what a message does to the peer
//! is left to [`Kicks`].
//!
//! A sender that has to wait keeps the message at the head of its queue. The fabric's timer calls
//! [`Qp::expired`]; a receiver that got a buffer calls [`Qp::wake`].

use super::{
    Done,
    Modify,
    Opcode,
    Qp,
    SendWqe,
    Sends,
    Sq,
    State,
    SEND_SOLICITED, //
};
use crate::{
    cq::{
        Kicks,
        Status,
        Wc,
        WcOpcode,
        WC_WITH_IMM, //
    },
    fault::Fault,
    glue::{
        self,
        Cursor,
        QpEvent,
        SendWr,
        Sge, //
    },
    qp::Kind,
    subnet::Destination,
    ud::{
        Address,
        Lost,
        Payload, //
    },
};
use kernel::{
    interrupt::{
        local_interrupt_disable,
        LocalInterruptDisabled, //
    },
    prelude::*,
    sync::Arc, //
};

/// The count of retries that means always.
const FOREVER: u8 = 7;

/// What is set of a connection.
#[derive(Clone, Copy, Default)]
pub(crate) struct Attributes {
    pub(crate) address: Option<Address>,
    pub(crate) path_mtu: Option<u8>,
    pub(crate) peer: Option<u32>,
    pub(crate) min_rnr_timer: Option<u8>,
    pub(crate) timeout: Option<u8>,
    pub(crate) retry_count: Option<u8>,
    pub(crate) rnr_retry: Option<u8>,
}

impl Attributes {
    /// Whether an HCA could do that.
    pub(crate) fn sound(&self) -> bool {
        let small = |value: Option<u8>, most: u8| value.is_none_or(|value| value <= most);
        small(self.path_mtu, 5)
            && self.path_mtu != Some(0)
            && small(self.min_rnr_timer, 31)
            && small(self.timeout, 31)
            && small(self.retry_count, FOREVER)
            && small(self.rnr_retry, FOREVER)
            && self.peer.is_none_or(|peer| peer <= 0xff_ffff)
    }
}

/// Nanoseconds that an acknowledgement may take; none if for ever.
fn ack_timeout(code: u8) -> Option<u64> {
    (code != 0).then(|| 4096u64 << (code & 31))
}

/// Nanoseconds that a sender waits for a receiver that was not ready.
fn rnr_timer(code: u8) -> u64 {
    /// In units of 10 microseconds.
    const DELAYS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    DELAYS
        .get(usize::from(code & 31))
        .map_or(0, |delay| delay * 10_000)
}

/// How often a message may be tried again.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Retries {
    silence: u8,
    not_ready: u8,
}

impl Retries {
    /// Nobody has acknowledged the message; whether it may be sent again.
    fn again_after_silence(&mut self) -> bool {
        match self.silence {
            0 => false,
            _ => {
                self.silence -= 1;
                true
            }
        }
    }

    /// The receiver had no buffer; whether the message may be sent again.
    fn again_after_not_ready(&mut self) -> bool {
        match self.not_ready {
            0 => false,
            FOREVER => true,
            _ => {
                self.not_ready -= 1;
                true
            }
        }
    }
}

/// Why the message at the head of the queue waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// For an acknowledgement that will not come.
    Silence,
    /// For the receiver's timer.
    NotReady,
    /// For the receiver to post a buffer, which a real wire would have left it time for.
    Grace,
    /// For a fault.
    Delay,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Wait {
    why: Why,
    /// None if for ever.
    until: Option<u64>,
}

impl Wait {
    fn is_over(&self, now: u64) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

/// The sending end of a connection.
pub(super) struct Sender {
    address: Address,
    peer: u32,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    left: Retries,
    wait: Option<Wait>,
    /// When the timer comes, if it is set.
    timer: Option<u64>,
    /// The message at the head has had its grace, or its delay.
    graced: bool,
    delayed: bool,
}

impl Sender {
    pub(super) const NEW: Self = Self {
        address: Address::NONE,
        peer: 0,
        timeout: 0,
        retry_count: 0,
        rnr_retry: 0,
        left: Retries {
            silence: 0,
            not_ready: 0,
        },
        wait: None,
        timer: None,
        graced: false,
        delayed: false,
    };

    pub(super) fn peer(&self) -> u32 {
        self.peer
    }

    /// As new, but for a timer that will still come.
    fn reset(&mut self) {
        *self = Self {
            timer: self.timer,
            ..Self::NEW
        };
    }

    fn modify(&mut self, attributes: &Attributes) {
        if let Some(address) = attributes.address {
            self.address = address;
        }
        self.peer = attributes.peer.unwrap_or(self.peer);
        self.timeout = attributes.timeout.unwrap_or(self.timeout);
        self.retry_count = attributes.retry_count.unwrap_or(self.retry_count);
        self.rnr_retry = attributes.rnr_retry.unwrap_or(self.rnr_retry);
        self.next();
    }

    /// Another message is at the head.
    fn next(&mut self) {
        self.left = Retries {
            silence: self.retry_count,
            not_ready: self.rnr_retry,
        };
        self.graced = false;
        self.delayed = false;
    }
}

/// The receiving end of a connection.
pub(super) struct Receiver {
    peer: u32,
    lid: u16,
    min_rnr_timer: u8,
    /// The peer, if it waits for a buffer.
    waiter: Option<Arc<Qp>>,
    /// Whether the consumer knows that the last buffer was used.
    told: bool,
}

impl Receiver {
    pub(super) const NEW: Self = Self {
        peer: 0,
        lid: 0,
        min_rnr_timer: 0,
        waiter: None,
        told: false,
    };

    fn modify(&mut self, attributes: &Attributes) {
        if let Some(address) = &attributes.address {
            self.lid = address.dlid;
        }
        self.peer = attributes.peer.unwrap_or(self.peer);
        self.min_rnr_timer = attributes.min_rnr_timer.unwrap_or(self.min_rnr_timer);
    }

    /// Whether a message is the peer's.
    fn accepts(&self, peer: u32, lid: u16) -> bool {
        (self.peer, self.lid) == (peer, lid)
    }

    pub(super) fn take_waiter(&mut self) -> Option<Arc<Qp>> {
        self.waiter.take()
    }
}

/// What became of a message.
enum Outcome {
    Done(Status),
    /// Nothing comes back.
    Silence,
    /// The receiver has no buffer, and this timer.
    NotReady(u8),
    /// It may get one in so many microseconds.
    Grace(u32),
    /// A fault keeps it for so many microseconds.
    Delay(u32),
}

/// A message on the wire.
struct Message<'a> {
    from: &'a Arc<Qp>,
    lid: u16,
    pkey: u16,
    wqe: &'a SendWqe,
    payload: Payload<'a>,
    /// Whether the sender would wait for a buffer.
    patient: bool,
}

impl Sends<'_> {
    /// Posts a message.
    pub(super) fn post_message(&mut self, wr: &SendWr<'_>, done: &Done, count: usize) -> Result {
        let qp = self.qp;
        let sq = &mut *self.sq;
        if !matches!(done.opcode, Opcode::Send | Opcode::SendImm) {
            return Err(EOPNOTSUPP);
        }
        let at = super::tail(sq.head, sq.len, sq.wqes.len());
        let first = at * qp.send_sges as usize;
        let sges = sq.sges.get_mut(first..first + count).ok_or(EINVAL)?;
        for (slot, sge) in sges.iter_mut().zip(wr.sges()) {
            *slot = sge;
        }
        let wqe = sq.wqes.get_mut(at).ok_or(EINVAL)?;
        *wqe = SendWqe {
            wr_id: done.wr_id,
            opcode: done.opcode,
            flags: done.flags,
            imm: wr.imm(),
            sges: count as u16,
            fault: qp.hca.fault(Fault::SendStatus).map(|status| status as u8),
            ..SendWqe::EMPTY
        };
        qp.sends_used.add(1, super::Relaxed);
        sq.len += 1;
        if sq.rc.wait.is_some() {
            return Ok(());
        }
        if qp.hca.deferred() {
            qp.schedule(sq);
        } else {
            qp.run_messages(self.irq, sq, self.kicks);
        }
        Ok(())
    }
}

impl Qp {
    /// Sends what is posted, until something has to wait.
    pub(super) fn run_messages(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        sq: &mut Sq,
        kicks: &mut Kicks,
    ) {
        while sq.len != 0 && sq.state == State::Rts && sq.rc.wait.is_none() {
            if self.hca.fault(Fault::StallSend).is_some() {
                return;
            }
            let Some(wqe) = sq.wqes.get(sq.head) else {
                return;
            };
            let at = sq.head * self.send_sges as usize;
            let sges = sq.sges.get(at..at + usize::from(wqe.sges));
            let sges = sges.unwrap_or_default();
            if !self.hca.wire_takes(sges.iter().map(Sge::len).sum()) {
                return;
            }
            let outcome = match wqe.fault {
                Some(status) => Outcome::Done(Status(u32::from(status))),
                None => self.transmit_message(irq, sq, wqe, sges, kicks),
            };
            let now = glue::now();
            let in_micros = |micros: u32| Some(now.saturating_add(u64::from(micros) * 1000));
            let (why, until) = match outcome {
                Outcome::Done(status) => {
                    self.finish(irq, sq, status, kicks);
                    continue;
                }
                Outcome::Silence => {
                    let timeout = ack_timeout(sq.rc.timeout);
                    (
                        Why::Silence,
                        timeout.map(|timeout| now.saturating_add(timeout)),
                    )
                }
                Outcome::NotReady(timer) => {
                    if !sq.rc.left.again_after_not_ready() {
                        self.finish(irq, sq, Status::RNR_RETRY_EXC_ERR, kicks);
                        continue;
                    }
                    (Why::NotReady, Some(now.saturating_add(rnr_timer(timer))))
                }
                Outcome::Grace(micros) => (Why::Grace, in_micros(micros)),
                Outcome::Delay(micros) => (Why::Delay, in_micros(micros)),
            };
            sq.rc.wait = Some(Wait { why, until });
            self.set_timer(irq, sq, kicks);
        }
    }

    /// The message at the head is done with.
    fn finish(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        sq: &mut Sq,
        status: Status,
        kicks: &mut Kicks,
    ) {
        let Some(wqe) = sq.wqes.get(sq.head) else {
            return;
        };
        let done = Done {
            wr_id: wqe.wr_id,
            flags: wqe.flags,
            opcode: wqe.opcode,
        };
        sq.pop();
        sq.rc.next();
        self.complete_send(irq, sq, done, status, kicks);
        if status != Status::SUCCESS {
            sq.state = State::Err;
            self.flush_sends(irq, sq, kicks);
            kicks.fail(self);
        }
    }

    /// Has the timer come when the wait is over, if it does not come before.
    fn set_timer(self: &Arc<Self>, irq: &LocalInterruptDisabled, sq: &mut Sq, kicks: &mut Kicks) {
        let Some(until) = sq.rc.wait.and_then(|wait| wait.until) else {
            return;
        };
        if sq.rc.timer.is_some_and(|timer| timer <= until) {
            return;
        }
        sq.rc.timer = Some(until);
        if self.hca.fabric().call_back(self, until).is_err() {
            // Nobody would ever look again.
            sq.rc.wait = None;
            self.finish(irq, sq, Status::RETRY_EXC_ERR, kicks);
        }
    }

    /// The timer has come.
    pub(crate) fn expired(self: &Arc<Self>) {
        let mut kicks = Kicks::new();
        let irq = local_interrupt_disable();
        let mut guard = self.sq.lock_with(&irq);
        let sq = &mut *guard;
        sq.rc.timer = None;
        if let Some(wait) = sq.rc.wait {
            if wait.is_over(glue::now()) {
                sq.rc.wait = None;
                sq.rc.graced |= wait.why == Why::Grace;
                sq.rc.delayed |= wait.why == Why::Delay;
                if wait.why == Why::Silence && !sq.rc.left.again_after_silence() {
                    self.finish(&irq, sq, Status::RETRY_EXC_ERR, &mut kicks);
                } else {
                    self.run_messages(&irq, sq, &mut kicks);
                }
            } else {
                self.set_timer(&irq, sq, &mut kicks);
            }
        }
        drop(guard);
        drop(irq);
        kicks.run();
    }

    /// The receiver got a buffer. No lock may be held.
    pub(crate) fn wake(self: &Arc<Self>) {
        let mut sq = self.sq.lock();
        if sq.rc.wait.is_some_and(|wait| wait.why == Why::Grace) {
            sq.rc.wait = None;
            sq.rc.graced = false;
            self.schedule(&mut sq);
        }
    }

    /// Sends a message to where the connection leads.
    fn transmit_message(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        sq: &Sq,
        wqe: &SendWqe,
        sges: &[Sge],
        kicks: &mut Kicks,
    ) -> Outcome {
        let hca = &self.hca;
        let mut len = 0;
        for sge in sges {
            if sge.lkey() != self.pd.lkey {
                hca.fabric().anomalies.bad_lkey.hit();
                return Outcome::Done(Status::LOC_PROT_ERR);
            }
            len += sge.len();
        }
        if hca.faulty() {
            // What is damaged is not acknowledged either.
            if hca.fault(Fault::Drop).is_some() || hca.fault(Fault::Corrupt).is_some() {
                hca.lose(Lost::Fault);
                return Outcome::Silence;
            }
            if !sq.rc.delayed {
                if let Some(micros) = hca.fault(Fault::Delay) {
                    return Outcome::Delay(micros);
                }
            }
        }
        let (peer, lid, pkey) = {
            let mut guard = hca.fabric().net().busy(irq);
            let net = &mut *guard;
            let Some(ca) = net.subnet.ca(hca.index()) else {
                return Outcome::Silence;
            };
            let lid = ca
                .port
                .lid()
                .wrapping_add(u16::from(sq.rc.address.path_bits));
            let pkey = ca.p_key(sq.pkey_index);
            let found = match net.subnet.unicast(hca.index(), sq.rc.address.dlid, len) {
                Ok(Destination::Ca(slot)) => {
                    net.qps(slot).and_then(|qps| qps.find(sq.rc.peer).cloned())
                }
                Ok(Destination::Switch) => None,
                Err(loss) => {
                    hca.lose(loss.into());
                    return Outcome::Silence;
                }
            };
            let eventful = net.subnet.has_events();
            drop(guard);
            if eventful {
                hca.fabric().poke();
            }
            (found, lid, pkey)
        };
        let Some(peer) = peer.filter(|peer| peer.kind == Kind::Rc) else {
            hca.lose(Lost::NoQp);
            return Outcome::Silence;
        };
        let message = Message {
            from: self,
            lid,
            pkey,
            wqe,
            payload: Payload::Posted(sges, len),
            patient: !sq.rc.graced,
        };
        match peer.take_in(irq, &message, kicks) {
            Ok(outcome) => outcome,
            Err(why) => {
                peer.hca.lose(why);
                Outcome::Silence
            }
        }
    }

    /// A message has come.
    fn take_in(
        self: &Arc<Self>,
        irq: &LocalInterruptDisabled,
        message: &Message<'_>,
        kicks: &mut Kicks,
    ) -> Result<Outcome, Lost> {
        let mut guard = self.rq.lock_with(irq);
        let rq = &mut *guard;
        if !matches!(rq.state, State::Rtr | State::Rts | State::Sqd) {
            return Err(Lost::State);
        }
        if !rq.rc.accepts(message.from.number, message.lid) {
            return Err(Lost::NoQp);
        }
        if !self.hca.pkey_matches(irq, rq.pkey_index, message.pkey) {
            return Err(Lost::PKey);
        }
        if self.hca.fault(Fault::Rnr).is_some() {
            return Ok(Outcome::NotReady(rq.rc.min_rnr_timer));
        }
        let grace = self.hca.rnr_grace();
        let patient = message.patient && grace != 0;
        let none = match patient {
            true => Outcome::Grace(grace),
            false => Outcome::NotReady(rq.rc.min_rnr_timer),
        };
        let taken;
        let (wr_id, sges) = match &self.srq {
            Some(srq) => {
                taken = match srq.take(irq, patient.then_some(message.from)) {
                    Some(taken) => taken,
                    None => return Ok(none),
                };
                (taken.wr_id, taken.sges())
            }
            None => {
                let Some(wqe) = rq.pop() else {
                    if patient {
                        rq.rc.waiter = Some(message.from.clone());
                    }
                    return Ok(none);
                };
                (wqe.wr_id, rq.memory(&wqe))
            }
        };
        let lkey = self.srq.as_ref().map_or(self.pd.lkey, |srq| srq.lkey());
        let len = message.payload.len();
        let mut room = 0;
        let mut ours = true;
        for sge in sges {
            ours &= sge.lkey() == lkey;
            room += sge.len();
        }
        let mut wc = Wc::new(self.handle, wr_id, Status::SUCCESS, WcOpcode::RECV);
        let mut answer = Status::SUCCESS;
        if !ours {
            self.hca.fabric().anomalies.bad_lkey.hit();
            (wc.status, answer) = (Status::LOC_PROT_ERR, Status::REM_OP_ERR);
        } else if room < len {
            (wc.status, answer) = (Status::LOC_LEN_ERR, Status::REM_INV_REQ_ERR);
        } else if let Some(status) = self.hca.fault(Fault::RecvStatus) {
            (wc.status, answer) = (Status(status), Status::REM_OP_ERR);
        } else {
            message.payload.copy_to(&mut Cursor::new(sges));
        }
        wc.byte_len = len as u32;
        wc.pkey_index = rq.pkey_index;
        if message.wqe.opcode == Opcode::SendImm {
            wc.flags |= WC_WITH_IMM;
            wc.imm = message.wqe.imm;
        }
        let solicited = message.wqe.flags & SEND_SOLICITED != 0;
        self.recv_cq
            .push(irq, self, &wc, self.receiver(), solicited, kicks);
        if wc.status != Status::SUCCESS {
            // Nothing else is taken in before all of it is in the error state.
            rq.state = State::Err;
            kicks.fail(self);
        }
        Ok(Outcome::Done(answer))
    }

    /// Sets what is said of the connection.
    pub(super) fn modify_connection(
        &self,
        sq: &mut Sq,
        rq: &mut super::Rq,
        modify: &Modify,
        next: State,
    ) {
        sq.rc.modify(&modify.rc);
        rq.rc.modify(&modify.rc);
        match next {
            State::Reset => {
                sq.rc.reset();
                rq.rc = Receiver::NEW;
            }
            State::Err => sq.rc.wait = None,
            _ => {}
        }
    }

    /// The queue pair has come to the error state, and all completions that it will have are there.
    pub(super) fn tell_last(self: &Arc<Self>, rq: &mut super::Rq) {
        if self.srq.is_some() && !rq.rc.told {
            rq.rc.told = true;
            self.raise(rq, QpEvent::LastWqe);
        }
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_rc)]
mod tests {
    use super::*;

    #[test]
    fn timers() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(8192));
        assert_eq!(ack_timeout(14), Some(67_108_864));
        assert_eq!(ack_timeout(31), Some(4096 << 31));
        assert_eq!(rnr_timer(0), 655_360_000);
        assert_eq!(rnr_timer(1), 10_000);
        assert_eq!(rnr_timer(12), 640_000);
        assert_eq!(rnr_timer(31), 491_520_000);
    }

    #[test]
    fn retries_run_out() {
        let mut left = Retries {
            silence: 2,
            not_ready: 1,
        };
        assert!(left.again_after_silence() && left.again_after_silence());
        assert!(!left.again_after_silence() && !left.again_after_silence());
        assert!(left.again_after_not_ready());
        assert!(!left.again_after_not_ready());
    }

    #[test]
    fn seven_means_for_ever() {
        let mut left = Retries {
            silence: 7,
            not_ready: 7,
        };
        assert!((0..100).all(|_| left.again_after_not_ready()));
        // But not for a peer that is silent.
        assert_eq!((0..100).filter(|_| left.again_after_silence()).count(), 7);
    }

    #[test]
    fn a_message_begins_with_all_retries() {
        let mut sender = Sender::NEW;
        sender.modify(&Attributes {
            retry_count: Some(3),
            rnr_retry: Some(1),
            ..Attributes::default()
        });
        assert!(sender.left.again_after_silence() && sender.left.again_after_not_ready());
        sender.graced = true;
        sender.next();
        assert_eq!((sender.left.silence, sender.left.not_ready), (3, 1));
        assert!(!sender.graced);
        // What is not named stays.
        sender.modify(&Attributes {
            timeout: Some(14),
            ..Attributes::default()
        });
        assert_eq!((sender.retry_count, sender.timeout), (3, 14));
        sender.timer = Some(5);
        sender.reset();
        assert_eq!((sender.retry_count, sender.timer), (0, Some(5)));
    }

    #[test]
    fn only_the_peer_is_heard() {
        let mut receiver = Receiver::NEW;
        receiver.modify(&Attributes {
            address: Some(Address {
                dlid: 7,
                ..Address::NONE
            }),
            peer: Some(0x1_0048),
            ..Attributes::default()
        });
        assert!(receiver.accepts(0x1_0048, 7));
        assert!(!receiver.accepts(0x1_0049, 7));
        // It has another LID now.
        assert!(!receiver.accepts(0x1_0048, 8));
    }

    #[test]
    fn a_wait_ends_in_time() {
        let wait = Wait {
            why: Why::Silence,
            until: Some(100),
        };
        assert!(!wait.is_over(99) && wait.is_over(100));
        let wait = Wait {
            until: None,
            ..wait
        };
        assert!(!wait.is_over(u64::MAX));
    }

    #[test]
    fn nonsense_is_refused() {
        let sound = |attributes: Attributes| attributes.sound();
        assert!(sound(Attributes::default()));
        let none = Attributes::default();
        assert!(sound(Attributes {
            path_mtu: Some(5),
            rnr_retry: Some(7),
            ..none
        }));
        assert!(!sound(Attributes {
            path_mtu: Some(0),
            ..none
        }));
        assert!(!sound(Attributes {
            path_mtu: Some(6),
            ..none
        }));
        assert!(!sound(Attributes {
            min_rnr_timer: Some(32),
            ..none
        }));
        assert!(!sound(Attributes {
            retry_count: Some(8),
            ..none
        }));
        assert!(!sound(Attributes {
            peer: Some(0x100_0000),
            ..none
        }));
    }
}
