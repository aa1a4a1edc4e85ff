// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! One port, one interface: its life, its states and what it does about events.
//!
//! ```text
//!            open                    port active, broadcast group joined
//!   Down ───────────▶ Up, no carrier ───────────────────────────────────▶ Up, carrier
//!     ▲                 ▲ │  ▲                                                │
//!     └─────── stop ────┘ └──┴───────── port down, GID gone ◀─────────────────┘
//! ```
//!
//! Events only note that something changed and queue work; the work looks at the port and does
//! what is left to do. All work of a port runs on its own ordered queue, through its [`Link`]. The
//! port is looked at before RTNL is taken, because looking may take it.
//!
//! Lock order: the link's mutex, RTNL, the instance lock, the transmit lock (softirqs off), a
//! neighbour's queue.

use crate::{
    cm::{
        self,
        Ability,
        Bell,
        Cm,
        Sent, //
    },
    control,
    ib::{
        ah::{
            self,
            Ah,
            Reaper, //
        },
        client::Query,
        cq::Status,
        device::{
            Device as Hca,
            Protocol, //
        },
        event,
        pd::Pd,
        queue::Destination,
        Gid,
        PortNum,
        QKey,
        Qpn, //
    },
    multicast::{
        Groups,
        Synced, //
    },
    neigh::{
        self,
        Header,
        Key,
        Neigh,
        Path,
        Queued, //
    },
    net::{
        self,
        device::{
            Device,
            DeviceId,
            DeviceRef,
            Driver,
            Link,
            Locked,
            Neighbourhood,
            Offloads,
            Parent,
            Registration,
            Setup,
            Stats,
            UnregisteredDevice, //
        },
        notifier,
        rtnl::{
            LinkOps,
            Rtnl, //
        },
        skb::Skb, //
    },
    path::{
        Fabric,
        View,
        Waker, //
    },
    roce::Roce,
    sa::Sa,
    stats::{
        Counter,
        Counters,
        Questions, //
    },
    sync::{
        elapsed,
        jiffies,
        lock::{
            new_spinlock_bh,
            SpinLockBh, //
        },
        rcu_map::Removed,
        work::{
            cancel_delayed_sync,
            OwnedQueue, //
        },
        HZ, //
    },
    ud::{
        RingSizes,
        Transport,
        Tx, //
    },
    wire::{
        self,
        Address, //
    },
};
use kernel::{
    impl_has_delayed_work, impl_has_work, new_delayed_work, new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic,
            AtomicFlag, //
        },
        barrier::{
            smp_mb,
            Full, //
        },
        new_mutex,
        rcu,
        Arc,
        Mutex, //
    },
    workqueue::{
        DelayedWork,
        Work,
        WorkItem, //
    },
};

/// `ARPHRD_INFINIBAND`.
const HARDWARE_TYPE: u16 = 32;

/// Seconds until a stalled transmission is reported.
const WATCHDOG: u32 = 10;

/// How often neighbours are told of a new hardware address, a second apart: what the Ethernet below
/// sends before its duplicate address detection is over is lost. A new interface's address is new
/// too, because it contains the number of a new queue pair.
const ANNOUNCEMENTS: u32 = 4;

/// Rebuilds in quick succession that are made at once; later ones are put off.
const PROMPT_REBUILDS: u32 = 4;

/// Rebuilds less than so many jiffies apart are in quick succession.
const QUICK: usize = HZ;

/// The longest pause before a rebuild, in jiffies.
const MAX_PAUSE: usize = HZ / 2;

/// Each rebuild that failed doubles that, so often at most.
const MAX_DOUBLINGS: u32 = 4;

/// Pauses between attempts to find the own GID, in jiffies.
const FIRST_SEARCH: usize = HZ / 50;
const LAST_SEARCH: usize = 5 * HZ;

/// Jiffies between two rounds of housekeeping.
const HOUSEKEEPING: usize = 10 * HZ;

/// What the module was told.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) rings: RingSizes,
    /// Connections that peers may open to an interface.
    pub(crate) max_connections: usize,
    pub(crate) roce: bool,
}

/// What every context of an interface shares.
#[pin_data(PinnedDrop)]
pub(crate) struct Port {
    _watching: Watching,
    pub(crate) stats: Counters,
    pub(crate) questions: Arc<Questions>,
    pub(crate) transport: Transport,
    #[pin]
    neighbours: neigh::Table,
    #[pin]
    pub(crate) cm: Cm,
    /// Bytes up to which a packet, with its header, goes by a datagram without further ado.
    plain: Atomic<u32>,
    /// The MTU of datagrams.
    datagram_mtu: Atomic<u32>,
    /// What datagrams of the link carry.
    qkey: Atomic<u32>,
    /// The link's P_Key, as of a full member, and its entry in the port's table.
    pkey: Atomic<u32>,
    pkey_index: Atomic<u32>,
    /// The queue pair works no more and will be rebuilt.
    broken: AtomicFlag,
    /// Interface is up, as far as the hot path cares.
    running: AtomicFlag,
    /// Packets wait for room in the ring.
    backlogged: AtomicFlag,
    reaper: Arc<Reaper>,
    pub(crate) hca: Arc<Hca>,
    pub(crate) number: PortNum,
    fabric: KBox<dyn Fabric>,
    worker: Arc<Worker>,
    queue: Arc<OwnedQueue>,
    common: Arc<Common>,
    /// Made and deleted by the parent's files.
    pub(crate) legacy: bool,
    /// The parent is about to delete it.
    condemned: AtomicFlag,
    umcast: AtomicFlag,
}

/// What a port's interface and its children share.
struct Common {
    config: Config,
    watchers: Arc<Watchers>,
    relatives: Arc<Relatives>,
    /// Runs what waits long: [`DELETE`] of the port's interface, and [`REAP`]. A child's end does not
    /// run its destructor, because the parent, which has the queue too, ends later.
    aside: OwnedQueue,
}

/// What belongs to the instance lock.
pub(crate) struct Control {
    up: bool,
    view: View,
    /// The MTU that the administrator asked for, if any, in datagram and in connected mode.
    admin_mtu: Option<u32>,
    connected_mtu: Option<u32>,
    /// The MTU is being changed by us.
    following: bool,
    groups: Groups,
    pub(crate) cm: cm::Table,
    /// Counts the addresses that the administrator gave; wraps.
    moves: u32,
    /// How often the neighbours are still to be told of a new address.
    announcements: u32,
    /// How long to wait, in jiffies, before the own GID is looked for again; 0 if it need not be.
    search: usize,
    /// The transport is started.
    started: bool,
    /// Counts the lives of the queue pair.
    life: u32,
    /// When it was rebuilt last, in jiffies, and how often in quick succession.
    rebuilt: usize,
    streak: u32,
    /// How many rebuilds failed in a row.
    failures: u32,
}

impl Control {
    /// Our own GID's place in the table.
    pub(crate) fn gid_index(&self) -> Option<u8> {
        self.view.gid_index
    }

    /// Megabits per second of the port; 0 if that is not known.
    pub(crate) fn mbps(&self) -> u32 {
        self.view.mbps
    }

    /// Bytes of a packet on the wire.
    pub(crate) fn ib_mtu(&self) -> u32 {
        self.view.ib_mtu
    }

    /// The MTU that the administrator chose in the present mode.
    fn chosen_mtu(&mut self, connected: bool) -> &mut Option<u32> {
        match connected {
            true => &mut self.connected_mtu,
            false => &mut self.admin_mtu,
        }
    }
}

const REFRESH: u64 = 1;
const RESOLVE: u64 = 2;
const RESTART: u64 = 3;
const GROUPS: u64 = 4;
const HOUSEKEEP: u64 = 5;
const REJOIN: u64 = 6;
const RESTART_LATER: u64 = 7;
const REFRESH_LATER: u64 = 8;
const CONNECT: u64 = 9;
const CONNECT_LATER: u64 = 10;
const TELL: u64 = 11;
const FOLLOW: u64 = 12;
const DELETE: u64 = 13;
const REAP: u64 = 14;

/// Ports and groups noted one by one when another way leads there; beyond, all are looked for anew.
const MAX_REROUTED: usize = 1024;

/// Ports and groups to which another way leads than did.
struct Rerouted {
    gids: KVVec<Gid>,
    /// There are more.
    all: bool,
}

/// The work of a port.
#[pin_data]
pub(crate) struct Worker {
    link: Arc<Link<Port>>,
    /// Memberships may have been lost: join anew.
    stale_groups: AtomicFlag,
    /// The fabric may lead elsewhere: ask for all ways anew.
    stale_paths: AtomicFlag,
    /// The device works no more.
    fatal: AtomicFlag,
    /// The fabric answered: ask it again for what waits.
    answered: AtomicFlag,
    #[pin]
    rerouted: SpinLockBh<Rerouted>,
    #[pin]
    refresh: Work<Worker, REFRESH>,
    #[pin]
    resolve: Work<Worker, RESOLVE>,
    #[pin]
    restart: Work<Worker, RESTART>,
    #[pin]
    groups: Work<Worker, GROUPS>,
    #[pin]
    housekeep: DelayedWork<Worker, HOUSEKEEP>,
    #[pin]
    rejoin: DelayedWork<Worker, REJOIN>,
    #[pin]
    restart_later: DelayedWork<Worker, RESTART_LATER>,
    #[pin]
    refresh_later: DelayedWork<Worker, REFRESH_LATER>,
    #[pin]
    connect: Work<Worker, CONNECT>,
    #[pin]
    connect_later: DelayedWork<Worker, CONNECT_LATER>,
    #[pin]
    tell: Work<Worker, TELL>,
    #[pin]
    follow: Work<Worker, FOLLOW>,
    #[pin]
    delete: Work<Worker, DELETE>,
    #[pin]
    reap: Work<Worker, REAP>,
}

impl_has_work! {
    impl HasWork<Self, REFRESH> for Worker { self.refresh }
    impl HasWork<Self, RESOLVE> for Worker { self.resolve }
    impl HasWork<Self, RESTART> for Worker { self.restart }
    impl HasWork<Self, GROUPS> for Worker { self.groups }
    impl HasWork<Self, CONNECT> for Worker { self.connect }
    impl HasWork<Self, TELL> for Worker { self.tell }
    impl HasWork<Self, FOLLOW> for Worker { self.follow }
    impl HasWork<Self, DELETE> for Worker { self.delete }
    impl HasWork<Self, REAP> for Worker { self.reap }
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self, HOUSEKEEP> for Worker { self.housekeep }
    impl HasDelayedWork<Self, REJOIN> for Worker { self.rejoin }
    impl HasDelayedWork<Self, RESTART_LATER> for Worker { self.restart_later }
    impl HasDelayedWork<Self, REFRESH_LATER> for Worker { self.refresh_later }
    impl HasDelayedWork<Self, CONNECT_LATER> for Worker { self.connect_later }
}

/// Makes a work item call a function with the port's device.
macro_rules! work {
    ($id:ident, $run:path) => {
        impl WorkItem<$id> for Worker {
            type Pointer = Arc<Self>;

            fn run(this: Arc<Self>) {
                // Nothing to do once the interface is gone.
                let _ = this.link.with($run);
            }
        }
    };
}

work!(REFRESH, refresh);
work!(RESOLVE, resolve);
work!(RESTART, restart);
work!(GROUPS, sync_groups);
work!(HOUSEKEEP, housekeep);
work!(REJOIN, sync_groups);
work!(RESTART_LATER, restart_now);
work!(REFRESH_LATER, refresh);
work!(CONNECT, cm::run);
work!(CONNECT_LATER, cm::run);
work!(TELL, cm::tell_senders);
work!(FOLLOW, children_follow);

impl WorkItem<DELETE> for Worker {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // Giving RTNL up waits for the last user of what was deleted; nothing else is held then.
        while let Some(Some(rtnl)) = this.link.with(delete_child) {
            drop(rtnl);
        }
    }
}

impl WorkItem<REAP> for Worker {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        cm::reap(&this.link);
    }
}

impl Worker {
    fn new(link: Arc<Link<Port>>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                link,
                stale_groups: AtomicFlag::new(false),
                stale_paths: AtomicFlag::new(false),
                fatal: AtomicFlag::new(false),
                answered: AtomicFlag::new(false),
                rerouted <- new_spinlock_bh!(
                    Rerouted {
                        gids: KVVec::new(),
                        all: false,
                    },
                    c"port::Worker::rerouted"
                ),
                refresh <- new_work!("ipoib_rs::refresh"),
                resolve <- new_work!("ipoib_rs::resolve"),
                restart <- new_work!("ipoib_rs::restart"),
                groups <- new_work!("ipoib_rs::groups"),
                housekeep <- new_delayed_work!("ipoib_rs::housekeep"),
                rejoin <- new_delayed_work!("ipoib_rs::rejoin"),
                restart_later <- new_delayed_work!("ipoib_rs::restart_later"),
                refresh_later <- new_delayed_work!("ipoib_rs::refresh_later"),
                connect <- new_work!("ipoib_rs::connect"),
                connect_later <- new_delayed_work!("ipoib_rs::connect_later"),
                tell <- new_work!("ipoib_rs::tell"),
                follow <- new_work!("ipoib_rs::follow"),
                delete <- new_work!("ipoib_rs::delete"),
                reap <- new_work!("ipoib_rs::reap"),
            }),
            GFP_KERNEL,
        )
    }
}

impl Port {
    /// Queues work; it may be queued already. Any context.
    fn soon<const ID: u64>(&self)
    where
        Arc<Worker>: kernel::workqueue::RawWorkItem<ID, EnqueueOutput = Result<(), Arc<Worker>>>
            + Send
            + 'static,
    {
        let _ = self.queue.enqueue::<Arc<Worker>, ID>(self.worker.clone());
    }

    /// Has the queue pair rebuilt.
    pub(crate) fn restart_soon(&self) {
        self.broken.store(true, Relaxed);
        self.soon::<RESTART>();
    }

    /// Has the queue pair rebuilt, if that is still needed, in so many jiffies.
    fn restart_after(&self, pause: usize) {
        let _ = self
            .queue
            .enqueue_delayed::<Arc<Worker>, RESTART_LATER>(self.worker.clone(), pause);
    }

    /// Has the port looked at again in so many jiffies.
    fn refresh_later(&self, delay: usize) {
        let _ = self
            .queue
            .enqueue_delayed::<Arc<Worker>, REFRESH_LATER>(self.worker.clone(), delay);
    }

    /// Has connections looked after again in so many jiffies.
    pub(crate) fn connect_later(&self, delay: usize) {
        let _ = self
            .queue
            .enqueue_delayed::<Arc<Worker>, CONNECT_LATER>(self.worker.clone(), delay);
    }

    /// Has the senders of refused packets told.
    pub(crate) fn tell_senders(&self) {
        self.soon::<TELL>();
    }

    /// The way to a port, from the own GID at `gid_index`. Sleeps.
    pub(crate) fn path_to(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr> {
        self.fabric.path(gid, gid_index)
    }

    /// The port's LID, 0 on RoCE. Sleeps, and may take RTNL.
    pub(crate) fn lid(&self) -> u16 {
        self.hca.query_port(self.number).map_or(0, |port| port.lid)
    }

    /// Has all packets looked after that wait for a way or for room.
    fn resolve_all(&self) {
        self.neighbours.want_all();
        self.soon::<RESOLVE>();
    }

    /// A completion says that the queue pair is dead.
    pub(crate) fn broken(&self, direction: &str, status: Status) {
        if self.broken.xchg(true, kernel::sync::atomic::ordering::Full) {
            return;
        }
        net::warn_ratelimited!(
            "{} port {}: a {} completed with {:?}; rebuilding the QP\n",
            self.hca.name(),
            self.number.0,
            direction,
            status
        );
        self.soon::<RESTART>();
    }

    /// The link's P_Key, as of a full member.
    #[inline]
    pub(crate) fn pkey(&self) -> u16 {
        self.pkey.load(Relaxed) as u16
    }

    /// Its entry in the port's table, while the interface has one.
    pub(crate) fn pkey_index(&self) -> u16 {
        self.pkey_index.load(Relaxed) as u16
    }

    /// Groups that others on the port have joined are theirs.
    pub(crate) fn umcast(&self) -> bool {
        self.umcast.load(Relaxed)
    }

    pub(crate) fn set_umcast(&self, on: bool) {
        self.umcast.store(on, Relaxed);
        if on {
            pr_warn!(
                "{} port {}: ignoring multicast groups joined directly by userspace\n",
                self.hca.name(),
                self.number.0
            );
        }
        self.soon::<GROUPS>();
    }

    /// Marks a child as good as gone.
    pub(crate) fn condemn(&self) {
        self.condemned.store(true, Relaxed);
    }

    /// Whether it is a child that is as good as gone.
    pub(crate) fn is_condemned(&self) -> bool {
        self.condemned.load(Relaxed)
    }

    /// Has identifiers of connections destroyed.
    pub(crate) fn reap_aside(&self) {
        let _ = self
            .common
            .aside
            .enqueue::<Arc<Worker>, REAP>(self.worker.clone());
    }

    /// Has the children deleted that are condemned.
    pub(crate) fn delete_condemned(&self) {
        let _ = self
            .common
            .aside
            .enqueue::<Arc<Worker>, DELETE>(self.worker.clone());
    }

    /// The way to another partition of the port; see [`Fabric::partition`].
    fn partition(&self, pkey: u16, questions: Arc<Questions>) -> Result<KBox<dyn Fabric>> {
        self.fabric.partition(pkey, questions)
    }

    #[inline]
    fn qkey(&self) -> QKey {
        QKey(self.qkey.load(Relaxed))
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }

    /// Whether the stack may hand packets over.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        self.running.load(Relaxed) && !self.is_broken()
    }

    /// There is room in the ring for packets that waited for it.
    #[inline]
    pub(crate) fn room_in_ring(&self) {
        if self.backlogged.load(Relaxed) {
            self.backlogged.store(false, Relaxed);
            self.resolve_all();
        }
    }

    /// Accounts for entries that left the neighbour table, and for what waited in them.
    fn discard(&self, removed: Removed<Key, Neigh>) {
        let waiters = &self.neighbours.waiters;
        removed.each(|_, neigh| {
            let mut lost = 0;
            while neigh.next_waiting(waiters).is_some() {
                lost += 1;
            }
            self.stats.tx_neigh_failed.add(lost);
        });
        self.reaper.reap();
    }
}

#[pinned_drop]
impl PinnedDrop for Port {
    fn drop(self: Pin<&mut Self>) {
        // Timers first: the queue waits for what is queued only.
        cancel_delayed_sync::<Worker, HOUSEKEEP>(&self.worker);
        cancel_delayed_sync::<Worker, REJOIN>(&self.worker);
        cancel_delayed_sync::<Worker, RESTART_LATER>(&self.worker);
        cancel_delayed_sync::<Worker, REFRESH_LATER>(&self.worker);
        cancel_delayed_sync::<Worker, CONNECT_LATER>(&self.worker);
    }
}

/// Looks at the port and makes the interface follow.
fn refresh(dev: &Device<Port>) {
    // What may take RTNL comes first.
    let (searching, moves) = {
        let mut locked = dev.lock();
        let control = locked.control();
        (control.search != 0, control.moves)
    };
    if searching {
        dev.reaper.reap();
        dev.fabric.find_gid();
    }
    let view = dev.fabric.view();
    let on_ethernet = dev.fabric.lower().is_some();
    let rtnl = Rtnl::lock();
    if !dev.is_registered(&rtnl) {
        return;
    }
    let mut locked = dev.lock();
    if locked.control().moves != moves {
        // The port may have been looked at before it got another address.
        dev.soon::<REFRESH>();
        return;
    }
    let fatal = dev.worker.fatal.load(Relaxed);
    let view = view.map(|view| View {
        active: view.active && !fatal,
        ..view
    });
    dev.cm
        .note_port(view.as_ref().is_ok_and(|view| view.active));
    let Ok(view) = view else {
        locked.control().view.active = false;
        dev.set_carrier(false);
        dev.refresh_later(HZ);
        return;
    };
    let old = core::mem::replace(&mut locked.control().view, view);
    follow_broadcast(&rtnl, &mut locked);
    if (old.pkey, old.pkey_index) != (view.pkey, view.pkey_index) {
        change_pkey(&rtnl, &mut locked);
    }
    let lost = old.gid_index.is_some() && view.gid_index.is_none();
    if old.gid != view.gid {
        let address = own_address(&dev.transport, dev.cm.is_able(), &view);
        locked.set_address(&rtnl, &address.0);
        pr_info!("{}: the port's GID is {} now\n", dev.name(), view.gid);
        locked.control().announcements = ANNOUNCEMENTS;
    }
    if old.gid != view.gid || lost {
        cm::abandon(&mut locked);
        // Receiving compares with the own GID, and what was sent names it.
        rebuild(&mut locked);
    }
    let doubtful = dev
        .worker
        .stale_paths
        .xchg(false, kernel::sync::atomic::ordering::Full);
    // Address handles keep the GID's place in the table, which another GID may need: that of the
    // Ethernet's next address.
    let idle = view.gid_index.is_none() || !view.active && on_ethernet;
    let names = |view: &View| (view.gid, view.gid_index, view.pkey, view.pkey_index);
    if names(&old) != names(&view) {
        dev.fabric.forget();
        dev.discard(dev.neighbours.clear());
    } else if idle {
        dev.discard(dev.neighbours.clear());
    } else if doubtful {
        dev.in_use(|in_use| dev.fabric.doubt(in_use));
    }
    search(&mut locked, on_ethernet && names(&old) != names(&view));
    follow_mtu(&rtnl, &mut locked);
    let stale = dev
        .worker
        .stale_groups
        .xchg(false, kernel::sync::atomic::ordering::Full);
    if stale {
        let control = locked.control();
        control.groups.leave_all(&*dev.fabric, &dev.transport.qp);
    }
    update_carrier(&mut locked);
    if dev.carrier() && locked.control().announcements != 0 {
        locked.control().announcements -= 1;
        locked.announce(&rtnl);
        if locked.control().announcements != 0 {
            dev.refresh_later(HZ);
        }
    }
    dev.soon::<GROUPS>();
}

/// Has the own GID looked for, after longer and longer pauses, while it is missing, and for a while
/// after it `moved`: its proper place in the table is free only when the last user of the GID that
/// was there has gone.
fn search(locked: &mut Locked<'_, Port>, moved: bool) {
    let control = locked.control();
    let found = control.view.gid_index.is_some();
    control.search = match control.search {
        0 if found && !moved => 0,
        LAST_SEARCH if found && !moved => 0,
        0 => FIRST_SEARCH.max(1),
        _ if moved => FIRST_SEARCH.max(1),
        pause => pause.saturating_mul(2).min(LAST_SEARCH),
    };
    let pause = control.search;
    if pause != 0 {
        locked.dev().refresh_later(pause);
    }
}

/// The broadcast address of the link that the administrator wants, of another scope maybe. The
/// stack makes the addresses of groups by it at once.
fn wanted_link(locked: &mut Locked<'_, Port>, rtnl: &Rtnl) -> Option<Address> {
    let own = *locked.control().groups.broadcast();
    let wanted = Address::read(locked.broadcast(rtnl))?;
    wire::scope_of(&wanted, &own).map(|_| wanted)
}

/// Moves to the link whose broadcast address the administrator has set, or has the stack go by ours
/// if that is no other scope's.
fn follow_broadcast(rtnl: &Rtnl, locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let own = *locked.control().groups.broadcast();
    let wanted = wanted_link(locked, rtnl);
    if wanted == Some(own) {
        return;
    }
    let moved = wanted.filter(|wanted| {
        let scope = wire::scope_of(wanted, &own);
        scope.is_some_and(|scope| dev.fabric.set_scope(scope).is_ok())
    });
    let Some(broadcast) = moved else {
        net::warn_seldom!(
            "{}: there is no link with that broadcast address\n",
            dev.name()
        );
        locked.set_broadcast(rtnl, &own.0);
        return;
    };
    let groups = &mut locked.control().groups;
    groups.leave_all(&*dev.fabric, &dev.transport.qp);
    groups.move_to(broadcast);
    pr_info!(
        "{}: the broadcast group is {} now\n",
        dev.name(),
        Gid(broadcast.gid())
    );
    dev.discard(dev.neighbours.clear_groups());
    // Receiving tells by it what was sent to all.
    rebuild(locked);
}

/// Moves to the partition that was seen, or to another entry of the P_Key table (B28).
fn change_pkey(rtnl: &Rtnl, locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let control = locked.control();
    let view = control.view;
    match view.pkey_index {
        Some(index) => pr_info!(
            "{}: P_Key {:#06x} is at {} of the table now\n",
            dev.name(),
            view.pkey,
            index
        ),
        None => pr_warn!("{}: P_Key {:#06x} is not found\n", dev.name(), view.pkey),
    }
    // Memberships are of the old partition; without an entry the port may not have any.
    control.groups.leave_all(&*dev.fabric, &dev.transport.qp);
    if view.pkey != dev.pkey() {
        let scope = dev.fabric.profile().scope;
        let broadcast = Address::group(&wire::broadcast_mgid(scope, view.pkey));
        control.groups.move_to(broadcast);
        dev.fabric.set_pkey(view.pkey);
        dev.fabric.forget();
        dev.pkey.store(view.pkey.into(), Relaxed);
        locked.set_broadcast(rtnl, &broadcast.0);
    }
    dev.pkey_index
        .store(view.pkey_index.unwrap_or(0).into(), Relaxed);
    cm::abandon(locked);
    rebuild(locked);
}

/// Sets the children up or down, as the parent is.
fn children_follow(dev: &Device<Port>) {
    let rtnl = Rtnl::lock();
    if !dev.is_registered(&rtnl) {
        return;
    }
    let up = dev.running.load(Relaxed);
    dev.each_child(&rtnl, |child| {
        if let Err(error) = child.set_up(&rtnl, up) {
            pr_warn!("{}: setting it up failed: {:?}\n", child.name(), error);
        }
    });
}

/// Deletes a child that is condemned, if there is one; the last of it goes with the result.
fn delete_child(dev: &Device<Port>) -> Option<Rtnl> {
    let rtnl = Rtnl::lock();
    if !dev.is_registered(&rtnl) {
        return None;
    }
    dev.remove_child(&rtnl, |child| child.is_condemned())
        .then_some(rtnl)
}

/// Sets the MTU to what the administrator wants and the port allows.
fn follow_mtu(rtnl: &Rtnl, locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let connected = dev.cm.is_connected();
    let most = max_mtu(locked);
    locked.set_mtu_limits(rtnl, wire::MIN_MTU, most);
    let chosen = *locked.control().chosen_mtu(connected);
    let mtu = chosen.unwrap_or(most).min(most);
    note_mtu(locked, mtu);
    if mtu == dev.mtu() {
        return;
    }
    locked.control().following = true;
    let status = locked.set_mtu(rtnl, mtu);
    locked.control().following = false;
    if let Err(error) = status {
        pr_warn!("{}: setting MTU {} failed: {:?}\n", dev.name(), mtu, error);
    }
}

/// The largest MTU in the present mode.
fn max_mtu(locked: &mut Locked<'_, Port>) -> u32 {
    match locked.dev().cm.is_connected() {
        true => locked.dev().cm.max_mtu(),
        false => wire::ip_mtu(locked.control().view.ib_mtu),
    }
}

/// Tells transmission what the MTU is, or is about to be.
fn note_mtu(locked: &mut Locked<'_, Port>, mtu: u32) {
    let dev = locked.dev();
    let datagram = wire::ip_mtu(locked.control().view.ib_mtu);
    let plain = match dev.cm.is_connected() {
        // Each packet is looked at.
        true => 0,
        false => mtu.saturating_add(wire::HEADER_LEN as u32),
    };
    dev.datagram_mtu.store(datagram.min(mtu), Relaxed);
    dev.plain.store(plain, Relaxed);
}

/// Opens connections from now on, or no more.
///
/// # Errors
///
/// `EINVAL`: the device cannot.
pub(crate) fn set_mode(rtnl: &Rtnl, locked: &mut Locked<'_, Port>, connected: bool) -> Result {
    let dev = locked.dev();
    if dev.cm.is_connected() == connected {
        return Ok(());
    }
    if connected && !dev.cm.is_able() {
        return Err(EINVAL);
    }
    if connected {
        locked.keep_routes(rtnl);
        pr_info!(
            "{}: connected mode; longer packets to groups than datagrams carry are dropped\n",
            dev.name()
        );
    }
    dev.cm.set_connected(connected);
    // No packet that the hardware is to cut comes while the MTU is that of connections.
    if connected {
        locked.update_features(rtnl);
    }
    follow_mtu(rtnl, locked);
    if !connected {
        locked.update_features(rtnl);
    }
    Ok(())
}

/// The hardware address, with what we take.
fn own_address(transport: &Transport, able: bool, view: &View) -> Address {
    let address = Address::new(transport.qp.qpn().0, &view.gid.0);
    match able {
        true => address.with_flag(wire::FLAG_RC),
        false => address,
    }
}

fn update_carrier(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let control = locked.control();
    let carrier = control.up && control.view.active && control.groups.has_link();
    dev.set_carrier(carrier);
}

/// Joins and leaves groups.
fn sync_groups(dev: &Device<Port>) {
    let mut locked = dev.lock();
    let control = locked.control();
    if !control.up || !control.view.active {
        return;
    }
    let before = control.groups.on_link();
    let synced = control.groups.sync(
        &*dev.fabric,
        &dev.transport.qp,
        &dev.stats,
        dev.name(),
        dev.umcast(),
    );
    let left = control.groups.take_left();
    if control.groups.on_link() && !before {
        joined_link(&mut locked);
    }
    // With an MTU that the group does not carry there is no carrier until the port was looked at.
    let most = locked.control().view.ib_mtu;
    if dev.fabric.terms().is_none_or(|terms| terms.ib_mtu >= most) {
        update_carrier(&mut locked);
    }
    if !left.is_empty() {
        // Who only sends joins in another way.
        dev.discard(dev.neighbours.clear_ways_to(&left));
    }
    if let Synced::Again(pause) = synced {
        let _ = dev
            .queue
            .enqueue_delayed::<Arc<Worker>, REJOIN>(dev.worker.clone(), pause);
    }
}

/// Takes over what the broadcast group prescribes, once it was joined.
fn joined_link(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let Some(terms) = dev.fabric.terms() else {
        return;
    };
    if dev.qkey() != terms.qkey {
        dev.qkey.store(terms.qkey.0, Relaxed);
        if let Err(error) = dev.transport.qp.set_qkey(terms.qkey) {
            pr_warn!("{}: setting the Q_Key failed: {:?}\n", dev.name(), error);
            dev.restart_soon();
        }
    }
    // Groups may have got other LIDs.
    dev.discard(dev.neighbours.clear_groups());
    if terms.ib_mtu != locked.control().view.ib_mtu {
        dev.soon::<REFRESH>();
    }
}

/// Rebuilds the queue pair, if the interface is up.
///
/// Where there is no route every send kills the queue pair: then the stack's queue holds the packets
/// for longer and longer.
fn restart(dev: &Device<Port>) {
    let mut locked = dev.lock();
    if !dev.is_broken() || dev.worker.fatal.load(Relaxed) {
        return;
    }
    let control = locked.control();
    if elapsed(control.rebuilt) > QUICK {
        control.streak = 0;
    }
    control.streak = control.streak.saturating_add(1);
    match control.streak.checked_sub(PROMPT_REBUILDS) {
        None | Some(0) => rebuild(&mut locked),
        Some(excess) => {
            let pause = (HZ / 100).max(1).saturating_mul(1 << excess.min(8));
            dev.restart_after(pause.min(MAX_PAUSE));
        }
    }
}

fn restart_now(dev: &Device<Port>) {
    let mut locked = dev.lock();
    if dev.is_broken() && !dev.worker.fatal.load(Relaxed) {
        rebuild(&mut locked);
    }
}

fn rebuild(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    if !locked.control().up {
        return;
    }
    dev.stats.qp_restarts.add(1);
    locked.control().rebuilt = jiffies();
    // Keeps completions from waking the queue.
    dev.broken.store(true, Relaxed);
    stop_transport(locked);
    // All sends are done with.
    dev.reaper.reap();
    // From here on a completion that says so is about the new life.
    dev.broken.store(false, Relaxed);
    match start_transport(locked) {
        Ok(()) => {
            locked.control().failures = 0;
            if !dev.is_broken() {
                dev.wake_queue();
            }
            // Packets may have waited for a completion that did not come.
            dev.resolve_all();
        }
        Err(error) => {
            dev.broken.store(true, Relaxed);
            net::warn_seldom!("{}: rebuilding the QP failed: {:?}\n", dev.name(), error);
            let failures = &mut locked.control().failures;
            dev.restart_after(MAX_PAUSE << (*failures).min(MAX_DOUBLINGS));
            *failures = failures.saturating_add(1);
        }
    }
}

fn start_transport(locked: &mut Locked<'_, Port>) -> Result {
    let dev = locked.dev();
    stop_transport(locked);
    let control = locked.control();
    if control.started {
        return Err(EBUSY);
    }
    // Without a P_Key it must not hear anybody (B27).
    let Some(pkey_index) = control.view.pkey_index else {
        return Ok(());
    };
    control.life = control.life.wrapping_add(1);
    control.started = true;
    let life = control.life;
    let names = (control.view.gid, Gid(control.groups.broadcast().gid()));
    locked.restart_watchdog();
    dev.transport
        .start(locked, life, names, pkey_index, dev.qkey())
        .inspect_err(|_| stop_transport(locked))
}

/// Stops the transport; it counts as started until that worked.
fn stop_transport(locked: &mut Locked<'_, Port>) {
    let control = locked.control();
    let life = control.life;
    if control.started {
        // Connections complete by the same queue.
        locked.disable_queue();
        cm::close_active(locked);
        let stopped = locked.dev().transport.stop(locked, life);
        locked.control().started = stopped.is_err();
    }
}

/// Finds the ways that packets wait for, and sends them.
fn resolve(dev: &Device<Port>) {
    let gid_index = dev.lock().control().view.gid_index;
    reroute(dev);
    if dev
        .worker
        .answered
        .xchg(false, kernel::sync::atomic::ordering::Full)
    {
        dev.fabric.refresh();
        dev.neighbours.want_all();
        dev.cm.path_known();
    }
    let keys = match dev.neighbours.take_work() {
        neigh::Work::Keys(keys) => keys,
        neigh::Work::All => {
            // Entries that came since have their own wish noted.
            let Ok(mut keys) = KVVec::with_capacity(dev.neighbours.len(), GFP_KERNEL) else {
                // The housekeeper tries again.
                return;
            };
            dev.neighbours.waiting(&mut keys);
            keys
        }
    };
    // What can be told at once comes first. What others must be asked for may take long: one of
    // those in each run, so that other work of the port gets its turn.
    let mut slow = None;
    let mut left = false;
    for key in &keys {
        let known = {
            let guard = rcu::read_lock();
            dev.neighbours
                .get(key, &guard)
                .map(|neigh| neigh.path().is_some())
        };
        match known {
            None => {}
            Some(true) => finish(dev, key, Ok(None)),
            Some(false) if dev.fabric.knows(&Gid(key.address().gid())) => {
                finish(dev, key, find_path(dev, key, gid_index).map(Some));
            }
            Some(false) if slow.is_none() => slow = Some(*key),
            Some(false) => {
                dev.neighbours.want(key);
                left = true;
            }
        }
    }
    if let Some(key) = slow {
        finish(dev, &key, find_path(dev, &key, gid_index).map(Some));
    }
    if left {
        dev.soon::<RESOLVE>();
    }
}

/// Lets go of neighbours to whom another way leads now.
fn reroute(dev: &Device<Port>) {
    let (mut gids, all) = {
        let mut rerouted = dev.worker.rerouted.lock();
        (
            core::mem::replace(&mut rerouted.gids, KVVec::new()),
            core::mem::replace(&mut rerouted.all, false),
        )
    };
    if all {
        dev.discard(dev.neighbours.clear());
    } else if !gids.is_empty() {
        neigh::sort(&mut gids);
        dev.discard(dev.neighbours.clear_ways_to(&gids));
    }
}

fn find_path(dev: &Device<Port>, key: &Key, gid_index: Option<u8>) -> Result<Path> {
    let gid_index = gid_index.ok_or(EHOSTUNREACH)?;
    let attr = match dev.fabric.path(&key.gid(), gid_index) {
        Err(ENOENT) => find_detour(dev, key, gid_index)?,
        found => found?,
    };
    Ok(Path {
        ah: Ah::new(&dev.reaper, dev.number, &attr)?,
        qpn: Qpn(key.address().qpn()),
        detour: (attr.gid != key.gid()).then_some(attr.gid),
    })
}

/// The way for packets to a group that is not there: routers may know more of it (R4391-10.c).
fn find_detour(dev: &Device<Port>, key: &Key, gid_index: u8) -> Result<ah::Attr> {
    let wide = {
        let guard = rcu::read_lock();
        dev.neighbours
            .get(key, &guard)
            .is_some_and(|neigh| neigh.first_waiting(wire::is_wide))
    };
    if !wide {
        return Err(EHOSTUNREACH);
    }
    let routers = Gid(wire::routers_mgid(&key.gid().0));
    let attr = match dev.fabric.path(&routers, gid_index) {
        Err(ENOENT | EHOSTUNREACH) => {
            let everybody = wire::broadcast_mgid(dev.fabric.profile().scope, dev.pkey());
            dev.fabric.path(&Gid(everybody), gid_index)?
        }
        found => found?,
    };
    dev.stats.group_detours.add(1);
    Ok(attr)
}

/// Notes the way to a neighbour and sends what waits for it, or drops it if there is none.
fn finish(dev: &Device<Port>, key: &Key, path: Result<Option<Path>>) {
    let waiters = &dev.neighbours.waiters;
    let mut tx = dev.tx_lock();
    let guard = rcu::read_lock();
    let Some(neigh) = dev.neighbours.get(key, &guard) else {
        return;
    };
    match path {
        Ok(Some(path)) => neigh.set_path(path),
        Ok(None) => {}
        // It waits for an answer.
        Err(EINPROGRESS) => return,
        Err(_) => {
            dev.stats.tx_neigh_failed.add(neigh.fail(waiters) as u64);
            return;
        }
    }
    let Some(path) = neigh.path() else {
        return;
    };
    let to = Destination {
        ah: &path.ah,
        qpn: path.qpn,
        qkey: dev.qkey(),
    };
    while let Some(skb) = neigh.next_waiting(waiters) {
        if !has_room(dev, &mut tx) {
            neigh.wait_again(waiters, skb);
            break;
        }
        tx.send(dev, skb, &to, true);
    }
    tx.flush(dev);
}

/// Whether a packet can be posted now; if not, a completion or a rebuild looks again.
fn has_room(dev: &Device<Port>, tx: &mut Tx) -> bool {
    if dev.may_send() && tx.room() != 0 {
        return true;
    }
    dev.backlogged.store(true, Relaxed);
    // Either a completion sees the flag, or we see the room that it made.
    smp_mb(Full);
    dev.may_send() && tx.room() != 0
}

/// Lets idle neighbours go, destroys what they left, and tries again what failed.
fn housekeep(dev: &Device<Port>) {
    dev.discard(dev.neighbours.expire());
    cm::housekeep(dev);
    dev.transport.look();
    dev.in_use(|in_use| dev.fabric.housekeep(in_use));
    if dev.is_broken() {
        dev.soon::<RESTART>();
    }
    if dev.running.load(Relaxed) && !dev.carrier() {
        // Nobody may have told us that the port is back.
        dev.soon::<REFRESH>();
    }
    if dev.neighbours.anyone_waits() {
        dev.resolve_all();
    }
    let _ = dev
        .queue
        .enqueue_delayed::<Arc<Worker>, HOUSEKEEP>(dev.worker.clone(), HOUSEKEEPING);
}

impl Driver for Port {
    type Control = Control;
    type Tx = Tx;

    const ADDRESS_LEN: usize = wire::ADDRESS_LEN;
    const HEADER_LEN: usize = wire::HEADER_LEN;

    fn open(locked: &mut Locked<'_, Self>) -> Result {
        let dev = locked.dev();
        dev.broken.store(false, Relaxed);
        dev.backlogged.store(false, Relaxed);
        start_transport(locked)?;
        cm::start(locked).inspect_err(|_| {
            cm::stop(locked);
            stop_transport(locked);
        })?;
        let control = locked.control();
        control.up = true;
        if control.view.pkey_index.is_none() {
            pr_warn!("{}: P_Key {:#06x} is not found\n", dev.name(), dev.pkey());
        }
        dev.running.store(true, Relaxed);
        dev.start_queue();
        dev.soon::<REFRESH>();
        dev.soon::<FOLLOW>();
        Ok(())
    }

    fn stop(locked: &mut Locked<'_, Self>) {
        let dev = locked.dev();
        dev.running.store(false, Relaxed);
        dev.set_carrier(false);
        let control = locked.control();
        control.up = false;
        control.groups.leave_all(&*dev.fabric, &dev.transport.qp);
        locked.disable_queue();
        cm::stop(locked);
        stop_transport(locked);
        dev.discard(dev.neighbours.clear());
        // Whoever sets the interface down and up wants to start afresh.
        dev.fabric.forget();
        dev.soon::<FOLLOW>();
    }

    #[inline]
    fn start_xmit(dev: &Device<Self>, tx: &mut Tx, skb: Skb) {
        let more = Device::<Self>::xmit_more();
        if let Err(lost) = xmit(dev, tx, skb, more) {
            lost.add(1);
            if !more {
                // Packets before this one may be waiting for the last of their burst.
                tx.flush(dev);
            }
        }
        // A burst ends here too when the queue was stopped, by whichever chain.
        let stopped = more && dev.queue_stopped();
        if stopped {
            tx.flush(dev);
        }
        if tx.chained_to.is_some() && (!more || stopped) {
            dev.cm.flush(dev, tx);
        }
    }

    fn tx_timeout(dev: &Device<Self>) {
        pr_warn!(
            "{}: transmission stalled, {} sends outstanding, queue {}, QP {}; rebuilding it\n",
            dev.name(),
            dev.transport.progress().outstanding(),
            match dev.queue_stopped() {
                true => "stopped",
                false => "limited",
            },
            match dev.is_broken() {
                true => "broken",
                false => "running",
            }
        );
        dev.stats.tx_timeouts.add(1);
        dev.restart_soon();
    }

    fn groups_changed(
        locked: &mut Locked<'_, Self>,
        rtnl: &Rtnl,
        groups: net::device::Groups<'_>,
    ) -> Result {
        let broadcast = wanted_link(locked, rtnl).unwrap_or(*locked.control().groups.broadcast());
        locked.control().groups.want(&groups, broadcast)?;
        locked.dev().soon::<GROUPS>();
        Ok(())
    }

    fn change_mtu(locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32> {
        let connected = locked.dev().cm.is_connected();
        let most = max_mtu(locked);
        if !locked.control().following {
            // Who takes all that there is goes with the port.
            *locked.control().chosen_mtu(connected) = (mtu < most).then_some(mtu);
        }
        let mtu = mtu.min(most);
        note_mtu(locked, mtu);
        Ok(mtu)
    }

    fn change_address(locked: &mut Locked<'_, Self>, rtnl: &Rtnl, address: &[u8]) -> Result {
        let dev = locked.dev();
        let control = locked.control();
        if control.up {
            return Err(EBUSY);
        }
        let present = own_address(&dev.transport, dev.cm.is_able(), &control.view);
        let wanted = Address::read(address).ok_or(EINVAL)?;
        let guid = wire::chosen_guid(&present, &wanted).ok_or(EINVAL)?;
        dev.fabric.set_guid(guid)?;
        control.moves = control.moves.wrapping_add(1);
        control.view.gid = Gid(wanted.gid());
        // The look at the port finds it, or not yet.
        control.view.gid_index = None;
        control.view.active = false;
        dev.soon::<REFRESH>();
        dev.each_child(rtnl, |child| {
            if child.fabric.set_guid(guid).is_ok() {
                child.soon::<REFRESH>();
            }
        });
        Ok(())
    }

    fn goes_without_offloads(dev: &Device<Self>) -> bool {
        dev.cm.is_connected()
    }

    fn stats(dev: &Device<Self>, stats: &mut Stats) {
        let c = &dev.stats;
        let sum = |a: &Counter, b: &Counter| a.get().wrapping_add(b.get());
        stats.rx_packets = sum(&c.rx_delivered_packets, &c.rx_conn_packets);
        stats.rx_bytes = sum(&c.rx_delivered_bytes, &c.rx_conn_bytes);
        stats.rx_length_errors = c.rx_bad_length.get();
        stats.rx_errors = c.rx_failed.get().wrapping_add(c.rx_bad_length.get());
        stats.rx_dropped = sum(&c.rx_no_memory, &c.rx_unread);
        stats.multicast = c.rx_multicast_packets.get();
        stats.tx_packets = c.tx_sent_packets.get();
        stats.tx_bytes = c.tx_sent_bytes.get();
        stats.tx_errors = c.tx_failed.get();
        stats.tx_dropped = [
            &c.tx_no_memory,
            &c.tx_no_room,
            &c.tx_oversize,
            &c.tx_runt,
            &c.tx_bad_protocol,
            &c.tx_bad_offload,
            &c.tx_neigh_queue_full,
            &c.tx_neigh_failed,
            &c.tx_neigh_overflow,
            &c.tx_too_big,
        ]
        .iter()
        .fold(0, |sum: u64, counter| sum.wrapping_add(counter.get()));
    }

    fn write_header(header: &mut [u8], ethertype: u16, destination: &[u8]) {
        let (address, encap) = header.split_at_mut(wire::ADDRESS_LEN.min(header.len()));
        for (to, from) in address.iter_mut().zip(destination) {
            *to = *from;
        }
        for (to, from) in encap.iter_mut().zip(wire::encap(ethertype)) {
            *to = from;
        }
    }
}

/// Sends a packet or lets it wait; the counter of its loss otherwise.
#[inline(always)]
fn xmit<'a>(
    dev: &'a Device<Port>,
    tx: &mut Tx,
    mut skb: Skb,
    more: bool,
) -> Result<(), &'a Counter> {
    let Some(header) = Header::read(skb.head()) else {
        return Err(&dev.stats.tx_runt);
    };
    if skb.len() <= dev.plain.load(Relaxed) as usize {
        let guard = rcu::read_lock();
        // The header is that of a packet that was sent, so nothing is wrong with it.
        let again = dev.neighbours.again(&tx.last, &header, &guard);
        if let Some(path) = again.and_then(|neigh| neigh.ready()) {
            let to = Destination {
                ah: &path.ah,
                qpn: path.qpn,
                qkey: dev.qkey(),
            };
            skb.pull(wire::ADDRESS_LEN);
            tx.send(dev, skb, &to, more);
            return Ok(());
        }
    }
    xmit_anew(dev, tx, skb, more)
}

/// Sends a packet whose header is not that of the one before.
#[inline(never)]
fn xmit_anew<'a>(
    dev: &'a Device<Port>,
    tx: &mut Tx,
    mut skb: Skb,
    more: bool,
) -> Result<(), &'a Counter> {
    let stats = &dev.stats;
    let head = skb.head();
    let header = Header::read(head);
    let (Some(key), Some(protocol)) = (
        Key::read(head, dev.pkey()),
        head.get(wire::ADDRESS_LEN..).and_then(wire::ethertype),
    ) else {
        return Err(&stats.tx_runt);
    };
    if !wire::is_sent(protocol) {
        return Err(&stats.tx_bad_protocol);
    }
    if skb.len() > dev.plain.load(Relaxed) as usize {
        return xmit_otherwise(dev, tx, skb, &key, protocol, more);
    }
    if !skb.pull(wire::ADDRESS_LEN) {
        return Err(&stats.tx_runt);
    }
    xmit_datagram(dev, tx, skb, &key, header, more)
}

/// Sends a packet that may be long: by a connection if there can be one.
#[inline(never)]
fn xmit_otherwise<'a>(
    dev: &'a Device<Port>,
    tx: &mut Tx,
    mut skb: Skb,
    key: &Key,
    protocol: u16,
    more: bool,
) -> Result<(), &'a Counter> {
    let connected = dev.cm.is_connected();
    let head = skb.head();
    // What is left to the hardware comes in connected mode only just after the mode was changed.
    let rides = connected
        && !skb.wants_offload()
        && head.first().is_some_and(|flags| flags & wire::FLAG_RC != 0)
        && head.get(4).is_some_and(|&byte| byte != 0xff)
        && wire::may_ride(protocol, head.get(wire::HEADER_LEN..).unwrap_or_default());
    if !skb.pull(wire::ADDRESS_LEN) {
        return Err(&dev.stats.tx_runt);
    }
    if rides {
        match dev.cm.send(dev, tx, key, skb, more) {
            Sent::Plain(plain) => skb = plain,
            Sent::Taken | Sent::Lost => {
                if !more {
                    // Datagrams before this one may wait for the last of their burst.
                    tx.flush(dev);
                }
                return Ok(());
            }
        }
    }
    let mtu = dev.datagram_mtu.load(Relaxed);
    if skb.len() > mtu as usize + wire::ENCAP_LEN && !skb.segments_fit(mtu) {
        if !connected {
            return Err(&dev.stats.tx_oversize);
        }
        dev.cm.refuse(dev, skb, mtu);
        if !more {
            tx.flush(dev);
        }
        return Ok(());
    }
    xmit_datagram(dev, tx, skb, key, None, more)
}

/// Sends a packet, whose link header is gone but for the encapsulation, as a datagram. A `header`
/// that is given is noted as one of packets that can be sent so.
#[inline(always)]
fn xmit_datagram<'a>(
    dev: &'a Device<Port>,
    tx: &mut Tx,
    skb: Skb,
    key: &Key,
    header: Option<Header>,
    more: bool,
) -> Result<(), &'a Counter> {
    let stats = &dev.stats;
    let guard = rcu::read_lock();
    let neigh = dev
        .neighbours
        .find(&mut tx.last, key, &guard)
        .map_err(|_| &stats.tx_neigh_overflow)?;
    if let Some(path) = neigh.ready() {
        let to = Destination {
            ah: &path.ah,
            qpn: path.qpn,
            qkey: dev.qkey(),
        };
        if let Some(header) = header {
            tx.last.note(header, neigh);
        }
        tx.send(dev, skb, &to, more);
        return Ok(());
    }
    match neigh.wait(&dev.neighbours.waiters, skb) {
        Queued::Waits { first } => {
            if first {
                dev.neighbours.want(key);
                dev.soon::<RESOLVE>();
            }
            if !more {
                tx.flush(dev);
            }
            Ok(())
        }
        Queued::Full => Err(&stats.tx_neigh_queue_full),
        Queued::Failed => Err(&stats.tx_neigh_failed),
    }
}

impl Device<Port> {
    /// Sends a packet that waited for a connection in vain, or refuses it. Posted by the next
    /// [`Tx::flush`] at the latest.
    pub(crate) fn send_datagram(&self, tx: &mut Tx, skb: Skb, key: &Key) {
        let mtu = self.datagram_mtu.load(Relaxed);
        if skb.len() > mtu as usize + wire::ENCAP_LEN {
            self.cm.refuse(self, skb, mtu);
        } else if !self.may_send() || tx.room() == 0 {
            self.stats.tx_no_room.add(1);
        } else if let Err(lost) = xmit_datagram(self, tx, skb, key, None, true) {
            lost.add(1);
        }
    }

    /// Calls `with` with a function that tells whether a port or group is a neighbour.
    fn in_use(&self, with: impl FnOnce(&dyn Fn(&Gid) -> bool)) {
        match self.neighbours.gids() {
            Ok(gids) => with(&|gid| gids.binary_search(gid).is_ok()),
            // Without memory all of them might be.
            Err(_) => with(&|_| true),
        }
    }

    /// A connection that kept the transmit queue stopped is gone.
    pub(crate) fn wake_if_room(&self) {
        let mut tx = self.tx_lock();
        if self.queue_stopped() && self.cm.has_room() && tx.room() != 0 && self.may_send() {
            self.wake_queue();
        }
    }
}

/// Turns needs of connections into work.
struct ConnectBell {
    worker: Arc<Worker>,
    queue: Arc<OwnedQueue>,
}

impl Bell for ConnectBell {
    fn ring(&self) {
        let _ = self
            .queue
            .enqueue::<Arc<Worker>, CONNECT>(self.worker.clone());
    }
}

/// The interfaces of a port: its own and its children.
#[pin_data]
struct Relatives {
    number: PortNum,
    #[pin]
    list: Mutex<KVec<(Arc<Worker>, Arc<OwnedQueue>)>>,
}

impl Relatives {
    fn new(number: PortNum) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                number,
                list <- new_mutex!(KVec::new(), "Relatives::list"),
            }),
            GFP_KERNEL,
        )
    }
}

/// Turns events of the RDMA device into work of each interface.
struct PortEvents(Arc<Relatives>);

impl event::Listener for PortEvents {
    /// The smallest reaction that is right: the rest is what [`refresh`] sees. The RDMA core itself
    /// tells of memberships that are lost.
    fn event(&self, port: PortNum, event: event::Event) {
        // Another manager alone changes nothing (B19): it says so if everybody shall ask anew.
        if port != self.0.number || matches!(event, event::Event::SmChange | event::Event::Other) {
            return;
        }
        for (worker, queue) in &*self.0.list.lock() {
            match event {
                event::Event::ClientReregister
                | event::Event::LidChange
                | event::Event::PortError => {
                    worker.stale_paths.store(true, Relaxed);
                }
                event::Event::PortActive => {
                    worker.stale_paths.store(true, Relaxed);
                    worker.fatal.store(false, Relaxed);
                }
                event::Event::DeviceFatal => worker.fatal.store(true, Relaxed),
                event::Event::PKeyChange
                | event::Event::GidChange
                | event::Event::SmChange
                | event::Event::Other => {}
            }
            let _ = queue.enqueue::<Arc<Worker>, REFRESH>(worker.clone());
        }
    }
}

/// Turns the fabric's late answers into work.
struct Answers {
    worker: Arc<Worker>,
    queue: Arc<OwnedQueue>,
}

impl Waker for Answers {
    fn path_known(&self) {
        self.worker.answered.store(true, Relaxed);
        let _ = self
            .queue
            .enqueue::<Arc<Worker>, RESOLVE>(self.worker.clone());
    }

    fn groups_changed(&self) {
        let _ = self
            .queue
            .enqueue::<Arc<Worker>, GROUPS>(self.worker.clone());
        // Packets to a group wait for it as for any other way.
        self.path_known();
    }

    fn path_changed(&self, gid: &Gid) {
        {
            let mut rerouted = self.worker.rerouted.lock();
            if rerouted.gids.len() >= MAX_REROUTED || rerouted.gids.push(*gid, GFP_ATOMIC).is_err()
            {
                rerouted.all = true;
            }
        }
        let _ = self
            .queue
            .enqueue::<Arc<Worker>, RESOLVE>(self.worker.clone());
    }
}

/// Who wants to know of changes of an Ethernet, and of its own interface.
struct Watcher {
    lower: Option<DeviceId>,
    own: DeviceId,
    worker: Arc<Worker>,
    queue: Arc<OwnedQueue>,
}

/// Turns changes of the Ethernets below into work.
///
/// One for all ports: a notifier cannot be registered while a port is being attached, because the
/// RDMA core then holds locks that are taken inside those of the notifier chain.
#[pin_data]
pub(crate) struct Watchers {
    #[pin]
    list: Mutex<KVec<Watcher>>,
}

impl Watchers {
    pub(crate) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                list <- new_mutex!(KVec::new(), "Watchers::list"),
            }),
            GFP_KERNEL,
        )
    }
}

impl notifier::Listener for Watchers {
    fn notify(&self, dev: DeviceId, _event: notifier::Event) {
        for watcher in &*self.list.lock() {
            if watcher.lower == Some(dev) {
                // The Ethernet's IPv6 forgets its groups when the MTU falls below what IPv6 needs.
                watcher.worker.stale_groups.store(true, Relaxed);
            } else if watcher.own != dev {
                continue;
            }
            let _ = watcher
                .queue
                .enqueue::<Arc<Worker>, REFRESH>(watcher.worker.clone());
        }
    }
}

/// An interface's entry among the watchers and the port's relatives; dropping it takes it out.
struct Watching {
    watchers: Arc<Watchers>,
    relatives: Arc<Relatives>,
    worker: Arc<Worker>,
}

impl Watching {
    fn new(common: &Common, watcher: Watcher) -> Result<Self> {
        let (worker, queue) = (watcher.worker.clone(), watcher.queue.clone());
        let this = Self {
            watchers: common.watchers.clone(),
            relatives: common.relatives.clone(),
            worker: worker.clone(),
        };
        this.watchers.list.lock().push(watcher, GFP_KERNEL)?;
        this.relatives
            .list
            .lock()
            .push((worker, queue), GFP_KERNEL)?;
        Ok(this)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.watchers
            .list
            .lock()
            .retain(|watcher| !Arc::ptr_eq(&watcher.worker, &self.worker));
        self.relatives
            .list
            .lock()
            .retain(|(worker, _)| !Arc::ptr_eq(worker, &self.worker));
    }
}

/// An attached port. Dropped in this order: no more events, then no more interface.
pub(crate) struct Attached {
    _events: Pin<KBox<event::Handler<PortEvents>>>,
    interface: Registration<Port>,
}

impl Attached {
    /// The network device that a request for a connection is for: who has its IP address, of our
    /// interfaces with its partition and GID and what is upon them. If nobody has, the only one
    /// there is.
    pub(crate) fn find(&self, query: &Query) -> Option<DeviceRef> {
        let relatives = &self.interface.common.relatives;
        if query.port != relatives.number {
            return None;
        }
        let mut fitting = 0;
        let mut any = None;
        for (worker, _) in &*relatives.list.lock() {
            let holder = worker.link.glance(|dev| {
                let address = Address(dev.hardware_address());
                if !wire::same_partition(query.pkey, dev.pkey())
                    || query.gid.is_some_and(|gid| gid.0 != address.gid())
                {
                    return None;
                }
                fitting += 1;
                any = Some(dev.master());
                dev.holder_of(query.address?)
            });
            if let Some(Some(holder)) = holder {
                return Some(holder);
            }
        }
        any.filter(|_| fitting == 1)
    }
}

/// Spreads interfaces over completion vectors.
static INDEX: Atomic<u32> = Atomic::new(0);

/// Makes an interface for a port.
///
/// # Errors
///
/// - `EOPNOTSUPP`: the port is not one to attach to.
/// - What the verbs and the network stack say.
pub(crate) fn attach(
    hca: &Arc<Hca>,
    number: PortNum,
    config: &Config,
    link_ops: &Arc<LinkOps<Port>>,
    watchers: &Arc<Watchers>,
) -> Result<Attached> {
    let questions = Arc::new(Questions::new(), GFP_KERNEL)?;
    let fabric: KBox<dyn Fabric> = match hca.protocol(number) {
        Protocol::InfiniBand => {
            let sa = Sa::new(hca.clone(), number, None, questions.clone())?;
            KBox::new(sa, GFP_KERNEL)?
        }
        Protocol::RoCE if config.roce => KBox::new(Roce::new(hca.clone(), number), GFP_KERNEL)?,
        Protocol::RoCE => {
            pr_info!(
                "{} port {}: RoCE, left alone; load with roce=1 to attach\n",
                hca.name(),
                number.0
            );
            return Err(EOPNOTSUPP);
        }
        Protocol::Other => return Err(EOPNOTSUPP),
    };
    let lower = hca.lower(number);
    let beside = match &lower {
        Some(lower) => Neighbourhood::of(lower),
        None => hca.neighbourhood(),
    };
    // A reference must not be kept: it would keep the Ethernet from going away.
    drop(lower);
    let relatives = Relatives::new(number)?;
    let common = Common {
        config: *config,
        watchers: watchers.clone(),
        relatives: relatives.clone(),
        aside: OwnedQueue::new_unhurried(c"ipoib_rs_aside")?,
    };
    let common = Arc::new(common, GFP_KERNEL)?;
    let mut dev = UnregisteredDevice::new(c"ib%d")?;
    control::sysfs::add_files(&mut dev, false);
    let place = Place::Port {
        link_ops: link_ops.clone(),
        beside,
    };
    let Made::Port(interface) = make(dev, hca, number, &common, fabric, questions, place)? else {
        return Err(EINVAL);
    };
    // What is in the port's tables may have changed before anybody listened (B29): look again.
    let events = event::Handler::new(hca.clone(), PortEvents(relatives))?;
    interface.soon::<REFRESH>();
    Ok(Attached {
        _events: events,
        interface,
    })
}

/// Makes a child in another partition of the parent's port; `legacy` if a file was written to.
///
/// # Errors
///
/// - `EOPNOTSUPP`: the port has no partitions.
/// - `EADDRNOTAVAIL`: the administrator wishes for a hardware address that it cannot have.
/// - What the verbs and the network stack say.
pub(crate) fn make_child<'a>(
    rtnl: &'a Rtnl,
    parent: &Device<Port>,
    mut dev: UnregisteredDevice<Port>,
    pkey: u16,
    legacy: bool,
) -> Result<&'a Device<Port>> {
    let questions = Arc::new(Questions::new(), GFP_KERNEL)?;
    let fabric = parent.partition(wire::full(pkey), questions.clone())?;
    control::sysfs::add_files(&mut dev, true);
    let place = Place::Child {
        rtnl,
        parent,
        legacy,
    };
    let (hca, number, common) = (&parent.hca, parent.number, &parent.common);
    let Made::Child(child) = make(dev, hca, number, common, fabric, questions, place)? else {
        return Err(EINVAL);
    };
    child.soon::<REFRESH>();
    Ok(child)
}

/// Where an interface belongs.
enum Place<'a, 'p> {
    Port {
        link_ops: Arc<LinkOps<Port>>,
        beside: Neighbourhood,
    },
    Child {
        rtnl: &'a Rtnl,
        parent: &'p Device<Port>,
        legacy: bool,
    },
}

/// An interface that was made.
enum Made<'a> {
    Port(Registration<Port>),
    Child(&'a Device<Port>),
}

/// Makes an interface.
fn make<'a>(
    dev: UnregisteredDevice<Port>,
    hca: &Arc<Hca>,
    number: PortNum,
    common: &Arc<Common>,
    fabric: KBox<dyn Fabric>,
    questions: Arc<Questions>,
    place: Place<'a, '_>,
) -> Result<Made<'a>> {
    let config = &common.config;
    let mut view = fabric.view()?;
    if let Some(wish) = dev.wished_address().and_then(Address::read) {
        // What comes before the GID nobody can know yet.
        let present = Address::new(0, &view.gid.0);
        let wanted = Address::new(0, &wish.gid());
        let guid = wire::chosen_guid(&present, &wanted).ok_or(EADDRNOTAVAIL)?;
        fabric.set_guid(guid)?;
        view = fabric.view()?;
    }
    let profile = fabric.profile();
    let lower = fabric.lower();
    let pd = Pd::new(hca.clone())?;
    let index = INDEX.fetch_add(1, Relaxed);
    let ability = Ability::of(hca, number, config.rings.recv);
    let (transport, tx) = Transport::new(&dev, &pd, number, config.rings, index)?;
    let reaper = Reaper::new(pd, transport.progress())?;
    let link = Arc::pin_init(Link::new(), GFP_KERNEL)?;
    let worker = Worker::new(link.clone())?;
    let queue = Arc::new(OwnedQueue::new_ordered(c"ipoib_rs")?, GFP_KERNEL)?;

    let bell = KBox::new(
        ConnectBell {
            worker: worker.clone(),
            queue: queue.clone(),
        },
        GFP_KERNEL,
    )?;
    let able = ability.is_able();
    let vector = index.wrapping_mul(2).wrapping_add(1);
    let cm = Cm::new(&dev, hca, ability, config.max_connections, vector, bell)?;

    fabric.start(KBox::new(
        Answers {
            worker: worker.clone(),
            queue: queue.clone(),
        },
        GFP_KERNEL,
    )?);

    let address = own_address(&transport, able, &view);
    let broadcast = Address::group(&wire::broadcast_mgid(profile.scope, profile.pkey));
    let most = wire::ip_mtu(view.ib_mtu);
    let admin_mtu = dev
        .wished_mtu()
        .filter(|mtu| (wire::MIN_MTU..most).contains(mtu));
    let mtu = admin_mtu.unwrap_or(most).max(wire::MIN_MTU);
    let (is_child, legacy) = match place {
        Place::Port { .. } => (false, false),
        Place::Child { legacy, .. } => (true, legacy),
    };
    let setup = Setup {
        address: &address.0,
        broadcast: &broadcast.0,
        hardware_type: HARDWARE_TYPE,
        mtu,
        min_mtu: wire::MIN_MTU,
        max_mtu: most,
        port: match is_child {
            true => 0,
            false => u16::try_from(number.0.saturating_sub(1)).unwrap_or(0),
        },
        scatter_gather: transport.qp.max_send_sge() > 1,
        offloads: Offloads {
            checksum: hca.has_checksums(),
            segmentation: hca.has_segmentation(),
            pieces: transport.qp.max_send_sge(),
        },
        parent: match is_child {
            true => Parent::none(),
            false => hca.parent(),
        },
        watchdog: WATCHDOG,
    };
    let control = Control {
        up: false,
        view,
        admin_mtu,
        connected_mtu: None,
        following: false,
        groups: Groups::new(broadcast),
        cm: cm::Table::new(),
        moves: 0,
        announcements: ANNOUNCEMENTS,
        search: 0,
        started: false,
        life: 0,
        rebuilt: 0,
        streak: 0,
        failures: 0,
    };
    let qkey = fabric.terms().map_or(0, |terms| terms.qkey.0);
    let (owned_hca, owned_worker, owned_queue) = (hca.clone(), worker.clone(), queue.clone());
    let watching = Watching::new(
        common,
        Watcher {
            lower,
            own: dev.id(),
            worker: worker.clone(),
            queue: queue.clone(),
        },
    )?;
    let owned_common = common.clone();
    let shared = try_pin_init!(Port {
        stats: Counters::new(),
            questions,
        transport,
        neighbours <- neigh::Table::new(),
        cm <- cm,
        plain: Atomic::new(mtu.saturating_add(wire::HEADER_LEN as u32)),
        datagram_mtu: Atomic::new(mtu),
        qkey: Atomic::new(qkey),
        pkey: Atomic::new(view.pkey.into()),
        pkey_index: Atomic::new(view.pkey_index.unwrap_or(0).into()),
        broken: AtomicFlag::new(false),
        running: AtomicFlag::new(false),
        backlogged: AtomicFlag::new(false),
        reaper,
        hca: owned_hca,
        number,
        fabric,
        worker: owned_worker,
        queue: owned_queue,
        common: owned_common,
        _watching: watching,
        legacy,
        condemned: AtomicFlag::new(false),
        umcast: AtomicFlag::new(false),
    });
    let made = match place {
        Place::Port { link_ops, beside } => {
            let port = dev.register(&setup, &beside, link_ops, link, shared, control, tx)?;
            Made::Port(port)
        }
        Place::Child { rtnl, parent, .. } => {
            let child = dev.register_child(rtnl, parent, &setup, link, shared, control, tx)?;
            Made::Child(child)
        }
    };
    let _ = queue.enqueue_delayed::<Arc<Worker>, HOUSEKEEP>(worker, HOUSEKEEPING);
    let interface = match &made {
        Made::Port(port) => port,
        Made::Child(child) => *child,
    };
    pr_info!(
        "{}: {} port {}, P_Key {:#06x}, QP {}, MTU {}\n",
        interface.name(),
        hca.name(),
        number.0,
        interface.pkey(),
        interface.transport.qp.qpn().0,
        mtu
    );
    Ok(made)
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
pub(crate) mod selftest;
