// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Connected transport: reliable connections to single neighbours (RFC 4755).
//!
//! A connection carries packets one way, from who opened it: [`Active`] ones are opened for the
//! first packet to a neighbour whose address says that it takes connections, [`Passive`] ones by
//! the peer. What arrives on either is received.
//!
//! ```text
//! of a neighbour:   New ──packet──▶ Asked ──reply──▶ Up ──broken, closed, idle──▶ New
//!                    ▲                │ rejected, no answer
//!                    └──── pause ── Refused (datagrams meanwhile)
//! of a connection:  asked or offered → up → buried (ERR, completions come) → destroyed
//! ```
//!
//! [`state`] has both as tables.
//!
//! | context | does |
//! |---|---|
//! | callbacks of the communication manager | put a [`Message`] into the [`Inbox`] |
//! | the port's work queue, instance lock | [`run`]: everything that makes, changes and ends a connection |
//! | `start_xmit`, transmit lock | [`Cm::send`]: finds the [`Peer`], posts or lets wait |
//! | NAPI of the send queue | [`Cm::complete`]: takes back, by the queue's index |
//! | NAPI of [`Cm::recv`] | [`RecvPoll`]: the shared receive queue |
//!
//! Nothing that a callback takes is held while an identifier is destroyed, so this may be done
//! with RTNL and the instance lock held.
//!
//! Lock order: instance lock, transmit lock, [`Peer::inner`]; [`Conn::completer`] and the lists'
//! own locks are innermost.

mod state;

use self::state::{
    Action,
    Fate,
    Patience,
    Phase,
    Remains,
    Request, //
};
use crate::{
    ib::{
        cm::{
            Accept,
            Acceptor,
            ConnId,
            Connect,
            Event,
            Handler,
            Id,
            Listener,
            Offer,
            Path,
            Reaper,
            Reason, //
        },
        cq::{
            Completions,
            Napi,
            NapiCq,
            Poll,
            Status,
            Wc, //
        },
        device::Device as Hca,
        qp::{
            self,
            Caps,
            Qp,
            Rtr, //
        },
        queue::{
            self,
            send_queue,
            Completed,
            Connected,
            Refused,
            SendCompleter,
            SendProgress,
            SendQueue, //
        },
        srq::{
            Received,
            Shape,
            SharedQueue,
            Srq, //
        },
        Gid,
        PortNum,
        QpId, //
    },
    neigh::Key,
    net::{
        device::{
            Device,
            Link,
            Locked,
            UnregisteredDevice, //
        },
        skb::{
            PacketType,
            Skb,
            SkbQueue, //
        },
        warn_seldom, //
    },
    port::Port,
    sync::{
        elapsed,
        jiffies,
        lock::{
            new_spinlock_bh,
            SpinLockBh, //
        },
        rcu_map::{
            Cache,
            RcuMap, //
        },
        HZ, //
    },
    ud::Tx,
    wire::{
        self,
        Address,
        Hello, //
    },
};
use core::mem;
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic,
            AtomicFlag, //
        },
        barrier::{
            smp_mb,
            Full as FullBarrier, //
        },
        new_mutex,
        rcu,
        Arc,
        Mutex, //
    },
    time::Delta, //
};

/// Sends of a connection that may be posted at a time.
const RING: u32 = 64;

/// Completions of connections that the send queue has room for: enough for 126 rings.
const SEND_COMPLETIONS: u32 = 126 * RING;

/// Messages that the shared receive queue holds.
const RECEIVES: (u32, u32) = (16, 1024);

/// Messages that a queue pair's own receive queue holds where none is shared, and how many queue
/// pairs have one at most: each is four mebibytes.
const OWN_RECEIVES: u32 = 64;
const MAX_OWN: u32 = 128;

/// Packets and bytes that wait for a connection, at most. As many packets as fit into the ring.
const MAX_WAITING: usize = RING as usize;
const MAX_WAITING_BYTES: usize = 1 << 20;

/// Neighbours that connections are opened to or were refused by, at most.
const MAX_PEERS: i32 = 4096;

/// Connections that are over and not gone yet, at most: while there are more, none is accepted.
const MAX_GRAVES: usize = 4096;

/// Offers that wait for the worker, at most.
const MAX_OFFERS: usize = 256;

/// Refused packets whose senders are still to be told, at most.
const MAX_OVERSIZE: usize = 64;

/// The first pause after a refusal, in jiffies; it doubles with each up to 64 of it.
const PAUSE: usize = HZ;

/// An opened connection that is unused for so long is closed.
const ACTIVE_IDLE: usize = 60 * HZ;

/// A peer's connection on which nothing came for so long is closed.
const PASSIVE_IDLE: usize = 600 * HZ;

/// Without an answer for so long a connection is given up, whatever became of the messages.
const ANSWER: usize = 15 * HZ;

/// How long the completions of a dead connection are waited for.
const PATIENCE: Patience = Patience {
    receive: HZ / 2,
    send: 2 * HZ,
};

/// The same while the interface waits.
const DRAIN: usize = HZ;

/// How soon the worker looks again at what takes time.
const SOON: usize = HZ / 20 + 1;

/// Packets up to this length are copied, and their pages stay in the queue.
const COPY_BREAK: usize = 256;

/// Linear room of a packet whose bytes are in pages: headers are pulled into it.
const HEAD_ROOM: usize = wire::HEADER_LEN + 168;

/// What a peer waits that has found no receive: 10 ms.
const RNR_TIMER: u8 = 20;

/// A path's life time on links that do not say: 67 ms.
const LIFE_TIME: u8 = 14;

/// How long a peer may take to answer: half a second, asked for four times.
const RESPONSE_TIME: u8 = 17;
const REPEATS: u8 = 4;

/// Asks the port's work queue for a call of [`run`]. Any context.
pub(crate) trait Bell: Send + Sync + 'static {
    fn ring(&self);
}

/// What became of a connection.
enum Message {
    /// A peer wants to connect.
    Offered {
        serial: u64,
        id: ConnId,
        from: Address,
        mtu: u32,
    },
    /// The peer has accepted.
    Replied { serial: u64, hello: Option<Hello> },
    /// The attempt failed.
    Refused { serial: u64, reason: Option<Reason> },
    /// It is over.
    Closed { serial: u64, asked: bool },
}

/// Messages for the worker.
#[pin_data]
struct Inbox {
    #[pin]
    messages: Mutex<KVVec<Message>>,
    serial: Atomic<u64>,
    /// Requests that were rejected at once: they made no sense, or too many wait.
    senseless: Atomic<u32>,
    crowded: Atomic<u32>,
    bell: KBox<dyn Bell>,
}

impl Inbox {
    fn new(bell: KBox<dyn Bell>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                messages <- new_mutex!(KVVec::new(), "cm::Inbox"),
                serial: Atomic::new(1),
                senseless: Atomic::new(0),
                crowded: Atomic::new(0),
                bell,
            }),
            GFP_KERNEL,
        )
    }

    /// A number that no connection had.
    fn serial(&self) -> u64 {
        self.serial.fetch_add(1, Relaxed)
    }

    /// A message that does not fit in memory is lost; the connection is given up by time then.
    fn put(&self, message: Message) {
        let _ = self.messages.lock().push(message, GFP_KERNEL);
        self.bell.ring();
    }

    fn take(&self) -> KVVec<Message> {
        mem::replace(&mut *self.messages.lock(), KVVec::new())
    }
}

/// Notes the events of an identifier.
struct Line {
    serial: u64,
    inbox: Arc<Inbox>,
}

impl Line {
    fn new(serial: u64, inbox: &Arc<Inbox>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                serial,
                inbox: inbox.clone(),
            },
            GFP_KERNEL,
        )?)
    }
}

impl Handler for Line {
    fn event(&self, _id: &Id, event: Event<'_>) {
        let serial = self.serial;
        self.inbox.put(match event {
            Event::Replied(reply) => Message::Replied {
                serial,
                hello: Hello::read(reply.private),
            },
            Event::Rejected { reason, .. } => Message::Refused {
                serial,
                reason: Some(reason),
            },
            Event::RequestFailed | Event::ReplyFailed => Message::Refused {
                serial,
                reason: None,
            },
            Event::DisconnectAsked => Message::Closed {
                serial,
                asked: true,
            },
            Event::Disconnected | Event::TimewaitOver => Message::Closed {
                serial,
                asked: false,
            },
            Event::Established => return,
        });
    }
}

/// Keeps the requests of peers for the worker.
struct Door {
    inbox: Arc<Inbox>,
    reaper: Arc<Reaper>,
    pkey: u16,
    hello: [u8; Hello::LEN],
}

impl Door {
    /// What the peer says of itself, if that makes sense.
    fn hello_of(&self, offer: &Offer<'_>) -> Option<Hello> {
        let gid = offer.gid();
        let on_link = wire::same_partition(offer.pkey(), self.pkey);
        Hello::read(offer.private()).filter(|hello| {
            on_link && hello.makes_sense() && gid != Gid::default() && !gid.is_multicast()
        })
    }

    fn reject(&self, offer: Offer<'_>, reason: Reason, counter: &Atomic<u32>) {
        let _ = offer.reject(reason, &self.hello);
        counter.add(1, Relaxed);
        self.inbox.bell.ring();
    }
}

impl Acceptor for Door {
    fn request(&self, offer: Offer<'_>) {
        let Some(hello) = self.hello_of(&offer) else {
            self.reject(offer, Reason::CONSUMER, &self.inbox.senseless);
            return;
        };
        if self.inbox.messages.lock().len() >= MAX_OFFERS {
            self.reject(offer, Reason::NO_RESOURCES, &self.inbox.crowded);
            return;
        }
        let from = Address::new(hello.qpn, &offer.gid().0);
        let mtu = offer.mtu();
        let serial = self.inbox.serial();
        let Ok(line) = Line::new(serial, &self.inbox) else {
            return;
        };
        if let Ok(id) = offer.keep(&self.reaper, line) {
            self.inbox.put(Message::Offered {
                serial,
                id,
                from,
                mtu,
            });
        }
    }
}

/// What events said about a queue pair.
struct Flags {
    /// It works no more.
    failed: AtomicFlag,
    /// It takes no more from the shared receive queue.
    last_receive: AtomicFlag,
    inbox: Arc<Inbox>,
}

impl Flags {
    fn new(inbox: &Arc<Inbox>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                failed: AtomicFlag::new(false),
                last_receive: AtomicFlag::new(false),
                inbox: inbox.clone(),
            },
            GFP_KERNEL,
        )?)
    }

    /// Has the worker end the connection. Any context.
    fn fail(&self) {
        if !self.failed.xchg(true, Full) {
            self.inbox.bell.ring();
        }
    }
}

impl qp::Watcher for Flags {
    fn event(&self, event: qp::Event) {
        match event {
            qp::Event::LastReceive => {
                self.last_receive.store(true, Relaxed);
                self.fail();
            }
            qp::Event::Fatal => self.fail(),
            qp::Event::Established | qp::Event::Other => {}
        }
    }
}

/// The queue pair of a connection that we opened, and its send queue's completing end.
#[pin_data]
pub(crate) struct Conn {
    index: u16,
    qp: Arc<Qp>,
    flags: Arc<Flags>,
    progress: SendProgress,
    /// The ring is full, and counted so in [`Cm::full`].
    full: AtomicFlag,
    #[pin]
    completer: SpinLockBh<SendCompleter<Connected>>,
}

/// A neighbour that is up: where its packets are posted.
struct Sender {
    queue: SendQueue<Connected>,
    conn: Arc<Conn>,
    mtu: u32,
    since: usize,
}

enum State {
    New,
    Asked,
    Up(KBox<Sender>),
    Refused { since: usize },
}

impl State {
    #[inline]
    fn phase(&self) -> Phase {
        match self {
            Self::New => Phase::New,
            Self::Asked => Phase::Asked,
            Self::Up(_) => Phase::Up,
            Self::Refused { .. } => Phase::Refused,
        }
    }
}

struct Inner {
    state: State,
    waiting: SkbQueue,
    /// Attempts in a row that failed.
    failures: u32,
    /// The service that answered last.
    service: u64,
}

impl Inner {
    /// Posts what is chained.
    fn flush(&mut self, dev: &Device<Port>) {
        if let State::Up(sender) = &mut self.state {
            sender.flush(dev);
        }
    }
}

/// A neighbour that takes connections.
#[pin_data]
pub(crate) struct Peer {
    used: Atomic<usize>,
    #[pin]
    inner: SpinLockBh<Inner>,
}

impl Peer {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            used: Atomic::new(jiffies()),
            inner <- new_spinlock_bh!(
                Inner {
                    state: State::New,
                    waiting: SkbQueue::new(),
                    failures: 0,
                    service: wire::SERVICE_LINUX,
                },
                c"cm::Peer::inner"
            ),
        })
    }
}

impl Sender {
    /// Posts the chain, unless `more` packets follow; true if there is one left.
    fn flush_unless(&mut self, dev: &Device<Port>, more: bool) -> bool {
        if more {
            return self.queue.is_chained();
        }
        self.flush(dev);
        false
    }

    /// Posts the chain. The transmit lock is held.
    fn flush(&mut self, dev: &Device<Port>) {
        match self.queue.flush() {
            Ok(0) => {}
            Ok(_) => {
                dev.stats.tx_posts.add_single(1);
                dev.stats.tx_conn_posts.add_single(1);
            }
            Err(_) => self.conn.flags.fail(),
        }
    }
}

/// How long connections are not asked for after so many failures.
fn pause(failures: u32) -> usize {
    PAUSE << failures.saturating_sub(1).min(6)
}

/// The peer of the last packet.
pub(crate) type PeerCache = Cache<Key, Peer>;

/// What became of a packet that may go by a connection.
pub(crate) enum Sent {
    /// It was posted, or waits.
    Taken,
    /// There is no connection: send it as a datagram.
    Plain(Skb),
    /// It was refused, and its sender will be told; or dropped.
    Lost,
}

/// A packet whose sender is to be told.
struct Oversize {
    skb: Skb,
    mtu: u32,
}

/// A queue pair that a peer sends to.
struct Origin {
    used: Atomic<usize>,
    flags: Arc<Flags>,
}

/// Connections of an interface: what every context shares.
#[pin_data(PinnedDrop)]
pub(crate) struct Cm {
    receives: Receives,
    connected: AtomicFlag,
    /// The port was down when it was looked at last.
    port_down: AtomicFlag,
    /// Connections that peers may open.
    max_passive: usize,
    /// Connections whose ring is full: the transmit queue is stopped while there are any.
    full: Atomic<i32>,
    /// Connections that we may open, and completions of theirs that can wait.
    max_active: u16,
    completions: u32,
    recv: Arc<NapiCq<RecvPoll>>,
    inbox: Arc<Inbox>,
    reaper: Arc<Reaper>,
    #[pin]
    peers: RcuMap<Key, Peer>,
    #[pin]
    senders: RcuMap<u32, Arc<Conn>>,
    #[pin]
    origins: RcuMap<QpId, Origin>,
    /// Peers to connect to.
    #[pin]
    wanted: SpinLockBh<KVVec<Key>>,
    #[pin]
    oversize: SpinLockBh<KVVec<Oversize>>,
}

/// What queue pairs receive from.
#[derive(Clone, Copy)]
enum Receives {
    /// All from one queue.
    Shared(Shape),
    /// Each from its own; so many of them.
    Own(Shape, u16),
}

impl Receives {
    fn shape(&self) -> Shape {
        match self {
            Self::Shared(shape) | Self::Own(shape, _) => *shape,
        }
    }

    /// Completions that can wait at once.
    fn completions(&self) -> u32 {
        match self {
            Self::Shared(shape) => shape.entries.saturating_add(shape.spare),
            Self::Own(shape, count) => shape.entries.saturating_mul((*count).into()),
        }
    }
}

/// What a device can do about connections.
pub(crate) struct Ability {
    receives: Receives,
    /// Entries of the send completion queue, 0 if the device cannot connect.
    completions: u32,
}

impl Ability {
    /// Whether the device can connect.
    pub(crate) fn is_able(&self) -> bool {
        self.completions != 0
    }

    pub(crate) fn of(hca: &Hca, number: PortNum, receives: u32) -> Self {
        let receives = receives.clamp(RECEIVES.0, RECEIVES.1);
        let longest = wire::MAX_MESSAGE as usize;
        let receives = match Shape::within(hca, receives, longest) {
            Ok(shape) => Receives::Shared(shape),
            Err(_) => {
                let shape = Shape::within_own(hca, OWN_RECEIVES, longest);
                let count = (hca.max_cqe() / shape.entries.max(1)).min(MAX_OWN);
                Receives::Own(shape, u16::try_from(count).unwrap_or(0))
            }
        };
        Self {
            completions: match hca.connects(number) {
                true => hca.max_cqe().min(SEND_COMPLETIONS) / RING * RING,
                false => 0,
            },
            receives,
        }
    }
}

/// A connection that we opened.
struct Active {
    serial: u64,
    key: Key,
    service: u64,
    tries: u32,
    since: usize,
    id: Option<ConnId>,
    conn: Arc<Conn>,
    path: Path,
    /// Until it is up.
    queue: Option<SendQueue<Connected>>,
    own: Option<u16>,
}

/// A connection that a peer opened.
struct Passive {
    serial: u64,
    from: Address,
    id: Option<ConnId>,
    qp: Arc<Qp>,
    flags: Arc<Flags>,
    own: Option<u16>,
}

/// A connection that is over, until nothing of it is under way.
struct Grave {
    /// Destroyed with it.
    _qp: Arc<Qp>,
    flags: Arc<Flags>,
    /// Of one that we opened, and where its send queue ends. It has the packets, which the device may
    /// read until the queue pair is destroyed.
    conn: Option<(Arc<Conn>, u32)>,
    /// Completions of its sends are not waited for any more.
    forgotten: bool,
    /// The number of its own receive queue.
    own: Option<u16>,
    since: usize,
}

impl Grave {
    /// Sends that are not known to be done.
    fn left_over(&self) -> u32 {
        match &self.conn {
            Some((conn, end)) if !conn.progress.passed(*end) => conn.progress.outstanding(),
            _ => 0,
        }
    }
}

/// Connections of an interface: what belongs to the instance lock.
pub(crate) struct Table {
    up: bool,
    srq: Option<Arc<Srq>>,
    listeners: KVec<Listener>,
    active: KVec<Active>,
    passive: KVec<Passive>,
    graves: KVec<Grave>,
    life: u32,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self {
            up: false,
            srq: None,
            listeners: KVec::new(),
            active: KVec::new(),
            passive: KVec::new(),
            graves: KVec::new(),
            life: 0,
        }
    }

    /// A number that no queue had for long.
    fn next_life(&mut self) -> u32 {
        self.life = self.life.wrapping_add(1);
        self.life
    }

    /// The number of a receive queue that no queue pair has as its own.
    fn free_own(&self, count: u16) -> Option<u16> {
        let taken = |number: u16| {
            let own = Some(number);
            self.active.iter().any(|active| active.own == own)
                || self.passive.iter().any(|passive| passive.own == own)
                || self.graves.iter().any(|grave| grave.own == own)
        };
        (1..=count).find(|&number| !taken(number))
    }

    /// An index that no connection has.
    fn free_index(&self, max: u16) -> Option<u16> {
        let of_graves = self.graves.iter().filter_map(|grave| grave.conn.as_ref());
        let taken = |index: u16| {
            self.active.iter().any(|active| active.conn.index == index)
                || of_graves.clone().any(|(conn, _)| conn.index == index)
        };
        (1..=max).find(|&index| !taken(index))
    }
}

impl Cm {
    pub(crate) fn new(
        dev: &UnregisteredDevice<Port>,
        hca: &Arc<Hca>,
        ability: Ability,
        max_passive: usize,
        vector: u32,
        bell: KBox<dyn Bell>,
    ) -> Result<impl PinInit<Self, Error>> {
        let receives = ability.receives;
        let slots = match ability.is_able() {
            true => receives.completions().max(1),
            false => 1,
        };
        let own = match receives {
            Receives::Shared(_) => 0,
            Receives::Own(_, count) => count,
        };
        let mut queues = KVec::with_capacity(own.into(), GFP_KERNEL)?;
        for _ in 0..own {
            queues.push(None, GFP_KERNEL)?;
        }
        let recv = NapiCq::new(
            dev,
            hca.clone(),
            slots,
            vector,
            RecvPoll {
                queue: None,
                own: queues,
                last: Cache::new(),
            },
        )?;
        let inbox = Inbox::new(bell)?;
        let reaper = Reaper::new(hca.clone())?;
        let oversize = KVVec::with_capacity(MAX_OVERSIZE, GFP_KERNEL)?;
        let max_active = u16::try_from(ability.completions / RING).unwrap_or(u16::MAX);
        Ok(try_pin_init!(Self {
            receives,
            connected: AtomicFlag::new(false),
            port_down: AtomicFlag::new(false),
            max_passive,
            full: Atomic::new(0),
            max_active,
            completions: ability.completions,
            recv,
            inbox,
            reaper,
            peers <- RcuMap::new(MAX_PEERS),
            senders <- RcuMap::new(i32::from(u16::MAX)),
            origins <- RcuMap::new(i32::MAX),
            wanted <- new_spinlock_bh!(KVVec::new(), c"cm::Cm::wanted"),
            oversize <- new_spinlock_bh!(oversize, c"cm::Cm::oversize"),
        }))
    }

    /// Whether connections are opened.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Relaxed)
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Relaxed);
        self.inbox.bell.ring();
    }

    /// Notes whether the port works.
    pub(crate) fn note_port(&self, active: bool) {
        self.port_down.store(!active, Relaxed);
    }

    /// The fabric has answered: has those looked after that wait for a way.
    pub(crate) fn path_known(&self) {
        if !self.wanted.lock().is_empty() {
            self.inbox.bell.ring();
        }
    }

    /// Whether the device can connect.
    pub(crate) fn is_able(&self) -> bool {
        self.max_active != 0
    }

    /// Receive queues of queue pairs' own that there may be.
    fn own_queues(&self) -> u16 {
        match self.receives {
            Receives::Shared(_) => 0,
            Receives::Own(_, count) => count,
        }
    }

    /// Whether queue pairs share a receive queue.
    fn shares(&self) -> bool {
        matches!(self.receives, Receives::Shared(_))
    }

    /// Bytes of the longest message that we take.
    fn message(&self) -> u32 {
        (self.receives.shape().message as u32).min(wire::MAX_MESSAGE)
    }

    /// The largest MTU in connected mode.
    pub(crate) fn max_mtu(&self) -> u32 {
        wire::connection_mtu(self.message(), wire::MAX_MESSAGE).unwrap_or(wire::MIN_MTU)
    }

    /// Whether no connection keeps the transmit queue stopped.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.full.load(Relaxed) == 0
    }

    /// There is room in the ring again, if there was none.
    fn not_full(&self, conn: &Conn) {
        if conn.full.load(Relaxed) && conn.full.xchg(false, Full) {
            self.full.add(-1, Relaxed);
        }
    }

    /// Sends a packet, whose link header is gone but for the encapsulation, by the connection to
    /// `key`; one is asked for if there is none. The transmit lock is held.
    ///
    /// The packet is posted now or, while `more` follow, by [`Self::flush`] at the latest.
    pub(crate) fn send(
        &self,
        dev: &Device<Port>,
        tx: &mut Tx,
        key: &Key,
        skb: Skb,
        more: bool,
    ) -> Sent {
        if tx.chained_to.is_some_and(|other| other != *key) {
            self.flush(dev, tx);
        }
        let guard = rcu::read_lock();
        let peer = match self.peers.get_cached(&mut tx.last_peer, key, &guard) {
            Some(peer) => peer,
            None => match self.peers.get_or_insert(key, Peer::new(), &guard) {
                Ok(peer) => peer,
                Err(_) => return Sent::Plain(skb),
            },
        };
        let now = jiffies();
        if peer.used.load(Relaxed) != now {
            peer.used.store(now, Relaxed);
        }
        let mut inner = peer.inner.lock();
        let rested = match &mut inner.state {
            State::Up(sender) => {
                if self.post(dev, tx, sender, skb, more) {
                    tx.chained_to = Some(*key);
                }
                return Sent::Taken;
            }
            State::Refused { since } => {
                let since = *since;
                elapsed(since) >= pause(inner.failures)
            }
            State::New | State::Asked => true,
        };
        match state::next(inner.state.phase(), state::Event::Packet { rested }).1 {
            Action::Wait => {}
            Action::Ask if self.want(key) => inner.state = State::Asked,
            _ => return Sent::Plain(skb),
        }
        let waiting = &mut inner.waiting;
        if waiting.packets() >= MAX_WAITING
            || waiting.bytes().saturating_add(skb.len()) > MAX_WAITING_BYTES
        {
            dev.stats.tx_neigh_queue_full.add(1);
            return Sent::Lost;
        }
        waiting.push(skb);
        Sent::Taken
    }

    /// Asks the worker for a connection; false when memory is out.
    fn want(&self, key: &Key) -> bool {
        let noted = self.wanted.lock().push(*key, GFP_ATOMIC).is_ok();
        if noted {
            self.inbox.bell.ring();
        }
        noted
    }

    /// Posts what is chained to a connection. The transmit lock is held.
    pub(crate) fn flush(&self, dev: &Device<Port>, tx: &mut Tx) {
        let Some(key) = tx.chained_to.take() else {
            return;
        };
        let guard = rcu::read_lock();
        if let Some(peer) = self.peers.get_cached(&mut tx.last_peer, &key, &guard) {
            peer.inner.lock().flush(dev);
        }
    }

    /// Sends a packet, or drops and counts it; true if it was chained and is still to be posted.
    /// The transmit lock is held.
    fn post(
        &self,
        dev: &Device<Port>,
        tx: &mut Tx,
        sender: &mut Sender,
        mut skb: Skb,
        more: bool,
    ) -> bool {
        let bytes = skb.len() as u32;
        if bytes > sender.mtu.saturating_add(wire::ENCAP_LEN as u32) {
            self.refuse(dev, skb, sender.mtu);
            return sender.flush_unless(dev, more);
        }
        skb.tx_timestamp();
        let lost = match sender.queue.push(skb, &queue::Peer) {
            Ok(()) => None,
            Err((_, Refused::Full)) => Some(&dev.stats.tx_no_room),
            Err((_, Refused::Memory | Refused::Malformed)) => Some(&dev.stats.tx_no_memory),
        };
        let full = sender.queue.is_full();
        if full {
            self.stop(dev, tx, sender);
        }
        if let Some(lost) = lost {
            lost.add(1);
            return sender.flush_unless(dev, more && !full);
        }
        dev.stats.tx_conn_packets.add_single(1);
        let now = dev.sent(bytes, more);
        sender.flush_unless(dev, !(now || full || sender.queue.chain_is_full()))
    }

    /// Stops the transmit queue, unless a completion came in between.
    fn stop(&self, dev: &Device<Port>, tx: &mut Tx, sender: &mut Sender) {
        dev.stop_queue();
        dev.stats.tx_ring_full.add_single(1);
        if !sender.conn.full.xchg(true, Full) {
            self.full.add(1, Relaxed);
        }
        // Pairs with the barrier in `complete`: either it sees that the ring is full, or we see
        // the room that it made.
        smp_mb(FullBarrier);
        if sender.queue.room() != 0 {
            self.not_full(&sender.conn);
            if self.has_room() && tx.room() != 0 && dev.may_send() {
                dev.start_queue();
            }
        }
    }

    /// Takes back what a completion says is done; `None` if it is of no connection.
    pub(crate) fn complete(&self, wc: &Wc, budget: usize) -> Option<Completed> {
        let guard = rcu::read_lock();
        let conn = self.senders.get(&wc.queue().into(), &guard)?;
        let (done, room) = {
            let mut completer = conn.completer.lock();
            let done = completer.complete(wc.id(), budget)?;
            (done, completer.room())
        };
        if wc.status() != Status::Success {
            conn.flags.fail();
        }
        // Pairs with the barrier in `stop`.
        smp_mb(FullBarrier);
        if room >= RING / 2 {
            self.not_full(conn);
        }
        Some(done)
    }

    /// Drops a packet that is too long for its way, and has its sender told. Atomic context is
    /// allowed.
    pub(crate) fn refuse(&self, dev: &Device<Port>, skb: Skb, mtu: u32) {
        dev.stats.tx_too_big.add(1);
        let mut oversize = self.oversize.lock();
        if oversize.push_within_capacity(Oversize { skb, mtu }).is_ok() {
            dev.tell_senders();
        }
    }

    /// What we say in private data.
    fn hello(&self, dev: &Device<Port>) -> [u8; Hello::LEN] {
        Hello {
            qpn: dev.transport.qp.qpn().0,
            message: self.message(),
        }
        .encode()
    }
}

#[pinned_drop]
impl PinnedDrop for Cm {
    fn drop(self: Pin<&mut Self>) {
        // Offers own identifiers, these the inbox.
        drop(self.inbox.take());
        // They cannot be kept any longer, whatever becomes of what they say now.
        if self.port_down.load(Relaxed) {
            let left = self.reaper.reap_silent();
            if left != 0 {
                pr_info!("{} connections end while their port is down\n", left);
            }
        }
    }
}

/// Tells the senders of refused packets.
pub(crate) fn tell_senders(dev: &Device<Port>) {
    loop {
        let next = dev.cm.oversize.lock().pop();
        let Some(Oversize { skb, mtu }) = next else {
            return;
        };
        if let Some(protocol) = wire::ethertype(skb.head()) {
            skb.too_big(protocol, mtu);
        }
    }
}

/// Handles what is received on connections.
pub(crate) struct RecvPoll {
    /// The shared queue, since the first connection.
    queue: Option<SharedQueue>,
    /// Queue pairs' own queues, by their number less one.
    own: KVec<Option<Own>>,
    last: Cache<QpId, Origin>,
}

/// A queue pair's own receive queue. The queue pair owns the completion queue in whose handler this
/// is: it has to be taken out again, see [`remove_own`].
struct Own {
    queue: SharedQueue,
    flags: Arc<Flags>,
}

impl Own {
    /// After its completions were handled.
    fn refill(&mut self, dev: &Device<Port>) {
        if self.queue.is_over() {
            self.flags.last_receive.store(true, Relaxed);
        } else if !matches!(self.queue.post(), Ok(0)) {
            dev.stats.rx_refill_failed.add(1);
        }
    }
}

impl RecvPoll {
    /// The queue that a completion is of.
    #[inline]
    fn queue_of(&mut self, wc: &Wc) -> Option<(&mut SharedQueue, Option<&Arc<Flags>>)> {
        match wc.queue() {
            0 => self.queue.as_mut().map(|queue| (queue, None)),
            number => {
                let own = self.own.get_mut(usize::from(number) - 1)?.as_mut()?;
                Some((&mut own.queue, Some(&own.flags)))
            }
        }
    }

    /// Passes a message on, or counts why not.
    fn deliver(dev: &Device<Port>, napi: Napi<'_>, len: usize, mut slot: Received<'_>) {
        let copy = len <= COPY_BREAK;
        let bytes = slot.head(if copy { len } else { wire::ENCAP_LEN });
        let (Some(protocol), Some(encap)) = (
            wire::ethertype(bytes),
            bytes.first_chunk::<{ wire::ENCAP_LEN }>(),
        ) else {
            dev.stats.rx_bad_length.add(1);
            return;
        };
        // In front of a received packet taps find a hardware address of zeros.
        let mut header = [0; wire::HEADER_LEN];
        header[wire::ADDRESS_LEN..].copy_from_slice(encap);
        let room = match copy {
            true => wire::HEADER_LEN + len,
            false => HEAD_ROOM,
        };
        let Some(mut skb) = napi.alloc_skb(room) else {
            dev.stats.rx_no_memory.add(1);
            return;
        };
        let whole = skb.append(&header)
            && match copy {
                true => skb.append(bytes.get(wire::ENCAP_LEN..).unwrap_or_default()),
                false => slot.attach(&mut skb, wire::ENCAP_LEN, len),
            };
        if !whole {
            dev.stats.rx_no_memory.add(1);
            return;
        }
        dev.stats.rx_conn_packets.add_single(1);
        dev.stats
            .rx_conn_bytes
            .add_single(len.saturating_sub(wire::ENCAP_LEN) as u64);
        napi.receive(skb.finish(wire::HEADER_LEN, protocol, PacketType::Host));
    }
}

impl Poll for RecvPoll {
    type Driver = Port;

    fn poll(
        &mut self,
        dev: &Device<Port>,
        napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let longest = dev.cm.receives.shape().message;
        let mut done = 0;
        while done < budget {
            let (batch, more) = cq.next(budget - done);
            done += batch.len();
            for wc in batch {
                let guard = rcu::read_lock();
                let origin = dev.cm.origins.get_cached(&mut self.last, &wc.qp(), &guard);
                let Some((queue, own)) = self.queue_of(wc) else {
                    // Of a queue that went with its queue pair.
                    dev.stats.conn_stale.add(1);
                    continue;
                };
                let flags = own.or(origin.map(|origin| &origin.flags));
                if !queue.is_of_this_life(wc.id()) {
                    // Of a queue that was there before.
                    dev.stats.conn_stale.add(1);
                    continue;
                }
                let Some(slot) = queue.take(wc.id()) else {
                    dev.stats.bad_completions.add(1);
                    continue;
                };
                match wc.status() {
                    Status::Success => {}
                    status => {
                        if status != Status::Flushed {
                            dev.stats.rx_failed.add(1);
                        }
                        drop(slot);
                        if own.is_some() {
                            queue.retire();
                        }
                        if let Some(flags) = flags {
                            flags.fail();
                        }
                        continue;
                    }
                }
                if let Some(origin) = origin {
                    origin.used.store(jiffies(), Relaxed);
                }
                let len = wc.byte_len();
                if len > longest {
                    dev.stats.rx_bad_length.add(1);
                } else {
                    Self::deliver(dev, napi, len, slot);
                }
            }
            if let Some(queue) = &mut self.queue {
                match queue.post() {
                    Ok(0) => {}
                    // The housekeeper tries again.
                    _ => dev.stats.rx_refill_failed.add(1),
                }
            }
            for own in self.own.iter_mut().flatten() {
                own.refill(dev);
            }
            if !more {
                break;
            }
        }
        done
    }
}

/// The interface is up: listens.
pub(crate) fn start(locked: &mut Locked<'_, Port>) -> Result {
    let dev = locked.dev();
    let cm = &dev.cm;
    if !cm.is_able() {
        return Ok(());
    }
    let door = Arc::new(
        Door {
            inbox: cm.inbox.clone(),
            reaper: cm.reaper.clone(),
            pkey: dev.pkey(),
            hello: cm.hello(dev),
        },
        GFP_KERNEL,
    )?;
    if locked.control().cm.srq.is_some() || !cm.shares() {
        cm.recv.enable(locked);
    }
    let qpn = u64::from(dev.transport.qp.qpn().0);
    let table = &mut locked.control().cm;
    table.up = true;
    for service in [wire::SERVICE_LINUX, wire::SERVICE_RFC] {
        let listener = Listener::new(&cm.reaper, dev.number, service | qpn, door.clone());
        match listener {
            Ok(listener) => table.listeners.push(listener, GFP_KERNEL)?,
            Err(error) => pr_warn!(
                "{}: listening for connections failed: {:?}\n",
                dev.name(),
                error
            ),
        }
    }
    Ok(())
}

/// The interface goes down: refuses what comes and ends what there is.
pub(crate) fn stop(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let listeners = mem::replace(&mut locked.control().cm.listeners, KVec::new());
    for listener in listeners {
        listener.stop();
    }
    locked.control().cm.up = false;
    abandon(locked);
    dev.cm.recv.disable(locked);
    if let Some((recv, _)) = dev.cm.recv.quiet(locked) {
        if recv.queue.as_ref().is_some_and(|queue| queue.lost() != 0) {
            renew_shared(locked);
        }
    }
    // The queue pairs are in their graves.
    for number in 1..=dev.cm.own_queues() {
        remove_own(locked, number);
    }
    dev.cm.inbox.bell.ring();
}

/// Ends all connections, after which no send completes any more. The transmit queue is disabled.
pub(crate) fn abandon(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    close_active(locked);
    let passive = mem::replace(&mut locked.control().cm.passive, KVec::new());
    for passive in passive {
        bury_passive(locked, passive);
    }
    dev.cm.origins.remove_if(|_, _| true).each(|_, _| {});
}

/// Ends the connections that we opened; otherwise as [`abandon`].
pub(crate) fn close_active(locked: &mut Locked<'_, Port>) {
    let dev = locked.dev();
    let cm = &dev.cm;
    forget_peers(dev);
    let table = &mut locked.control().cm;
    let active = mem::replace(&mut table.active, KVec::new());
    for active in active {
        bury_active(table, active);
    }
    let open = |grave: &Grave| !grave.forgotten && grave.left_over() != 0;
    let start = jiffies();
    while table.graves.iter().any(open) && elapsed(start) < drain() {
        kernel::time::delay::fsleep(Delta::from_millis(1));
    }
    // The bytes that are left are forgotten with those of datagrams.
    cm.senders
        .remove_if(|_, _| true)
        .each(|_, conn| cm.not_full(conn));
    for grave in table.graves.iter_mut() {
        grave.forgotten = grave.left_over() != 0;
        if !grave.forgotten {
            grave.conn = None;
        }
    }
}

/// How long sends of dying connections are waited for, in jiffies.
fn drain() -> usize {
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    if crate::ib::fake::NO_DRAIN.is_on() {
        return 0;
    }
    DRAIN
}

/// Lets go of all neighbours, and of what waits for them.
fn forget_peers(dev: &Device<Port>) {
    // First, as who comes meanwhile has its own wish noted.
    drop(mem::replace(&mut *dev.cm.wanted.lock(), KVVec::new()));
    let mut lost = 0;
    dev.cm.peers.remove_if(|_, _| true).each(|_, peer| {
        let _tx = dev.tx_lock();
        let mut inner = peer.inner.lock();
        // What is chained completes with the rest of the connection.
        inner.flush(dev);
        lost += inner.waiting.packets() as u64;
    });
    dev.stats.tx_neigh_failed.add(lost);
}

/// Has the queue pair of a connection fail everything, and notes it until then.
fn bury_active(table: &mut Table, mut active: Active) {
    // Nobody posts any more: a queue that is not the worker's was taken from the peer.
    drop(active.queue.take());
    let conn = active.conn;
    let _ = conn.qp.error();
    let grave = Grave {
        _qp: conn.qp.clone(),
        flags: conn.flags.clone(),
        conn: Some((conn.clone(), conn.progress.head())),
        forgotten: false,
        own: active.own,
        since: jiffies(),
    };
    drop(active.id.take());
    let _ = table.graves.push(grave, GFP_KERNEL);
}

fn bury_passive(locked: &mut Locked<'_, Port>, mut passive: Passive) {
    let _ = passive.qp.error();
    let grave = Grave {
        _qp: passive.qp,
        flags: passive.flags,
        conn: None,
        forgotten: false,
        own: passive.own,
        since: jiffies(),
    };
    drop(passive.id.take());
    let _ = locked.control().cm.graves.push(grave, GFP_KERNEL);
}

/// Makes and ends connections, as messages, peers and time demand. Work of the port.
pub(crate) fn run(dev: &Device<Port>) {
    let cm = &dev.cm;
    account(dev);
    for message in cm.inbox.take() {
        handle(dev, message);
    }
    if cm.is_connected() {
        prepare(dev);
        let wanted = mem::replace(&mut *cm.wanted.lock(), KVVec::new());
        for key in &wanted {
            open(dev, key);
        }
    } else {
        part_from_peers(dev);
    }
    collect_failed(dev);
    let (done, busy) = exhume(dev);
    // Queue pairs may take a second to go.
    drop(done);
    if busy {
        dev.connect_later(SOON);
    }
    if !cm.reaper.is_empty() {
        dev.reap_aside();
    }
}

/// Destroys identifiers. The core waits for messages of theirs that are under way, for seconds if a
/// peer behaves oddly: this is no work of the port's queue, and the device is not kept meanwhile.
pub(crate) fn reap(link: &Link<Port>) {
    let reaper = link.glance(|dev| (dev.cm.reaper.clone(), dev.cm.port_down.load(Relaxed)));
    let Some((reaper, down)) = reaper else {
        return;
    };
    let left = match down {
        true => reaper.reap_silent(),
        false => reaper.reap(),
    };
    if left != 0 {
        link.glance(|dev| dev.connect_later(HZ));
    }
}

/// Makes the shared receive queue when the mode is first used: that takes longer than to connect.
fn prepare(dev: &Device<Port>) {
    let Receives::Shared(shape) = dev.cm.receives else {
        return;
    };
    let mut locked = dev.lock();
    if locked.control().cm.up {
        // The first connection tries again.
        let _ = shared(&mut locked, shape);
    }
}

/// Counts the requests that were rejected at once.
fn account(dev: &Device<Port>) {
    let inbox = &dev.cm.inbox;
    let senseless = inbox.senseless.xchg(0, Relaxed);
    let crowded = inbox.crowded.xchg(0, Relaxed);
    let stats = &dev.stats;
    stats.conn_bad_message.add(senseless.into());
    stats
        .conn_rejected
        .add(u64::from(senseless) + u64::from(crowded));
    if senseless != 0 {
        warn_seldom!(
            "{}: requests to connect that make no sense are rejected\n",
            dev.name()
        );
    }
    if crowded != 0 {
        warn_seldom!(
            "{}: more than {} requests to connect wait, others are rejected\n",
            dev.name(),
            MAX_OFFERS
        );
    }
}

fn handle(dev: &Device<Port>, message: Message) {
    match message {
        Message::Offered {
            serial,
            id,
            from,
            mtu,
        } => {
            let own_mtu = dev.lock().control().ib_mtu();
            let accepted = match mtu > own_mtu {
                true => Err(Reason::MTU),
                false => accept(dev, serial, &id, from),
            };
            match accepted {
                Ok(passive) => {
                    admit(dev, passive, id);
                    dev.stats.conn_accepted.add(1);
                }
                Err(reason) => {
                    dev.stats.conn_rejected.add(1);
                    let _ = id.reject(reason, &dev.cm.hello(dev));
                }
            }
        }
        Message::Replied { serial, hello } => replied(dev, serial, hello),
        Message::Refused { serial, reason } => refused(dev, serial, reason),
        Message::Closed { serial, asked } => closed(dev, serial, asked),
    }
}

/// A queue pair to connect with, in INIT, and the number of its own receive queue, if it has one:
/// [`remove_own`] must follow then.
fn make_qp(
    locked: &mut Locked<'_, Port>,
    caps: Caps,
    flags: &Arc<Flags>,
) -> Result<(Arc<Qp>, Option<u16>)> {
    let dev = locked.dev();
    let cm = &dev.cm;
    let (srq, own) = match cm.receives {
        Receives::Shared(shape) => (shared(locked, shape)?, None),
        Receives::Own(shape, count) => {
            let table = &mut locked.control().cm;
            let number = table.free_own(count).ok_or(ENOSPC)?;
            let life = table.next_life();
            let pd = dev.transport.qp.pd().clone();
            let queue = SharedQueue::own(pd, shape, number, life)?;
            (queue.srq().clone(), Some((number, queue)))
        }
    };
    let qp =
        dev.transport
            .connected_qp(cm.completions, cm.recv.clone(), srq, caps, flags.clone())?;
    qp.to_init(dev.number, dev.pkey_index())?;
    let Some((number, mut queue)) = own else {
        return Ok((qp, None));
    };
    queue.attach(qp.clone())?;
    queue.fill()?;
    if queue.waiting() == 0 {
        return Err(ENOMEM);
    }
    let flags = flags.clone();
    let (recv, _) = quiet(locked)?;
    if let Some(place) = recv.own.get_mut(usize::from(number) - 1) {
        *place = Some(Own { queue, flags });
    }
    cm.recv.enable(locked);
    Ok((qp, Some(number)))
}

/// The receiving handler, while nobody polls; [`NapiCq::enable`] is to follow.
fn quiet<'a>(locked: &'a mut Locked<'_, Port>) -> Result<(&'a mut RecvPoll, Completions<'a>)> {
    let recv = &locked.dev().cm.recv;
    recv.disable(locked);
    recv.quiet(locked).ok_or(EBUSY)
}

/// Takes a queue pair's own receive queue away, whose memory goes with the queue pair.
fn remove_own(locked: &mut Locked<'_, Port>, number: u16) {
    let dev = locked.dev();
    let gone = match quiet(locked) {
        Ok((recv, _)) => recv
            .own
            .get_mut(usize::from(number).wrapping_sub(1))
            .and_then(Option::take),
        Err(_) => None,
    };
    if locked.control().cm.up {
        dev.cm.recv.enable(locked);
    }
    // May be the last to know the queue pair.
    drop(gone);
}

/// Makes the shared receive queue, if there is none.
fn shared(locked: &mut Locked<'_, Port>, shape: Shape) -> Result<Arc<Srq>> {
    if let Some(srq) = &locked.control().cm.srq {
        return Ok(srq.clone());
    }
    let dev = locked.dev();
    let life = locked.control().cm.next_life();
    let mut queue = SharedQueue::new(dev.transport.qp.pd().clone(), shape, 0, life)?;
    queue.fill()?;
    if queue.waiting() == 0 {
        return Err(ENOMEM);
    }
    let srq = queue.srq().clone();
    dev.cm.recv.quiet(locked).ok_or(EBUSY)?.0.queue = Some(queue);
    dev.cm.recv.enable(locked);
    locked.control().cm.srq = Some(srq.clone());
    Ok(srq)
}

/// Lets go of the shared receive queue, which has lost receives: the next queue pair has a new one
/// made, and polled. The old one goes with its last queue pair, whose completions are stale from now
/// on. Nobody polls.
fn renew_shared(locked: &mut Locked<'_, Port>) {
    if let Some((recv, _)) = locked.dev().cm.recv.quiet(locked) {
        recv.queue = None;
    }
    locked.control().cm.srq = None;
}

/// Accepts a peer's request.
fn accept(dev: &Device<Port>, serial: u64, id: &ConnId, from: Address) -> Result<Passive, Reason> {
    let mut locked = dev.lock();
    let table = &mut locked.control().cm;
    if !table.up {
        return Err(Reason::NO_SERVICE);
    }
    if table.graves.len() >= MAX_GRAVES {
        return Err(Reason::NO_RESOURCES);
    }
    // Those of the same peer will be replaced.
    let others = table.passive.iter().filter(|passive| passive.from != from);
    if others.count() >= dev.cm.max_passive {
        dev.stats.conn_over_limit.add(1);
        warn_seldom!(
            "{}: peers have opened max_connections={} connections, others are rejected\n",
            dev.name(),
            dev.cm.max_passive
        );
        return Err(Reason::NO_QP);
    }
    let caps = Caps {
        send_wr: 1,
        recv_wr: 0,
        send_sge: 1,
        recv_sge: 0,
        segmentation: false,
    };
    let made = Flags::new(&dev.cm.inbox)
        .and_then(|flags| Ok((make_qp(&mut locked, caps, &flags)?, flags)))
        .map_err(|error| match error {
            error if error == ENOSPC => {
                dev.stats.conn_over_limit.add(1);
                Reason::NO_QP
            }
            error => {
                warn_seldom!("{}: accepting failed: {:?}\n", dev.name(), error);
                Reason::NO_RESOURCES
            }
        });
    let ((qp, own), flags) = made?;
    let answer = || {
        let psn = starting_psn(serial);
        let rtr = Rtr {
            min_rnr_timer: RNR_TIMER,
            rq_psn: Some(psn),
            mtu: None,
        };
        qp.to_rtr(id, rtr)?;
        qp.to_rts(id)?;
        // Before the peer can send.
        let origin = Origin {
            used: Atomic::new(jiffies()),
            flags: flags.clone(),
        };
        {
            let guard = rcu::read_lock();
            dev.cm.origins.get_or_insert(&qp.id(), origin, &guard)?;
        }
        id.accept(&Accept {
            qpn: qp.qpn(),
            psn,
            private: &dev.cm.hello(dev),
            rnr_retries: qp::MAX_RETRIES,
            srq: dev.cm.shares(),
        })
        .inspect_err(|_| forget_origin(dev, qp.id()))
    };
    if let Err(error) = answer() {
        warn_seldom!("{}: accepting failed: {:?}\n", dev.name(), error);
        if let Some(number) = own {
            remove_own(&mut locked, number);
        }
        return Err(Reason::NO_RESOURCES);
    }
    Ok(Passive {
        serial,
        from,
        id: None,
        qp,
        flags,
        own,
    })
}

/// Notes an accepted connection, which replaces what the peer had.
fn admit(dev: &Device<Port>, mut passive: Passive, id: ConnId) {
    let mut locked = dev.lock();
    let mut old = KVec::new();
    let table = &mut locked.control().cm;
    let mut at = 0;
    while at < table.passive.len() {
        if table.passive[at].from == passive.from {
            match table.passive.remove(at) {
                Ok(gone) => drop(old.push(gone, GFP_KERNEL)),
                Err(_) => break,
            }
        } else {
            at += 1;
        }
    }
    passive.id = Some(id);
    match table.up {
        true => drop(table.passive.push(passive, GFP_KERNEL)),
        // The interface went down since it was accepted.
        false => drop(old.push(passive, GFP_KERNEL)),
    }
    for old in old {
        forget_origin(dev, old.qp.id());
        bury_passive(&mut locked, old);
    }
}

fn forget_origin(dev: &Device<Port>, id: QpId) {
    dev.cm.origins.remove_if(|at, _| *at == id).each(|_, _| {});
}

/// 24 bits that no connection of a moment ago had.
fn starting_psn(serial: u64) -> u32 {
    let mixed = (serial as u32)
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(jiffies() as u32);
    mixed & 0x00ff_ffff
}

/// Opens a connection for a peer that wants one.
fn open(dev: &Device<Port>, key: &Key) {
    let (gid_index, mtu) = {
        let mut locked = dev.lock();
        let control = locked.control();
        (control.gid_index(), control.ib_mtu())
    };
    let address = key.address();
    let path = gid_index
        .ok_or(EHOSTUNREACH)
        .and_then(|index| dev.path_to(&Gid(address.gid()), index));
    let path = match path {
        Ok(to) => to,
        Err(EINPROGRESS) => {
            // Asked again soon.
            if dev.cm.wanted.lock().push(*key, GFP_ATOMIC).is_ok() {
                dev.connect_later(SOON);
                return;
            }
            return fail_peer(dev, key);
        }
        Err(_) => return fail_peer(dev, key),
    };
    let service = {
        let guard = rcu::read_lock();
        let Some(peer) = dev.cm.peers.get(key, &guard) else {
            return;
        };
        let inner = peer.inner.lock();
        if !matches!(inner.state, State::Asked) {
            return;
        }
        inner.service
    };
    let path = Path {
        to: path,
        pkey: dev.pkey(),
        mtu,
        dlid: path.dlid,
        slid: dev.lid(),
        rate: path.rate,
        life_time: LIFE_TIME,
    };
    if connect(dev, key, service, 0, path).is_err() {
        dev.stats.conn_failed.add(1);
        fail_peer(dev, key);
    }
}

/// Makes a queue pair and sends the request.
fn connect(dev: &Device<Port>, key: &Key, service: u64, tries: u32, path: Path) -> Result {
    let mut locked = dev.lock();
    let cm = &dev.cm;
    let table = &mut locked.control().cm;
    if !table.up {
        return Err(ENETDOWN);
    }
    let index = table.free_index(cm.max_active).ok_or(ENOSPC)?;
    let life = table.next_life();
    let (half, mut completer) = send_queue::<Connected>(&dev.hca, RING, index)?;
    completer.begin(life);
    let flags = Flags::new(&cm.inbox)?;
    let caps = Caps {
        send_wr: RING,
        recv_wr: 0,
        send_sge: dev
            .hca
            .max_send_sge()
            .min(crate::net::skb::MAX_FRAGS as u32 + 1),
        recv_sge: 0,
        segmentation: false,
    };
    let (qp, own) = make_qp(&mut locked, caps, &flags)?;
    let request = || -> Result<Active> {
        let mut queue = half.with(qp.clone())?;
        queue.begin(life);
        let serial = cm.inbox.serial();
        let (qpn, progress) = (qp.qpn(), queue.progress());
        let conn = Arc::pin_init(
            pin_init!(Conn {
                index,
                qp,
                flags,
                progress,
                full: AtomicFlag::new(false),
                completer <- new_spinlock_bh!(completer, c"cm::Conn::completer"),
            }),
            GFP_KERNEL,
        )?;
        let id = ConnId::new(&cm.reaper, Line::new(serial, &cm.inbox)?)?;
        id.connect(&Connect {
            path,
            service: service | u64::from(key.address().qpn()),
            qpn,
            psn: starting_psn(serial),
            private: &cm.hello(dev),
            response_time: RESPONSE_TIME,
            repeats: REPEATS,
            srq: cm.shares(),
            ..Connect::new(dev.number)
        })?;
        let guard = rcu::read_lock();
        cm.senders
            .get_or_insert(&index.into(), conn.clone(), &guard)?;
        Ok(Active {
            serial,
            key: *key,
            service,
            tries,
            since: jiffies(),
            id: Some(id),
            conn,
            path,
            queue: Some(queue),
            own,
        })
    };
    let asked =
        request().and_then(|active| Ok(locked.control().cm.active.push(active, GFP_KERNEL)?));
    if asked.is_err() {
        cm.senders
            .remove_if(|at, _| *at == u32::from(index))
            .each(|_, _| {});
        if let Some(number) = own {
            remove_own(&mut locked, number);
        }
    }
    asked
}

/// The peer has accepted: packets may flow.
fn replied(dev: &Device<Port>, serial: u64, hello: Option<Hello>) {
    let up = {
        let mut locked = dev.lock();
        let active = &mut locked.control().cm.active;
        match active.iter_mut().find(|active| active.serial == serial) {
            Some(active) => establish(dev, active, hello),
            None => return,
        }
    };
    match up {
        Ok(()) => dev.stats.conn_opened.add(1),
        Err(error) => {
            warn_seldom!("{}: connecting failed: {:?}\n", dev.name(), error);
            dev.stats.conn_failed.add(1);
            end_active(dev, serial);
        }
    }
}

fn establish(dev: &Device<Port>, active: &mut Active, hello: Option<Hello>) -> Result {
    let id = active.id.as_ref().ok_or(EINVAL)?;
    let mtu = hello
        .filter(|hello| hello.qpn == active.key.address().qpn())
        .and_then(|hello| wire::connection_mtu(dev.cm.message(), hello.message));
    let Some(mtu) = mtu else {
        dev.stats.conn_bad_message.add(1);
        let _ = id.reject(Reason::CONSUMER, &dev.cm.hello(dev));
        return Err(EPROTO);
    };
    let rtr = Rtr {
        min_rnr_timer: RNR_TIMER,
        ..Rtr::default()
    };
    let qp = &active.conn.qp;
    qp.to_rtr(id, rtr)?;
    qp.to_rts(id)?;
    id.ready(&dev.cm.hello(dev))?;
    let mut sender = KBox::new(
        Sender {
            queue: active.queue.take().ok_or(EINVAL)?,
            conn: active.conn.clone(),
            mtu,
            since: jiffies(),
        },
        GFP_KERNEL,
    )?;
    let mut tx = dev.tx_lock();
    let guard = rcu::read_lock();
    let peer = dev.cm.peers.get(&active.key, &guard).ok_or(ENOENT)?;
    let mut inner = peer.inner.lock();
    let (_, action) = state::next(inner.state.phase(), state::Event::Accepted);
    if action != Action::Release {
        return Err(ECONNABORTED);
    }
    inner.failures = 0;
    inner.service = active.service;
    // No packet overtakes those that wait, since the transmit lock is held.
    while let Some(skb) = inner.waiting.pop() {
        // There is room: as many as wait at most.
        let more = inner.waiting.packets() != 0;
        dev.cm.post(dev, &mut tx, &mut sender, skb, more);
    }
    inner.state = State::Up(sender);
    Ok(())
}

/// An attempt of ours, or an acceptance, came to nothing.
fn refused(dev: &Device<Port>, serial: u64, reason: Option<Reason>) {
    let again = {
        let mut locked = dev.lock();
        let table = &mut locked.control().cm;
        let Some(at) = table
            .active
            .iter()
            .position(|active| active.serial == serial)
        else {
            drop(locked);
            return end_passive(dev, serial, false);
        };
        let active = &table.active[at];
        if active.queue.is_none() {
            // It is up: the peer ends it. Packets are being posted to it, so it must be parted from.
            drop(locked);
            dev.stats.conn_broken.add(1);
            return end_active(dev, serial);
        }
        let asked = Request {
            service: active.service,
            mtu: active.path.mtu,
        };
        state::ask_again(reason, asked, active.tries).and_then(|request| {
            let active = table.active.remove(at).ok()?;
            let (key, tries) = (active.key, active.tries);
            let path = Path {
                mtu: request.mtu,
                ..active.path
            };
            bury_active(table, active);
            Some((key, request.service, tries.saturating_add(1), path))
        })
    };
    match again {
        Some((key, service, tries, path)) => {
            if connect(dev, &key, service, tries, path).is_err() {
                dev.stats.conn_failed.add(1);
                fail_peer(dev, &key);
            }
        }
        None => {
            dev.stats.conn_failed.add(1);
            end_active(dev, serial);
        }
    }
}

/// The peer wants an end, or there is one.
fn closed(dev: &Device<Port>, serial: u64, asked: bool) {
    if asked {
        let mut locked = dev.lock();
        let table = &mut locked.control().cm;
        let active = table.active.iter().find(|active| active.serial == serial);
        if let Some(id) = active.and_then(|active| active.id.as_ref()) {
            let _ = id.answer_disconnect();
        }
    }
    end_active(dev, serial);
    end_passive(dev, serial, asked);
}

/// Ends a connection that we opened. What waits for it goes by datagrams.
fn end_active(dev: &Device<Port>, serial: u64) {
    let mut locked = dev.lock();
    let active = &mut locked.control().cm.active;
    let Some(at) = active.iter().position(|active| active.serial == serial) else {
        return;
    };
    // Nobody posts to it any more when it is buried, and it is seen until then.
    fail_peer(dev, &active[at].key);
    if let Ok(active) = active.remove(at) {
        bury_active(&mut locked.control().cm, active);
    }
}

fn end_passive(dev: &Device<Port>, serial: u64, asked: bool) {
    let mut locked = dev.lock();
    let passive = &mut locked.control().cm.passive;
    let at = passive.iter().position(|passive| passive.serial == serial);
    if let Some(passive) = at.and_then(|at| passive.remove(at).ok()) {
        if let Some(id) = passive.id.as_ref().filter(|_| asked) {
            let _ = id.answer_disconnect();
        }
        forget_origin(dev, passive.qp.id());
        bury_passive(&mut locked, passive);
    }
}

/// There is no connection to a peer any more: takes the posting end away, and sends what waits by
/// datagrams. One that was up for a while may be asked for again at once.
fn fail_peer(dev: &Device<Port>, key: &Key) {
    let mut tx = dev.tx_lock();
    let guard = rcu::read_lock();
    let Some(peer) = dev.cm.peers.get(key, &guard) else {
        return;
    };
    let (old, mut waiting) = {
        let mut inner = peer.inner.lock();
        // What is chained completes with the rest of the connection.
        inner.flush(dev);
        let held = match &inner.state {
            State::Up(sender) => elapsed(sender.since) >= PAUSE,
            State::New | State::Asked | State::Refused { .. } => false,
        };
        let state = match state::next(inner.state.phase(), state::Event::Ended { held }).1 {
            Action::Forget => State::New,
            Action::FallBack => {
                inner.failures = inner.failures.saturating_add(1);
                State::Refused { since: jiffies() }
            }
            // There is no connection, and nothing waits for one.
            _ => return,
        };
        let old = mem::replace(&mut inner.state, state);
        (old, mem::replace(&mut inner.waiting, SkbQueue::new()))
    };
    while let Some(skb) = waiting.pop() {
        dev.send_datagram(&mut tx, skb, key);
    }
    tx.flush(dev);
    drop(guard);
    drop(tx);
    drop(old);
}

/// Ends all that we opened, in datagram mode.
fn part_from_peers(dev: &Device<Port>) {
    let cm = &dev.cm;
    // Who sends by a connection still does so under the transmit lock.
    drop(dev.tx_lock());
    if cm.peers.len() == 0 {
        return;
    }
    let mut serials = KVec::new();
    for active in dev.lock().control().cm.active.iter() {
        let _ = serials.push(active.serial, GFP_KERNEL);
    }
    for serial in serials {
        end_active(dev, serial);
    }
    if cm.is_connected() {
        // Again, meanwhile: what is wanted now is of that mode.
        return;
    }
    drop(mem::replace(&mut *cm.wanted.lock(), KVVec::new()));
    let mut keys = KVVec::new();
    cm.peers.for_each(|key, _| {
        let _ = keys.push(*key, GFP_ATOMIC);
    });
    for key in &keys {
        fail_peer(dev, key);
    }
    forget_peers(dev);
}

/// Ends what events and completions found dead, and what was not answered.
fn collect_failed(dev: &Device<Port>) {
    let mut dead = KVec::new();
    {
        let mut locked = dev.lock();
        let table = &mut locked.control().cm;
        for active in &table.active {
            let late = active.queue.is_some() && elapsed(active.since) > ANSWER;
            if late || active.conn.flags.failed.load(Relaxed) {
                let _ = dead.push(active.serial, GFP_KERNEL);
            }
        }
        for passive in &table.passive {
            if passive.flags.failed.load(Relaxed) {
                let _ = dead.push(passive.serial, GFP_KERNEL);
            }
        }
    }
    // All at once: each removal waits for the readers.
    dev.cm
        .origins
        .remove_if(|_, origin| origin.flags.failed.load(Relaxed))
        .each(|_, _| {});
    for serial in dead {
        dev.stats.conn_broken.add(1);
        end_active(dev, serial);
        end_passive(dev, serial, false);
    }
}

/// Takes out the graves of which nothing is under way any more, and says whether to look again.
fn exhume(dev: &Device<Port>) -> (KVec<Grave>, bool) {
    let mut done = KVec::new();
    let mut left_over = false;
    let busy;
    {
        let mut locked = dev.lock();
        let table = &mut locked.control().cm;
        let mut at = 0;
        while let Some(grave) = table.graves.get(at) {
            let remains = Remains {
                received: grave.flags.last_receive.load(Relaxed),
                sent: grave.forgotten || grave.left_over() == 0,
                age: elapsed(grave.since),
            };
            match state::fate(remains, PATIENCE) {
                Fate::Wait => {
                    at += 1;
                    continue;
                }
                Fate::Destroy => {}
                Fate::GiveUp => left_over = true,
            }
            match table.graves.remove(at) {
                Ok(grave) => drop(done.push(grave, GFP_KERNEL)),
                Err(_) => break,
            }
        }
        let asking = table.active.iter().any(|active| active.queue.is_some());
        busy = asking || !table.graves.is_empty();
    }
    let of_done = |index: u32| {
        let mut conns = done.iter().filter_map(|grave: &Grave| grave.conn.as_ref());
        conns.any(|(conn, _)| u32::from(conn.index) == index)
    };
    if done.iter().any(|grave| grave.conn.is_some()) {
        dev.cm
            .senders
            .remove_if(|index, _| of_done(*index))
            .each(|_, conn| dev.cm.not_full(conn));
        dev.wake_if_room();
    }
    for grave in &done {
        dev.stats.tx_failed.add(grave.left_over().into());
    }
    let own_of_done = done.iter().filter_map(|grave: &Grave| grave.own);
    if !dev.cm.shares() && !done.is_empty() {
        let mut locked = dev.lock();
        for number in own_of_done {
            remove_own(&mut locked, number);
        }
    }
    if left_over {
        // Forgets the bytes that did not complete.
        dev.restart_soon();
    }
    (done, busy)
}

/// Lets idle connections go, and replaces receives that were lost.
pub(crate) fn housekeep(dev: &Device<Port>) {
    let cm = &dev.cm;
    let is_idle = |peer: &Peer| elapsed(peer.used.load(Relaxed)) > ACTIVE_IDLE;
    let mut keys = KVVec::new();
    cm.peers.for_each(|key, peer| {
        if is_idle(peer) {
            let _ = keys.push(*key, GFP_ATOMIC);
        }
    });
    if !keys.is_empty() {
        let mut serials = KVec::new();
        for active in dev.lock().control().cm.active.iter() {
            if active.queue.is_none() && keys.contains(&active.key) {
                let _ = serials.push(active.serial, GFP_KERNEL);
            }
        }
        for serial in serials {
            end_active(dev, serial);
        }
        let unused = |peer: &Peer| {
            let inner = peer.inner.lock();
            inner.waiting.packets() == 0 && !matches!(inner.state, State::Up(_) | State::Asked)
        };
        let mut lost = 0;
        cm.peers
            .remove_if(|_, peer| is_idle(peer) && unused(peer))
            // A packet may have come between.
            .each(|_, peer| lost += peer.inner.lock().waiting.packets() as u64);
        dev.stats.tx_neigh_failed.add(lost);
        cm.inbox.bell.ring();
    }
    cm.origins.for_each(|_, origin| {
        if elapsed(origin.used.load(Relaxed)) > PASSIVE_IDLE {
            origin.flags.fail();
        }
    });
    let mut locked = dev.lock();
    let table = &locked.control().cm;
    if (table.srq.is_none() && cm.shares()) || !table.up {
        return;
    }
    let mut worn = false;
    if let Ok((recv, _)) = quiet(&mut locked) {
        if let Some(queue) = &mut recv.queue {
            let audit = queue.audit();
            dev.stats.rx_lost_slots.add(audit.lost.into());
            worn = audit.missing > queue.shape().entries / 2;
        }
        let own = recv.own.iter_mut().flatten().map(|own| &mut own.queue);
        for queue in Iterator::chain(recv.queue.iter_mut(), own) {
            if !matches!(queue.fill(), Ok(0)) {
                dev.stats.rx_refill_failed.add(1);
            }
        }
    }
    if worn {
        // Peers connect again, with a queue pair of the new queue.
        renew_shared(&mut locked);
        let table = &locked.control().cm;
        let active = table.active.iter().map(|active| &active.conn.flags);
        let passive = table.passive.iter().map(|passive| &passive.flags);
        Iterator::chain(active, passive).for_each(|flags| flags.fail());
    } else {
        cm.recv.enable(&mut locked);
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
mod selftest;
