// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Connections against real RoCE devices: pairs of queue pairs that the communication manager
//! connects.
//!
//! As [`super::selftest`], but a pair may be of two devices: each test runs within the first one,
//! and between the first two if there are two. Users of this layer test themselves against a
//! [`Node`].

use super::{
    ah,
    client::{
        self,
        Client,
        Registry, //
    },
    cm::{
        self,
        Accept,
        Acceptor,
        ConnId,
        Connect,
        Handler,
        Id,
        Listener,
        Offer,
        Reason, //
    },
    cq::{
        Completions,
        Napi,
        NapiCq,
        Poll,
        Status, //
    },
    device::{
        Device,
        Protocol, //
    },
    pd::Pd,
    qp::{
        self,
        Caps,
        Qp,
        Rtr, //
    },
    queue::{
        send_queue,
        Connected,
        Peer,
        SendCompleter,
        SendProgress,
        SendQueue, //
    },
    srq::{
        Audit,
        Shape,
        SharedQueue, //
    },
    Gid,
    PortNum, //
};
use crate::{
    net::{
        self,
        device::{
            self as netdev,
            Link,
            Locked,
            Neighbourhood,
            Registration,
            Setup,
            UnregisteredDevice, //
        },
        ethtool,
        rtnl::{
            Attributes,
            LinkKind,
            LinkOps,
            Rtnl, //
        },
        skb::{
            NewSkb,
            PacketType,
            Skb,
            SkbQueue, //
        },
    },
    sync::lock::{
        new_spinlock_bh,
        SpinLockBh, //
    },
    wire, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Relaxed, //
            },
            Atomic, //
        },
        new_mutex,
        Arc,
        Mutex, //
    },
    time::Delta, //
};

const SERVICE: u64 = 0x0100_0000_0012_3456;
const RING: u32 = 8;
const RECEIVES: u32 = 16;
/// Completions of all send queues of a test that can wait at once.
const COMPLETIONS: u32 = 256;
/// Send queues of a test at a time.
const QUEUES: usize = 16;
/// The longest message.
const LONGEST: usize = 65_524;

/// What happened to a connection, as bits.
pub(crate) const REPLIED: u32 = 1 << 0;
pub(crate) const ESTABLISHED: u32 = 1 << 1;
pub(crate) const REJECTED: u32 = 1 << 2;
const FAILED: u32 = 1 << 3;
pub(crate) const ASKED: u32 = 1 << 4;
const DISCONNECTED: u32 = 1 << 5;
const TIMEWAIT: u32 = 1 << 6;
/// A verb failed in a handler.
const BROKEN: u32 = 1 << 7;

/// Connections and queue pairs that there are.
static CONNS: Atomic<u32> = Atomic::new(0);
static QPS: Atomic<u32> = Atomic::new(0);

/// The send queues' completing ends, by index.
#[pin_data]
struct Table {
    #[pin]
    completers: SpinLockBh<KVVec<Option<SendCompleter<Connected>>>>,
    life: Atomic<u32>,
}

impl Table {
    fn new() -> Result<Arc<Self>> {
        let mut completers = KVVec::with_capacity(QUEUES, GFP_KERNEL)?;
        for _ in 0..QUEUES {
            completers.push(None, GFP_KERNEL)?;
        }
        Arc::pin_init(
            pin_init!(Self {
                completers <- new_spinlock_bh!(completers, c"ib::selftest_rc::Table"),
                life: Atomic::new(1),
            }),
            GFP_KERNEL,
        )
    }
}

/// What the handlers of a node saw.
#[pin_data]
pub(crate) struct Wire {
    table: Arc<Table>,
    send: Arc<NapiCq<SendSide>>,
    recv: Arc<NapiCq<RecvSide>>,
    sent: Atomic<u32>,
    flushed: Atomic<u32>,
    failed: Atomic<u32>,
    pub(crate) received: Atomic<u32>,
    wrong: Atomic<u32>,
    recv_failed: Atomic<u32>,
    /// Any message is right.
    pub(crate) raw: Atomic<bool>,
    /// Received packets are kept here when `keep` says so.
    keep: Atomic<bool>,
    #[pin]
    kept: SpinLockBh<SkbQueue>,
}

struct SendSide(Arc<Table>);

impl Poll for SendSide {
    type Driver = Pin<KBox<Wire>>;

    fn poll(
        &mut self,
        dev: &netdev::Device<Self::Driver>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        loop {
            let (batch, _) = cq.next(8);
            if batch.is_empty() {
                return 0;
            }
            let mut completers = self.0.completers.lock();
            for wc in batch {
                let completer = completers.get_mut(usize::from(wc.queue()));
                let done = completer
                    .and_then(|completer| completer.as_mut())
                    .and_then(|completer| completer.complete(wc.id(), budget));
                let count = match (done, wc.status()) {
                    (Some(_), Status::Success) => &dev.sent,
                    (Some(_), Status::Flushed) => &dev.flushed,
                    (Some(_), Status::Error(_)) => &dev.failed,
                    (None, _) => &dev.wrong,
                };
                count.add(done.map_or(1, |done| done.packets), Relaxed);
            }
        }
    }
}

struct RecvSide(SharedQueue);

/// The byte at `at` of packet `number`.
fn pattern(number: u8, at: usize) -> u8 {
    number.wrapping_add((at % 251) as u8)
}

/// Whether `bytes` is a packet that [`Node::packet`] made.
fn is_right(bytes: &[u8]) -> bool {
    bytes.first().is_some_and(|&number| {
        bytes
            .iter()
            .enumerate()
            .all(|(at, &byte)| byte == pattern(number, at))
    })
}

impl RecvSide {
    /// Takes a message; `None` if something is wrong with it.
    fn message(
        queue: &mut SharedQueue,
        dev: &netdev::Device<Pin<KBox<Wire>>>,
        napi: Napi<'_>,
        id: u64,
        len: usize,
    ) -> Option<()> {
        let mut slot = queue.take(id)?;
        if dev.raw.load(Relaxed) {
            return Some(());
        }
        if len <= 256 {
            return is_right(slot.head(len)).then_some(());
        }
        // The first four bytes go another way than the rest, as a header would.
        let mut skb = napi.alloc_skb(64)?;
        if !skb.append(slot.head(4)) || !slot.attach(&mut skb, 4, len) {
            return None;
        }
        let skb = skb.finish(0, 0, PacketType::Host);
        if skb.len() != len {
            return None;
        }
        if dev.keep.load(Relaxed) {
            dev.kept.lock().push(skb);
            return Some(());
        }
        let mut skb = skb;
        skb.linearize().ok()?;
        is_right(skb.head()).then_some(())
    }
}

impl Poll for RecvSide {
    type Driver = Pin<KBox<Wire>>;

    fn poll(
        &mut self,
        dev: &netdev::Device<Self::Driver>,
        napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let (batch, _) = cq.next(budget - done);
            if batch.is_empty() {
                break;
            }
            done += batch.len();
            for wc in batch {
                if wc.status() != Status::Success {
                    drop(self.0.take(wc.id()));
                    dev.recv_failed.add(1, Relaxed);
                    continue;
                }
                let count = match Self::message(&mut self.0, dev, napi, wc.id(), wc.byte_len()) {
                    Some(()) => &dev.received,
                    None => &dev.wrong,
                };
                count.add(1, Relaxed);
            }
            if self.0.post().is_err() {
                dev.wrong.add(1, Relaxed);
            }
        }
        done
    }
}

impl ethtool::Ops for Pin<KBox<Wire>> {
    const COUNTERS: &'static [&'static str] = &[];

    fn info(_dev: &netdev::Device<Self>, _info: &mut ethtool::Info<'_>) {}

    fn rings(_dev: &netdev::Device<Self>) -> ethtool::Rings {
        ethtool::Rings {
            rx: RING,
            rx_max: RING,
            tx: RING,
            tx_max: RING,
        }
    }

    fn counters(_dev: &netdev::Device<Self>, _values: &mut [u64]) {}
}

impl netdev::Driver for Pin<KBox<Wire>> {
    type Control = ();
    type Tx = ();

    const ADDRESS_LEN: usize = 20;
    const HEADER_LEN: usize = 24;

    fn open(_locked: &mut Locked<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }

    fn stop(_locked: &mut Locked<'_, Self>) {}

    fn start_xmit(_dev: &netdev::Device<Self>, _tx: &mut (), _skb: Skb) {}

    fn tx_timeout(_dev: &netdev::Device<Self>) {}

    fn groups_changed(
        _locked: &mut Locked<'_, Self>,
        _rtnl: &Rtnl,
        _groups: net::device::Groups<'_>,
    ) -> Result {
        Ok(())
    }

    fn change_mtu(_locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32> {
        Ok(mtu)
    }

    fn stats(_dev: &netdev::Device<Self>, _stats: &mut netdev::Stats) {}

    fn write_header(_header: &mut [u8], _ethertype: u16, _destination: &[u8]) {}
}

impl LinkKind for Pin<KBox<Wire>> {
    const ATTRIBUTES: usize = 0;

    fn fill(_dev: &netdev::Device<Self>, _attributes: &mut Attributes<'_>) -> Result {
        Ok(())
    }
}

/// What events said about a queue pair. The queue pair owns it: its count is that of queue pairs.
struct Flags {
    last_receive: Atomic<u32>,
}

impl qp::Watcher for Flags {
    fn event(&self, event: qp::Event) {
        if event == qp::Event::LastReceive {
            self.last_receive.add(1, Relaxed);
        }
    }
}

impl Drop for Flags {
    fn drop(&mut self) {
        QPS.add(u32::MAX, Relaxed);
    }
}

/// A connection. Its identifier owns it: its count is that of identifiers.
#[pin_data(PinnedDrop)]
pub(crate) struct Conn {
    qp: Arc<Qp>,
    flags: Arc<Flags>,
    #[pin]
    tx: SpinLockBh<SendQueue<Connected>>,
    progress: SendProgress,
    #[pin]
    id: Mutex<Option<ConnId>>,
    seen: Atomic<u32>,
    pub(crate) reason: Atomic<u32>,
    /// The first four bytes of the peer's private data.
    pub(crate) said: Atomic<u32>,
    /// Destroys the identifier in its own handler when the peer disconnects.
    impatient: bool,
    port: PortNum,
    /// What was sent stays until the queue pair is gone: Soft-RoCE completes a send whose acknowledgement comes while
    /// it is being repeated, and goes on to read it. Hence the last field.
    #[pin]
    held: SpinLockBh<SkbQueue>,
}

#[pinned_drop]
impl PinnedDrop for Conn {
    fn drop(self: Pin<&mut Self>) {
        CONNS.add(u32::MAX, Relaxed);
    }
}

fn word(bytes: &[u8]) -> u32 {
    match bytes {
        [a, b, c, d, ..] => u32::from_be_bytes([*a, *b, *c, *d]),
        _ => 0,
    }
}

const RTR: Rtr = Rtr {
    min_rnr_timer: 24,
    rq_psn: None,
    mtu: None,
};

impl Conn {
    fn note(&self, bit: u32) {
        // One writer at a time, the handler.
        let seen = self.seen.load(Relaxed);
        self.seen.store(seen | bit, Relaxed);
    }

    pub(crate) fn has(&self, bits: u32) -> bool {
        self.seen.load(Relaxed) & bits == bits
    }

    fn replied(&self, id: &Id) -> Result {
        self.qp.to_rtr(id, RTR)?;
        self.qp.to_rts(id)?;
        id.ready(b"rtu!")
    }

    fn tried(&self, result: Result) {
        if let Err(error) = result {
            pr_err!("a handler failed: {:?}\n", error);
            self.note(BROKEN);
        }
    }

    /// Posts packets of the lengths in `lens`, all at once.
    fn send(&self, number: u8, lens: &[usize]) -> Result {
        let mut packets = SkbQueue::new();
        for &len in lens {
            packets.push(packet(number, len)?);
        }
        self.send_queue(&mut packets)
    }

    /// Posts a message.
    pub(crate) fn send_bytes(&self, bytes: &[u8]) -> Result {
        let mut skb = NewSkb::alloc(bytes.len()).ok_or(ENOMEM)?;
        check!(skb.append(bytes));
        let mut packets = SkbQueue::new();
        packets.push(skb.finish(0, 0, PacketType::Host));
        self.send_queue(&mut packets)
    }

    /// Whether all that was posted is done.
    pub(crate) fn is_quiet(&self) -> bool {
        self.progress.passed(self.progress.head())
    }

    fn send_queue(&self, packets: &mut SkbQueue) -> Result {
        let mut tx = self.tx.lock();
        while let Some(skb) = packets.pop() {
            self.held.lock().push(skb.share().ok_or(ENOMEM)?);
            tx.push(skb, &Peer).map_err(|_| ENOBUFS)?;
            if tx.chain_is_full() {
                tx.flush()?;
            }
        }
        tx.flush().map(|_| ())
    }

    /// Ends it, as an owner must: the identifier goes, and the queue pair is left to the last
    /// reference.
    pub(crate) fn close(&self) {
        let id = self.id.lock().take();
        if let Some(id) = id {
            id.destroy();
        }
    }
}

impl Handler for Conn {
    fn event(&self, id: &Id, event: cm::Event<'_>) {
        match event {
            cm::Event::Replied(reply) => {
                self.said.store(word(reply.private), Relaxed);
                self.tried(self.replied(id));
                self.note(REPLIED);
            }
            cm::Event::Established => self.note(ESTABLISHED),
            cm::Event::Rejected { reason, private } => {
                self.reason.store(reason.0, Relaxed);
                self.said.store(word(private), Relaxed);
                self.note(REJECTED);
            }
            cm::Event::RequestFailed | cm::Event::ReplyFailed => self.note(FAILED),
            cm::Event::DisconnectAsked => {
                if self.impatient {
                    self.close();
                } else {
                    self.tried(id.answer_disconnect());
                }
                self.note(ASKED);
            }
            cm::Event::Disconnected => self.note(DISCONNECTED),
            cm::Event::TimewaitOver => self.note(TIMEWAIT),
        }
    }
}

fn packet(number: u8, len: usize) -> Result<Skb> {
    let mut skb = NewSkb::alloc(len).ok_or(ENOMEM)?;
    for at in 0..len {
        if !skb.append(&[pattern(number, at)]) {
            return Err(ENOMEM);
        }
    }
    Ok(skb.finish(0, 0, PacketType::Host))
}

/// A port with a shared receive queue.
#[pin_data]
pub(crate) struct Node {
    pub(crate) dev: Registration<Pin<KBox<Wire>>>,
    pub(crate) reaper: Arc<cm::Reaper>,
    shape: Shape,
    srq: Arc<super::srq::Srq>,
    pd: Arc<Pd>,
    pub(crate) port: PortNum,
    pub(crate) gid: Gid,
    gid_index: u8,
    mtu: u32,
    /// All that were made since the last [`Self::clear`].
    #[pin]
    conns: Mutex<KVec<Arc<Conn>>>,
}

impl Node {
    pub(crate) fn new(
        device: &Arc<Device>,
        port: PortNum,
        link_ops: &Arc<LinkOps<Pin<KBox<Wire>>>>,
    ) -> Result<Arc<Self>> {
        let mac = device
            .lower(port)
            .and_then(|lower| lower.mac())
            .ok_or(ENODEV)?;
        let gid = Gid(wire::gid_of_mac(&mac));
        let attr = device.query_port(port)?;
        let gid_index = device
            .find_roce_v2_gid(port, attr.gid_table_len, &gid)
            .ok_or(ENOENT)?;
        let pd = Pd::new(device.clone())?;
        let unregistered = UnregisteredDevice::<Pin<KBox<Wire>>>::new(c"ibtest%d")?;
        let table = Table::new()?;
        let shape = Shape::within(device, RECEIVES, LONGEST)?;
        let queue = SharedQueue::new(pd.clone(), shape, 0, 1)?;
        let srq = queue.srq().clone();
        let send = NapiCq::new(
            &unregistered,
            device.clone(),
            COMPLETIONS,
            0,
            SendSide(table.clone()),
        )?;
        let recv = NapiCq::new(
            &unregistered,
            device.clone(),
            COMPLETIONS,
            1,
            RecvSide(queue),
        )?;
        let setup = Setup {
            address: &[0; 20],
            broadcast: &[0xff; 20],
            hardware_type: 32,
            mtu: 1000,
            min_mtu: 68,
            max_mtu: 1000,
            port: 0,
            scatter_gather: false,
            offloads: Default::default(),
            parent: device.parent(),
            watchdog: 10,
        };
        let wire = KBox::pin_init(
            pin_init!(Wire {
                table,
                send,
                recv,
                sent: Atomic::new(0),
                flushed: Atomic::new(0),
                failed: Atomic::new(0),
                received: Atomic::new(0),
                wrong: Atomic::new(0),
                recv_failed: Atomic::new(0),
                raw: Atomic::new(false),
                keep: Atomic::new(false),
                kept <- new_spinlock_bh!(SkbQueue::new(), c"ib::selftest_rc::kept"),
            }),
            GFP_KERNEL,
        )?;
        let dev = unregistered.register(
            &setup,
            &Neighbourhood::initial(),
            link_ops.clone(),
            Arc::pin_init(Link::new(), GFP_KERNEL)?,
            Ok(wire),
            (),
            (),
        )?;
        let reaper = cm::Reaper::new(device.clone())?;
        let node = Arc::pin_init(
            pin_init!(Self {
                dev,
                reaper,
                shape,
                srq,
                pd,
                port,
                gid,
                gid_index,
                mtu: attr.mtu,
                conns <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )?;
        let mut locked = node.dev.lock();
        let (side, _) = node.dev.recv.quiet(&mut locked).ok_or(EBUSY)?;
        side.0.fill()?;
        if side.0.waiting() != RECEIVES as usize {
            return Err(ENOMEM);
        }
        node.dev.send.enable(&mut locked);
        node.dev.recv.enable(&mut locked);
        drop(locked);
        Ok(node)
    }

    /// Works on the shared receive queue while nobody polls.
    fn with_queue<R>(&self, work: impl FnOnce(&mut SharedQueue) -> R) -> Result<R> {
        let mut locked = self.dev.lock();
        self.dev.recv.disable(&mut locked);
        let result = self
            .dev
            .recv
            .quiet(&mut locked)
            .map(|(side, _)| work(&mut side.0))
            .ok_or(EBUSY);
        self.dev.recv.enable(&mut locked);
        result
    }

    /// A queue pair in INIT, and a connection around it.
    fn conn(&self, impatient: bool) -> Result<Arc<Conn>> {
        // One at a time: the place in the table is free until the end.
        let mut conns = self.conns.lock();
        let table = &self.dev.table;
        let index = table
            .completers
            .lock()
            .iter()
            .position(|completer| completer.is_none())
            .ok_or(ENOSPC)?;
        let (half, mut completer) = send_queue::<Connected>(self.pd.device(), RING, index as u16)?;
        let life = table.life.fetch_add(1, Relaxed);
        completer.begin(life);
        let flags = Arc::new(
            Flags {
                last_receive: Atomic::new(0),
            },
            GFP_KERNEL,
        )?;
        QPS.add(1, Relaxed);
        let caps = Caps {
            send_wr: RING,
            recv_wr: 0,
            send_sge: 18,
            recv_sge: 0,
            segmentation: false,
        };
        let qp = Qp::new_connected(
            self.pd.clone(),
            self.dev.send.clone(),
            self.dev.recv.clone(),
            self.srq.clone(),
            caps,
            flags.clone(),
        )
        .inspect_err(|error| pr_err!("no queue pair: {:?}\n", error))?;
        let mut tx = half.with(qp.clone())?;
        tx.begin(life);
        qp.to_init(self.port, 0)?;
        let progress = tx.progress();
        let conn = Arc::pin_init(
            pin_init!(Conn {
                qp,
                flags,
                tx <- new_spinlock_bh!(tx, c"ib::selftest_rc::tx"),
                progress,
                id <- new_mutex!(None),
                seen: Atomic::new(0),
                reason: Atomic::new(0),
                said: Atomic::new(0),
                impatient,
                port: self.port,
                held <- new_spinlock_bh!(SkbQueue::new(), c"ib::selftest_rc::held"),
            }),
            GFP_KERNEL,
        )?;
        CONNS.add(1, Relaxed);
        conns.push(conn.clone(), GFP_KERNEL)?;
        // The queue pair is made for good.
        if let Some(place) = table.completers.lock().get_mut(index) {
            *place = Some(completer);
        }
        Ok(conn)
    }

    /// Asks `to` for a connection.
    fn connect(&self, to: &Node, service: u64, private: &[u8]) -> Result<Arc<Conn>> {
        self.request(&to.gid, self.mtu.min(to.mtu), service, private)
    }

    /// Asks whoever serves at a GID for a connection.
    pub(crate) fn request(
        &self,
        to: &Gid,
        mtu: u32,
        service: u64,
        private: &[u8],
    ) -> Result<Arc<Conn>> {
        let conn = self.conn(false)?;
        let id = ConnId::new(&self.reaper, conn.clone())?;
        let mut place = conn.id.lock();
        *place = Some(id);
        drop(place);
        let request = Connect {
            path: cm::Path {
                to: ah::Attr {
                    gid: *to,
                    global: true,
                    sgid_index: self.gid_index,
                    hop_limit: 64,
                    dmac: wire::mac_of_gid(&to.0).ok_or(EINVAL)?,
                    ..ah::Attr::default()
                },
                pkey: 0xffff,
                mtu,
                // A second until a send is repeated. On an emulated machine acknowledgements are often late,
                // and Soft-RoCE goes on to read what is acknowledged while it is being repeated.
                life_time: 17,
                ..cm::Path::default()
            },
            service,
            qpn: conn.qp.qpn(),
            psn: 0x123456,
            private,
            retries: 3,
            // A slow peer is not asked twice.
            response_time: 19,
            ..Connect::new(conn.port)
        };
        let asked = match conn.id.lock().as_ref() {
            Some(id) => id.connect(&request),
            None => Err(EINVAL),
        };
        if let Err(error) = asked {
            conn.close();
            return Err(error);
        }
        Ok(conn)
    }

    /// Ends all connections, and destroys what was dropped.
    pub(crate) fn clear(&self) -> Result {
        let mut conns = KVec::new();
        core::mem::swap(&mut conns, &mut *self.conns.lock());
        for conn in &conns {
            conn.close();
        }
        // Queue pairs before their places in the table.
        drop(conns);
        let reaped = eventually(|| self.reaper.reap() == 0);
        for index in 0..QUEUES {
            let completer = self
                .dev
                .table
                .completers
                .lock()
                .get_mut(index)
                .and_then(|place| place.take());
            drop(completer);
        }
        check!(reaped);
        Ok(())
    }
}

/// What a server does with a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    Accept,
    /// Accepts, and says so much.
    Say([u8; 8]),
    /// Keeps it, and never answers.
    Silence,
    /// As `Say`, and rejects at once what it has accepted.
    Revoke([u8; 8], Reason),
    /// Accepts, and destroys its end in the handler when the peer is gone.
    AcceptImpatient,
    Reject,
    /// As `Say`, but packets may not be longer.
    Limit(u32, [u8; 8]),
    Ignore,
    /// Keeps it, and drops it at once.
    Drop,
}

const PASSIVE_PSN: u32 = 0x654321;

/// Answers requests to a node.
#[pin_data]
pub(crate) struct Server {
    node: Arc<Node>,
    policy: Policy,
    pub(crate) requests: Atomic<u32>,
    wrong: Atomic<u32>,
    #[pin]
    conns: Mutex<KVec<Arc<Conn>>>,
}

impl Server {
    pub(crate) fn new(node: &Arc<Node>, policy: Policy) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                node: node.clone(),
                policy,
                requests: Atomic::new(0),
                wrong: Atomic::new(0),
                conns <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )
    }

    fn accept(&self, offer: Offer<'_>) -> Result {
        let conn = self.node.conn(self.policy == Policy::AcceptImpatient)?;
        conn.said.store(word(offer.private()), Relaxed);
        let id = offer.keep(&self.node.reaper, conn.clone())?;
        if self.policy == Policy::Drop {
            return Ok(());
        }
        if self.policy == Policy::Silence {
            *conn.id.lock() = Some(id);
            return Ok(self.conns.lock().push(conn, GFP_KERNEL)?);
        }
        let rtr = Rtr {
            rq_psn: Some(PASSIVE_PSN),
            ..RTR
        };
        conn.qp.to_rtr(&id, rtr)?;
        conn.qp.to_rts(&id)?;
        let accept = Accept {
            qpn: conn.qp.qpn(),
            psn: PASSIVE_PSN,
            private: match &self.policy {
                Policy::Say(bytes) | Policy::Limit(_, bytes) | Policy::Revoke(bytes, _) => bytes,
                _ => b"yes!",
            },
            rnr_retries: 6,
            srq: true,
        };
        id.accept(&accept)?;
        if let Policy::Revoke(_, reason) = self.policy {
            id.reject(reason, &[])?;
        }
        *conn.id.lock() = Some(id);
        Ok(self.conns.lock().push(conn, GFP_KERNEL)?)
    }

    /// The connection that was accepted as number `at`. The peer may have heard of it before we have
    /// noted it.
    pub(crate) fn conn(&self, at: usize) -> Result<Arc<Conn>> {
        eventually(|| self.conns.lock().len() > at);
        let conns = self.conns.lock();
        Ok(conns.get(at).ok_or(ENOENT)?.clone())
    }

    pub(crate) fn close(&self) {
        let mut conns = KVec::new();
        core::mem::swap(&mut conns, &mut *self.conns.lock());
        for conn in conns {
            conn.close();
        }
    }
}

impl Acceptor for Server {
    fn request(&self, offer: Offer<'_>) {
        self.requests.add(1, Relaxed);
        // Others than these tests ask as they like.
        let strict = !self.node.dev.raw.load(Relaxed);
        let right = offer.port() == self.node.port
            && offer.own_gid() == self.node.gid
            && offer.own_gid_index() == Some(self.node.gid_index.into())
            && offer.gid() != Gid::default()
            && offer.psn() == 0x123456
            && offer.qpn().0 > 1
            && offer.pkey() == 0xffff
            && offer.rnr_retries() == 6
            && offer.lid() == 0
            && offer.mtu() >= 256
            && offer.private()[4..] == [0; cm::REQUEST_DATA - 4];
        if strict && !right {
            pr_err!("a request is not as it should be\n");
            self.wrong.add(1, Relaxed);
        }
        let result = match self.policy {
            Policy::Ignore => Ok(()),
            Policy::Reject => offer.reject(Reason::NO_QP, b"full"),
            Policy::Limit(mtu, _) if offer.mtu() > mtu => offer.reject(Reason::MTU, &[]),
            _ => self.accept(offer),
        };
        if let Err(error) = result {
            pr_err!("answering failed: {:?}\n", error);
            self.wrong.add(1, Relaxed);
        }
    }
}

/// Waits, up to ten seconds, until `done` holds.
pub(crate) fn eventually(done: impl Fn() -> bool) -> bool {
    for _ in 0..5000 {
        if done() {
            return true;
        }
        kernel::time::delay::fsleep(Delta::from_millis(2));
    }
    false
}

/// Two nodes, which may be one.
struct Pair {
    active: Arc<Node>,
    passive: Arc<Node>,
}

impl Pair {
    /// A server on the passive node, with a policy.
    fn serve(&self, policy: Policy) -> Result<(Arc<Server>, Listener)> {
        let server = Server::new(&self.passive, policy)?;
        let listener = Listener::new(
            &self.passive.reaper,
            self.passive.port,
            SERVICE,
            server.clone(),
        )?;
        Ok((server, listener))
    }

    fn ask(&self) -> Result<Arc<Conn>> {
        self.active.connect(&self.passive, SERVICE, b"abcd")
    }

    /// A connection; the server's end is its latest.
    fn established(&self, server: &Server) -> Result<(Arc<Conn>, Arc<Conn>)> {
        let at = server.conns.lock().len();
        let ours = self.ask()?;
        let ready = eventually(|| ours.has(REPLIED) && server.conns.lock().len() > at);
        let theirs = server.conn(at);
        if !ready || theirs.is_err() {
            pr_err!("not connected: {:x}\n", ours.seen.load(Relaxed));
            ours.close();
            return Err(ETIMEDOUT);
        }
        let theirs = theirs?;
        check!(eventually(|| theirs.has(ESTABLISHED)));
        check!(!ours.has(BROKEN) && !theirs.has(BROKEN));
        Ok((ours, theirs))
    }

    /// What both nodes counted; once if they are one.
    fn sum(&self, count: impl Fn(&Wire) -> &Atomic<u32>) -> u32 {
        let passive = count(&self.passive.dev).load(Acquire);
        match core::ptr::eq(&*self.active, &*self.passive) {
            true => passive,
            false => passive.wrapping_add(count(&self.active.dev).load(Acquire)),
        }
    }

    fn received(&self) -> u32 {
        self.sum(|wire| &wire.received)
    }

    fn clean(&self) -> Result {
        check!(self.sum(|wire| &wire.wrong) == 0);
        check!(self.sum(|wire| &wire.failed) == 0);
        check!(self.sum(|wire| &wire.recv_failed) == 0);
        Ok(())
    }

    fn clear(&self) -> Result {
        self.active.clear()?;
        self.passive.clear()
    }
}

type Test = fn(&Pair) -> Result;

/// Collects active RoCE ports; there is a client per run.
#[pin_data]
struct Found {
    #[pin]
    ports: Mutex<KVec<(Arc<Device>, PortNum)>>,
}

struct Probe(Arc<Found>);

impl Client for Probe {
    type Data = ();

    const NAME: &'static CStr = c"ipoib_rs_selftest_rc";

    fn registry() -> &'static Registry<Self> {
        static REGISTRY: Registry<Probe> = Registry::new();
        &REGISTRY
    }

    fn add(&self, device: Arc<Device>) -> Result {
        for port in device.ports() {
            if device.protocol(port) == Protocol::RoCE && device.query_port(port)?.active {
                self.0
                    .ports
                    .lock()
                    .push((device.clone(), port), GFP_KERNEL)?;
            }
        }
        Err(EOPNOTSUPP)
    }
}

/// The active RoCE ports.
pub(crate) fn ports() -> Result<KVec<(Arc<Device>, PortNum)>> {
    let found = Arc::pin_init(
        pin_init!(Found { ports <- new_mutex!(KVec::new()) }),
        GFP_KERNEL,
    )?;
    drop(client::Registration::new(Probe(found.clone()))?);
    let mut ports = KVec::new();
    core::mem::swap(&mut ports, &mut *found.ports.lock());
    Ok(ports)
}

fn on_pairs(test: Test) -> Result {
    let link_ops = LinkOps::register(c"ipoib_rs_test_rc")?;
    let ports = ports()?;
    let mut nodes = KVec::new();
    for (device, port) in ports.iter().take(2) {
        nodes.push(Node::new(device, *port, &link_ops)?, GFP_KERNEL)?;
    }
    drop(ports);
    let first = nodes.first().ok_or(ENODEV)?;
    for second in &nodes {
        let pair = Pair {
            active: first.clone(),
            passive: second.clone(),
        };
        let (conns, qps) = (CONNS.load(Acquire), QPS.load(Acquire));
        let result = test(&pair);
        pair.clear()?;
        result?;
        check!(eventually(
            || CONNS.load(Acquire) == conns && QPS.load(Acquire) == qps
        ));
    }
    Ok(())
}

#[kernel::macros::kunit_tests(ipoib_rs_connections)]
mod tests {
    use super::*;

    /// Both ways, every length around a page's and the longest, every byte compared.
    #[test]
    fn messages_of_all_lengths() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::Accept)?;
            let (ours, theirs) = pair.established(&server)?;
            check!(ours.said.load(Relaxed) == word(b"yes!"));
            check!(theirs.said.load(Relaxed) == word(b"abcd"));
            check!(server.wrong.load(Relaxed) == 0);
            let lens = [
                1, 2, 4, 255, 256, 257, 1024, 4095, 4096, 4097, 8192, 8193, 61_440, 65_520, LONGEST,
            ];
            for (number, &len) in lens.iter().enumerate() {
                for conn in [&ours, &theirs] {
                    let before = pair.received();
                    conn.send(number as u8, &[len])?;
                    check!(eventually(|| pair.received() == before + 1));
                }
            }
            // Chains, and around the ring.
            for round in 0..6 {
                let before = pair.received();
                ours.send(round, &[10, 5000, 20, 300, 7])?;
                check!(eventually(|| pair.received() == before + 5));
                let head = ours.progress.head();
                check!(eventually(|| ours.progress.passed(head)));
            }
            pair.clean()?;
            ours.close();
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// What was received in pages is sent on from them.
    #[test]
    fn received_pages_are_sent_on() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::Accept)?;
            let (ours, theirs) = pair.established(&server)?;
            let wire = &*pair.passive.dev;
            wire.keep.store(true, Relaxed);
            ours.send(9, &[LONGEST, 5000])?;
            check!(eventually(|| wire.kept.lock().packets() == 2));
            wire.keep.store(false, Relaxed);
            let mut kept = SkbQueue::new();
            core::mem::swap(&mut kept, &mut *wire.kept.lock());
            let before = pair.received();
            theirs.send_queue(&mut kept)?;
            check!(eventually(|| pair.received() == before + 2));
            pair.clean()?;
            ours.close();
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// Two queue pairs receive from one queue.
    #[test]
    fn two_share_a_receive_queue() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::Accept)?;
            let first = pair.established(&server)?;
            let second = pair.established(&server)?;
            for round in 0..5 {
                let before = pair.received();
                for (at, conn) in [&first.0, &second.0, &first.1, &second.1]
                    .iter()
                    .enumerate()
                {
                    conn.send(round, &[100 + at, 3000])?;
                }
                check!(eventually(|| pair.received() == before + 8));
            }
            pair.clean()?;
            first.0.close();
            second.0.close();
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// The reason and the private data arrive; what nobody answers is rejected too.
    #[test]
    fn rejections() -> Result {
        on_pairs(|pair| {
            for (policy, reason, said) in [
                (Policy::Reject, Reason::NO_QP, word(b"full")),
                (Policy::Ignore, Reason::CONSUMER, 0),
                (Policy::Drop, Reason::CONSUMER, 0),
            ] {
                let (server, listener) = pair.serve(policy)?;
                let ours = pair.ask()?;
                if policy == Policy::Drop {
                    check!(eventually(|| server.requests.load(Relaxed) == 1));
                    check!(eventually(
                        || pair.passive.reaper.reap() == 0 && ours.has(REJECTED)
                    ));
                }
                check!(eventually(|| ours.has(REJECTED)));
                check!(ours.reason.load(Relaxed) == reason.0);
                check!(ours.said.load(Relaxed) == said);
                check!(server.requests.load(Relaxed) == 1);
                check!(server.wrong.load(Relaxed) == 0);
                ours.close();
                server.close();
                listener.stop();
                pair.clear()?;
            }
            Ok(())
        })
    }

    /// Nobody listens, or for another port, or no more.
    #[test]
    fn nobody_listens() -> Result {
        on_pairs(|pair| {
            let server = Server::new(&pair.passive, Policy::Accept)?;
            for other_port in [false, true] {
                let port = PortNum(pair.passive.port.0 + 1);
                let listener = other_port
                    .then(|| Listener::new(&pair.passive.reaper, port, SERVICE, server.clone()))
                    .transpose()?;
                let ours = pair.ask()?;
                check!(eventually(|| ours.has(REJECTED)));
                check!(ours.reason.load(Relaxed) == Reason::NO_SERVICE.0);
                check!(server.requests.load(Relaxed) == 0);
                ours.close();
                drop(listener);
                check!(pair.passive.reaper.reap() == 0);
            }
            // One listener at a time, and then the next.
            let (_, first) = pair.serve(Policy::Accept)?;
            check!(pair.serve(Policy::Accept).is_err());
            first.stop();
            let (_, second) = pair.serve(Policy::Accept)?;
            second.stop();
            Ok(())
        })
    }

    /// Requests that cannot be are refused before anything is sent.
    #[test]
    fn bad_requests() -> Result {
        on_pairs(|pair| {
            let node = &*pair.active;
            let conn = node.conn(false)?;
            let id = ConnId::new(&node.reaper, conn.clone())?;
            let good = Connect {
                path: cm::Path {
                    mtu: 1024,
                    pkey: 0xffff,
                    ..cm::Path::default()
                },
                ..Connect::new(node.port)
            };
            let bad = [
                Connect { retries: 7, ..good },
                Connect {
                    rnr_retries: 7,
                    ..good
                },
                Connect {
                    psn: 1 << 24,
                    ..good
                },
                Connect {
                    private: &[0; cm::REQUEST_DATA + 1],
                    ..good
                },
                Connect {
                    path: cm::Path {
                        mtu: 1000,
                        ..good.path
                    },
                    ..good
                },
            ];
            for request in &bad {
                check!(id.connect(request) == Err(EINVAL));
            }
            check!(id.ready(&[]).is_err());
            check!(id
                .accept(&Accept {
                    qpn: conn.qp.qpn(),
                    psn: 0,
                    private: &[],
                    rnr_retries: 0,
                    srq: true,
                })
                .is_err());
            check!(id.disconnect().is_err());
            check!(id.answer_disconnect().is_err());
            check!(id.reject(Reason::CONSUMER, &[]).is_err());
            check!(id
                .reject(Reason::CONSUMER, &[0; cm::REJECT_DATA + 1])
                .is_err());
            check!(conn.qp.to_rtr(&id, RTR).is_err());
            check!(conn.qp.to_rts(&id).is_err());
            // A GID index that is not there, and no second try.
            let nowhere = Connect {
                path: cm::Path {
                    to: ah::Attr {
                        sgid_index: 200,
                        ..ah::Attr::default()
                    },
                    ..good.path
                },
                ..good
            };
            check!(id.connect(&nowhere).is_err());
            check!(id.connect(&good) == Err(EALREADY));
            drop(id);
            check!(node.reaper.reap_silent() == 0);
            Ok(())
        })
    }

    /// Either side ends it; the other is told, and both see the end.
    #[test]
    fn disconnects() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::Accept)?;
            // In order.
            let (ours, theirs) = pair.established(&server)?;
            match ours.id.lock().as_ref() {
                Some(id) => id.disconnect()?,
                None => return Err(EINVAL),
            }
            check!(eventually(|| theirs.has(ASKED) && ours.has(DISCONNECTED)));
            check!(eventually(|| theirs.has(TIMEWAIT) && ours.has(TIMEWAIT)));
            ours.close();
            // Dropped.
            for passive_first in [false, true] {
                let (ours, theirs) = pair.established(&server)?;
                let (first, second) = match passive_first {
                    true => (&theirs, &ours),
                    false => (&ours, &theirs),
                };
                drop(first.id.lock().take());
                let reaper = match passive_first {
                    true => &pair.passive.reaper,
                    false => &pair.active.reaper,
                };
                // It would speak to the peer.
                check!(reaper.reap_silent() == 1);
                check!(!second.has(ASKED));
                check!(reaper.reap() == 0);
                check!(eventually(|| second.has(ASKED)));
                second.close();
            }
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// An identifier that is destroyed in its own handler goes by way of the reaper.
    #[test]
    fn destroyed_in_its_own_handler() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::AcceptImpatient)?;
            let (ours, theirs) = pair.established(&server)?;
            ours.close();
            check!(eventually(|| theirs.has(ASKED)));
            check!(theirs.id.lock().is_none());
            check!(eventually(|| pair.passive.reaper.reap() == 0));
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// What is posted to a queue pair in ERR is flushed, and it says, any number of times, that it
    /// receives no more.
    #[test]
    fn errors_flush() -> Result {
        on_pairs(|pair| {
            let (server, listener) = pair.serve(Policy::Accept)?;
            let (ours, theirs) = pair.established(&server)?;
            ours.qp.error()?;
            ours.send(1, &[10, 5000, 20])?;
            let head = ours.progress.head();
            check!(eventually(|| ours.progress.passed(head)));
            check!(eventually(|| pair.sum(|wire| &wire.flushed) == 3));
            check!(eventually(|| ours.flags.last_receive.load(Relaxed) > 0));
            ours.qp.error()?;
            // The peer finds out when it sends.
            theirs.send(2, &[10])?;
            let head = theirs.progress.head();
            check!(eventually(|| theirs.progress.passed(head)));
            check!(eventually(|| pair.sum(|wire| &wire.failed) == 1));
            check!(pair.sum(|wire| &wire.wrong) == 0);
            pair.active.dev.failed.store(0, Relaxed);
            pair.passive.dev.failed.store(0, Relaxed);
            pair.active.dev.flushed.store(0, Relaxed);
            pair.passive.dev.flushed.store(0, Relaxed);
            ours.close();
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// Twenty times, a message each; a connection may be gone while its sends are under way.
    #[test]
    fn twenty_rounds() -> Result {
        on_pairs(|pair| {
            let (conns, qps) = (CONNS.load(Acquire), QPS.load(Acquire));
            let (server, listener) = pair.serve(Policy::Accept)?;
            for round in 0..20 {
                let (ours, theirs) = pair.established(&server)?;
                let before = pair.received();
                ours.send(round, &[2000])?;
                check!(eventually(|| pair.received() == before + 1));
                if round % 2 == 0 {
                    let _ = theirs.send(round, &[LONGEST, 100]);
                }
                ours.close();
                server.close();
                // Queue pairs before their places in the table.
                drop((ours, theirs));
                pair.clear()?;
                check!(eventually(
                    || CONNS.load(Acquire) == conns && QPS.load(Acquire) == qps
                ));
            }
            listener.stop();
            Ok(())
        })
    }

    /// Slots that queue pairs took with them are replaced.
    #[test]
    fn lost_slots_are_replaced() -> Result {
        on_pairs(|pair| {
            let node = &*pair.passive;
            for number in 0..6 {
                let (server, listener) = pair.serve(Policy::Accept)?;
                let (ours, theirs) = pair.established(&server)?;
                ours.send(number, &[LONGEST, LONGEST])?;
                // Somewhere in the message.
                kernel::time::delay::fsleep(Delta::from_micros(i64::from(number) * 400));
                theirs.qp.error()?;
                ours.close();
                server.close();
                listener.stop();
                drop((ours, theirs));
                pair.clear()?;
            }
            // Overtake the lost ones, twice around.
            let (server, listener) = pair.serve(Policy::Accept)?;
            let (ours, _) = pair.established(&server)?;
            let around = || -> Result {
                for _ in 0..RECEIVES / 2 {
                    let before = pair.received();
                    ours.send(1, &[100, 5000, 7, 300])?;
                    check!(eventually(|| pair.received() == before + 4));
                    let head = ours.progress.head();
                    check!(eventually(|| ours.progress.passed(head)));
                }
                Ok(())
            };
            around()?;
            check!(node.with_queue(|queue| queue.audit())? == Audit::default());
            let (audit, waiting) = node.with_queue(|queue| {
                let audit = queue.audit();
                (audit, queue.fill().map(|_| queue.waiting()))
            })?;
            pr_info!("{} slots were lost\n", audit.lost);
            check!(waiting? == RECEIVES as usize);
            check!(audit.missing == 0);
            around()?;
            node.dev.recv_failed.store(0, Relaxed);
            node.dev.failed.store(0, Relaxed);
            ours.close();
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// A completion queue comes and goes while the network device is registered.
    #[test]
    fn a_queue_is_added_later() -> Result {
        on_pairs(|pair| {
            let dev = &*pair.active.dev;
            let device = pair.active.pd.device();
            for _ in 0..3 {
                let side = SendSide(dev.table.clone());
                let late = NapiCq::beside(&dev.send, device.clone(), 16, 0, side)?;
                let mut locked = dev.lock();
                late.enable(&mut locked);
                check!(late.quiet(&mut locked).is_none());
                drop(locked);
                drop(late);
            }
            Ok(())
        })
    }

    /// What the device cannot do is not asked for.
    #[test]
    fn shapes() -> Result {
        on_pairs(|pair| {
            let device = pair.active.pd.device();
            check!(pair.active.shape.message == 65_536);
            let huge = Shape::within(device, u32::MAX, usize::MAX)?;
            check!(huge.entries <= device.max_srq_wr());
            check!(huge.message <= 17 * 4096);
            let tiny = Shape::within(device, 0, 0)?;
            check!(tiny.entries == 1 && tiny.message == 4096);
            Ok(())
        })
    }
}
