// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A host channel adapter: its identity, its tables, and the executor of deferred sends.

use crate::{
    cq::Kicks,
    fabric::Fabric,
    fault::{
        Fault,
        Faults,
        Rule, //
    },
    glue::{
        self,
        Gate,
        Pd, //
    },
    mad::{
        Mad,
        Reaction, //
    },
    mcast::Groups,
    port::{
        p_keys_match,
        Event, //
    },
    qp::{
        Kind,
        Qp, //
    },
    sma::CaConfig,
    ud::{
        Header,
        Lost,
        Payload, //
    },
};
use kernel::{
    interrupt::LocalInterruptDisabled,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        SpinLockIrq, //
    },
    workqueue::{
        self,
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// Number of the first queue pair that is not special, counted from the HCA's base.
const FIRST_QPN: u32 = 0x48;
/// Queue pairs of a HCA differ in the low 16 bits.
const QPNS: u32 = 0x1_0000 - FIRST_QPN;
/// How late, in nanoseconds, who waits for the wire is called at most: a few timer ticks.
const LATE: u64 = 20_000_000;
/// Buckets of the queue pair table.
const BUCKETS: usize = 64;

/// What is fixed when a HCA is added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HcaConfig {
    pub(crate) max_send_sge: u8,
    pub(crate) max_srq_sge: u8,
    pub(crate) vectors: u8,
    /// The IBA code.
    pub(crate) mtu: u8,
    pub(crate) csum: bool,
    pub(crate) tso: bool,
    pub(crate) mcast_lb: bool,
    pub(crate) flow_steering: bool,
    /// Whether there are shared receive queues.
    pub(crate) srq: bool,
    /// Microseconds that a message waits for a buffer before its sender is told.
    pub(crate) rnr_grace: u32,
    /// Addresses are physical, so that the DMA API watches its users; virtual otherwise.
    pub(crate) physical: bool,
    /// Sends are executed later, and read their memory then.
    pub(crate) deferred: bool,
    /// Completion handlers are called from an interrupt.
    pub(crate) interrupts: bool,
    /// Whether the stock ib_ipoib may attach.
    pub(crate) stock: bool,
}

impl HcaConfig {
    pub(crate) const MAX_WR: u32 = 1 << 14;
    pub(crate) const MAX_CQE: u32 = 1 << 17;
    pub(crate) const MAX_RECV_SGE: u8 = 16;
    pub(crate) const MAX_SEND_SGE: u8 = 32;
    /// Locally administered: nobody's.
    pub(crate) const VENDOR: u32 = 0x02_1bf0;
}

/// How many objects there are, by kind.
pub(crate) struct Objects {
    pub(crate) pds: Atomic<i32>,
    pub(crate) mrs: Atomic<i32>,
    pub(crate) ahs: Atomic<i32>,
    pub(crate) cqs: Atomic<i32>,
    pub(crate) srqs: Atomic<i32>,
    pub(crate) qps: Atomic<i32>,
    pub(crate) attached: Atomic<i32>,
}

impl Objects {
    const fn new() -> Self {
        Self {
            pds: Atomic::new(0),
            mrs: Atomic::new(0),
            ahs: Atomic::new(0),
            cqs: Atomic::new(0),
            srqs: Atomic::new(0),
            qps: Atomic::new(0),
            attached: Atomic::new(0),
        }
    }

    pub(crate) fn each(&self) -> [(&'static str, i32); 7] {
        [
            ("pd", self.pds.load(Relaxed)),
            ("mr", self.mrs.load(Relaxed)),
            ("ah", self.ahs.load(Relaxed)),
            ("cq", self.cqs.load(Relaxed)),
            ("srq", self.srqs.load(Relaxed)),
            ("qp", self.qps.load(Relaxed)),
            ("attached", self.attached.load(Relaxed)),
        ]
    }
}

/// What a HCA computes for its users.
#[derive(Clone, Copy)]
pub(crate) enum Did {
    /// A checksum was filled in.
    Checksum,
    /// A receiver was told that checksums are right.
    ChecksumOk,
    LargeSend,
    Segment,
    /// A datagram to a group was kept from the queue pair that sent it.
    Blocked,
}

impl Did {
    const NAMES: [&'static str; 5] = [
        "checksum",
        "checksum_ok",
        "large_send",
        "segment",
        "blocked",
    ];
}

/// What a port says of itself; all numbers are the codes of the IBA.
pub(crate) struct PortView {
    pub(crate) state: u8,
    pub(crate) phys_state: u8,
    pub(crate) max_mtu: u8,
    pub(crate) active_mtu: u8,
    pub(crate) cap_mask: u32,
    pub(crate) gid_prefix: u64,
    pub(crate) lid: u16,
    pub(crate) lmc: u8,
    pub(crate) sm_lid: u16,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) width: u8,
    pub(crate) speed: u8,
    pub(crate) pkey_violations: u16,
    pub(crate) qkey_violations: u16,
}

/// The queue pairs of a HCA by number.
pub(crate) struct Qps {
    smi: Option<Arc<Qp>>,
    gsi: Option<Arc<Qp>>,
    buckets: [KVec<Arc<Qp>>; BUCKETS],
}

impl Qps {
    pub(crate) const fn new() -> Self {
        Self {
            smi: None,
            gsi: None,
            buckets: [const { KVec::new() }; BUCKETS],
        }
    }

    #[inline(always)]
    pub(crate) fn find(&self, number: u32) -> Option<&Arc<Qp>> {
        match number {
            0 => self.smi.as_ref(),
            1 => self.gsi.as_ref(),
            _ => self
                .buckets
                .get(number as usize % BUCKETS)?
                .iter()
                .find(|qp| qp.number() == number),
        }
    }
}

/// A host channel adapter.
#[pin_data]
pub(crate) struct Hca {
    fabric: Arc<Fabric>,
    /// Its slot in the subnet.
    place: u8,
    config: HcaConfig,
    deferred: Atomic<bool>,
    interrupts: Atomic<bool>,
    rnr_grace: Atomic<u32>,
    faulty: Atomic<bool>,
    next_qpn: Atomic<u32>,
    next_key: Atomic<u32>,
    lost: [Atomic<u64>; Lost::NAMES.len()],
    /// Queue pairs that became able to send on a connection.
    pub(crate) connected: Atomic<u64>,
    /// Events that its clients were told.
    told: [Atomic<u64>; Event::NAMES.len()],
    /// What it computed for its users.
    did: [Atomic<u64>; Did::NAMES.len()],
    /// When the wire has taken what was sent, in nanoseconds, while its bandwidth is limited.
    wire_free: Atomic<u64>,
    /// Whether a send queue waits for that.
    wire_wanted: Atomic<bool>,
    pub(crate) objects: Objects,
    #[pin]
    gate: SpinLockIrq<Gate>,
    #[pin]
    groups: SpinLockIrq<Groups<Arc<Qp>>>,
    #[pin]
    faults: SpinLockIrq<Faults>,
    #[pin]
    ready: SpinLockIrq<KVec<Arc<Qp>>>,
    #[pin]
    work: Work<Hca, 1>,
}

impl_has_work! {
    impl HasWork<Hca, 1> for Hca { self.work }
}

impl WorkItem<1> for Hca {
    type Pointer = Arc<Self>;

    /// Executes what was deferred, as much as there is now.
    fn run(this: Arc<Self>) {
        let count = this.ready.lock().len();
        for _ in 0..count {
            let first = this.ready.lock().remove(0);
            match first {
                Ok(qp) => qp.execute(),
                Err(_) => return,
            }
        }
        if !this.ready.lock().is_empty() {
            this.enqueue();
        }
    }
}

impl Hca {
    pub(crate) fn new(fabric: Arc<Fabric>, place: u8, config: HcaConfig) -> Result<Arc<Self>> {
        let faults = Faults::new(u64::from(place) + 1);
        let (deferred, interrupts) = (config.deferred, config.interrupts);
        Arc::pin_init(
            pin_init!(Self {
                fabric,
                place,
                config,
                deferred: Atomic::new(deferred),
                interrupts: Atomic::new(interrupts),
                rnr_grace: Atomic::new(config.rnr_grace),
                faulty: Atomic::new(false),
                next_qpn: Atomic::new(0),
                next_key: Atomic::new(1),
                lost: [const { Atomic::new(0) }; Lost::NAMES.len()],
                connected: Atomic::new(0),
                told: [const { Atomic::new(0) }; Event::NAMES.len()],
                did: [const { Atomic::new(0) }; Did::NAMES.len()],
                wire_free: Atomic::new(0),
                wire_wanted: Atomic::new(false),
                objects: Objects::new(),
                gate <- new_spinlock_irq!(Gate::CLOSED, "ibf_gate"),
                groups <- new_spinlock_irq!(Groups::new(), "ibf_groups"),
                faults <- new_spinlock_irq!(faults, "ibf_faults"),
                ready <- new_spinlock_irq!(KVec::new(), "ibf_ready"),
                work <- new_work!("ibf_execute"),
            }),
            GFP_KERNEL,
        )
    }

    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    pub(crate) fn slot(&self) -> u8 {
        self.place
    }

    #[inline]
    pub(crate) fn index(&self) -> usize {
        usize::from(self.place)
    }

    #[inline]
    pub(crate) fn config(&self) -> &HcaConfig {
        &self.config
    }

    pub(crate) fn gate(&self) -> &SpinLockIrq<Gate> {
        &self.gate
    }

    pub(crate) fn groups(&self) -> &SpinLockIrq<Groups<Arc<Qp>>> {
        &self.groups
    }

    fn guid(&self, kind: u64) -> u64 {
        // Locally administered.
        0x021b_f000_0000_0000 | (kind << 32) | (u64::from(self.place) + 1)
    }

    pub(crate) fn node_guid(&self) -> u64 {
        self.guid(1)
    }

    pub(crate) fn port_guid(&self) -> u64 {
        self.guid(2)
    }

    pub(crate) fn system_guid(&self) -> u64 {
        self.guid(3)
    }

    pub(crate) fn node_desc(&self) -> [u8; 64] {
        let mut text = [0; 64];
        let name = [
            b'i',
            b'b',
            b'f',
            b'0' + self.place / 10,
            b'0' + self.place % 10,
        ];
        let digits = if self.place < 10 { 4 } else { 3 };
        text[..3].copy_from_slice(&name[..3]);
        for (to, from) in text.iter_mut().skip(3).zip(name.iter().skip(digits)) {
            *to = *from;
        }
        text
    }

    pub(crate) fn ca_config(&self) -> CaConfig {
        CaConfig {
            node_guid: self.node_guid(),
            port_guid: self.port_guid(),
            system_guid: self.system_guid(),
            description: self.node_desc(),
            caps: crate::port::PortCaps {
                mtu: self.config.mtu,
                ..crate::port::PortCaps::DEFAULT
            },
        }
    }

    // Modes and faults.

    #[inline]
    pub(crate) fn deferred(&self) -> bool {
        self.deferred.load(Relaxed)
    }

    pub(crate) fn set_deferred(&self, on: bool) {
        self.deferred.store(on, Relaxed);
        self.end_ways();
    }

    /// Nobody relies any more on what was found before.
    fn end_ways(&self) {
        drop(self.fabric.net().lock());
    }

    #[inline]
    pub(crate) fn interrupts(&self) -> bool {
        self.interrupts.load(Relaxed)
    }

    pub(crate) fn set_interrupts(&self, on: bool) {
        self.interrupts.store(on, Relaxed);
    }

    pub(crate) fn rnr_grace(&self) -> u32 {
        self.rnr_grace.load(Relaxed)
    }

    pub(crate) fn set_rnr_grace(&self, micros: u32) {
        self.rnr_grace.store(micros, Relaxed);
    }

    #[inline]
    pub(crate) fn faulty(&self) -> bool {
        self.faulty.load(Relaxed)
    }

    /// A chance for a fault.
    #[inline]
    pub(crate) fn fault(&self, fault: Fault) -> Option<u32> {
        if !self.faulty() {
            return None;
        }
        self.strike(fault)
    }

    #[cold]
    fn strike(&self, fault: Fault) -> Option<u32> {
        let mut faults = self.faults.lock();
        let struck = faults.strike(fault);
        self.faulty.store(faults.any(), Relaxed);
        struck
    }

    pub(crate) fn set_fault(self: &Arc<Self>, fault: Fault, rule: Option<Rule>) {
        let mut faults = self.faults.lock();
        faults.set(fault, rule);
        self.faulty.store(faults.any(), Relaxed);
        drop(faults);
        self.end_ways();
        if matches!(fault, Fault::StallSend | Fault::Bandwidth) && rule.is_none() {
            self.wire_free.store(0, Relaxed);
            self.resume();
        }
    }

    /// A datagram waits for the next one from now on, or none does; returns what was before.
    pub(crate) fn hold(&self, on: bool) -> bool {
        let mut faults = self.faults.lock();
        let before = faults.hold(on);
        self.faulty.store(faults.any(), Relaxed);
        before
    }

    /// Whether the wire takes `bytes` now. If not the caller waits for the executor.
    pub(crate) fn wire_takes(&self, bytes: usize) -> bool {
        if !self.faulty() && self.wire_free.load(Relaxed) == 0 {
            return true;
        }
        self.wire_takes_slow(bytes)
    }

    #[cold]
    fn wire_takes_slow(&self, bytes: usize) -> bool {
        let now = glue::now();
        let free = self.wire_free.load(Relaxed);
        if free > now {
            self.wire_wanted.store(true, Relaxed);
            self.fabric.poke();
            return false;
        }
        let next = match self.fault(Fault::Bandwidth) {
            // Whoever waited is called late, and may catch up.
            Some(megabits) => {
                let start = if now - free < LATE { free } else { now };
                start.saturating_add(bytes as u64 * 8000 / u64::from(megabits).max(1))
            }
            None => 0,
        };
        self.wire_free.store(next, Relaxed);
        true
    }

    /// When a send queue that waits for the wire is to be looked at.
    pub(crate) fn wire_deadline(&self) -> Option<u64> {
        let wanted = self.wire_wanted.load(Relaxed);
        wanted.then(|| self.wire_free.load(Relaxed))
    }

    /// Has the executor look at queues that waited for the wire long enough.
    pub(crate) fn wire_ready(self: &Arc<Self>) {
        if self.wire_deadline().is_some_and(|due| due <= glue::now()) {
            self.wire_wanted.store(false, Relaxed);
            self.resume();
        }
    }

    /// Counts what was computed.
    pub(crate) fn did(&self, what: Did) {
        if let Some(counter) = self.did.get(what as usize) {
            counter.add(1, Relaxed);
        }
    }

    pub(crate) fn all_done(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Did::NAMES
            .iter()
            .zip(&self.did)
            .map(|(name, count)| (*name, count.load(Relaxed)))
    }

    /// Counts an event that clients were told.
    pub(crate) fn tell(&self, event: Event) {
        if let Some(counter) = self.told.get(event as usize) {
            counter.add(1, Relaxed);
        }
    }

    pub(crate) fn told(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Event::NAMES
            .iter()
            .zip(&self.told)
            .map(|(name, count)| (*name, count.load(Relaxed)))
    }

    pub(crate) fn seed(&self, seed: u64) {
        self.faults.lock().seed(seed);
    }

    pub(crate) fn faults(&self) -> &SpinLockIrq<Faults> {
        &self.faults
    }

    /// A chance for a verb to fail.
    #[inline]
    pub(crate) fn verb(&self, fault: Fault) -> Result {
        match self.fault(fault) {
            None => Ok(()),
            Some(errno) => Err(Self::error_of(errno)),
        }
    }

    /// The error that a fault asks for.
    pub(crate) fn error_of(errno: u32) -> Error {
        Error::from_errno(i32::try_from(errno).map_or(-5, |errno| -errno))
    }

    /// Counts a datagram that got lost. The subnet's lock may be held unless a Q_Key was wrong.
    pub(crate) fn lose(&self, why: Lost) {
        if why == Lost::QKey {
            if let Some(ca) = self.fabric.net().lock().subnet.ca_mut(self.index()) {
                ca.port.count_bad_q_key();
            }
        }
        if let Some(counter) = self.lost.get(why as usize) {
            counter.add(1, Relaxed);
        }
    }

    pub(crate) fn lost(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Lost::NAMES
            .iter()
            .zip(&self.lost)
            .map(|(name, count)| (*name, count.load(Relaxed)))
    }

    // Deferred sends.

    /// Has the executor look at a queue pair. Any context.
    pub(crate) fn schedule(self: &Arc<Self>, qp: &Arc<Qp>) {
        // There is room for all queue pairs, see `add_qp`, and each is in once at most.
        if self.ready.lock().push_within_capacity(qp.clone()).is_err() {
            self.fabric.anomalies.executor_full.hit();
        }
        self.enqueue();
    }

    fn enqueue(self: &Arc<Self>) {
        // Refused if queued already, which is as good.
        let _ = workqueue::system_bh().enqueue::<_, 1>(self.clone());
    }

    /// Waits until the executor has nothing to do. Sleeps.
    pub(crate) fn settle(self: &Arc<Self>) {
        glue::flush::<Self, 1>(self);
        let left = core::mem::take(&mut *self.ready.lock());
        drop(left);
    }

    /// Has the executor look at all queue pairs.
    fn resume(self: &Arc<Self>) {
        let mut all = KVec::new();
        {
            let net = self.fabric.net().lock();
            let Some(qps) = net.qps(self.index()) else {
                return;
            };
            for qp in qps.buckets.iter().flatten() {
                if all.push(qp.clone(), GFP_ATOMIC).is_err() {
                    break;
                }
            }
        }
        for qp in all {
            qp.resume();
        }
    }

    // Objects.

    pub(crate) fn alloc_pd(&self) -> Result<Arc<Pd>> {
        let number = self.next_key.fetch_add(1, Relaxed) & 0xff_ffff;
        let lkey = (u32::from(self.place) + 1) << 24 | number;
        let pd = Arc::new(Pd { lkey }, GFP_KERNEL)?;
        self.objects.pds.fetch_add(1, Relaxed);
        Ok(pd)
    }

    /// A number for a new queue pair; used again only after all others were.
    pub(crate) fn number_for(&self, kind: Kind) -> Result<u32> {
        let net = self.fabric.net().lock();
        let qps = net.qps(self.index()).ok_or(ENODEV)?;
        match kind {
            Kind::Smi if qps.smi.is_none() => return Ok(0),
            Kind::Gsi if qps.gsi.is_none() => return Ok(1),
            Kind::Smi | Kind::Gsi => return Err(EBUSY),
            Kind::Ud | Kind::Rc => {}
        }
        let base = (u32::from(self.place) + 1) << 16 | FIRST_QPN;
        for _ in 0..QPNS {
            let number = base + self.next_qpn.fetch_add(1, Relaxed) % QPNS;
            if qps.find(number).is_none() {
                return Ok(number);
            }
        }
        Err(ENOMEM)
    }

    pub(crate) fn add_qp(&self, qp: &Arc<Qp>) -> Result {
        {
            let mut ready = self.ready.lock();
            let live = usize::try_from(self.objects.qps.load(Relaxed)).unwrap_or(0);
            ready.reserve(live + 1, GFP_ATOMIC)?;
        }
        let mut net = self.fabric.net().lock();
        let qps = net.qps_mut(self.index()).ok_or(ENODEV)?;
        let special = match qp.kind() {
            Kind::Smi => &mut qps.smi,
            Kind::Gsi => &mut qps.gsi,
            Kind::Ud | Kind::Rc => {
                let bucket = qps
                    .buckets
                    .get_mut(qp.number() as usize % BUCKETS)
                    .ok_or(EINVAL)?;
                return Ok(bucket.push(qp.clone(), GFP_ATOMIC)?);
            }
        };
        if special.is_some() {
            return Err(EBUSY);
        }
        *special = Some(qp.clone());
        Ok(())
    }

    /// Takes a queue pair out of all tables.
    pub(crate) fn remove_qp(&self, qp: &Arc<Qp>) {
        let left = self
            .groups
            .lock()
            .detach_all(|member| Arc::ptr_eq(member, qp));
        if left != 0 {
            self.fabric.anomalies.attached_at_destroy.hit();
            self.objects.attached.fetch_sub(left as i32, Relaxed);
        }
        let mut net = self.fabric.net().lock();
        let Some(qps) = net.qps_mut(self.index()) else {
            return;
        };
        match qp.kind() {
            Kind::Smi => qps.smi = None,
            Kind::Gsi => qps.gsi = None,
            Kind::Ud | Kind::Rc => {
                if let Some(bucket) = qps.buckets.get_mut(qp.number() as usize % BUCKETS) {
                    bucket.retain(|have| !Arc::ptr_eq(have, qp));
                }
            }
        }
    }

    pub(crate) fn qp(&self, number: u32) -> Option<Arc<Qp>> {
        self.fabric
            .net()
            .lock()
            .qps(self.index())?
            .find(number)
            .cloned()
    }

    // Arrival.

    /// A datagram has come for a queue pair or for the members of a group.
    pub(crate) fn arrive(
        &self,
        irq: &LocalInterruptDisabled,
        header: &Header,
        payload: &Payload<'_>,
        skip: Option<&Qp>,
        kicks: &mut Kicks,
    ) {
        if let Some(mgid) = header.group() {
            let groups = self.groups.lock_with(irq);
            for qp in groups.members(&mgid, header.dlid) {
                if skip.is_some_and(|skip| core::ptr::eq(skip, &**qp)) {
                    self.did(Did::Blocked);
                    continue;
                }
                if let Err(why) = qp.receive_any(irq, header, payload, kicks) {
                    self.lose(why);
                }
            }
            return;
        }
        let qp = self
            .fabric
            .net()
            .busy(irq)
            .qps(self.index())
            .and_then(|qps| qps.find(header.dest_qp).cloned());
        let outcome = match qp {
            Some(qp) => qp.receive_any(irq, header, payload, kicks),
            None => Err(Lost::NoQp),
        };
        if let Err(why) = outcome {
            self.lose(why);
        }
    }

    // The port.

    pub(crate) fn port(&self) -> Result<PortView> {
        self.verb(Fault::QueryPort)?;
        let net = self.fabric.net().lock();
        let port = &net.subnet.ca(self.index()).ok_or(ENODEV)?.port;
        Ok(PortView {
            state: port.state() as u8,
            phys_state: port.phys_state() as u8,
            max_mtu: port.max_mtu(),
            active_mtu: port.active_mtu(),
            cap_mask: port.cap_mask(),
            gid_prefix: port.gid_prefix,
            lid: port.lid(),
            lmc: port.lmc(),
            sm_lid: port.sm_lid(),
            sm_sl: port.sm_sl(),
            subnet_timeout: port.subnet_timeout(),
            width: port.width(),
            speed: port.speed(),
            pkey_violations: port.p_key_violations(),
            qkey_violations: port.q_key_violations(),
        })
    }

    pub(crate) fn gid(&self, index: usize) -> Result<[u8; 16]> {
        self.verb(Fault::QueryGid)?;
        if index >= glue::GIDS {
            return Err(EINVAL);
        }
        let net = self.fabric.net().lock();
        Ok(net.subnet.ca(self.index()).ok_or(ENODEV)?.gid(index))
    }

    pub(crate) fn pkey(&self, index: usize) -> Result<u16> {
        self.verb(Fault::QueryPkey)?;
        if index >= glue::PKEYS {
            return Err(EINVAL);
        }
        let net = self.fabric.net().lock();
        Ok(net
            .subnet
            .ca(self.index())
            .ok_or(ENODEV)?
            .p_key(index as u16))
    }

    /// Whether a datagram with a P_Key is for a queue pair with the index; counted if not.
    #[inline]
    pub(crate) fn pkey_matches(&self, irq: &LocalInterruptDisabled, index: u16, pkey: u16) -> bool {
        let mut net = self.fabric.net().busy(irq);
        let Some(ca) = net.subnet.ca_mut(self.index()) else {
            return false;
        };
        let matches = p_keys_match(ca.p_key(index), pkey);
        if !matches {
            ca.port.count_bad_p_key();
        }
        matches
    }

    /// The index of a P_Key that matches; counted if there is none.
    pub(crate) fn find_pkey(&self, irq: &LocalInterruptDisabled, pkey: u16) -> Option<u16> {
        let mut net = self.fabric.net().busy(irq);
        let ca = net.subnet.ca_mut(self.index())?;
        let found = ca
            .p_keys()
            .iter()
            .position(|have| p_keys_match(*have, pkey));
        if found.is_none() {
            ca.port.count_bad_p_key();
        }
        found.map(|index| index as u16)
    }

    pub(crate) fn modify_cap_mask(&self, set: u32, clear: u32) {
        {
            let mut net = self.fabric.net().lock();
            if let Some(ca) = net.subnet.ca_mut(self.index()) {
                ca.set_caps(set, clear);
            }
        }
        self.fabric.after();
    }

    pub(crate) fn set_node_desc(&self, text: &[u8; 64]) {
        {
            let mut net = self.fabric.net().lock();
            if let Some(ca) = net.subnet.ca_mut(self.index()) {
                ca.set_description(text);
            }
        }
        self.fabric.after();
    }

    /// A MAD for the agents of the HCA, answered in place.
    pub(crate) fn process_mad(&self, mad: &mut Mad) -> Reaction {
        let reaction = self
            .fabric
            .net()
            .lock()
            .subnet
            .process_mad(self.index(), mad);
        self.fabric.after();
        reaction
    }
}
