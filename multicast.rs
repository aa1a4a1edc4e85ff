// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Groups of which an interface is a member: the broadcast group, and what its multicast list
//! names.
//!
//! The list only says what is wanted; [`Groups::sync`] joins and leaves, one group after the other,
//! and says whether it must be called again. All of it belongs to the instance lock.
//!
//! Where a fabric answers later, a join is in progress meanwhile, and the waker has the lists
//! synchronised again.

use crate::{
    ib::{
        qp::Qp,
        Gid, //
    },
    net,
    path::{
        Backoff,
        Fabric, //
    },
    stats::Counters,
    sync::HZ,
    wire::{
        self,
        Address, //
    },
};
use kernel::{
    prelude::*,
    rbtree::RBTree, //
};

/// Failures to join anew after which the link is taken to be another one.
const MAX_HELD: u32 = 3;

/// A group of the interface's list.
struct Member {
    /// It is in the list.
    wanted: bool,
    standing: Standing,
    backoff: Backoff,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Out,
    /// Asked for, without an answer yet.
    Asked,
    Joined,
}

/// The groups of an interface.
pub(crate) struct Groups {
    broadcast: Address,
    /// Whether the broadcast group is joined.
    on_link: bool,
    /// It was, and is being joined anew: the link is taken to be the same.
    held: bool,
    backoff: Backoff,
    /// All others, wanted or not left yet.
    members: RBTree<Gid, Member>,
    /// Groups that were left, and what is sent to them goes another way.
    left: KVVec<Gid>,
}

/// How a synchronisation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Synced {
    Done,
    /// Some groups could not be joined: look again in so many jiffies.
    Again(usize),
}

impl Groups {
    /// No groups, on the link with this broadcast address.
    pub(crate) fn new(broadcast: Address) -> Self {
        Self {
            broadcast,
            on_link: false,
            held: false,
            backoff: Backoff::NONE,
            members: RBTree::new(),
            left: KVVec::new(),
        }
    }

    /// Moves to the link with another broadcast address. No group is joined.
    pub(crate) fn move_to(&mut self, broadcast: Address) {
        self.broadcast = broadcast;
        let mut moved = RBTree::new();
        while let Some(mut at) = self.members.cursor_front_mut() {
            let (gid, member) = at.current_mut();
            let wanted = member.wanted;
            let address = wire::on_link(&Address::group(&gid.0), &broadcast);
            let memory = at.remove_current().1.into_reservation();
            if let Some(address) = address {
                let member = Member {
                    wanted,
                    standing: Standing::Out,
                    backoff: Backoff::NONE,
                };
                moved.insert(memory.into_node(Gid(address.gid()), member));
            }
        }
        self.members = moved;
        self.backoff = Backoff::NONE;
    }

    /// The link's broadcast address.
    pub(crate) fn broadcast(&self) -> &Address {
        &self.broadcast
    }

    /// Takes over the interface's list, made for the link with this broadcast address. Addresses of
    /// another link are none of ours.
    ///
    /// # Errors
    ///
    /// `ENOMEM`: no group that was wanted before is left.
    pub(crate) fn want(&mut self, list: &net::device::Groups<'_>, broadcast: Address) -> Result {
        let mut status = Ok(());
        for member in self.members.values_mut() {
            member.wanted = false;
        }
        list.for_each(|bytes| {
            let address = Address::read(bytes)
                .and_then(|address| wire::on_link(&address, &broadcast))
                .filter(|address| *address != broadcast);
            let Some(address) = address else {
                return;
            };
            let gid = Gid(address.gid());
            if let Some(member) = self.members.get_mut(&gid) {
                member.wanted = true;
                return;
            }
            let member = Member {
                wanted: true,
                standing: Standing::Out,
                backoff: Backoff::NONE,
            };
            if let Err(error) = self.members.try_create_and_insert(gid, member, GFP_KERNEL) {
                status = Err(error);
            }
        });
        if status.is_err() {
            for member in self.members.values_mut() {
                member.wanted = true;
            }
        }
        status
    }

    /// Takes the list of groups that were left since, sorted.
    pub(crate) fn take_left(&mut self) -> KVVec<Gid> {
        core::mem::replace(&mut self.left, KVVec::new())
    }

    /// Whether the broadcast group is joined.
    pub(crate) fn on_link(&self) -> bool {
        self.on_link
    }

    /// Whether the link is of use: the broadcast group is joined, or was and is being joined anew.
    pub(crate) fn has_link(&self) -> bool {
        self.on_link || self.held
    }

    /// Leaves what is not wanted any more and joins what is, the broadcast group first; with
    /// `umcast` without the groups that others on the port have joined. Sleeps.
    pub(crate) fn sync(
        &mut self,
        fabric: &dyn Fabric,
        qp: &Qp,
        stats: &Counters,
        name: &CStr,
        umcast: bool,
    ) -> Synced {
        let broadcast = Gid(self.broadcast.gid());
        if self.on_link && !fabric.is_member(&broadcast) {
            fabric.leave(qp, &broadcast);
            self.on_link = false;
            self.held = true;
        }
        let join = |group: &Gid| {
            fabric.join(qp, group).inspect_err(|error| {
                if *error != EINPROGRESS {
                    stats.join_failed.add(1);
                    net::warn_ratelimited!(
                        "{}: joining group {} failed: {:?}\n",
                        name,
                        group,
                        error
                    );
                }
            })
        };
        // Until the first is to be tried again.
        let mut pause = None;
        let mut wait = |backoff: &Backoff| {
            let left = backoff.left(fabric.successes()).clamp(1, HZ);
            pause = Some(pause.map_or(left, |pause: usize| pause.min(left)));
        };
        if !self.on_link && self.backoff.is_over(fabric.successes()) {
            match join(&broadcast) {
                Ok(()) => {
                    self.on_link = true;
                    self.held = false;
                    self.backoff = Backoff::NONE;
                }
                Err(EINPROGRESS) => {}
                Err(error) => {
                    self.backoff.failed(error, fabric.successes());
                    self.held = self.held && self.backoff.failures() < MAX_HELD;
                    wait(&self.backoff);
                }
            }
        } else if !self.on_link {
            wait(&self.backoff);
        }
        let mut cursor = self.members.cursor_front_mut();
        while let Some(mut at) = cursor {
            let (gid, member) = at.current_mut();
            let lost = member.standing == Standing::Joined && !fabric.is_member(gid);
            if member.standing != Standing::Out && (lost || !member.wanted) {
                fabric.leave(qp, gid);
                member.standing = Standing::Out;
            }
            if !member.wanted {
                // The list is in the order of the tree. Without memory the way there stays as it
                // is until it is idle.
                let _ = self.left.push(*gid, GFP_KERNEL);
                cursor = at.remove_current().0;
                continue;
            }
            // All depend on the broadcast group (R4391-5.a).
            if self.on_link && member.standing != Standing::Joined {
                if umcast && member.standing == Standing::Out && fabric.is_others(gid) {
                    cursor = at.move_next();
                    continue;
                }
                if member.backoff.is_over(fabric.successes()) {
                    member.standing = match join(gid) {
                        Ok(()) => {
                            member.backoff = Backoff::NONE;
                            Standing::Joined
                        }
                        Err(EINPROGRESS) => Standing::Asked,
                        Err(error) => {
                            member.backoff.failed(error, fabric.successes());
                            Standing::Out
                        }
                    };
                }
                if member.standing == Standing::Out {
                    wait(&member.backoff);
                }
            }
            cursor = at.move_next();
        }
        pause.map_or(Synced::Done, Synced::Again)
    }

    /// Leaves all groups; what is wanted stays so. Sleeps.
    pub(crate) fn leave_all(&mut self, fabric: &dyn Fabric, qp: &Qp) {
        for (gid, member) in self.members.iter_mut() {
            if member.standing != Standing::Out {
                fabric.leave(qp, gid);
                member.standing = Standing::Out;
            }
        }
        if core::mem::replace(&mut self.on_link, false) {
            fabric.leave(qp, &Gid(self.broadcast.gid()));
        }
        self.held = false;
        fabric.abandon();
        self.backoff = Backoff::NONE;
        for member in self.members.values_mut() {
            member.backoff = Backoff::NONE;
        }
    }
}
