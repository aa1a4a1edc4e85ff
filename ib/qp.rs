// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Queue pairs, datagram (UD) and connected (RC).
//!
//! A queue pair goes RESET → INIT → RTR → RTS, one step at a time; hardware may take it to ERR by
//! itself, without an event. From everywhere it can be moved to ERR and RESET. All transitions
//! sleep.
//!
//! | step | datagram | connected |
//! |---|---|---|
//! | RESET → INIT | [`Qp::init`] | [`Qp::to_init`], before the request is sent or accepted |
//! | INIT → RTR | [`Qp::ready`] | [`Qp::to_rtr`], in the answer's handler or before accepting |
//! | RTR → RTS | | [`Qp::to_rts`] |

use super::{
    cm,
    cq::{
        NapiCq,
        Poll, //
    },
    device,
    pd::Pd,
    srq::Srq,
    Gid,
    PortNum,
    QKey,
    QpId,
    Qpn, //
};
use crate::bindings;
use core::{
    any::Any,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        Arc,
        SetOnce, //
    },
};

/// How a queue pair delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// UD: to whom each send names.
    Datagram,
    /// RC: to its peer, in order and once.
    Connected,
}

/// What happened to a connected queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// In ERR, and it takes nothing more from its shared receive queue. May come many times.
    LastReceive,
    /// Data came before the connection was established.
    Established,
    /// It is in ERR, or soon will be.
    Fatal,
    Other,
}

/// Receives the events of a connected queue pair.
pub(crate) trait Watcher: Send + Sync + 'static {
    /// Something happened. Any context, interrupts may be off and locks of the provider held: set
    /// a flag, queue a work item, call nothing else.
    fn event(&self, event: Event);
}

/// What the path of a connection does not say, or says wrong.
#[derive(Clone, Copy, Default)]
pub(crate) struct Rtr {
    /// How long the peer waits when there is no receive, 1 to 31 as in the specification's table
    /// (12 is 0.64 ms). The communication manager says 0, which is the longest, 655 ms.
    pub(crate) min_rnr_timer: u8,
    /// On the passive side, before [`cm::Id::accept`]: the starting PSN that will be accepted
    /// with. The communication manager does not know it yet, and a wrong one loses all that comes
    /// in without an error.
    pub(crate) rq_psn: Option<u32>,
    /// Bytes of a packet, if fewer than the path's: the smaller of both ends'.
    pub(crate) mtu: Option<u32>,
}

/// Retries, at most: more are "for ever" to some providers.
pub(crate) const MAX_RETRIES: u8 = 6;

/// Sizes of a queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Caps {
    pub(crate) send_wr: u32,
    pub(crate) recv_wr: u32,
    pub(crate) send_sge: u32,
    pub(crate) recv_sge: u32,
    /// Sends may be cut into segments; datagrams only, and if the device can.
    pub(crate) segmentation: bool,
}

/// A queue pair.
///
/// # Invariants
///
/// - `raw` is a live queue pair of the kind `kind` that this object owns.
/// - `_owned` owns its completion queues, whose handlers own the buffers of a datagram queue pair.
/// - `receives` is what a connected one receives from, which owns the buffers; `sends` owns what is
///   posted to send.
/// - The context of `raw` is the address of the content of `_watcher`, if there is one.
pub(crate) struct Qp {
    raw: NonNull<bindings::ib_qp>,
    kind: Kind,
    max_send_sge: u32,
    pd: Arc<Pd>,
    sends: SetOnce<KBox<dyn Any + Send + Sync>>,
    receives: Option<Arc<Srq>>,
    _watcher: Option<KBox<Arc<dyn Watcher>>>,
    _owned: KBox<dyn Any + Send + Sync>,
}

// SAFETY: Queue pairs may be used from any thread; C serialises what needs it.
unsafe impl Send for Qp {}

// SAFETY: As above.
unsafe impl Sync for Qp {}

impl Qp {
    /// Makes a datagram queue pair in RESET. Sends are signalled on request. Sleeps.
    pub(crate) fn new<S: Poll, R: Poll>(
        pd: Arc<Pd>,
        send: Arc<NapiCq<S>>,
        recv: Arc<NapiCq<R>>,
        caps: Caps,
    ) -> Result<Arc<Self>> {
        let init = bindings::ib_qp_init_attr {
            send_cq: send.as_raw(),
            recv_cq: recv.as_raw(),
            qp_type: bindings::ib_qp_type_IB_QPT_UD,
            ..pin_init::zeroed()
        };
        let owned = KBox::new((send, recv), GFP_KERNEL)?;
        Self::make(Kind::Datagram, pd, init, caps, owned, None, None)
    }

    /// Makes a connected queue pair in RESET that receives from `srq`, or has it as its own receive
    /// queue, of whose size it is. Sends are signalled on request; receives complete to `recv`, and
    /// events go to `watcher`. Sleeps.
    ///
    /// `send` may be shared with other queue pairs: it needs room for the completions of them all,
    /// which in ERR are as many as `caps.send_wr` each. If it was extended then the extension does.
    pub(crate) fn new_connected<S: Poll, R: Poll>(
        pd: Arc<Pd>,
        send: Arc<NapiCq<S>>,
        recv: Arc<NapiCq<R>>,
        srq: Arc<Srq>,
        caps: Caps,
        watcher: Arc<dyn Watcher>,
    ) -> Result<Arc<Self>> {
        // The address of the box's content, as a handle of a `dyn` is two words.
        let watcher = KBox::new(watcher, GFP_KERNEL)?;
        srq.take()?;
        let init = bindings::ib_qp_init_attr {
            event_handler: Some(Self::event_callback),
            qp_context: ptr::from_ref(&*watcher).cast_mut().cast(),
            send_cq: send.as_raw_extension(),
            recv_cq: recv.as_raw_extension(),
            srq: srq.as_raw().unwrap_or(ptr::null_mut()),
            qp_type: bindings::ib_qp_type_IB_QPT_RC,
            ..pin_init::zeroed()
        };
        // What is received into a shared queue is none of the queue pair's capacity.
        let (recv_wr, recv_sge) = match srq.as_raw() {
            Some(_) => (0, 0),
            None => (srq.shape().slots(), srq.shape().pages() as u32),
        };
        let caps = Caps {
            recv_wr,
            recv_sge,
            segmentation: false,
            ..caps
        };
        let owned = KBox::new((send, recv), GFP_KERNEL)?;
        Self::make(
            Kind::Connected,
            pd,
            init,
            caps,
            owned,
            Some(srq),
            Some(watcher),
        )
    }

    /// `init` without sizes; `owned` owns what it names.
    fn make(
        kind: Kind,
        pd: Arc<Pd>,
        init: bindings::ib_qp_init_attr,
        caps: Caps,
        owned: KBox<dyn Any + Send + Sync>,
        receives: Option<Arc<Srq>>,
        watcher: Option<KBox<Arc<dyn Watcher>>>,
    ) -> Result<Arc<Self>> {
        let mut init = bindings::ib_qp_init_attr {
            cap: bindings::ib_qp_cap {
                max_send_wr: caps.send_wr,
                max_recv_wr: caps.recv_wr,
                max_send_sge: caps.send_sge,
                max_recv_sge: caps.recv_sge,
                ..pin_init::zeroed()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
            create_flags: match caps.segmentation {
                true => bindings::ib_qp_create_flags_IB_QP_CREATE_IPOIB_UD_LSO as u32,
                false => 0,
            },
            ..init
        };
        // SAFETY: The domain and the queues are live, and owned by the object made below; the name
        // is a static string.
        let raw = unsafe {
            bindings::ib_create_qp_kernel(pd.as_raw(), &mut init, c"ipoib_rs".as_char_ptr())
        };
        let raw = NonNull::new(kernel::error::from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: It was just made, and nobody else has it.
        Ok(Arc::new(
            Self {
                raw,
                kind,
                max_send_sge: init.cap.max_send_sge,
                pd,
                sends: SetOnce::new(),
                receives,
                _watcher: watcher,
                _owned: owned,
            },
            GFP_KERNEL,
        )?)
    }

    /// # Safety
    ///
    /// Called by C for a live queue pair made by [`Self::new_connected`], with its context.
    unsafe extern "C" fn event_callback(event: *mut bindings::ib_event, context: *mut c_void) {
        // SAFETY: By the type invariants, and C destroys the queue pair before its context goes.
        let watcher = unsafe { &*context.cast::<Arc<dyn Watcher>>() };
        // SAFETY: C gives a live event.
        let event = match unsafe { (*event).event } {
            bindings::ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED => {
                #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
                // SAFETY: The event names the live queue pair.
                if super::fake::LOST_LAST_RECEIVES.strikes(unsafe { (*(*event).element.qp).qp_num })
                {
                    return;
                }
                Event::LastReceive
            }
            bindings::ib_event_type_IB_EVENT_COMM_EST => Event::Established,
            bindings::ib_event_type_IB_EVENT_QP_FATAL
            | bindings::ib_event_type_IB_EVENT_QP_REQ_ERR
            | bindings::ib_event_type_IB_EVENT_QP_ACCESS_ERR => Event::Fatal,
            _ => Event::Other,
        };
        watcher.event(event);
    }

    /// Whether it receives from that queue.
    pub(super) fn receives_from(&self, srq: &Arc<Srq>) -> bool {
        self.receives
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, srq))
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Keeps `sends`, where posted packets are, until the queue pair is destroyed.
    pub(super) fn keep(&self, sends: KBox<dyn Any + Send + Sync>) -> Result {
        match self.sends.populate(sends) {
            true => Ok(()),
            false => Err(EBUSY),
        }
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut bindings::ib_qp {
        self.raw.as_ptr()
    }

    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The queue pair's number.
    pub(crate) fn qpn(&self) -> Qpn {
        // SAFETY: By the type invariants the queue pair is live; its number is fixed.
        Qpn(unsafe { (*self.as_raw()).qp_num })
    }

    /// What completions call it.
    pub(crate) fn id(&self) -> QpId {
        QpId(self.as_raw() as usize)
    }

    /// Pieces of memory that a send can gather.
    pub(crate) fn max_send_sge(&self) -> usize {
        self.max_send_sge as usize
    }

    fn modify(&self, mut attr: bindings::ib_qp_attr, mask: u32) -> Result {
        let mask = mask | bindings::ib_qp_attr_mask_IB_QP_STATE;
        // SAFETY: By the type invariants the queue pair is live; C checks the transition.
        to_result(unsafe { bindings::ib_modify_qp(self.as_raw(), &mut attr, mask as i32) })
    }

    fn to(&self, state: bindings::ib_qp_state, mask: u32) -> Result {
        self.modify(
            bindings::ib_qp_attr {
                qp_state: state,
                ..pin_init::zeroed()
            },
            mask,
        )
    }

    /// RESET → INIT of a datagram queue pair: receives may be posted from here on.
    pub(crate) fn init(&self, port: PortNum, pkey_index: u16, qkey: QKey) -> Result {
        self.modify(
            bindings::ib_qp_attr {
                qp_state: bindings::ib_qp_state_IB_QPS_INIT,
                qkey: qkey.0,
                port_num: port.0,
                pkey_index,
                ..pin_init::zeroed()
            },
            bindings::ib_qp_attr_mask_IB_QP_QKEY
                | bindings::ib_qp_attr_mask_IB_QP_PORT
                | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX,
        )
    }

    /// INIT → RTR → RTS of a datagram queue pair: receives and sends.
    pub(crate) fn ready(&self) -> Result {
        self.to(bindings::ib_qp_state_IB_QPS_RTR, 0)?;
        self.to(
            bindings::ib_qp_state_IB_QPS_RTS,
            bindings::ib_qp_attr_mask_IB_QP_SQ_PSN,
        )
    }

    /// Changes the Q_Key that datagrams must carry, where it is in use already. Sleeps.
    pub(crate) fn set_qkey(&self, qkey: QKey) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qkey: qkey.0,
            ..pin_init::zeroed()
        };
        let mask = bindings::ib_qp_attr_mask_IB_QP_QKEY as i32;
        // SAFETY: By the type invariants the queue pair is live; C checks the state.
        to_result(unsafe { bindings::ib_modify_qp(self.as_raw(), &mut attr, mask) })
    }

    /// RESET → INIT of a connected queue pair. Peers get no access to memory.
    pub(crate) fn to_init(&self, port: PortNum, pkey_index: u16) -> Result {
        self.modify(
            bindings::ib_qp_attr {
                qp_state: bindings::ib_qp_state_IB_QPS_INIT,
                port_num: port.0,
                pkey_index,
                ..pin_init::zeroed()
            },
            bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS
                | bindings::ib_qp_attr_mask_IB_QP_PORT
                | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX,
        )
    }

    /// What the communication manager says about a step, and the mask of what it says.
    fn cm_attr(
        &self,
        id: &cm::Id,
        state: bindings::ib_qp_state,
    ) -> Result<(bindings::ib_qp_attr, u32)> {
        if self.kind != Kind::Connected {
            return Err(EINVAL);
        }
        let mut attr = bindings::ib_qp_attr {
            qp_state: state,
            ..pin_init::zeroed()
        };
        let mut mask = 0;
        // SAFETY: The identifier is live, and the attributes are valid for writes.
        to_result(unsafe { bindings::ib_cm_init_qp_attr(id.as_raw(), &mut attr, &mut mask) })?;
        Ok((attr, mask as u32))
    }

    /// INIT → RTR: connected to the peer of `id`, and receives from it.
    ///
    /// Active: once the peer has replied, best in that event's handler. Passive: while the request
    /// waits for an answer, with `rtr.rq_psn`.
    ///
    /// # Errors
    ///
    /// `EINVAL`: not in that state, or no such MTU; else of the provider.
    pub(crate) fn to_rtr(&self, id: &cm::Id, rtr: Rtr) -> Result {
        let (mut attr, mask) = self.cm_attr(id, bindings::ib_qp_state_IB_QPS_RTR)?;
        attr.min_rnr_timer = rtr.min_rnr_timer;
        if let Some(psn) = rtr.rq_psn {
            attr.rq_psn = psn;
        }
        if let Some(mtu) = rtr.mtu {
            attr.path_mtu = attr.path_mtu.min(device::mtu_code(mtu).ok_or(EINVAL)?);
        }
        // The identifier, which is borrowed, holds the entry of the GID table that `attr` names.
        self.modify(attr, mask)
    }

    /// RTR → RTS: may send. Retries are what was asked for in the request, [`MAX_RETRIES`] at most.
    ///
    /// # Errors
    ///
    /// As of [`Self::to_rtr`].
    pub(crate) fn to_rts(&self, id: &cm::Id) -> Result {
        let (mut attr, mask) = self.cm_attr(id, bindings::ib_qp_state_IB_QPS_RTS)?;
        attr.retry_cnt = attr.retry_cnt.min(MAX_RETRIES);
        attr.rnr_retry = attr.rnr_retry.min(MAX_RETRIES);
        self.modify(attr, mask)
    }

    /// Any state → ERR: what is posted completes as flushed.
    pub(crate) fn error(&self) -> Result {
        self.to(bindings::ib_qp_state_IB_QPS_ERR, 0)
    }

    /// Any state → RESET: nothing is posted any more, and not all of it has completed.
    pub(crate) fn reset(&self) -> Result {
        self.to(bindings::ib_qp_state_IB_QPS_RESET, 0)
    }

    /// Receives datagrams to `group` too. `lid` is 0 on RoCE. Sleeps.
    pub(crate) fn attach(&self, group: &Gid, lid: u16) -> Result {
        let mut gid = bindings::ib_gid { raw: group.0 };
        // SAFETY: By the type invariants the queue pair is live; the GID is copied.
        to_result(unsafe { bindings::ib_attach_mcast(self.as_raw(), &mut gid, lid) })
    }

    /// Undoes [`Self::attach`]. Sleeps.
    pub(crate) fn detach(&self, group: &Gid, lid: u16) -> Result {
        let mut gid = bindings::ib_gid { raw: group.0 };
        // SAFETY: As above.
        to_result(unsafe { bindings::ib_detach_mcast(self.as_raw(), &mut gid, lid) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: By the type invariants the queue pair is ours, and nobody else has it.
        let status = unsafe { bindings::ib_destroy_qp_user(self.as_raw(), ptr::null_mut()) };
        if status != 0 {
            pr_err!("destroying QP {} failed: {}\n", self.qpn().0, status);
        }
    }
}
