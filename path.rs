// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! How a port finds its way: what a fabric must answer.
//!
//! A RoCE port answers by itself ([`crate::roce`]), an InfiniBand port asks the subnet
//! administrator. The choice is made once per port; nothing above asks which it is.

use crate::ib::{
    ah,
    qp::Qp,
    Gid,
    QKey, //
};
use crate::net::device::DeviceId;
use crate::stats::Questions;
use crate::sync::{
    elapsed,
    jiffies,
    HZ, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The longest pause after failures, in seconds: 1, 2, 4, 8, 16, 16 …
const MAX_PAUSE: usize = 16;

/// When to try again what has failed.
#[derive(Clone, Copy)]
pub(crate) struct Backoff {
    /// Failures in a row.
    failures: u32,
    /// When it failed last, in jiffies.
    since: usize,
    /// Nobody answered, when others had been answered so often. Once another is answered, a second
    /// is pause enough.
    silent: Option<u32>,
    /// Nobody was asked, because it was not known whom: it will be soon.
    unasked: bool,
}

impl Backoff {
    /// Nothing has failed.
    pub(crate) const NONE: Self = Self {
        failures: 0,
        since: 0,
        silent: None,
        unasked: false,
    };

    /// It failed, after `successes` of the fabric's questions.
    pub(crate) fn failed(&mut self, error: Error, successes: u32) {
        self.failures = self.failures.saturating_add(1);
        self.since = jiffies();
        self.silent = (!is_refusal(error)).then_some(successes);
        self.unasked = error == EAGAIN;
    }

    /// Failures in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Jiffies until to try again, now that there were so many `successes`.
    pub(crate) fn left(&self, successes: u32) -> usize {
        let pause = match self.failures.checked_sub(1) {
            None => return 0,
            Some(0) if self.unasked => (HZ / 8).max(1),
            Some(_) if self.silent.is_some_and(|then| then != successes) => HZ,
            Some(before) => (1usize << before.min(8)).min(MAX_PAUSE) * HZ,
        };
        pause.saturating_sub(elapsed(self.since))
    }

    /// Whether to try again.
    pub(crate) fn is_over(&self, successes: u32) -> bool {
        self.left(successes) == 0
    }

    /// Whether it failed so long ago that it may be forgotten.
    pub(crate) fn is_history(&self) -> bool {
        elapsed(self.since) >= 2 * MAX_PAUSE * HZ
    }
}

/// Whether a failure is an answer, and not the lack of one.
pub(crate) fn is_refusal(error: Error) -> bool {
    error == EINVAL || error == EPROTO || error == ENOENT
}

/// What a port is at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct View {
    /// Whether datagrams flow.
    pub(crate) active: bool,
    /// Bytes that a datagram carries at most.
    pub(crate) ib_mtu: u32,
    /// Megabits per second; 0 if that is not known.
    pub(crate) mbps: u32,
    /// The port's GID, and its entry in the table if it is there.
    pub(crate) gid: Gid,
    pub(crate) gid_index: Option<u8>,
    /// The link's P_Key, as of a full member, and its entry in the table if it is there and valid.
    pub(crate) pkey: u16,
    pub(crate) pkey_index: Option<u16>,
}

/// What identifies a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Profile {
    pub(crate) pkey: u16,
    pub(crate) scope: u8,
}

/// What a link's broadcast group prescribes to its members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Terms {
    pub(crate) qkey: QKey,
    /// Bytes that a datagram carries at most.
    pub(crate) ib_mtu: u32,
}

/// Is told when an answer came that was not there at once. Process context.
pub(crate) trait Waker: Send + Sync {
    /// [`Fabric::path`] knows more now.
    fn path_known(&self);

    /// [`Fabric::join`] or [`Fabric::is_member`] say something else now.
    fn groups_changed(&self);

    /// [`Fabric::path`] says something else about a port or a group than it did.
    fn path_changed(&self, gid: &Gid);
}

/// Answers for a port. All calls are made in process context and may sleep, but wait for no other
/// node, unless they say so.
pub(crate) trait Fabric: Send + Sync {
    /// What the link is.
    fn profile(&self) -> Profile;

    /// Names who is told of later answers; before anything is asked.
    fn start(&self, _waker: KBox<dyn Waker>) {}

    /// Looks at the port. May take RTNL where the fabric has no partitions.
    fn view(&self) -> Result<View>;

    /// Has the port's own GID looked for, which is missing from the table. May take RTNL.
    fn find_gid(&self) {}

    /// The port's GID shall have this GUID, once its table has it.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP`: nobody can choose it.
    fn set_guid(&self, _guid: u64) -> Result {
        Err(EOPNOTSUPP)
    }

    /// Moves to the link with another P_Key, as [`Self::view`] said. No group is joined.
    fn set_pkey(&self, _pkey: u16) {}

    /// Moves to the link with another scope. No group is joined.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP`: there is none.
    fn set_scope(&self, _scope: u8) -> Result {
        Err(EOPNOTSUPP)
    }

    /// The same port in another partition, with a P_Key as of a full member; counts in `questions`.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP`: there are none.
    fn partition(&self, _pkey: u16, _questions: Arc<Questions>) -> Result<KBox<dyn Fabric>> {
        Err(EOPNOTSUPP)
    }

    /// Becomes a full member of a group, so that its datagrams arrive at `qp`. The link's broadcast
    /// group comes first.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS`: the waker will be told; ask again then.
    fn join(&self, qp: &Qp, group: &Gid) -> Result;

    /// Undoes [`Self::join`], whatever came of it.
    fn leave(&self, qp: &Qp, group: &Gid);

    /// Gives up all that was asked for and not joined.
    fn abandon(&self) {}

    /// Answers to questions so far; wraps.
    fn successes(&self) -> u32 {
        0
    }

    /// Whether what was joined still is.
    fn is_member(&self, _group: &Gid) -> bool {
        true
    }

    /// Whether somebody else on the port has joined a group, and this interface has not.
    fn is_others(&self, _group: &Gid) -> bool {
        false
    }

    /// What the broadcast group prescribes, once it is joined.
    fn terms(&self) -> Option<Terms>;

    /// Whether [`Self::path`] can answer without waiting for other nodes.
    fn knows(&self, gid: &Gid) -> bool;

    /// The way to a port or a group, from the own GID at `gid_index`.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: there is none.
    /// - `ENOENT`: there is no such group, and we may not make it.
    /// - `EINPROGRESS`: the waker will be told; ask again then.
    fn path(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr>;

    /// Forgets all paths.
    fn forget(&self) {}

    /// Paths may lead elsewhere: asks anew for those in use, which stay until the answer. Does not
    /// call `in_use` with locks of its own held.
    fn doubt(&self, _in_use: &dyn Fn(&Gid) -> bool) {}

    /// Goes on with what [`Self::doubt`] and [`Self::housekeep`] began; to be called after each
    /// answer.
    fn refresh(&self) {}

    /// Lets go of what is not in use, asks anew for what is old.
    fn housekeep(&self, _in_use: &dyn Fn(&Gid) -> bool) {}

    /// The network device whose changes are this port's too.
    fn lower(&self) -> Option<DeviceId>;
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_path)]
mod tests {
    use super::*;

    /// Whether the pause is over after so many failures of a kind, and so many jiffies.
    fn is_over(failures: u32, error: Error, age: usize, successes: u32) -> bool {
        let mut backoff = Backoff::NONE;
        for _ in 0..failures {
            backoff.failed(error, 7);
        }
        backoff.since = jiffies().wrapping_sub(age);
        backoff.is_over(successes)
    }

    #[test]
    fn pauses() {
        assert!(Backoff::NONE.is_over(0));
        for (failures, pause) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 16), (1000, 16)] {
            for error in [ETIMEDOUT, EINVAL, EPROTO] {
                assert!(!is_over(failures, error, pause * HZ - HZ / 2, 7));
                assert!(is_over(failures, error, pause * HZ, 7));
            }
        }
    }

    /// For a moment nobody knows who the administrator is.
    #[test]
    fn nobody_to_ask() {
        assert!(is_over(1, EAGAIN, HZ / 4, 7));
        assert!(!is_over(2, EAGAIN, HZ, 7));
        assert!(is_over(2, EAGAIN, 2 * HZ, 7));
    }

    /// An answer to another question ends the pause after silence, not the one after a refusal.
    #[test]
    fn silence_that_ended() {
        assert!(is_over(9, ETIMEDOUT, HZ, 8));
        assert!(!is_over(9, ETIMEDOUT, HZ / 2, 8));
        assert!(!is_over(9, EINVAL, HZ, 8));
        assert!(!is_over(9, EPROTO, HZ, 8));
    }
}
