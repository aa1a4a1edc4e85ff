// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Questions to the subnet administrator: paths and memberships of groups.
//!
//! All answers come later, in process context, to a [`Listener`]. A [`Client`] is asked by one port;
//! dropping it calls its questions back and waits for the listener's last call.
//!
//! C header: [`include/rdma/ib_sa.h`](srctree/include/rdma/ib_sa.h)

use super::{
    ah,
    device::{
        mtu_bytes,
        Device, //
    },
    Gid,
    PortNum,
    QKey, //
};
use crate::{
    bindings,
    sync::lock::{
        new_spinlock_bh,
        SpinLockBh, //
    }, //
};
use core::ptr::{
    self,
    NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// Milliseconds until a question for a path counts as unanswered, repetitions included.
const TIMEOUT_MS: usize = 1000;

/// LIDs of groups (IBA 1.4, section 4.1.3).
const GROUP_LIDS: core::ops::RangeInclusive<u16> = 0xc000..=0xfffe;

/// A bit of a record's component mask, as it stands in memory.
const fn component(number: u32) -> u64 {
    (1u64 << number).to_be()
}

/// Components of a path record (IBA 1.4, table 205).
mod path {
    use super::component;

    pub(super) const DGID: u64 = component(2);
    pub(super) const SGID: u64 = component(3);
    pub(super) const TRAFFIC_CLASS: u64 = component(10);
    pub(super) const NUMB_PATH: u64 = component(12);
    pub(super) const PKEY: u64 = component(13);
}

/// Components of a multicast member record (IBA 1.4, table 210).
mod member {
    use super::component;

    pub(super) const MGID: u64 = component(0);
    pub(super) const PORT_GID: u64 = component(1);
    pub(super) const QKEY: u64 = component(2);
    pub(super) const MTU_SELECTOR: u64 = component(4);
    pub(super) const MTU: u64 = component(5);
    pub(super) const TRAFFIC_CLASS: u64 = component(6);
    pub(super) const PKEY: u64 = component(7);
    pub(super) const RATE_SELECTOR: u64 = component(8);
    pub(super) const RATE: u64 = component(9);
    pub(super) const SL: u64 = component(12);
    pub(super) const FLOW_LABEL: u64 = component(13);
    pub(super) const HOP_LIMIT: u64 = component(14);
    pub(super) const JOIN_STATE: u64 = component(16);
}

/// Learns the administrator's answers. Process context, no locks held.
pub(crate) trait Listener: Send + Sync + 'static {
    /// The way to a port.
    fn path(&self, to: &Gid, answer: Result<ah::Attr>);

    /// The state of the membership of a group is another one.
    fn membership_changed(&self, group: &Gid, state: &State);
}

/// A port's access to the administrator.
///
/// # Invariants
///
/// `raw` is registered and stays in place; only questions of this object name it.
#[pin_data(PinnedDrop)]
pub(crate) struct Client<L: Listener> {
    #[pin]
    raw: Opaque<bindings::ib_sa_client>,
    device: Arc<Device>,
    port: PortNum,
    listener: Arc<L>,
}

// SAFETY: The administrator's client may be used and unregistered from any thread.
unsafe impl<L: Listener> Send for Client<L> {}

// SAFETY: As above.
unsafe impl<L: Listener> Sync for Client<L> {}

/// A question that may be called back.
pub(crate) struct Question {
    id: i32,
    raw: *mut bindings::ib_sa_query,
}

// SAFETY: The pointer is compared, never followed.
unsafe impl Send for Question {}

/// What the callback of a question for a path needs; it owns this.
struct Asked<L: Listener> {
    listener: Arc<L>,
    to: Gid,
    pkey: u16,
    sgid_index: u8,
}

impl<L: Listener> Client<L> {
    /// Gives access to the administrator of the subnet of `port`.
    pub(crate) fn new(
        device: Arc<Device>,
        port: PortNum,
        listener: Arc<L>,
    ) -> Result<Pin<KBox<Self>>> {
        KBox::pin_init(
            pin_init!(Self {
                raw <- Opaque::ffi_init(|raw| {
                    // SAFETY: `raw` is valid for writes; `drop` unregisters.
                    unsafe { bindings::ib_sa_register_client(raw) }
                }),
                device,
                port,
                listener,
            }),
            GFP_KERNEL,
        )
    }

    /// Asks for the way from the own GID at `sgid_index` to `to`, for packets with `pkey`.
    ///
    /// # Errors
    ///
    /// `EAGAIN`: no administrator is known. After an error no answer comes.
    pub(crate) fn ask_path(
        &self,
        from: &Gid,
        sgid_index: u8,
        to: &Gid,
        pkey: u16,
    ) -> Result<Question> {
        let asked = KBox::new(
            Asked {
                listener: self.listener.clone(),
                to: *to,
                pkey,
                sgid_index,
            },
            GFP_KERNEL,
        )?;
        let mut rec: bindings::sa_path_rec = pin_init::zeroed();
        rec.rec_type = bindings::sa_path_rec_type_SA_PATH_REC_TYPE_IB;
        rec.dgid.raw = to.0;
        rec.sgid.raw = from.0;
        rec.pkey = pkey.to_be();
        rec.numb_path = 1;
        let mask = path::DGID | path::SGID | path::PKEY | path::TRAFFIC_CLASS | path::NUMB_PATH;
        let context = KBox::into_raw(asked);
        let mut query = ptr::null_mut();
        // SAFETY: The client is registered and the device live; the record is copied. The callback
        // runs once, with the context that it owns, if and only if this succeeds.
        let id = unsafe {
            bindings::ib_sa_path_rec_get(
                self.raw.get(),
                self.device.as_raw(),
                self.port.0,
                &mut rec,
                mask,
                TIMEOUT_MS,
                bindings::GFP_KERNEL,
                Some(Self::path_callback),
                context.cast(),
                &mut query,
            )
        };
        if id < 0 {
            // SAFETY: The callback will not run, so the context is ours again.
            drop(unsafe { KBox::from_raw(context) });
            return Err(Error::from_errno(id));
        }
        Ok(Question { id, raw: query })
    }

    /// Calls a question back: it is answered by an error, unless it was answered already.
    pub(crate) fn call_back(&self, question: Question) {
        // SAFETY: C looks for the number and compares the pointer before it follows it.
        unsafe { bindings::ib_sa_cancel_query(question.id, question.raw) };
    }

    /// # Safety
    ///
    /// Called by C once for each question, with its context.
    unsafe extern "C" fn path_callback(
        status: c_int,
        answer: *mut bindings::sa_path_rec,
        _count: c_uint,
        context: *mut c_void,
    ) {
        // SAFETY: `ask_path` gave the context away for this call.
        let asked = unsafe { KBox::from_raw(context.cast::<Asked<L>>()) };
        // SAFETY: C gives a record, or nothing.
        let answer = match (status, unsafe { answer.as_ref() }) {
            (0, Some(rec)) => path_of(rec, &asked),
            (0, None) => Err(EIO),
            (status, _) => Err(Error::from_errno(status)),
        };
        asked.listener.path(&asked.to, answer);
    }

    /// Whether anybody on the port is in a group.
    pub(crate) fn is_joined(&self, group: &Gid) -> bool {
        let mut gid = bindings::ib_gid { raw: group.0 };
        let mut rec: bindings::ib_sa_mcmember_rec = pin_init::zeroed();
        let (device, port) = (self.device.as_raw(), self.port.0);
        // SAFETY: The device is live, and the record valid for writes.
        let status = unsafe { bindings::ib_sa_get_mcmember_rec(device, port, &mut gid, &mut rec) };
        status == 0
    }

    /// Asks to be let into a group. The answer is a change of the membership's state.
    pub(crate) fn join(&self, wish: &Wish) -> Result<Membership<L>> {
        let context = Arc::pin_init(
            pin_init!(Context {
                state <- new_spinlock_bh!(State::Asked, c"sa::Context::state"),
                listener: self.listener.clone(),
                wish: *wish,
            }),
            GFP_KERNEL,
        )?;
        let (mut rec, mask) = wish.record();
        // SAFETY: The client is registered and the device live; the record is copied. The context
        // outlives the membership, whose `drop` waits for the callback.
        let raw = unsafe {
            bindings::ib_sa_join_multicast(
                self.raw.get(),
                self.device.as_raw(),
                self.port.0,
                &mut rec,
                mask,
                bindings::GFP_KERNEL,
                Some(Membership::<L>::callback),
                Arc::as_ptr(&context).cast_mut().cast(),
            )
        };
        let raw = NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: It was just made, with this context.
        Ok(Membership { raw, context })
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Client<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the client is registered. Waits until no question is left.
        unsafe { bindings::ib_sa_unregister_client(self.raw.get()) };
    }
}

/// Reads what the administrator says about a path; nonsense is refused.
fn path_of<L: Listener>(rec: &bindings::sa_path_rec, asked: &Asked<L>) -> Result<ah::Attr> {
    // SAFETY: All bytes of the union are plain data.
    let to = Gid(unsafe { rec.dgid.raw });
    if to != asked.to || !same_partition(u16::from_be(rec.pkey), asked.pkey) {
        return Err(EPROTO);
    }
    if rec.rec_type != bindings::sa_path_rec_type_SA_PATH_REC_TYPE_IB {
        return Err(EPROTO);
    }
    // SAFETY: The record is of this kind; all bytes of the union are plain data.
    let lids = unsafe { rec.__bindgen_anon_1.ib };
    let dlid = u16::from_be(lids.dlid);
    if dlid == 0 || dlid >= *GROUP_LIDS.start() {
        return Err(EPROTO);
    }
    Ok(ah::Attr {
        gid: asked.to,
        // A path with a hop limit leads through a router.
        global: rec.hop_limit > 0,
        sgid_index: asked.sgid_index,
        hop_limit: rec.hop_limit,
        traffic_class: rec.traffic_class,
        flow_label: u32::from_be(rec.flow_label),
        sl: rec.sl & 0x0f,
        dlid,
        path_bits: (u16::from_be(lids.slid) & 0x7f) as u8,
        rate: rec.rate,
        dmac: [0; 6],
    })
}

/// Whether P_Keys differ by the membership bit at most.
fn same_partition(a: u16, b: u16) -> bool {
    (a ^ b) & 0x7fff == 0
}

/// How to be in a group (IBA 1.4, section 15.2.5.17).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[allow(clippy::enum_variant_names, reason = "the names of the specification")]
pub(crate) enum JoinState {
    Full = 1,
    /// Non-member, to send only.
    SendOnly = 4,
    /// Full member, to send only; not every administrator knows it.
    SendOnlyFull = 8,
}

/// What a group's members share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) mlid: u16,
    pub(crate) qkey: QKey,
    /// Code and bytes of the largest datagram.
    mtu: u8,
    pub(crate) mtu_bytes: u32,
    pub(crate) rate: u8,
    sl: u8,
    traffic_class: u8,
    flow_label: u32,
    hop_limit: u8,
}

impl Record {
    /// The way to the group.
    pub(crate) fn path(&self, group: &Gid, sgid_index: u8) -> ah::Attr {
        ah::Attr {
            gid: *group,
            global: true,
            sgid_index,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            sl: self.sl,
            dlid: self.mlid,
            path_bits: 0,
            rate: self.rate,
            dmac: [0; 6],
        }
    }
}

/// Which group to join, and how.
#[derive(Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) group: Gid,
    pub(crate) port: Gid,
    pub(crate) pkey: u16,
    pub(crate) state: JoinState,
    /// The group to be like, if this one has to be made.
    pub(crate) like: Option<Record>,
}

impl Wish {
    fn record(&self) -> (bindings::ib_sa_mcmember_rec, u64) {
        let mut rec: bindings::ib_sa_mcmember_rec = pin_init::zeroed();
        rec.mgid.raw = self.group.0;
        rec.port_gid.raw = self.port.0;
        rec.pkey = self.pkey.to_be();
        rec.join_state = self.state as u8;
        let mut mask = member::MGID | member::PORT_GID | member::PKEY | member::JOIN_STATE;
        if let Some(like) = &self.like {
            rec.qkey = like.qkey.0.to_be();
            rec.mtu_selector = bindings::ib_sa_selector_IB_SA_EQ as u8;
            rec.mtu = like.mtu;
            rec.traffic_class = like.traffic_class;
            rec.rate_selector = bindings::ib_sa_selector_IB_SA_EQ as u8;
            rec.rate = like.rate;
            rec.sl = like.sl;
            rec.flow_label = like.flow_label.to_be();
            rec.hop_limit = like.hop_limit;
            mask |= member::QKEY
                | member::MTU_SELECTOR
                | member::MTU
                | member::TRAFFIC_CLASS
                | member::RATE_SELECTOR
                | member::RATE
                | member::SL
                | member::FLOW_LABEL
                | member::HOP_LIMIT;
        }
        (rec, mask)
    }
}

/// Where a membership stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// The administrator has not answered.
    Asked,
    Member(Record),
    /// Refused, unanswered, or lost (`ENETRESET`).
    Failed(Error),
}

#[pin_data]
struct Context<L: Listener> {
    #[pin]
    state: SpinLockBh<State>,
    listener: Arc<L>,
    wish: Wish,
}

/// A membership, or the wish for one. Dropping it leaves the group; sleeps.
///
/// # Invariants
///
/// `raw` is live, ours, and has the address of `context`.
pub(crate) struct Membership<L: Listener> {
    raw: NonNull<bindings::ib_sa_multicast>,
    context: Arc<Context<L>>,
}

// SAFETY: A membership may be given up from any thread.
unsafe impl<L: Listener> Send for Membership<L> {}

impl<L: Listener> Membership<L> {
    pub(crate) fn state(&self) -> State {
        *self.context.state.lock()
    }

    /// # Safety
    ///
    /// Called by C with a live membership, before `ib_sa_free_multicast` returns.
    unsafe extern "C" fn callback(status: c_int, raw: *mut bindings::ib_sa_multicast) -> c_int {
        // SAFETY: As C promises; by the type invariant the context outlives the membership.
        let (rec, context) = unsafe { (&(*raw).rec, &*(*raw).context.cast::<Context<L>>()) };
        let state = match status {
            0 => record_of(rec, &context.wish).map_or_else(State::Failed, State::Member),
            status => State::Failed(Error::from_errno(status)),
        };
        *context.state.lock() = state;
        context
            .listener
            .membership_changed(&context.wish.group, &state);
        // It is for `drop` to give the membership up.
        0
    }
}

impl<L: Listener> Drop for Membership<L> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant it is live and ours. Waits for a running callback.
        unsafe { bindings::ib_sa_free_multicast(self.raw.as_ptr()) };
    }
}

/// Reads what the administrator says about a group; nonsense is refused.
fn record_of(rec: &bindings::ib_sa_mcmember_rec, wish: &Wish) -> Result<Record> {
    let mlid = u16::from_be(rec.mlid);
    // SAFETY: All bytes of the union are plain data.
    let group = Gid(unsafe { rec.mgid.raw });
    if group != wish.group
        || !same_partition(u16::from_be(rec.pkey), wish.pkey)
        || !GROUP_LIDS.contains(&mlid)
        || !(1..=5).contains(&rec.mtu)
        // Queue pairs that were not told a key yet have this one.
        || rec.qkey == 0
    {
        return Err(EPROTO);
    }
    Ok(Record {
        mlid,
        qkey: QKey(u32::from_be(rec.qkey)),
        mtu: rec.mtu,
        mtu_bytes: mtu_bytes(rec.mtu.into()),
        rate: rec.rate,
        sl: rec.sl & 0x0f,
        traffic_class: rec.traffic_class,
        flow_label: u32::from_be(rec.flow_label),
        hop_limit: rec.hop_limit,
    })
}
