// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Connections, by way of the communication manager.
//!
//! | type | is |
//! |---|---|
//! | [`Listener`] | a service that an [`Acceptor`] answers for |
//! | [`Offer`] | an incoming request, for the length of the acceptor's call |
//! | [`ConnId`] | an identifier that we own, of a connection that either side opened |
//! | [`Id`] | the same, borrowed: what one can do with it; [`Handler`]s are given it |
//! | [`Reaper`] | destroys identifiers that were dropped |
//!
//! ```text
//! active                                      passive
//! ConnId::new, Qp::to_init, ConnId::connect   Acceptor::request(offer), offer.keep → ConnId
//!                                             Qp::to_init, to_rtr(rq_psn), to_rts, id.accept
//! Replied: Qp::to_rtr, to_rts, id.ready       Established
//! id.disconnect → Disconnected                DisconnectAsked → id.answer_disconnect
//! ```
//!
//! For instance, with `conn` an object that implements [`Handler`]:
//!
//! ```ignore
//! let id = ConnId::new(&reaper, conn.clone())?;
//! qp.to_init(port, pkey_index)?;
//! id.connect(&Connect { path, service, qpn: qp.qpn(), psn, private: &hello, ..Connect::new(port) })?;
//! // In Handler::event, with the borrowed `id`:
//! match event {
//!     Event::Replied(reply) => {
//!         qp.to_rtr(id, Rtr { min_rnr_timer: 12, ..Rtr::default() })?;
//!         qp.to_rts(id)?;
//!         id.ready(&hello)?;
//!     }
//!     Event::DisconnectAsked => id.answer_disconnect()?,
//!     ..
//! }
//! ```
//!
//! # Contexts
//!
//! Acceptors and handlers are called in process context, by a work item of the communication
//! manager, with no lock held. They may sleep, but while they do other events of this CPU wait. The
//! calls for one identifier come one at a time, in order.
//!
//! All methods of [`Id`] may be called from anywhere in process context, those that send a message
//! return when it is queued.
//!
//! # The end of an identifier
//!
//! [`ConnId::destroy`] waits for a running call of the handler, but for one that tells of a message
//! that was not answered: not with a lock that the handler takes. Called by the handler itself, for
//! its own identifier, it does what `drop` does.
//!
//! Dropping an identifier never waits: it goes to its [`Reaper`], from any context. No call of the
//! handler begins afterwards, but one may be running until [`Reaper::reap`] has destroyed it.
//!
//! Destroying an identifier says so to the peer, unless the connection was ended before. On
//! Soft-RoCE a message that is sent while the port is down breaks connecting for good: keep
//! identifiers of established connections meanwhile, either as they are or with
//! [`Reaper::reap_silent`].

use super::{
    ah,
    device::{
        mtu_bytes,
        mtu_code,
        Device, //
    },
    qp::MAX_RETRIES,
    Gid,
    PortNum,
    Qpn, //
};
use crate::{
    bindings,
    sync::lock::{
        new_spinlock_bh,
        SpinLockBh, //
    }, //
};
use core::{
    cell::Cell,
    mem,
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        ArcBorrow, //
    },
    task::Task,
    types::Opaque, //
};

/// Bytes of private data in a request, a reply, a rejection.
pub(crate) const REQUEST_DATA: usize = 92;
pub(crate) const REPLY_DATA: usize = 196;
pub(crate) const REJECT_DATA: usize = 148;

/// Bytes of private data that say that we are ready.
const READY_DATA: usize = 224;

/// What numbers of queue pairs and packets have less than.
const TWO_TO_24: u32 = 1 << 24;

/// Why a request is rejected: the numbers of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reason(pub(crate) u32);

impl Reason {
    pub(crate) const NO_QP: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_QP);
    pub(crate) const NO_RESOURCES: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_RESOURCES);
    pub(crate) const TIMEOUT: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_TIMEOUT);
    /// Nobody listens.
    pub(crate) const NO_SERVICE: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_SERVICE_ID);
    pub(crate) const TRANSPORT: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_TRANSPORT_TYPE);
    /// The peer still has a connection from an earlier life.
    pub(crate) const STALE: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_STALE_CONN);
    pub(crate) const MTU: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_MTU);
    /// The private data says why.
    pub(crate) const CONSUMER: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

/// How to reach the peer of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Path {
    pub(crate) to: ah::Attr,
    pub(crate) pkey: u16,
    /// Bytes of a packet: what both ends have, 256 to 4096.
    pub(crate) mtu: u32,
    /// LIDs of the peer and our own, 0 on RoCE.
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    /// Static rate as in path records, 0 on RoCE.
    pub(crate) rate: u8,
    /// How long a packet may be on its way: 4.096 µs times two to this power. The peers wait about
    /// four times as long for an acknowledgement.
    pub(crate) life_time: u8,
}

/// A request to connect.
#[derive(Clone, Copy)]
pub(crate) struct Connect<'a> {
    pub(crate) port: PortNum,
    pub(crate) path: Path,
    pub(crate) service: u64,
    /// Our queue pair, which is in INIT.
    pub(crate) qpn: Qpn,
    /// Number of the first packet that the peer shall send, 24 bits.
    pub(crate) psn: u32,
    /// [`REQUEST_DATA`] bytes at most; the peer sees zeros behind them.
    pub(crate) private: &'a [u8],
    /// Retries of a packet that is not acknowledged, or for which there is no receive; up to
    /// [`MAX_RETRIES`].
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// How long the peer may take to reply, 4.096 µs times two to this power, and how often it is
    /// asked again.
    pub(crate) response_time: u8,
    pub(crate) repeats: u8,
    /// Whether our queue pair has a shared receive queue.
    pub(crate) srq: bool,
}

impl Connect<'_> {
    /// A request from `port` with moderate retries (an answer within a second is asked for three
    /// times) and all else unset.
    pub(crate) fn new(port: PortNum) -> Self {
        Self {
            port,
            path: Path::default(),
            service: 0,
            qpn: Qpn(0),
            psn: 0,
            private: &[],
            retries: MAX_RETRIES,
            rnr_retries: MAX_RETRIES,
            response_time: 18,
            repeats: 3,
            srq: true,
        }
    }
}

/// An answer that accepts.
#[derive(Clone, Copy)]
pub(crate) struct Accept<'a> {
    /// Our queue pair, which is in RTR or RTS.
    pub(crate) qpn: Qpn,
    /// Number of the first packet that the peer shall send, 24 bits; the same as
    /// [`rq_psn`](super::qp::Rtr::rq_psn) of the queue pair.
    pub(crate) psn: u32,
    /// [`REPLY_DATA`] bytes at most; the peer sees zeros behind them.
    pub(crate) private: &'a [u8],
    pub(crate) rnr_retries: u8,
    pub(crate) srq: bool,
}

/// The peer accepts.
#[derive(Clone, Copy)]
pub(crate) struct Reply<'a> {
    pub(crate) qpn: Qpn,
    /// Number of the first packet that we shall send.
    pub(crate) psn: u32,
    pub(crate) private: &'a [u8; REPLY_DATA],
}

/// What happened to a connection.
#[derive(Clone, Copy)]
pub(crate) enum Event<'a> {
    /// Our request was accepted: move the queue pair to RTS and be [`Id::ready`].
    Replied(Reply<'a>),
    /// Our peer is ready.
    Established,
    /// Our request, or our reply, was rejected; by the core if `reason` says so.
    Rejected {
        reason: Reason,
        private: &'a [u8; REJECT_DATA],
    },
    /// Nobody answered our request, or it could not be sent.
    RequestFailed,
    /// Nobody answered our reply, or it could not be sent.
    ReplyFailed,
    /// The peer ends the connection: [`Id::answer_disconnect`].
    DisconnectAsked,
    /// The connection is ended: the peer has answered, or never will.
    Disconnected,
    /// No packet of the connection is under way any more. The last event of a connection that was
    /// established.
    TimewaitOver,
}

/// Receives the events of an identifier.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Something happened. See the module for context; the owned identifier of `id` may be
    /// dropped here.
    fn event(&self, id: &Id, event: Event<'_>);
}

/// Answers requests.
pub(crate) trait Acceptor: Send + Sync + 'static {
    /// Somebody wants to connect. An offer that is neither kept nor rejected is rejected, without
    /// private data, for [`Reason::CONSUMER`]. See the module for context; calls for several
    /// requests may run at once.
    fn request(&self, offer: Offer<'_>);
}

/// An identifier, borrowed.
#[repr(transparent)]
pub(crate) struct Id(Opaque<bindings::ib_cm_id>);

// SAFETY: The identifier has a lock of its own in C.
unsafe impl Sync for Id {}

/// Private data as C takes it.
fn parts(private: &[u8], max: usize) -> Result<(*const c_void, u8)> {
    if private.len() > max {
        return Err(EINVAL);
    }
    Ok((
        private.as_ptr().cast(),
        u8::try_from(private.len()).map_err(|_| EINVAL)?,
    ))
}

impl Id {
    /// # Safety
    ///
    /// `raw` is live, for the lifetime of the result.
    unsafe fn from_raw<'a>(raw: *mut bindings::ib_cm_id) -> &'a Self {
        // CAST: `Self` has the layout of a `struct ib_cm_id`.
        // SAFETY: As the caller promises.
        unsafe { &*raw.cast::<Self>() }
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_cm_id {
        self.0.get()
    }

    /// Accepts the request that this identifier was made for.
    ///
    /// # Errors
    ///
    /// `EINVAL`: there is no request that waits (the peer may have given up), or too much private
    /// data; else of the core.
    pub(crate) fn accept(&self, accept: &Accept<'_>) -> Result {
        let (private_data, private_data_len) = parts(accept.private, REPLY_DATA)?;
        if accept.qpn.0 >= TWO_TO_24 || accept.psn >= TWO_TO_24 {
            return Err(EINVAL);
        }
        let mut param = bindings::ib_cm_rep_param {
            qp_num: accept.qpn.0,
            starting_psn: accept.psn,
            private_data,
            private_data_len,
            rnr_retry_count: accept.rnr_retries.min(MAX_RETRIES),
            srq: accept.srq.into(),
            ..pin_init::zeroed()
        };
        // SAFETY: The identifier is live; the data, which is that long, is copied.
        to_result(unsafe { bindings::ib_send_cm_rep(self.as_raw(), &mut param) })
    }

    /// Tells the peer that has accepted that we are ready. `private` has 224 bytes at most.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the peer has not replied, or too much private data; else of the core.
    pub(crate) fn ready(&self, private: &[u8]) -> Result {
        let (data, len) = parts(private, READY_DATA)?;
        // SAFETY: The identifier is live; the data, which is that long, is copied.
        to_result(unsafe { bindings::ib_send_cm_rtu(self.as_raw(), data, len) })
    }

    /// Rejects a request, or a reply. `private` has [`REJECT_DATA`] bytes at most.
    ///
    /// # Errors
    ///
    /// `EINVAL`: there is none that waits, or too much private data; else of the core.
    pub(crate) fn reject(&self, reason: Reason, private: &[u8]) -> Result {
        let (data, len) = parts(private, REJECT_DATA)?;
        // SAFETY: The identifier is live; the data, which is that long, is copied.
        to_result(unsafe {
            bindings::ib_send_cm_rej(self.as_raw(), reason.0, ptr::null_mut(), 0, data, len)
        })
    }

    /// Asks the peer to end the connection.
    ///
    /// # Errors
    ///
    /// `EINVAL`: it is not established; else of the core, and the connection is ended anyway.
    pub(crate) fn disconnect(&self) -> Result {
        // SAFETY: The identifier is live.
        to_result(unsafe { bindings::ib_send_cm_dreq(self.as_raw(), ptr::null(), 0) })
    }

    /// Agrees to end the connection.
    ///
    /// # Errors
    ///
    /// As of [`Self::disconnect`].
    pub(crate) fn answer_disconnect(&self) -> Result {
        // SAFETY: The identifier is live.
        to_result(unsafe { bindings::ib_send_cm_drep(self.as_raw(), ptr::null(), 0) })
    }

    /// Whether destroying it would say something to the peer.
    fn speaks(&self) -> bool {
        // SAFETY: The identifier is live; the state is a plain number that C writes under a lock
        // of its own. A state of those below does not become another one without the peer.
        let state = unsafe { ptr::read_volatile(&raw const (*self.as_raw()).state) };
        !matches!(
            state,
            bindings::ib_cm_state_IB_CM_IDLE
                | bindings::ib_cm_state_IB_CM_LISTEN
                | bindings::ib_cm_state_IB_CM_DREQ_SENT
                | bindings::ib_cm_state_IB_CM_TIMEWAIT
        )
    }
}

/// Who is called for an identifier.
enum Role {
    Connection(Arc<dyn Handler>),
    Listener {
        acceptor: Arc<dyn Acceptor>,
        port: PortNum,
    },
}

/// The context of an identifier.
struct Context {
    role: Role,
    /// The task that is in a call of the handler, as an address; 0 if none is.
    running: Atomic<usize>,
    /// The owned identifier was dropped.
    retired: Atomic<bool>,
    /// A request was sent.
    asked: Atomic<bool>,
}

impl Context {
    fn new(role: Role) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                role,
                running: Atomic::new(0),
                retired: Atomic::new(false),
                asked: Atomic::new(false),
            },
            GFP_KERNEL,
        )?)
    }

    /// Whether the present task is in a call of the handler.
    fn is_running_here(&self) -> bool {
        // If it is, then it was this task that wrote so.
        self.running.load(Relaxed) == here()
    }
}

/// The present task, as an address.
fn here() -> usize {
    Task::current_raw() as usize
}

/// An identifier, as a member of the reaper's list.
///
/// # Invariants
///
/// `raw` is live, its device is that of `reaper`, or of the reaper whose list this is in, and its
/// context is the address of the content of `context`.
struct Node {
    raw: NonNull<bindings::ib_cm_id>,
    context: Arc<Context>,
    reaper: Option<Arc<Reaper>>,
    next: Option<KBox<Node>>,
}

// SAFETY: Identifiers may be used and destroyed from any thread.
unsafe impl Send for Node {}

impl Node {
    /// Room for a node, before there is anything to put in.
    fn room() -> Result<KBox<mem::MaybeUninit<Self>>> {
        Ok(KBox::new_uninit(GFP_KERNEL)?)
    }

    /// Makes an identifier, and its node.
    fn new(reaper: &Arc<Reaper>, role: Role) -> Result<KBox<Self>> {
        let context = Context::new(role)?;
        let room = Self::room()?;
        // SAFETY: The device is live; the node made below owns the context and destroys the
        // identifier first.
        let raw = unsafe {
            bindings::ib_create_cm_id(
                reaper.device.as_raw(),
                Some(callback),
                Arc::as_ptr(&context).cast_mut().cast(),
            )
        };
        let raw = NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: As just made.
        Ok(KBox::write(
            room,
            Self {
                raw,
                context,
                reaper: Some(reaper.clone()),
                next: None,
            },
        ))
    }

    /// Destroys the identifier. Sleeps, until a running call of the handler is over; a handler's
    /// own identifier is given back instead.
    fn destroy(node: KBox<Self>) -> Option<KBox<Self>> {
        if node.context.is_running_here() {
            return Some(node);
        }
        // SAFETY: By the type invariants the identifier is live and ours, and this is none of its
        // handler's calls. No call runs afterwards, and then the context may go.
        unsafe { bindings::ib_destroy_cm_id(node.raw.as_ptr()) };
        None
    }

    /// Hands the identifier to its reaper.
    fn retire(mut node: KBox<Self>) {
        node.context.retired.store(true, Relaxed);
        if let Some(reaper) = node.reaper.take() {
            reaper.take(node);
        }
    }
}

/// An identifier of a connection, owned. See the module about its end.
///
/// # Invariants
///
/// The node is there until the object is dropped, and its `raw` is the pointer.
pub(crate) struct ConnId(Option<KBox<Node>>, NonNull<bindings::ib_cm_id>);

// SAFETY: Identifiers may be used and destroyed from any thread.
unsafe impl Send for ConnId {}

// SAFETY: As above.
unsafe impl Sync for ConnId {}

impl Deref for ConnId {
    type Target = Id;

    fn deref(&self) -> &Id {
        // SAFETY: By the type invariant the identifier is live for as long as `self`.
        unsafe { Id::from_raw(self.1.as_ptr()) }
    }
}

impl ConnId {
    fn of(node: KBox<Node>) -> Self {
        let raw = node.raw;
        // INVARIANT: The node is there.
        Self(Some(node), raw)
    }

    /// Makes an identifier to connect with, on the reaper's device. Sleeps.
    pub(crate) fn new(reaper: &Arc<Reaper>, handler: Arc<dyn Handler>) -> Result<Self> {
        Ok(Self::of(Node::new(reaper, Role::Connection(handler))?))
    }

    /// Asks to connect. The answer may come before this returns. Sleeps.
    ///
    /// # Errors
    ///
    /// The identifier can only be dropped then.
    ///
    /// - `EINVAL`: something is out of range, or no path of this port.
    /// - `EALREADY`: it was asked before, with whatever result.
    /// - `ENETUNREACH` and others that the network stack or the core say.
    pub(crate) fn connect(&self, connect: &Connect<'_>) -> Result {
        let node = self.0.as_ref().ok_or(EINVAL)?;
        let reaper = node.reaper.as_ref().ok_or(EINVAL)?;
        let (private_data, private_data_len) = parts(connect.private, REQUEST_DATA)?;
        let path = &connect.path;
        let mtu = mtu_code(path.mtu).ok_or(EINVAL)?;
        if connect.qpn.0 >= TWO_TO_24
            || connect.psn >= TWO_TO_24
            || connect.retries > MAX_RETRIES
            || connect.rnr_retries > MAX_RETRIES
            || connect.response_time > 31
            || connect.repeats > 15
            || path.life_time > 31
        {
            return Err(EINVAL);
        }
        // C forgets part of a request that failed, and takes no second one.
        if node.context.asked.xchg(true, Relaxed) {
            return Err(EALREADY);
        }
        let index = i32::from(path.to.sgid_index);
        let device = reaper.device.as_raw();
        // SAFETY: The device is live; C checks port and index.
        let sgid = unsafe { bindings::rdma_get_gid_attr(device, connect.port.0, index) };
        let sgid = kernel::error::from_err_ptr(sgid.cast_mut())?;
        let mut record: bindings::sa_path_rec = pin_init::zeroed();
        record.dgid.raw = path.to.gid.0;
        record.flow_label = path.to.flow_label.to_be();
        record.hop_limit = path.to.hop_limit;
        record.traffic_class = path.to.traffic_class;
        record.sl = path.to.sl;
        record.reversible = 1;
        record.pkey = path.pkey.to_be();
        record.mtu_selector = bindings::ib_sa_selector_IB_SA_EQ as u8;
        record.mtu = mtu as u8;
        record.rate_selector = bindings::ib_sa_selector_IB_SA_EQ as u8;
        record.rate = path.rate;
        record.packet_life_time_selector = bindings::ib_sa_selector_IB_SA_EQ as u8;
        record.packet_life_time = path.life_time;
        // SAFETY: We hold a reference to the entry; all bytes of the union are plain data.
        let kind = unsafe {
            record.sgid.raw = (*sgid).gid.raw;
            (*sgid).gid_type
        };
        match kind {
            bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP => {
                record.rec_type = bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V2;
                record.__bindgen_anon_1.roce.dmac = path.to.dmac;
            }
            bindings::ib_gid_type_IB_GID_TYPE_ROCE => {
                record.rec_type = bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V1;
                record.__bindgen_anon_1.roce.dmac = path.to.dmac;
            }
            _ => {
                record.rec_type = bindings::sa_path_rec_type_SA_PATH_REC_TYPE_IB;
                record.__bindgen_anon_1.ib.dlid = path.dlid.to_be();
                record.__bindgen_anon_1.ib.slid = path.slid.to_be();
            }
        }
        let mut param = bindings::ib_cm_req_param {
            primary_path: &mut record,
            ppath_sgid_attr: sgid,
            service_id: connect.service.to_be(),
            qp_num: connect.qpn.0,
            qp_type: bindings::ib_qp_type_IB_QPT_RC,
            starting_psn: connect.psn,
            private_data,
            private_data_len,
            remote_cm_response_timeout: connect.response_time,
            local_cm_response_timeout: connect.response_time,
            retry_count: connect.retries,
            rnr_retry_count: connect.rnr_retries,
            max_cm_retries: connect.repeats,
            srq: connect.srq.into(),
            ..pin_init::zeroed()
        };
        // SAFETY: The identifier is live; what the request names is live, and copied.
        let status = to_result(unsafe { bindings::ib_send_cm_req(self.as_raw(), &mut param) });
        // SAFETY: The reference is ours to give back.
        unsafe { bindings::rdma_put_gid_attr(sgid) };
        status
    }

    /// Destroys the identifier. See the module.
    pub(crate) fn destroy(mut self) {
        if let Some(node) = self.0.take() {
            node.context.retired.store(true, Relaxed);
            if let Some(node) = Node::destroy(node) {
                Node::retire(node);
            }
        }
    }
}

impl Drop for ConnId {
    fn drop(&mut self) {
        if let Some(node) = self.0.take() {
            Node::retire(node);
        }
    }
}

/// A service; dropping it hands it to the reaper, until which nobody else can listen.
pub(crate) struct Listener(Option<KBox<Node>>);

// SAFETY: A shared reference gives nothing away.
unsafe impl Sync for Listener {}

impl Listener {
    /// Listens for requests to `service` that arrive on `port`. Those to other ports of the device
    /// are rejected for [`Reason::NO_SERVICE`], those of other transports for
    /// [`Reason::TRANSPORT`]. Sleeps.
    ///
    /// # Errors
    ///
    /// `EBUSY`: somebody listens for that service on this device.
    pub(crate) fn new(
        reaper: &Arc<Reaper>,
        port: PortNum,
        service: u64,
        acceptor: Arc<dyn Acceptor>,
    ) -> Result<Self> {
        let node = Node::new(reaper, Role::Listener { acceptor, port })?;
        // SAFETY: The identifier is live.
        let status =
            to_result(unsafe { bindings::ib_cm_listen(node.raw.as_ptr(), service.to_be()) });
        let listener = Self(Some(node));
        match status {
            Ok(()) => Ok(listener),
            Err(error) => {
                listener.stop();
                Err(error)
            }
        }
    }

    /// Stops listening, and waits for running calls of the acceptor: the acceptor itself must not
    /// call this, it may drop the listener. Sleeps.
    pub(crate) fn stop(mut self) {
        if let Some(node) = self.0.take() {
            node.context.retired.store(true, Relaxed);
            if let Some(node) = Node::destroy(node) {
                Node::retire(node);
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(node) = self.0.take() {
            Node::retire(node);
        }
    }
}

/// Destroys the identifiers of a device that were dropped.
///
/// Its owner calls [`Self::reap`] from a work item of its own when it has dropped some, keeps it
/// for longer than all identifiers, and drops it, in process context and in no handler, before the
/// device goes.
#[pin_data(PinnedDrop)]
pub(crate) struct Reaper {
    #[pin]
    retired: SpinLockBh<Option<KBox<Node>>>,
    device: Arc<Device>,
}

impl Reaper {
    pub(crate) fn new(device: Arc<Device>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                retired <- new_spinlock_bh!(None, c"ib::cm::Reaper"),
                device,
            }),
            GFP_KERNEL,
        )
    }

    fn take(&self, mut node: KBox<Node>) {
        let mut retired = self.retired.lock();
        node.next = retired.take();
        *retired = Some(node);
    }

    fn reap_if(&self, may: impl Fn(&Id) -> bool) -> usize {
        let mut list = mem::take(&mut *self.retired.lock());
        let mut left = 0;
        while let Some(mut node) = list {
            list = node.next.take();
            // SAFETY: By the type invariants the identifier is live for as long as the node.
            let kept = match may(unsafe { Id::from_raw(node.raw.as_ptr()) }) {
                true => Node::destroy(node),
                false => Some(node),
            };
            if let Some(node) = kept {
                left += 1;
                self.take(node);
            }
        }
        left
    }

    /// Whether nothing waits to be destroyed.
    pub(crate) fn is_empty(&self) -> bool {
        self.retired.lock().is_none()
    }

    /// Destroys what was dropped; returns how many are left: those whose handler calls this. Sleeps.
    pub(crate) fn reap(&self) -> usize {
        self.reap_if(|_| true)
    }

    /// Destroys what was dropped and has nothing to say to a peer; returns how many are left. Sleeps.
    pub(crate) fn reap_silent(&self) -> usize {
        self.reap_if(|id| !id.speaks())
    }
}

#[pinned_drop]
impl PinnedDrop for Reaper {
    fn drop(self: Pin<&mut Self>) {
        if self.reap() != 0 {
            pr_err!("a reaper was dropped in a handler of its connections\n");
        }
    }
}

/// What became of an offer.
#[derive(Clone, Copy)]
enum Answer {
    None,
    /// Kept, with this context.
    Kept(*const Context),
}

/// An incoming request, for the length of the acceptor's call.
pub(crate) struct Offer<'a> {
    id: &'a Id,
    request: &'a bindings::ib_cm_req_event_param,
    private: &'a [u8; REQUEST_DATA],
    answer: &'a Cell<Answer>,
}

impl<'a> Offer<'a> {
    fn path(&self) -> Option<&bindings::sa_path_rec> {
        // SAFETY: C gives a live path, or null.
        unsafe { self.request.primary_path.as_ref() }
    }

    /// The port that it arrived on, which is the listener's.
    pub(crate) fn port(&self) -> PortNum {
        PortNum(self.request.port.into())
    }

    /// The peer's queue pair.
    pub(crate) fn qpn(&self) -> Qpn {
        Qpn(self.request.remote_qpn & (TWO_TO_24 - 1))
    }

    /// Number of the first packet that we shall send.
    pub(crate) fn psn(&self) -> u32 {
        self.request.starting_psn & (TWO_TO_24 - 1)
    }

    /// The peer's private data.
    pub(crate) fn private(&self) -> &'a [u8; REQUEST_DATA] {
        self.private
    }

    /// The peer's GID.
    pub(crate) fn gid(&self) -> Gid {
        // SAFETY: All bytes of the union are plain data.
        self.path()
            .map_or(Gid::default(), |path| Gid(unsafe { path.dgid.raw }))
    }

    /// The peer's LID, 0 on RoCE.
    pub(crate) fn lid(&self) -> u16 {
        match self.path() {
            Some(path) if path.rec_type == bindings::sa_path_rec_type_SA_PATH_REC_TYPE_IB => {
                // SAFETY: All bytes of the union are plain data.
                u16::from_be(unsafe { path.__bindgen_anon_1.ib.dlid })
            }
            _ => 0,
        }
    }

    /// Our own GID that it was sent to.
    pub(crate) fn own_gid(&self) -> Gid {
        // SAFETY: All bytes of the union are plain data.
        self.path()
            .map_or(Gid::default(), |path| Gid(unsafe { path.sgid.raw }))
    }

    /// Where our GID is in the table, on RoCE.
    pub(crate) fn own_gid_index(&self) -> Option<u16> {
        // SAFETY: C gives a live entry, or null.
        unsafe { self.request.ppath_sgid_attr.as_ref() }.map(|attr| attr.index)
    }

    /// Bytes of a packet, as the peer wants it.
    pub(crate) fn mtu(&self) -> u32 {
        self.path().map_or(0, |path| mtu_bytes(path.mtu.into()))
    }

    /// The P_Key that the peer wants.
    pub(crate) fn pkey(&self) -> u16 {
        self.path().map_or(0, |path| u16::from_be(path.pkey))
    }

    /// How often the peer tries again when there is no receive.
    pub(crate) fn rnr_retries(&self) -> u8 {
        // SAFETY: The request is live.
        unsafe { bindings::cm_req_rnr_retry_count(self.request) }
    }

    /// Keeps the request, to be answered now or later by [`Id::accept`] or [`Id::reject`], and
    /// gives its events to `handler`. The peer asks again until then; it must not be long.
    ///
    /// # Errors
    ///
    /// The request is rejected for [`Reason::NO_RESOURCES`].
    ///
    /// - `EINVAL`: the reaper is of another device.
    /// - `ENOMEM`.
    pub(crate) fn keep(self, reaper: &Arc<Reaper>, handler: Arc<dyn Handler>) -> Result<ConnId> {
        let prepared = Context::new(Role::Connection(handler))
            .and_then(|context| Ok((context, Node::room()?)))
            .inspect_err(|_| {
                let _ = self.id.reject(Reason::NO_RESOURCES, &[]);
            });
        let (context, room) = prepared?;
        let raw = NonNull::new(self.id.as_raw()).ok_or(EINVAL)?;
        // SAFETY: The identifier is live, its device is fixed.
        if unsafe { (*raw.as_ptr()).device } != reaper.device.as_raw() {
            let _ = self.id.reject(Reason::NO_RESOURCES, &[]);
            return Err(EINVAL);
        }
        context.running.store(here(), Relaxed);
        let pointer = Arc::as_ptr(&context);
        // SAFETY: The identifier is live, and only this call of its handler reads or writes its
        // context; the node made below owns the new one.
        unsafe { (*raw.as_ptr()).context = pointer.cast_mut().cast() };
        self.answer.set(Answer::Kept(pointer));
        // INVARIANT: The identifier is live, since `callback` will not have it destroyed.
        Ok(ConnId::of(KBox::write(
            room,
            Node {
                raw,
                context,
                reaper: Some(reaper.clone()),
                next: None,
            },
        )))
    }

    /// Rejects the request, with [`REJECT_DATA`] bytes of private data at most.
    ///
    /// # Errors
    ///
    /// As of [`Id::reject`]; the request is rejected, if possible, without private data then.
    pub(crate) fn reject(self, reason: Reason, private: &[u8]) -> Result {
        self.id.reject(reason, private)
    }
}

/// The private data of an event, which has `N` bytes.
///
/// # Safety
///
/// `event` is a live event of a kind that has that many, if any.
unsafe fn private<const N: usize>(event: &bindings::ib_cm_event) -> &[u8; N] {
    // SAFETY: As the caller promises.
    unsafe { event.private_data.cast::<[u8; N]>().as_ref() }.unwrap_or(&[0; N])
}

/// Has the identifier destroyed; it is C that does so.
const DESTROY: c_int = -(bindings::ECONNREFUSED as c_int);

/// Answers a request on behalf of a listener.
///
/// # Safety
///
/// `event` is one of a request, for the new identifier `id`.
unsafe fn requested(
    listener: &Context,
    acceptor: &dyn Acceptor,
    port: PortNum,
    id: &Id,
    event: &bindings::ib_cm_event,
) -> c_int {
    // SAFETY: As the caller promises.
    let (request, private) = unsafe { (&event.param.req_rcvd, private::<REQUEST_DATA>(event)) };
    if listener.retired.load(Relaxed) || PortNum(request.port.into()) != port {
        let _ = id.reject(Reason::NO_SERVICE, &[]);
        return DESTROY;
    }
    if request.qp_type != bindings::ib_qp_type_IB_QPT_RC {
        let _ = id.reject(Reason::TRANSPORT, &[]);
        return DESTROY;
    }
    let answer = Cell::new(Answer::None);
    acceptor.request(Offer {
        id,
        request,
        private,
        answer: &answer,
    });
    match answer.get() {
        Answer::None => DESTROY,
        Answer::Kept(context) => {
            // SAFETY: The identifier is destroyed only after this call, and its context after it.
            unsafe { (*context).running.store(0, Relaxed) };
            0
        }
    }
}

/// # Safety
///
/// Called by C with a live identifier, whose context is that of a live node or, for a request, of
/// the listener's, and with the event.
unsafe extern "C" fn callback(
    raw: *mut bindings::ib_cm_id,
    event: *const bindings::ib_cm_event,
) -> c_int {
    // SAFETY: As C promises; the identifier is destroyed, and waits for this call, before its
    // context goes. A listener waits for the calls of its requests.
    let (id, context, event) = unsafe {
        (
            Id::from_raw(raw),
            ArcBorrow::from_raw((*raw).context.cast::<Context>()),
            &*event,
        )
    };
    // C does not wait for this call if it tells of a message that was not answered: what the
    // handler wakes may destroy the identifier before the handler returns.
    let context: Arc<Context> = context.into();
    let handler = match &context.role {
        Role::Listener { acceptor, port } => {
            if event.event != bindings::ib_cm_event_type_IB_CM_REQ_RECEIVED {
                // Of a request that was not kept, or one that has no connection.
                return DESTROY;
            }
            // SAFETY: It is a request.
            return unsafe { requested(&context, &**acceptor, *port, id, event) };
        }
        Role::Connection(handler) => handler,
    };
    if context.retired.load(Relaxed) {
        return 0;
    }
    let event = match event.event {
        bindings::ib_cm_event_type_IB_CM_REP_RECEIVED => {
            // SAFETY: It is a reply.
            let (reply, private) = unsafe { (&event.param.rep_rcvd, private(event)) };
            Event::Replied(Reply {
                qpn: Qpn(reply.remote_qpn & (TWO_TO_24 - 1)),
                psn: reply.starting_psn & (TWO_TO_24 - 1),
                private,
            })
        }
        bindings::ib_cm_event_type_IB_CM_RTU_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_USER_ESTABLISHED => Event::Established,
        bindings::ib_cm_event_type_IB_CM_REJ_RECEIVED => {
            // SAFETY: It is a rejection.
            let (rejection, private) = unsafe { (&event.param.rej_rcvd, private(event)) };
            Event::Rejected {
                reason: Reason(rejection.reason),
                private,
            }
        }
        bindings::ib_cm_event_type_IB_CM_REQ_ERROR => Event::RequestFailed,
        bindings::ib_cm_event_type_IB_CM_REP_ERROR => Event::ReplyFailed,
        bindings::ib_cm_event_type_IB_CM_DREQ_RECEIVED => Event::DisconnectAsked,
        bindings::ib_cm_event_type_IB_CM_DREP_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_DREQ_ERROR => Event::Disconnected,
        bindings::ib_cm_event_type_IB_CM_TIMEWAIT_EXIT => Event::TimewaitOver,
        // Not ours: the peer takes its time, or has another path.
        _ => return 0,
    };
    context.running.store(here(), Relaxed);
    handler.event(id, event);
    context.running.store(0, Relaxed);
    0
}
