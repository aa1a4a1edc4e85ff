// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! One end of the stream: a queue pair on a port, its two queues and what they do.
//!
//! The same packets go round for ever: a completion gives them back, and they are posted again, in
//! chains of which the last request is signalled. A received datagram's buffer is posted again as it
//! is. So nothing is allocated while the stream runs.
//!
//! | context | owns |
//! |---|---|
//! | transmit lock | [`Tx`] |
//! | NAPI of the send queue | [`SendSide`] |
//! | NAPI of the receive queue | [`RecvSide`] |
//!
//! Completion queues need NAPI, and NAPI a network device: there is one, down and without a use.

use crate::{
    ib::{
        ah::{
            self,
            Ah,
            Reaper, //
        },
        cq::{
            Completions,
            Napi,
            NapiCq,
            Poll,
            Status, //
        },
        device::Device,
        pd::Pd,
        qp::{
            Caps,
            Qp, //
        },
        queue::{
            send_queue,
            Destination,
            RecvQueue,
            SendCompleter,
            SendProgress,
            SendQueue, //
        },
        Gid,
        PortNum,
        QKey,
        Qpn, //
    },
    net::{
        device::{
            self as netdev,
            Groups,
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
            Skb, //
        },
    },
    within,
    PATIENCE, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    },
};

/// Largest datagram: a receive buffer's page.
pub(crate) const MAX_SIZE: usize = 4096;

/// Length of the global route header.
const GRH_LEN: usize = 40;

/// Receive buffers for each datagram on its way.
const RECV_FACTOR: u32 = 4;

const QKEY: QKey = QKey(0x0bec);

/// The GID that a RoCE device always has: the link-local one of its Ethernet.
const GID_INDEX: u8 = 0;

/// The only life of the queue pair.
const LIFE: u32 = 1;

/// What is to be sent.
pub(crate) struct Plan {
    /// Bytes of a datagram.
    pub(crate) size: usize,
    /// Datagrams on their way at most, a power of two.
    pub(crate) window: u32,
}

/// What an end does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Posts again what has been sent.
    Streams,
    /// Only receives.
    Listens,
    /// Sends a datagram for each that comes.
    Answers,
}

/// A counter with one writer at a time.
pub(crate) struct Counter(Atomic<u64>);

impl Counter {
    pub(crate) fn new() -> Self {
        Self(Atomic::new(0))
    }

    pub(crate) fn add(&self, count: u64) {
        self.0
            .store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What all contexts share.
pub(crate) struct Shared {
    qp: Arc<Qp>,
    send: Arc<NapiCq<SendSide>>,
    recv: Arc<NapiCq<RecvSide>>,
    role: Role,
    sent: Counter,
    received: Counter,
    posts: Counter,
    /// Completions that were not a success or not what was expected, and refused posts.
    failures: Atomic<u64>,
}

impl Shared {
    fn fail(&self) {
        self.failures.add(1, Relaxed);
    }
}

/// Where the other end is.
struct Target {
    ah: Ah,
    qpn: Qpn,
}

/// The transmit lock's part.
pub(crate) struct Tx {
    queue: SendQueue,
    /// Packets that are not posted.
    idle: KVec<Skb>,
    target: Option<Target>,
    running: bool,
}

impl Tx {
    /// Takes a packet back; there is room for all.
    fn keep(&mut self, skb: Skb) {
        let _ = self.idle.push_within_capacity(skb);
    }

    /// Posts idle packets, `limit` at most. Nothing once something failed: a queue pair in ERR would
    /// flush them at once, for ever.
    fn pump(&mut self, shared: &Shared, limit: usize) {
        let running = self.running && shared.failures.load(Relaxed) == 0;
        let Some(target) = self.target.as_ref().filter(|_| running) else {
            return;
        };
        let to = Destination {
            ah: &target.ah,
            qpn: target.qpn,
            qkey: QKEY,
        };
        for _ in 0..limit {
            let Some(skb) = self.idle.pop() else {
                break;
            };
            if let Err((skb, _)) = self.queue.push(skb, &to) {
                let _ = self.idle.push_within_capacity(skb);
                shared.fail();
                break;
            }
            if self.queue.chain_is_full() {
                Self::flush(&mut self.queue, shared);
            }
        }
        Self::flush(&mut self.queue, shared);
    }

    fn flush(queue: &mut SendQueue, shared: &Shared) {
        match queue.flush() {
            Ok(0) => {}
            Ok(_) => shared.posts.add(1),
            Err(_) => shared.fail(),
        }
    }
}

/// Handles completed sends.
struct SendSide(SendCompleter);

impl Poll for SendSide {
    type Driver = Shared;

    fn poll(
        &mut self,
        dev: &netdev::Device<Shared>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        _budget: usize,
    ) -> usize {
        let mut tx = dev.tx_lock();
        loop {
            let (batch, more) = cq.next(usize::MAX);
            for wc in batch {
                match (
                    self.0.complete_with(wc.id(), |skb| tx.keep(skb)),
                    wc.status(),
                ) {
                    (Some(done), Status::Success) => dev.sent.add(done.packets.into()),
                    _ => dev.fail(),
                }
            }
            // Nothing is posted here, so it ends.
            if !more {
                break;
            }
        }
        if dev.role == Role::Streams {
            tx.pump(dev, usize::MAX);
        }
        0
    }
}

/// Handles received datagrams.
struct RecvSide {
    queue: RecvQueue<GRH_LEN>,
    size: usize,
}

impl Poll for RecvSide {
    type Driver = Shared;

    fn poll(
        &mut self,
        dev: &netdev::Device<Shared>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let (batch, more) = cq.next(budget - done);
            done += batch.len();
            for wc in batch {
                let right = self.queue.take(wc.id()).is_some()
                    && wc.status() == Status::Success
                    && wc.byte_len() == GRH_LEN + self.size;
                if !right {
                    dev.fail();
                }
            }
            dev.received.add(batch.len() as u64);
            // A queue pair in ERR would flush them at once.
            if dev.failures.load(Relaxed) == 0 && self.queue.post(&dev.qp) != Ok(0) {
                dev.fail();
            }
            if !more {
                break;
            }
        }
        if dev.role == Role::Answers {
            dev.tx_lock().pump(dev, done);
        }
        done
    }
}

/// One end of the stream.
pub(crate) struct End {
    // Dropped before what follows, which it uses.
    dev: Registration<Shared>,
    reaper: Arc<Reaper>,
    progress: SendProgress,
    port: PortNum,
    gid: Gid,
    mac: [u8; 6],
}

impl End {
    /// Makes an end on a port, at rest.
    ///
    /// # Errors
    ///
    /// - `EMSGSIZE`: the port's MTU is smaller than the datagrams.
    /// - Those of the verbs and of the network device.
    pub(crate) fn new(
        device: &Arc<Device>,
        port: PortNum,
        link_ops: &Arc<LinkOps<Shared>>,
        role: Role,
        plan: &Plan,
    ) -> Result<Self> {
        let mtu = device.query_port(port)?.mtu as usize;
        if mtu < plan.size {
            pr_err!("{}: the MTU is {}\n", device.name(), mtu);
            return Err(EMSGSIZE);
        }
        let gid = device.gid(port, GID_INDEX.into())?;
        let mac = device
            .lower(port)
            .and_then(|lower| lower.mac())
            .ok_or(ENODEV)?;
        let pd = Pd::new(device.clone())?;
        let unregistered = UnregisteredDevice::<Shared>::new(c"rawverbs%d")?;
        let receives = plan.window.saturating_mul(RECV_FACTOR);
        let (half, completer) = send_queue(device, plan.window, 0)?;
        let send = NapiCq::new(
            &unregistered,
            device.clone(),
            plan.window,
            0,
            SendSide(completer),
        )?;
        let recv = NapiCq::new(
            &unregistered,
            device.clone(),
            receives,
            1,
            RecvSide {
                queue: RecvQueue::new(pd.clone(), receives)?,
                size: plan.size,
            },
        )?;
        let caps = Caps {
            send_wr: plan.window,
            recv_wr: receives,
            send_sge: 1,
            recv_sge: 2,
            segmentation: false,
        };
        let qp = Qp::new(pd.clone(), send.clone(), recv.clone(), caps)?;
        let queue = half.with(qp.clone())?;
        let progress = queue.progress();
        let reaper = Reaper::new(pd, queue.progress())?;
        let setup = Setup {
            address: &[0; 20],
            broadcast: &[0xff; 20],
            hardware_type: 32,
            mtu: 68,
            min_mtu: 68,
            max_mtu: 68,
            port: 0,
            scatter_gather: false,
            offloads: Default::default(),
            parent: device.parent(),
            watchdog: 10,
        };
        let shared = Shared {
            qp,
            send,
            recv,
            role,
            sent: Counter::new(),
            received: Counter::new(),
            posts: Counter::new(),
            failures: Atomic::new(0),
        };
        let tx = Tx {
            queue,
            idle: packets(plan)?,
            target: None,
            running: false,
        };
        let dev = unregistered.register(
            &setup,
            &Neighbourhood::initial(),
            link_ops.clone(),
            Arc::pin_init(Link::new(), GFP_KERNEL)?,
            Ok(shared),
            (),
            tx,
        )?;
        Ok(Self {
            dev,
            reaper,
            progress,
            port,
            gid,
            mac,
        })
    }

    /// Names the end that datagrams go to.
    pub(crate) fn connect(&self, other: &End) -> Result {
        let attr = ah::Attr {
            gid: other.gid,
            global: true,
            sgid_index: GID_INDEX,
            hop_limit: 64,
            dmac: other.mac,
            ..ah::Attr::default()
        };
        let ah = Ah::new(&self.reaper, self.port, &attr)?;
        let qpn = other.dev.qp.qpn();
        self.dev.tx_lock().target = Some(Target { ah, qpn });
        Ok(())
    }

    /// Receives from here on, and answers if that is its role.
    pub(crate) fn start(&self) -> Result {
        let dev = &*self.dev;
        let mut locked = dev.lock();
        if let Some((side, _)) = dev.send.quiet(&mut locked) {
            side.0.begin(LIFE);
        }
        {
            let mut tx = dev.tx_lock();
            tx.queue.begin(LIFE);
            tx.running = true;
        }
        dev.qp.init(self.port, 0, QKEY)?;
        let (side, _) = dev.recv.quiet(&mut locked).ok_or(EBUSY)?;
        side.queue.begin(LIFE);
        if side.queue.fill(&dev.qp)? != 0 {
            return Err(ENOMEM);
        }
        dev.qp.ready()?;
        dev.send.enable(&mut locked);
        dev.recv.enable(&mut locked);
        Ok(())
    }

    /// Sends the first datagrams: all, or one if the other end is to answer.
    pub(crate) fn begin(&self) {
        let first = match self.dev.role {
            Role::Streams => usize::MAX,
            Role::Listens => 0,
            Role::Answers => 1,
        };
        self.dev.tx_lock().pump(&self.dev, first);
    }

    /// Sends no more, and waits until everything posted has completed; false if it does not.
    pub(crate) fn finish(&self) -> bool {
        self.dev.tx_lock().running = false;
        let last = self.progress.head();
        within(PATIENCE, || self.progress.passed(last))
    }

    /// Datagrams sent.
    pub(crate) fn sent(&self) -> u64 {
        self.dev.sent.get()
    }

    /// Datagrams received.
    pub(crate) fn received(&self) -> u64 {
        self.dev.received.get()
    }

    /// Chains posted.
    pub(crate) fn posts(&self) -> u64 {
        self.dev.posts.get()
    }

    /// Anything but a success.
    pub(crate) fn failures(&self) -> u64 {
        self.dev.failures.load(Relaxed)
    }

    fn stop(&self) -> Result {
        let dev = &*self.dev;
        let mut locked = dev.lock();
        dev.send.disable(&mut locked);
        dev.recv.disable(&mut locked);
        dev.tx_lock().target = None;
        // ERR first, if that can be: hardware finishes what it has begun before RESET forgets it.
        let _ = dev.qp.error();
        dev.qp.reset()?;
        if let Some((side, _)) = dev.send.quiet(&mut locked) {
            side.0.begin(LIFE);
        }
        if let Some((side, _)) = dev.recv.quiet(&mut locked) {
            side.queue.begin(LIFE);
            side.queue.release();
        }
        self.reaper.reap();
        Ok(())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Without NAPI nothing uses the network device's data any more. If the queue pair refuses
        // it is destroyed with its buffers.
        if let Err(error) = self.stop() {
            pr_err!("resetting a QP failed: {:?}\n", error);
        }
    }
}

/// The packets of a window.
fn packets(plan: &Plan) -> Result<KVec<Skb>> {
    let mut packets = KVec::with_capacity(plan.window as usize, GFP_KERNEL)?;
    for number in 0..plan.window {
        let mut skb = NewSkb::alloc(plan.size).ok_or(ENOMEM)?;
        let pattern = [number as u8; 64];
        let mut left = plan.size;
        while left > 0 {
            let piece = left.min(pattern.len());
            if !skb.append(&pattern[..piece]) {
                return Err(ENOMEM);
            }
            left -= piece;
        }
        packets.push(skb.finish(0, 0, PacketType::Host), GFP_KERNEL)?;
    }
    Ok(packets)
}

impl ethtool::Ops for Shared {
    const COUNTERS: &'static [&'static str] = &[];

    fn info(_dev: &netdev::Device<Self>, _info: &mut ethtool::Info<'_>) {}

    fn rings(_dev: &netdev::Device<Self>) -> ethtool::Rings {
        ethtool::Rings {
            rx: 0,
            rx_max: 0,
            tx: 0,
            tx_max: 0,
        }
    }

    fn counters(_dev: &netdev::Device<Self>, _values: &mut [u64]) {}
}

impl netdev::Driver for Shared {
    type Control = ();
    type Tx = Tx;

    const ADDRESS_LEN: usize = 20;
    const HEADER_LEN: usize = 24;

    fn open(_locked: &mut Locked<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }

    fn stop(_locked: &mut Locked<'_, Self>) {}

    fn start_xmit(_dev: &netdev::Device<Self>, _tx: &mut Tx, _skb: Skb) {}

    fn tx_timeout(_dev: &netdev::Device<Self>) {}

    fn groups_changed(_locked: &mut Locked<'_, Self>, _rtnl: &Rtnl, _groups: Groups<'_>) -> Result {
        Ok(())
    }

    fn change_mtu(_locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32> {
        Ok(mtu)
    }

    fn stats(_dev: &netdev::Device<Self>, _stats: &mut netdev::Stats) {}

    fn write_header(_header: &mut [u8], _ethertype: u16, _destination: &[u8]) {}
}

impl LinkKind for Shared {
    const ATTRIBUTES: usize = 0;

    fn fill(_dev: &netdev::Device<Self>, _attributes: &mut Attributes<'_>) -> Result {
        Ok(())
    }
}
