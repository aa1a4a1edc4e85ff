// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Shared receive queues.
//!
//! Lock order: receive queue of a queue pair → shared receive queue → completion queue.
//!
//! A slot is in use from posting until the completion was polled. The memory of a request is moved
//! out of the queue when a message takes it, because completions may be polled in another order:
//! the place of a request that was taken may be posted to before its own completion was polled.

use crate::{
    fault::Fault,
    glue::{
        Pd,
        RecvWr,
        Sge, //
    },
    hca::{
        Hca,
        HcaConfig, //
    },
    qp::Qp, //
};
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

/// The most pieces of memory that a receive has.
pub(crate) const MAX_SGES: usize = HcaConfig::MAX_RECV_SGE as usize;

/// A request that a message has taken, whose memory it fills.
pub(crate) struct Taken {
    pub(crate) wr_id: u64,
    sges: [Sge; MAX_SGES],
    count: usize,
}

impl Taken {
    pub(crate) fn sges(&self) -> &[Sge] {
        self.sges.get(..self.count).unwrap_or_default()
    }
}

#[derive(Clone, Copy)]
struct Wqe {
    wr_id: u64,
    sges: u16,
}

/// Requests in the order in which they were posted.
struct Ring {
    wqes: KVVec<Wqe>,
    sges: KVVec<Sge>,
    /// Pieces of memory of a request.
    stride: usize,
    head: usize,
    len: usize,
}

impl Ring {
    fn new(slots: usize, stride: usize) -> Result<Self> {
        let mut sges = KVVec::with_capacity(slots * stride, GFP_KERNEL)?;
        for _ in 0..slots * stride {
            sges.push(Sge::EMPTY, GFP_KERNEL)?;
        }
        Ok(Self {
            wqes: KVVec::from_elem(Wqe { wr_id: 0, sges: 0 }, slots, GFP_KERNEL)?,
            sges,
            stride,
            head: 0,
            len: 0,
        })
    }

    /// Adds a request; false if there is no room for it.
    fn push(&mut self, wr_id: u64, sges: impl Iterator<Item = Sge>) -> bool {
        let size = self.wqes.len();
        if self.len == size {
            return false;
        }
        let at = self.head + self.len;
        let at = if at >= size { at - size } else { at };
        let first = at * self.stride;
        let Some(room) = self.sges.get_mut(first..first + self.stride) else {
            return false;
        };
        let mut count = 0;
        for (slot, sge) in room.iter_mut().zip(sges) {
            *slot = sge;
            count += 1;
        }
        if let Some(wqe) = self.wqes.get_mut(at) {
            *wqe = Wqe { wr_id, sges: count };
        }
        self.len += 1;
        true
    }

    fn pop(&mut self) -> Option<Taken> {
        if self.len == 0 {
            return None;
        }
        let wqe = *self.wqes.get(self.head)?;
        let count = usize::from(wqe.sges);
        let first = self.head * self.stride;
        let mut taken = Taken {
            wr_id: wqe.wr_id,
            sges: [Sge::EMPTY; MAX_SGES],
            count,
        };
        let from = self.sges.get_mut(first..first + count)?;
        for (to, from) in taken.sges.iter_mut().zip(from) {
            *to = core::mem::replace(from, Sge::EMPTY);
        }
        self.head = if self.head + 1 == self.wqes.len() {
            0
        } else {
            self.head + 1
        };
        self.len -= 1;
        Some(taken)
    }
}

struct Queue {
    ring: Ring,
    /// Senders that found nothing, and are told when there is something.
    waiting: KVec<Arc<Qp>>,
    limit: u32,
}

/// A shared receive queue.
#[pin_data]
pub(crate) struct Srq {
    hca: Arc<Hca>,
    pd: Arc<Pd>,
    slots: u32,
    sges: u32,
    used: Atomic<u32>,
    #[pin]
    queue: SpinLockIrq<Queue>,
}

impl Srq {
    pub(crate) fn new(hca: Arc<Hca>, pd: Arc<Pd>, slots: u32, sges: u32) -> Result<Arc<Self>> {
        let config = hca.config();
        if !config.srq {
            return Err(EOPNOTSUPP);
        }
        let sges = sges.max(1);
        if slots == 0 || slots > HcaConfig::MAX_WR || sges > u32::from(config.max_srq_sge) {
            return Err(EINVAL);
        }
        let ring = Ring::new(slots as usize, sges as usize)?;
        let srq = Arc::pin_init(
            pin_init!(Self {
                hca,
                pd,
                slots,
                sges,
                used: Atomic::new(0),
                queue <- new_spinlock_irq!(Queue {
                    ring,
                    waiting: KVec::new(),
                    limit: 0,
                }, "ibf_srq"),
            }),
            GFP_KERNEL,
        )?;
        srq.hca.objects.srqs.fetch_add(1, Relaxed);
        Ok(srq)
    }

    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.pd.lkey
    }

    /// Requests and pieces of memory, as many as there may be.
    pub(crate) fn size(&self) -> (u32, u32) {
        (self.slots, self.sges)
    }

    pub(crate) fn limit(&self) -> u32 {
        self.queue.lock().limit
    }

    /// Kept, and without effect.
    pub(crate) fn set_limit(&self, limit: u32) -> Result {
        if limit > self.slots {
            return Err(EINVAL);
        }
        self.queue.lock().limit = limit;
        Ok(())
    }

    /// Slots whose completions were polled.
    #[inline]
    pub(crate) fn give_back(&self, slots: u32) {
        self.used.fetch_sub(slots, Relaxed);
    }

    /// Posts a receive.
    pub(crate) fn post(&self, irq: &LocalInterruptDisabled, wr: &RecvWr<'_>) -> Result {
        let anomalies = &self.hca.fabric().anomalies;
        self.hca.verb(Fault::FailPostSrq)?;
        if wr.sge_count() > self.sges as usize {
            anomalies.too_many_sges.hit();
            return Err(EINVAL);
        }
        let mut queue = self.queue.lock_with(irq);
        let free = self.used.load(Relaxed) < self.slots;
        if !free || !queue.ring.push(wr.wr_id(), wr.sges()) {
            anomalies.over_post.hit();
            return Err(ENOMEM);
        }
        self.used.add(1, Relaxed);
        Ok(())
    }

    /// Those who wait for a receive, if there is one now. To be woken with no lock held.
    pub(crate) fn waiting(&self, irq: &LocalInterruptDisabled) -> KVec<Arc<Qp>> {
        let mut queue = self.queue.lock_with(irq);
        if queue.ring.len == 0 {
            return KVec::new();
        }
        core::mem::take(&mut queue.waiting)
    }

    /// Takes the first request. If there is none, `waiter` is woken when one was posted.
    pub(crate) fn take(
        &self,
        irq: &LocalInterruptDisabled,
        waiter: Option<&Arc<Qp>>,
    ) -> Option<Taken> {
        let mut queue = self.queue.lock_with(irq);
        let taken = queue.ring.pop();
        if let (None, Some(waiter)) = (&taken, waiter) {
            if !queue.waiting.iter().any(|have| Arc::ptr_eq(have, waiter)) {
                // Without memory it is its own timer that wakes it.
                let _ = queue.waiting.push(waiter.clone(), GFP_ATOMIC);
            }
        }
        taken
    }

    /// No queue pair uses it any more.
    pub(crate) fn retire(&self) {
        let waiting = {
            let mut queue = self.queue.lock();
            queue.ring.len = 0;
            core::mem::take(&mut queue.waiting)
        };
        drop(waiting);
        self.hca.objects.srqs.fetch_sub(1, Relaxed);
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_srq)]
mod tests {
    use super::*;

    fn some(count: usize) -> impl Iterator<Item = Sge> {
        core::iter::repeat_with(|| Sge::EMPTY).take(count)
    }

    #[test]
    fn first_in_first_out() -> Result {
        let mut ring = Ring::new(3, 2)?;
        assert!(ring.pop().is_none());
        // Twice round.
        for number in 0..7 {
            assert!(ring.push(number, some(1)));
            assert!(ring.push(number + 100, some(2)));
            let first = ring.pop();
            assert_eq!(first.map(|wqe| (wqe.wr_id, wqe.count)), Some((number, 1)));
            let second = ring.pop();
            assert_eq!(
                second.map(|wqe| (wqe.wr_id, wqe.sges().len())),
                Some((number + 100, 2))
            );
            assert!(ring.pop().is_none());
        }
        Ok(())
    }

    #[test]
    fn is_full_at_its_size() -> Result {
        let mut ring = Ring::new(2, 1)?;
        assert!(ring.push(1, some(1)) && ring.push(2, some(0)));
        assert!(!ring.push(3, some(1)));
        assert_eq!(ring.pop().map(|wqe| wqe.wr_id), Some(1));
        assert!(ring.push(3, some(1)));
        assert_eq!(ring.pop().map(|wqe| (wqe.wr_id, wqe.count)), Some((2, 0)));
        assert_eq!(ring.pop().map(|wqe| wqe.wr_id), Some(3));
        Ok(())
    }

    #[test]
    fn takes_no_more_pieces_than_a_slot_has() -> Result {
        let mut ring = Ring::new(2, 2)?;
        assert!(ring.push(1, some(5)));
        assert!(ring.push(2, some(1)));
        assert_eq!(ring.pop().map(|wqe| wqe.count), Some(2));
        assert_eq!(ring.pop().map(|wqe| (wqe.wr_id, wqe.count)), Some((2, 1)));
        Ok(())
    }
}
