// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Arithmetic of rings with free-running positions.
//!
//! A position is a `u32` that wraps; the kernel builds Rust with overflow checks, so every step is
//! explicit.

/// The positions of a ring of a fixed number of slots, a power of two up to 2^31.
#[derive(Clone, Copy)]
pub(crate) struct Cursor {
    slots: u32,
}

impl Cursor {
    /// For a ring of `len` slots; a length that is no power of two counts as the next lower one.
    #[inline]
    pub(crate) fn of_len(len: usize) -> Self {
        let len = if len > 1 << 31 { 1 << 31 } else { len as u32 };
        let slots = if len == 0 { 1 } else { 1 << len.ilog2() };
        Self { slots }
    }

    /// Index of a position's slot.
    #[inline]
    pub(crate) fn slot(self, position: u32) -> usize {
        (position & self.slots.wrapping_sub(1)) as usize
    }

    /// Free slots between the producer's `head` and the consumer's `tail`.
    #[inline]
    pub(crate) fn room(self, head: u32, tail: u32) -> u32 {
        self.slots.saturating_sub(head.wrapping_sub(tail))
    }

    /// Whether `now` is at or after `position`, for positions less than 2^31 apart.
    #[inline]
    pub(crate) fn reached(now: u32, position: u32) -> bool {
        now.wrapping_sub(position) < 1 << 31
    }
}

/// The size a queue gets when `asked` for: the next power of two, within `min..=max`, which are
/// powers of two themselves. `None` for zero and negative numbers.
pub(crate) fn queue_size(asked: i32, min: u32, max: u32) -> Option<u32> {
    let asked = u32::try_from(asked).ok().filter(|&asked| asked > 0)?;
    Some(asked.next_power_of_two().clamp(min, max))
}

/// What identifies a posted work request: the slot's position, the queue among those that share a
/// completion queue, and its life, so that a completion from an earlier life is recognised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrId {
    /// Queue and life in one, made by [`Self::life_of`].
    pub(crate) life: u32,
    pub(crate) position: u32,
}

impl WrId {
    /// Life number `count`, modulo 2^16, of the queue at `queue`.
    #[inline]
    pub(crate) fn life_of(queue: u16, count: u32) -> u32 {
        u32::from(queue) << 16 | count & 0xffff
    }

    /// The queue of the request.
    #[inline]
    pub(crate) fn queue(self) -> u16 {
        (self.life >> 16) as u16
    }

    /// As carried by the work request.
    #[inline]
    pub(crate) fn encode(self) -> u64 {
        u64::from(self.life) << 32 | u64::from(self.position)
    }

    /// From a completion.
    #[inline]
    pub(crate) fn decode(raw: u64) -> Self {
        Self {
            life: (raw >> 32) as u32,
            position: raw as u32,
        }
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_ring)]
mod tests {
    use super::*;

    #[test]
    fn room_and_slots_survive_the_wrap() {
        let ring = Cursor::of_len(8);
        for start in [0, 5, u32::MAX - 3, u32::MAX] {
            for filled in 0..=8 {
                let head = start.wrapping_add(filled);
                assert_eq!(ring.room(head, start), 8 - filled);
            }
        }
        assert_eq!(ring.slot(u32::MAX), 7);
        assert_eq!(ring.slot(u32::MAX.wrapping_add(1)), 0);
    }

    #[test]
    fn reached_is_wrapping() {
        assert!(Cursor::reached(5, 5));
        assert!(Cursor::reached(6, 5));
        assert!(!Cursor::reached(4, 5));
        assert!(Cursor::reached(2, u32::MAX - 1));
        assert!(!Cursor::reached(u32::MAX - 1, 2));
    }

    #[test]
    fn odd_lengths_never_index_outside() {
        for len in [0usize, 1, 2, 3, 7, 8, 9, 1000] {
            let ring = Cursor::of_len(len);
            for position in [0, 1, 1023, u32::MAX] {
                assert!(ring.slot(position) < len.max(1));
            }
        }
    }

    #[test]
    fn queue_sizes_are_rounded_and_clamped() {
        let table = [
            (1, Some(128)),
            (128, Some(128)),
            (129, Some(256)),
            (8192, Some(8192)),
            (8193, Some(8192)),
            (i32::MAX, Some(8192)),
            (0, None),
            (-1, None),
            (i32::MIN, None),
        ];
        for (asked, want) in table {
            assert_eq!(queue_size(asked, 128, 8192), want);
        }
    }

    #[test]
    fn wr_id_round_trip() {
        for life in [0, 1, u32::MAX] {
            for position in [0, 127, u32::MAX] {
                let id = WrId { life, position };
                assert_eq!(WrId::decode(id.encode()), id);
            }
        }
    }

    #[test]
    fn wr_id_names_queue_and_life() {
        for queue in [0, 1, 4096, u16::MAX] {
            for count in [0, 1, 0xffff, 0x1_0000, u32::MAX] {
                let id = WrId {
                    life: WrId::life_of(queue, count),
                    position: 7,
                };
                assert_eq!(WrId::decode(id.encode()).queue(), queue);
                let next = WrId::life_of(queue, count.wrapping_add(1));
                assert_ne!(id.life, next);
                assert_ne!(id.life, WrId::life_of(queue.wrapping_add(1), count));
            }
        }
    }
}
