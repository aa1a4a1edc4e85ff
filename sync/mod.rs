// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the `kernel` crate's `sync` and `workqueue` modules do not offer yet.

pub(crate) mod lock;
pub(crate) mod rcu_map;
pub(crate) mod spsc;
pub(crate) mod work;

use crate::bindings;
use kernel::sync::atomic::{
    ordering::{
        Full,
        Relaxed, //
    },
    Atomic, //
};

/// The present time in jiffies. Wraps: compare by [`elapsed`].
#[inline]
pub(crate) fn jiffies() -> usize {
    // SAFETY: Reads a counter; always safe to call.
    unsafe { bindings::jiffies() }
}

/// How long ago `then` was, in jiffies, for times less than half the counter's range ago.
#[inline]
pub(crate) fn elapsed(then: usize) -> usize {
    jiffies().wrapping_sub(then)
}

/// Jiffies in a second.
pub(crate) const HZ: usize = bindings::HZ;

/// Says yes once in so many jiffies.
pub(crate) struct Seldom {
    /// When it last did, 0 before the first time.
    last: Atomic<usize>,
}

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self {
            last: Atomic::new(0),
        }
    }

    /// Whether the last yes was `period` jiffies ago or more; of several callers at a time one
    /// gets it. Any context.
    pub(crate) fn may(&self, period: usize) -> bool {
        let last = self.last.load(Relaxed);
        if last != 0 && elapsed(last) < period {
            return false;
        }
        self.last.cmpxchg(last, jiffies().max(1), Full).is_ok()
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_sync)]
mod tests {
    use super::*;

    #[test]
    fn seldom() {
        let seldom = Seldom::new();
        assert!(seldom.may(10 * HZ));
        for _ in 0..100 {
            assert!(!seldom.may(10 * HZ));
        }
        // The period is over, also beyond the counter's wrap.
        assert!(seldom.may(0));
        seldom.last.store(jiffies().wrapping_sub(10 * HZ), Relaxed);
        assert!(seldom.may(10 * HZ));
        assert!(!seldom.may(10 * HZ));
    }
}
