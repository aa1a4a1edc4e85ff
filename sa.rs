// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! InfiniBand ports, whose paths and groups the subnet administrator knows.
//!
//! Answers come later. A path is asked for once, by whoever needs it first, and kept. When it may
//! have changed, or is old, it is asked for anew and used until the answer; after a failure it is
//! not asked for again for a while, longer each time. Groups that are only sent to are joined for
//! that, and left when no neighbour entry names them any more.
//!
//! Whatever an answer says is checked: nonsense is a failure, and what promises more than the port
//! can do is cut.
//!
//! Lock order: [`Sa::groups`], then [`Shared::paths`].

use crate::{
    ib::{
        ah,
        device::{
            rate_mbps,
            Device, //
        },
        qp::Qp,
        sa::{
            Client,
            JoinState,
            Listener,
            Membership,
            Question,
            Record,
            State,
            Wish, //
        },
        Gid,
        PortNum, //
    },
    net::{
        device::DeviceId,
        warn_ratelimited, //
    },
    path::{
        is_refusal,
        Backoff,
        Fabric,
        Profile,
        Terms,
        View,
        Waker, //
    },
    stats::Questions,
    sync::{
        elapsed,
        jiffies,
        lock::{
            new_spinlock_bh,
            SpinLockBh, //
        },
        HZ, //
    },
    wire, //
};
use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full as FullOrder,
                Relaxed,
                Release, //
            },
            Atomic,
            AtomicFlag, //
        },
        new_mutex,
        Arc,
        Mutex,
        SetOnce, //
    },
};

/// Questions for paths that wait for an answer at a time.
const MAX_QUESTIONS: usize = 32;

/// Of these, questions for paths that are known and may have changed.
const MAX_SECOND_QUESTIONS: usize = MAX_QUESTIONS / 2;

/// Scope of the link's groups, unless the administrator wants another: link-local.
const SCOPE: u8 = 2;

/// Paths that are kept, at most.
const MAX_PATHS: usize = 16384;

/// Above so many, those that are not in use go, however fresh they are.
const MANY_PATHS: usize = MAX_PATHS / 2;

/// Groups joined only to send to them, at most.
const MAX_SEND_ONLY: usize = 4096;

/// A path is asked for again when it is so old, in jiffies, and still needed.
const FRESH: usize = 600 * HZ;

/// What is known of the way to a port.
struct Known {
    path: Option<ah::Attr>,
    /// When the administrator said so, in jiffies.
    since: usize,
    /// It may have changed.
    stale: bool,
    asked: bool,
    /// The question that was asked is of no interest any more.
    void: bool,
    /// To call the question back.
    question: Option<Question>,
    backoff: Backoff,
}

impl Known {
    /// Whether it is to be asked for anew. Spread over a minute, so that not all are at once.
    fn is_old(&self, gid: &Gid) -> bool {
        self.stale || elapsed(self.since) >= FRESH + usize::from(gid.0[15]) * HZ / 4
    }

    /// Whether the administrator is to be asked, who answered so many questions.
    fn is_due(&self, gid: &Gid, successes: u32) -> bool {
        !self.asked && (self.path.is_none() || self.is_old(gid)) && self.backoff.is_over(successes)
    }

    /// Notes what became of the question; an error that is news.
    fn answered(&mut self, answer: Result<ah::Attr>, successes: u32) -> Option<Error> {
        self.asked = false;
        self.question = None;
        if core::mem::replace(&mut self.void, false) {
            return None;
        }
        match answer {
            Ok(attr) => {
                self.path = Some(attr);
                self.since = jiffies();
                self.stale = false;
                self.backoff = Backoff::NONE;
                None
            }
            Err(error) => {
                self.backoff.failed(error, successes);
                // What was called back has not failed.
                (self.backoff.failures() == 1 && error != EINTR).then_some(error)
            }
        }
    }

    /// Has it asked for anew if it is old; whether it is to go, of which there may be too `many`.
    fn sift(&mut self, is_old: bool, used: bool, many: bool) -> bool {
        self.stale |= is_old;
        let unwanted = if is_old {
            !used || self.path.is_none()
        } else {
            many && !used
        };
        unwanted && !self.asked
    }

    /// Forgets the path, and an answer that is yet to come; whether nothing is left.
    fn forget(&mut self) -> bool {
        self.path = None;
        self.backoff = Backoff::NONE;
        self.void = self.asked;
        !self.asked
    }

    /// What to do without asking.
    fn answer(&self) -> Result<ah::Attr> {
        self.path.ok_or(match self.asked {
            true => EINPROGRESS,
            false => EHOSTUNREACH,
        })
    }
}

struct Paths {
    tree: RBTree<Gid, Known>,
    count: usize,
    questions: usize,
    /// Some that are stale may not have been asked for yet, from `next` on.
    refreshing: bool,
    next: Gid,
}

/// What callbacks use.
#[pin_data]
struct Shared {
    #[pin]
    paths: SpinLockBh<Paths>,
    waker: SetOnce<KBox<dyn Waker>>,
    questions: Arc<Questions>,
    /// Answers so far; wraps.
    successes: Atomic<u32>,
    /// Something was not answered since the last answer.
    silent: AtomicFlag,
    /// Memberships were lost since the broadcast group was joined. It is lost too then, although
    /// that may be said last, and its terms may be others (B26).
    lost: AtomicFlag,
    /// Megabits per second of the link; 0 if that is not known.
    mbps: Atomic<u32>,
    device: Arc<Device>,
    port: PortNum,
}

impl Shared {
    fn succeeded(&self) {
        self.successes.fetch_add(1, Relaxed);
        if self.silent.load(Relaxed) && self.silent.xchg(false, FullOrder) {
            if let Some(waker) = self.waker.as_ref() {
                waker.groups_changed();
            }
        }
    }

    fn failed(&self, error: Error) {
        if error == EPROTO {
            self.questions.sa_answers_bad.add(1);
        } else if !is_refusal(error) {
            self.silent.store(true, Relaxed);
        }
    }

    fn is_too_fast(&self, rate: u8) -> bool {
        let mbps = self.mbps.load(Relaxed);
        // 0 is the link's own.
        rate != 0 && rate_mbps(rate).is_none_or(|rate| mbps != 0 && rate > mbps)
    }

    /// A way whose rate the link has.
    fn fit(&self, mut attr: ah::Attr) -> ah::Attr {
        if self.is_too_fast(attr.rate) {
            attr.rate = 0;
        }
        attr
    }

    /// Counts an answer that promises too much.
    fn clamped(&self, gid: &Gid, what: &str) {
        self.questions.sa_answers_clamped.add(1);
        warn_ratelimited!(
            "{} port {}: the subnet administrator gives {} more {} than the port has\n",
            self.device.name(),
            self.port.0,
            gid,
            what
        );
    }
}

impl Listener for Shared {
    fn path(&self, to: &Gid, answer: Result<ah::Attr>) {
        let answer = answer.map(|attr| {
            if self.is_too_fast(attr.rate) {
                self.clamped(to, "rate");
            }
            self.fit(attr)
        });
        match answer {
            Ok(_) => self.succeeded(),
            Err(error) => {
                self.questions.sa_paths_failed.add(1);
                self.failed(error);
            }
        }
        let mut changed = false;
        let mut first = None;
        {
            let mut paths = self.paths.lock();
            paths.questions = paths.questions.saturating_sub(1);
            if let Some(known) = paths.tree.get_mut(to) {
                let before = known.path;
                let successes = self.successes.load(Relaxed);
                first = known.answered(answer, successes);
                changed = before.is_some() && before != known.path;
            }
        }
        if let Some(error) = first {
            warn_ratelimited!(
                "{} port {}: no path to {}: {:?}\n",
                self.device.name(),
                self.port.0,
                to,
                error
            );
        }
        if let Some(waker) = self.waker.as_ref() {
            if changed {
                waker.path_changed(to);
            }
            waker.path_known();
        }
    }

    fn membership_changed(&self, _group: &Gid, state: &State) {
        match *state {
            State::Asked => return,
            State::Member(_) => self.succeeded(),
            // It was joined, and is to be joined anew.
            State::Failed(error) if error == ENETRESET => self.lost.store(true, Release),
            State::Failed(error) => {
                self.questions.sa_joins_failed.add(1);
                self.failed(error);
            }
        }
        if let Some(waker) = self.waker.as_ref() {
            waker.groups_changed();
        }
    }
}

/// A group, joined or about to be.
struct Group {
    membership: Membership<Shared>,
    /// Who was joined.
    port: Gid,
    state: JoinState,
    /// The LID by which the queue pair is attached.
    attached: Option<u16>,
    /// Its record was looked at.
    judged: bool,
    /// It was joined to send only, under another membership.
    upgraded: bool,
    /// Its failure was seen.
    noted: bool,
    backoff: Backoff,
}

/// An InfiniBand port.
pub(crate) struct Sa {
    device: Arc<Device>,
    port: PortNum,
    /// The P_Key at the table's first entry, or one that was given.
    fixed_pkey: Option<u16>,
    pkey: Atomic<u32>,
    scope: Atomic<u32>,
    /// The GUID that the administrator chose, 0 for the port's own.
    guid: Atomic<u64>,
    shared: Arc<Shared>,
    groups: Pin<KBox<Mutex<Groups>>>,
    // Dropped last: the memberships are its.
    client: Pin<KBox<Client<Shared>>>,
}

struct Groups {
    tree: RBTree<Gid, Group>,
    send_only: usize,
    /// What the broadcast group prescribes, since it was joined first.
    record: Option<Record>,
    /// The MTU that it prescribed last, which is likely what it will.
    mtu_bytes: Option<u32>,
}

impl Groups {
    /// Takes a group out; it is left when the result is dropped.
    fn take(&mut self, qp: Option<&Qp>, gid: &Gid) -> Option<Group> {
        let mut group = self.tree.remove(gid)?;
        if group.state != JoinState::Full {
            self.send_only = self.send_only.saturating_sub(1);
        }
        if let (Some(qp), Some(lid)) = (qp, group.attached.take()) {
            if let Err(error) = qp.detach(gid, lid) {
                pr_warn!("detaching from {} failed: {:?}\n", gid, error);
            }
        }
        Some(group)
    }
}

impl Sa {
    /// In the partition of the P_Key table's first entry, or in another.
    pub(crate) fn new(
        device: Arc<Device>,
        port: PortNum,
        pkey: Option<u16>,
        questions: Arc<Questions>,
    ) -> Result<Self> {
        let shared_device = device.clone();
        let shared = Arc::pin_init(
            pin_init!(Shared {
                paths <- new_spinlock_bh!(
                    Paths {
                        tree: RBTree::new(),
                        count: 0,
                        questions: 0,
                        refreshing: false,
                        next: Gid::default(),
                    },
                    c"sa::Shared::paths"
                ),
                waker: SetOnce::new(),
                questions,
                successes: Atomic::new(0),
                silent: AtomicFlag::new(false),
                lost: AtomicFlag::new(false),
                mbps: Atomic::new(0),
                device: shared_device,
                port,
            }),
            GFP_KERNEL,
        )?;
        let current = match pkey {
            Some(pkey) => pkey,
            None => device.pkey(port, 0)?,
        };
        let client = Client::new(device.clone(), port, shared.clone())?;
        Ok(Self {
            device,
            port,
            fixed_pkey: pkey,
            pkey: Atomic::new(wire::full(current).into()),
            scope: Atomic::new(SCOPE.into()),
            guid: Atomic::new(0),
            shared,
            groups: KBox::pin_init(
                new_mutex!(
                    Groups {
                        tree: RBTree::new(),
                        send_only: 0,
                        record: None,
                        mtu_bytes: None,
                    },
                    "Sa::groups"
                ),
                GFP_KERNEL,
            )?,
            client,
        })
    }

    fn pkey(&self) -> u16 {
        self.pkey.load(Relaxed) as u16
    }

    fn scope(&self) -> u8 {
        self.scope.load(Relaxed) as u8
    }

    fn broadcast(&self) -> Gid {
        Gid(wire::broadcast_mgid(self.scope(), self.pkey()))
    }

    /// The P_Key, and its entry in the table. Limited members have a full member's groups.
    fn find_pkey(&self) -> Result<(u16, Option<u16>)> {
        match self.fixed_pkey {
            Some(pkey) => Ok((pkey, self.device.find_pkey(self.port, pkey))),
            None => {
                let pkey = wire::full(self.device.pkey(self.port, 0)?);
                Ok((pkey, wire::is_valid_pkey(pkey).then_some(0)))
            }
        }
    }

    /// The GID that we go by, and its entry in the table if it is there.
    fn own_gid(&self) -> Result<(Gid, Option<u8>)> {
        let first = self.device.gid(self.port, 0)?;
        let guid = self.guid.load(Relaxed);
        let gid = Gid(wire::with_guid(&first.0, guid));
        if guid == 0 || gid == first {
            // It is the port's own business again, unless another was chosen meanwhile.
            let _ = self.guid.cmpxchg(guid, 0, Relaxed);
            return Ok((first, Some(0)));
        }
        Ok((gid, self.device.find_gid(self.port, &gid)))
    }

    /// Asks to be let into a group; `EINPROGRESS` when the link itself must be joined first.
    fn ask(&self, groups: &mut Groups, group: &Gid, state: JoinState, backoff: Backoff) -> Result {
        let broadcast = self.broadcast();
        let like = match *group == broadcast {
            // It belongs to the administrator (R4391-5.c).
            true => None,
            false => match groups.tree.get(&broadcast).map(|it| it.membership.state()) {
                Some(State::Member(record)) if !self.shared.lost.load(Acquire) => Some(record),
                _ => return Err(EINPROGRESS),
            },
        };
        let (port, _) = self.own_gid()?;
        let membership = self.client.join(&Wish {
            group: *group,
            port,
            pkey: self.pkey(),
            state,
            like,
        })?;
        self.shared.questions.sa_joins_asked.add(1);
        let asked = Group {
            membership,
            port,
            state,
            attached: None,
            judged: false,
            upgraded: false,
            noted: false,
            backoff,
        };
        groups
            .tree
            .try_create_and_insert(*group, asked, GFP_KERNEL)?;
        if state != JoinState::Full {
            groups.send_only = groups.send_only.saturating_add(1);
        }
        Ok(())
    }

    /// Looks at what a group prescribes, once.
    fn judge(&self, gid: &Gid, group: &mut Group, record: &Record) {
        if core::mem::replace(&mut group.judged, true) {
            return;
        }
        if self.shared.is_too_fast(record.rate) {
            self.shared.clamped(gid, "rate");
        }
        if *gid == self.broadcast() {
            if let Ok(port) = self.device.query_port(self.port) {
                if record.mtu_bytes > port.limit() {
                    self.shared.clamped(gid, "MTU");
                }
            }
        }
    }

    /// The way to a group, which is joined for sending if it was not joined at all.
    fn group_path(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr> {
        let mut groups = self.groups.lock();
        let full = groups.send_only >= MAX_SEND_ONLY;
        let successes = self.successes();
        let (next, backoff) = match groups.tree.get_mut(gid) {
            // The link is no link without it.
            None if *gid == self.broadcast() => return Err(EHOSTUNREACH),
            None if full => return Err(EHOSTUNREACH),
            None => (JoinState::SendOnlyFull, Backoff::NONE),
            Some(group) => match group.membership.state() {
                State::Member(record) => {
                    self.judge(gid, group, &record);
                    return Ok(self.shared.fit(record.path(gid, gid_index)));
                }
                State::Asked => return Err(EINPROGRESS),
                // Is joined anew soon.
                State::Failed(_) if group.state == JoinState::Full => return Err(EINPROGRESS),
                State::Failed(error) if error == ENETRESET => {
                    (JoinState::SendOnlyFull, Backoff::NONE)
                }
                // Not every administrator knows the newer state (R4391-10.b).
                State::Failed(error)
                    if error == EINVAL && group.state == JoinState::SendOnlyFull =>
                {
                    (JoinState::SendOnly, group.backoff)
                }
                State::Failed(error) => {
                    if !core::mem::replace(&mut group.noted, true) {
                        group.backoff.failed(error, successes);
                        warn_ratelimited!(
                            "{} port {}: joining group {} to send failed: {:?}\n",
                            self.device.name(),
                            self.port.0,
                            gid,
                            error
                        );
                    }
                    if !group.backoff.is_over(successes) {
                        return Err(match is_refusal(error) {
                            true => ENOENT,
                            false => EHOSTUNREACH,
                        });
                    }
                    (JoinState::SendOnlyFull, group.backoff)
                }
            },
        };
        let before = groups.take(None, gid);
        let asked = self.ask(&mut groups, gid, next, backoff);
        drop(before);
        asked.and(Err(EINPROGRESS))
    }

    fn port_path(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr> {
        let successes = self.successes();
        {
            let paths = self.shared.paths.lock();
            match paths.tree.get(gid) {
                Some(known) if !known.is_due(gid, successes) => return known.answer(),
                None if paths.count >= MAX_PATHS => return Err(EHOSTUNREACH),
                _ => {}
            }
        }
        // What can fail comes before the question is noted, which only an answer takes back.
        let from = self.device.gid(self.port, gid_index.into())?;
        let mut fresh = Some(RBTreeNode::new(
            *gid,
            Known {
                path: None,
                since: 0,
                stale: false,
                asked: true,
                void: false,
                question: None,
                backoff: Backoff::NONE,
            },
            GFP_KERNEL,
        )?);
        {
            let mut paths = self.shared.paths.lock();
            let full = paths.questions >= MAX_QUESTIONS;
            match paths.tree.get_mut(gid) {
                Some(known) if !known.is_due(gid, successes) => return known.answer(),
                // The next answer has everybody ask again.
                Some(known) if full => return known.path.ok_or(EINPROGRESS),
                Some(known) => known.asked = true,
                None if full => return Err(EINPROGRESS),
                None => {
                    if let Some(node) = fresh.take() {
                        paths.tree.insert(node);
                        paths.count += 1;
                    }
                }
            }
            paths.questions += 1;
        }
        self.shared.questions.sa_paths_asked.add(1);
        let asked = self.client.ask_path(&from, gid_index, gid, self.pkey());
        let error = asked.as_ref().err().copied();
        if let Some(error) = error {
            self.shared.path(gid, Err(error));
        }
        let mut paths = self.shared.paths.lock();
        match paths.tree.get_mut(gid) {
            Some(known) => {
                // It may have been answered already.
                if known.asked {
                    known.question = asked.ok();
                }
                known.answer()
            }
            None => Err(EHOSTUNREACH),
        }
    }

    /// All ports of which a path is known, or its lack.
    fn known(&self) -> Result<KVVec<Gid>> {
        let count = self.shared.paths.lock().count;
        // What comes meanwhile is young.
        let mut gids = KVVec::with_capacity(count, GFP_KERNEL)?;
        for gid in self.shared.paths.lock().tree.keys() {
            let _ = gids.push_within_capacity(*gid);
        }
        Ok(gids)
    }

    /// Has what is in use asked for anew if it is `old`, and forgets the rest that is, or that is
    /// too much.
    fn sift(&self, in_use: &dyn Fn(&Gid) -> bool, is_old: impl Fn(&Gid, &Known) -> bool) {
        let Ok(gids) = self.known() else {
            // Of use another time.
            return;
        };
        for gid in &gids {
            let used = in_use(gid);
            let mut paths = self.shared.paths.lock();
            let many = paths.count > MANY_PATHS;
            let mut gone = false;
            if let Some(known) = paths.tree.get_mut(gid) {
                gone = known.sift(is_old(gid, known), used, many);
            }
            if gone {
                paths.tree.remove(gid);
                paths.count = paths.count.saturating_sub(1);
            }
        }
        let mut paths = self.shared.paths.lock();
        paths.refreshing = true;
        paths.next = Gid::default();
    }
}

impl Fabric for Sa {
    fn profile(&self) -> Profile {
        Profile {
            pkey: self.pkey(),
            scope: self.scope(),
        }
    }

    fn set_guid(&self, guid: u64) -> Result {
        self.guid.store(guid, Relaxed);
        Ok(())
    }

    fn set_pkey(&self, pkey: u16) {
        self.pkey.store(pkey.into(), Relaxed);
        self.groups.lock().mtu_bytes = None;
    }

    fn set_scope(&self, scope: u8) -> Result {
        self.scope.store(scope.into(), Relaxed);
        self.groups.lock().mtu_bytes = None;
        Ok(())
    }

    fn partition(&self, pkey: u16, questions: Arc<Questions>) -> Result<KBox<dyn Fabric>> {
        let partition = Self::new(self.device.clone(), self.port, Some(pkey), questions)?;
        partition.guid.store(self.guid.load(Relaxed), Relaxed);
        Ok(KBox::new(partition, GFP_KERNEL)?)
    }

    fn start(&self, waker: KBox<dyn Waker>) {
        let _ = self.shared.waker.populate(waker);
    }

    fn view(&self) -> Result<View> {
        let attr = self.device.query_port(self.port)?;
        self.shared.mbps.store(attr.mbps, Relaxed);
        let limit = attr.limit();
        let prescribed = self.groups.lock().mtu_bytes.unwrap_or(limit);
        let (pkey, pkey_index) = self.find_pkey()?;
        let (gid, gid_index) = self.own_gid()?;
        Ok(View {
            active: attr.active && pkey_index.is_some() && gid_index.is_some(),
            ib_mtu: prescribed.min(limit),
            mbps: attr.mbps,
            gid,
            gid_index,
            pkey,
            pkey_index,
        })
    }

    fn join(&self, qp: &Qp, gid: &Gid) -> Result {
        let mut groups = self.groups.lock();
        let state = match groups.tree.get(gid) {
            Some(group) if group.state == JoinState::Full => group.membership.state(),
            // It was joined to send only, or not at all.
            _ => {
                let before = groups.take(None, gid);
                let asked = self.ask(&mut groups, gid, JoinState::Full, Backoff::NONE);
                if let Some(group) = groups.tree.get_mut(gid) {
                    group.upgraded = before.is_some();
                }
                // Only now, so that the group does not vanish in between.
                drop(before);
                return asked.and(Err(EINPROGRESS));
            }
        };
        match state {
            State::Asked => Err(EINPROGRESS),
            State::Failed(error) => {
                drop(groups.take(Some(qp), gid));
                if error != ENETRESET {
                    return Err(error);
                }
                self.ask(&mut groups, gid, JoinState::Full, Backoff::NONE)
                    .and(Err(EINPROGRESS))
            }
            State::Member(record) => {
                if let Some(group) = groups.tree.get_mut(gid) {
                    if group.attached.is_none() {
                        if let Err(error) = qp.attach(gid, record.mlid) {
                            // Nobody leaves what was not joined.
                            drop(groups.take(None, gid));
                            return Err(error);
                        }
                        group.attached = Some(record.mlid);
                        if *gid == self.broadcast() {
                            self.shared.lost.store(false, Release);
                        }
                    }
                    self.judge(gid, group, &record);
                    if core::mem::replace(&mut group.upgraded, false) {
                        if let Some(waker) = self.shared.waker.as_ref() {
                            waker.path_changed(gid);
                        }
                    }
                }
                if *gid == self.broadcast() {
                    groups.record = Some(record);
                    groups.mtu_bytes = Some(record.mtu_bytes);
                }
                Ok(())
            }
        }
    }

    fn leave(&self, qp: &Qp, gid: &Gid) {
        drop(self.groups.lock().take(Some(qp), gid));
    }

    fn abandon(&self) {
        let mut groups = self.groups.lock();
        groups.tree = RBTree::new();
        groups.send_only = 0;
        groups.record = None;
    }

    fn successes(&self) -> u32 {
        self.shared.successes.load(Relaxed)
    }

    fn is_member(&self, gid: &Gid) -> bool {
        let groups = self.groups.lock();
        if *gid == self.broadcast() && self.shared.lost.load(Acquire) {
            return false;
        }
        groups.tree.get(gid).is_some_and(|group| {
            matches!(group.membership.state(), State::Member(_))
                && self.own_gid().map_or(true, |(port, _)| port == group.port)
        })
    }

    fn is_others(&self, gid: &Gid) -> bool {
        self.groups.lock().tree.get(gid).is_none() && self.client.is_joined(gid)
    }

    fn terms(&self) -> Option<Terms> {
        self.groups.lock().record.map(|record| Terms {
            qkey: record.qkey,
            ib_mtu: record.mtu_bytes,
        })
    }

    fn knows(&self, _gid: &Gid) -> bool {
        // Nothing here waits.
        true
    }

    fn path(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr> {
        if gid.is_multicast() {
            self.group_path(gid, gid_index)
        } else {
            self.port_path(gid, gid_index)
        }
    }

    fn forget(&self) {
        let mut paths = self.shared.paths.lock();
        let mut cursor = paths.tree.cursor_front_mut();
        let mut gone = 0;
        while let Some(mut at) = cursor {
            cursor = if at.current_mut().1.forget() {
                gone += 1;
                at.remove_current().0
            } else {
                at.move_next()
            };
        }
        paths.count = paths.count.saturating_sub(gone);
        paths.refreshing = false;
    }

    fn doubt(&self, in_use: &dyn Fn(&Gid) -> bool) {
        self.sift(in_use, |_, _| true);
        self.refresh();
    }

    fn refresh(&self) {
        let successes = self.successes();
        loop {
            let mut found = None;
            // Some pause after a failure.
            let mut later = false;
            {
                let mut paths = self.shared.paths.lock();
                if !paths.refreshing || paths.questions >= MAX_SECOND_QUESTIONS {
                    return;
                }
                let next = paths.next;
                let mut cursor = paths.tree.cursor_lower_bound_mut(&next);
                while let Some(at) = cursor {
                    let (gid, known) = at.current();
                    if let Some(path) = known.path {
                        if known.stale && known.is_due(gid, successes) {
                            found = Some((*gid, path.sgid_index));
                            break;
                        }
                        later |= known.stale && !known.asked;
                    }
                    cursor = at.move_next();
                }
                paths.next = found.map_or(Gid::default(), |(gid, _)| gid);
                if found.is_none() {
                    if next != Gid::default() {
                        // Now all of them, from the front.
                        continue;
                    }
                    paths.refreshing = later;
                }
            }
            let Some((gid, gid_index)) = found else {
                return;
            };
            if self.port_path(&gid, gid_index).is_err() {
                // No memory, or no such GID any more; the housekeeper tries again.
                return;
            }
        }
    }

    fn housekeep(&self, in_use: &dyn Fn(&Gid) -> bool) {
        self.sift(in_use, |gid, known| match known.path {
            Some(_) => known.is_old(gid),
            None => known.backoff.is_history(),
        });
        self.refresh();
        let mut groups = self.groups.lock();
        let mut idle = KVVec::new();
        for (gid, group) in groups.tree.iter() {
            let (settled, failed) = match group.membership.state() {
                State::Asked => (false, false),
                State::Member(_) => (!in_use(gid), false),
                State::Failed(_) => (!group.noted || group.backoff.is_history(), true),
            };
            if group.state != JoinState::Full && settled {
                let _ = idle.push((*gid, failed), GFP_KERNEL);
            }
        }
        for (gid, failed) in &idle {
            drop(groups.take(None, gid));
            if let (true, Some(waker)) = (*failed, self.shared.waker.as_ref()) {
                // Its packets may go to the routers.
                waker.path_changed(gid);
            }
        }
    }

    fn lower(&self) -> Option<DeviceId> {
        None
    }
}

impl Drop for Sa {
    fn drop(&mut self) {
        let mut open = KVVec::new();
        {
            let mut paths = self.shared.paths.lock();
            let mut cursor = paths.tree.cursor_front_mut();
            while let Some(mut at) = cursor {
                if let Some(question) = at.current_mut().1.question.take() {
                    // Without memory for the list the question times out by itself.
                    let _ = open.push(question, GFP_ATOMIC);
                }
                cursor = at.move_next();
            }
        }
        for question in open {
            self.client.call_back(question);
        }
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_sa)]
mod tests {
    use super::*;

    /// The GID of a port, and what is known of it: a path of that age.
    fn known(tail: u8, age: usize) -> (Gid, Known) {
        let mut gid = Gid::default();
        gid.0[15] = tail;
        let known = Known {
            path: Some(ah::Attr::default()),
            since: jiffies().wrapping_sub(age),
            stale: false,
            asked: false,
            void: false,
            question: None,
            backoff: Backoff::NONE,
        };
        (gid, known)
    }

    /// Paths that were told at the same time are not asked for at the same time (W19).
    #[test]
    fn ages_are_spread() {
        for tail in [0, 1, 100, 255] {
            let due = FRESH + usize::from(tail) * HZ / 4;
            for (age, is_old) in [
                (0, false),
                (FRESH - HZ, false),
                (due - HZ, false),
                (due, true),
            ] {
                let (gid, known) = known(tail, age);
                assert_eq!(known.is_old(&gid), is_old);
                assert_eq!(known.is_due(&gid, 0), is_old);
            }
        }
    }

    /// Used until the answer, asked for once, and with pauses after failures.
    #[test]
    fn doubt() {
        let (gid, mut known) = known(7, 0);
        known.stale = true;
        assert!(known.is_due(&gid, 0));
        assert!(known.answer().is_ok());
        known.asked = true;
        assert!(!known.is_due(&gid, 0));
        assert!(known.answer().is_ok());
        known.asked = false;
        known.backoff.failed(EINVAL, 0);
        assert!(!known.is_due(&gid, 0));
        assert!(known.answer().is_ok());
    }

    /// What was asked before everything was forgotten may be about another partition or GID: its
    /// answer is none.
    #[test]
    fn forgotten_question() {
        let path = || Ok(ah::Attr::default());
        for answer in [path(), Err(EINVAL)] {
            let (gid, mut known) = known(7, 0);
            known.asked = true;
            assert!(!known.forget());
            assert_eq!(known.answer().err(), Some(EINPROGRESS));
            assert_eq!(known.answered(answer, 0), None);
            assert!(known.path.is_none());
            assert!(known.is_due(&gid, 0));
            // That to the next question is.
            known.asked = true;
            assert_eq!(known.answered(path(), 0), None);
            assert!(known.answer().is_ok());
            assert!(!known.is_due(&gid, 0));
            assert!(known.forget());
        }
    }

    /// What is old or too much goes, unless it is in use or asked for.
    #[test]
    fn sifting() {
        for (is_old, used, many, gone) in [
            (false, false, false, false),
            (false, false, true, true),
            (false, true, true, false),
            (true, false, false, true),
            (true, true, true, false),
        ] {
            let (_, mut known) = known(7, 0);
            assert_eq!(known.sift(is_old, used, many), gone);
            assert_eq!(known.stale, is_old);
            known.asked = true;
            assert!(!known.sift(is_old, used, many));
        }
        let (_, mut known) = known(7, 0);
        known.path = None;
        assert!(known.sift(true, true, false));
        assert!(!known.sift(false, true, true));
    }

    /// Nobody is told to wait for an answer that was no.
    #[test]
    fn refusal() {
        let (gid, mut known) = known(7, 0);
        known.path = None;
        assert!(known.is_due(&gid, 0));
        known.asked = true;
        assert_eq!(known.answer().err(), Some(EINPROGRESS));
        known.asked = false;
        known.backoff.failed(EINVAL, 0);
        assert!(!known.is_due(&gid, 0));
        assert_eq!(known.answer().err(), Some(EHOSTUNREACH));
    }
}
