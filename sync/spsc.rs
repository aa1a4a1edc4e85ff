// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A bounded ring between one producer and one consumer, without a lock.
//!
//! Made for a send queue: the producer runs under the transmit lock, the consumer in NAPI on
//! another CPU. Positions run freely and wrap; the slot of a position is its low bits.

use crate::ring::Cursor;
use core::cell::UnsafeCell;
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc, //
    },
};

/// Keeps what two CPUs write in different cache lines.
#[repr(align(64))]
struct CacheLine<T>(T);

/// # Invariants
///
/// - `slots.len()` is a power of two, of which `cursor` is made.
/// - `head - tail` (wrapping) is at most `slots.len()`.
/// - The slots of positions in `tail..head` belong to the one [`Consumer`]; all others belong to
///   the one [`Producer`].
/// - Only the producer stores `head`, only the consumer stores `tail`.
struct Ring<T> {
    slots: KVVec<UnsafeCell<T>>,
    cursor: Cursor,
    head: CacheLine<Atomic<u32>>,
    tail: CacheLine<Atomic<u32>>,
}

// SAFETY: By the type invariants each slot has one owner at a time, and ownership moves with a
// release store and an acquire load.
unsafe impl<T: Send> Sync for Ring<T> {}

// SAFETY: The ring owns its values, which may be sent.
unsafe impl<T: Send> Send for Ring<T> {}

/// Makes a ring of `capacity` slots, a power of two, with values that `make` makes.
///
/// The slots stay: producer and consumer fill and empty them in place, by turns.
///
/// # Errors
///
/// - `EINVAL`: `capacity` is not a power of two.
/// - `ENOMEM`: out of memory.
pub(crate) fn ring<T: Send>(
    capacity: u32,
    mut make: impl FnMut() -> T,
) -> Result<(Producer<T>, Consumer<T>)> {
    if !capacity.is_power_of_two() {
        return Err(EINVAL);
    }
    let mut slots = KVVec::with_capacity(capacity as usize, GFP_KERNEL)?;
    for _ in 0..capacity {
        slots.push(UnsafeCell::new(make()), GFP_KERNEL)?;
    }
    // INVARIANT: The length is a power of two; head and tail are equal, so every slot is the
    // producer's.
    let ring = Arc::new(
        Ring {
            cursor: Cursor::of_len(slots.len()),
            slots,
            head: CacheLine(Atomic::new(0)),
            tail: CacheLine(Atomic::new(0)),
        },
        GFP_KERNEL,
    )?;
    Ok((
        Producer {
            slots: ring.slots.as_ptr(),
            capacity,
            ring: ring.clone(),
            head: 0,
            seen: 0,
        },
        Consumer {
            slots: ring.slots.as_ptr(),
            capacity,
            ring,
            tail: 0,
        },
    ))
}

/// The end that fills the ring.
///
/// # Invariants
///
/// `head` equals the ring's head, `seen` is a value that the ring's tail has had. `slots` points at
/// the ring's slots, of which there are `capacity`.
pub(crate) struct Producer<T> {
    ring: Arc<Ring<T>>,
    slots: *const UnsafeCell<T>,
    capacity: u32,
    head: u32,
    seen: u32,
}

// SAFETY: The pointer is to the ring, which the object owns with others; the ring may be sent.
unsafe impl<T: Send> Send for Producer<T> {}

// SAFETY: As above; through a shared producer nothing is reached but what the ring shares.
unsafe impl<T: Send> Sync for Producer<T> {}

impl<T: Send> Producer<T> {
    /// Position of the next push.
    #[inline]
    pub(crate) fn position(&self) -> u32 {
        self.head
    }

    /// Free slots, at least.
    #[inline]
    pub(crate) fn room(&mut self) -> u32 {
        // INVARIANT: `seen` is the tail just read.
        self.seen = self.ring.tail.0.load(Acquire);
        self.ring.cursor.room(self.head, self.seen)
    }

    /// Whether no slot is free; looks at the consumer only if that seems so.
    #[inline]
    pub(crate) fn is_full(&mut self) -> bool {
        // The tail only moves forward, so a stale one errs to the safe side.
        self.head.wrapping_sub(self.seen) >= self.capacity && self.room() == 0
    }

    /// The next slot, to be filled and pushed; `None` when the ring is full.
    #[inline(always)]
    pub(crate) fn vacant(&mut self) -> Option<Vacant<'_, T>> {
        if self.is_full() {
            return None;
        }
        let at = (self.head & self.capacity.wrapping_sub(1)) as usize;
        // INVARIANT: There is room.
        Some(Vacant {
            // SAFETY: There is room, so by the ring's invariants the slot at `head` is the
            // producer's, and `&mut self` is the only producer. `capacity` is a power of two, so
            // the index is below it.
            slot: unsafe { &mut *(*self.slots.add(at)).get() },
            ring: &self.ring,
            head: &mut self.head,
        })
    }

    /// A view of the ring's progress.
    pub(crate) fn watch(&self) -> Watch<T> {
        Watch(self.ring.clone())
    }
}

/// A free slot. Unless it is pushed it stays free.
///
/// # Invariants
///
/// `head` is the producer's and `slot` the slot at that position of `ring`, which has room for it.
pub(crate) struct Vacant<'a, T> {
    slot: &'a mut T,
    ring: &'a Ring<T>,
    head: &'a mut u32,
}

impl<T> Vacant<'_, T> {
    /// What is in the slot.
    #[inline]
    pub(crate) fn slot(&mut self) -> &mut T {
        self.slot
    }

    /// Hands the slot to the consumer.
    #[inline]
    pub(crate) fn push(self) {
        // INVARIANT: There is room; the store gives the slot to the consumer.
        *self.head = self.head.wrapping_add(1);
        self.ring.head.0.store(*self.head, Release);
    }
}

/// The end that empties the ring.
///
/// # Invariants
///
/// `tail` equals the ring's tail. `slots` points at the ring's slots, of which there are `capacity`.
pub(crate) struct Consumer<T> {
    ring: Arc<Ring<T>>,
    slots: *const UnsafeCell<T>,
    capacity: u32,
    tail: u32,
}

// SAFETY: As for the producer.
unsafe impl<T: Send> Send for Consumer<T> {}

// SAFETY: As for the producer.
unsafe impl<T: Send> Sync for Consumer<T> {}

impl<T: Send> Consumer<T> {
    /// Filled slots, at least.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.ring.head.0.load(Acquire).wrapping_sub(self.tail)
    }

    /// Position of the next pop.
    #[inline]
    pub(crate) fn position(&self) -> u32 {
        self.tail
    }

    /// Free slots, at least.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        self.ring
            .cursor
            .room(self.ring.head.0.load(Relaxed), self.tail)
    }

    /// Empties the oldest `count` slots with `empty` and gives them back; false, and nothing is
    /// done, if fewer are filled.
    #[inline]
    pub(crate) fn take(&mut self, count: u32, mut empty: impl FnMut(&mut T)) -> bool {
        if count > self.len() {
            return false;
        }
        for ahead in 0..count {
            let position = self.tail.wrapping_add(ahead);
            let at = (position & self.capacity.wrapping_sub(1)) as usize;
            // SAFETY: The position is before `head`, so by the ring's invariants the slot is the
            // consumer's, and `&mut self` is the only consumer. `capacity` is a power of two, so
            // the index is below it.
            empty(unsafe { &mut *(*self.slots.add(at)).get() });
        }
        // INVARIANT: The slots were the consumer's; the store gives them back.
        self.tail = self.tail.wrapping_add(count);
        self.ring.tail.0.store(self.tail, Release);
        true
    }
}

/// Reads how far a ring has come, from any context.
pub(crate) struct Watch<T>(Arc<Ring<T>>);

impl<T: Send> Watch<T> {
    /// Position of the producer's next push.
    pub(crate) fn head(&self) -> u32 {
        self.0.head.0.load(Acquire)
    }

    /// Whether all that was pushed before `position` has been popped.
    pub(crate) fn passed(&self, position: u32) -> bool {
        Cursor::reached(self.0.tail.0.load(Acquire), position)
    }

    /// How many entries were pushed and not yet popped, about.
    pub(crate) fn outstanding(&self) -> u32 {
        let tail = self.0.tail.0.load(Acquire);
        self.head().wrapping_sub(tail)
    }
}

impl<T> Clone for Watch<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_spsc)]
mod tests {
    use super::*;

    #[test]
    fn fills_and_empties_in_order() -> Result {
        let (mut producer, mut consumer) = ring(4, || 0u32)?;
        let watch = producer.watch();
        for round in 0..100u32 {
            for at in 0..4 {
                let mut vacant = producer.vacant().ok_or(ENOSPC)?;
                *vacant.slot() = round * 4 + at;
                vacant.push();
            }
            assert!(producer.vacant().is_none());
            assert_eq!(consumer.len(), 4);
            let head = watch.head();
            let mut next = round * 4;
            for count in [1, 3] {
                assert!(!watch.passed(head));
                assert_eq!(watch.outstanding(), consumer.len());
                assert!(consumer.take(count, |&mut value| {
                    assert_eq!(value, next);
                    next += 1;
                }));
            }
            assert!(watch.passed(head));
            assert!(!consumer.take(1, |_| next = 0));
            assert_eq!(next, (round + 1) * 4);
            assert_eq!(producer.room(), 4);
        }
        Ok(())
    }

    #[test]
    fn what_is_not_pushed_stays_free() -> Result {
        let (mut producer, mut consumer) = ring(2, || 0u32)?;
        *producer.vacant().ok_or(ENOSPC)?.slot() = 7;
        assert_eq!(consumer.len(), 0);
        let mut seen = None;
        assert!(!consumer.take(1, |&mut value| seen = Some(value)));
        assert_eq!(seen, None);
        assert_eq!(producer.room(), 2);
        Ok(())
    }

    #[test]
    fn refuses_odd_capacities() {
        assert!(ring(3, || ()).is_err());
        assert!(ring(0, || ()).is_err());
    }
}
