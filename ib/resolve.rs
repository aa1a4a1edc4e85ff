// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Ethernet addresses of RoCE destinations whose GID does not contain one.
//!
//! C header: [`include/rdma/ib_addr.h`](srctree/include/rdma/ib_addr.h)

use super::{
    device::Device,
    Gid,
    PortNum, //
};
use crate::bindings;
use core::ptr;
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        Completion, //
    },
    types::Opaque,
};

/// How long an answer may take.
const TIMEOUT_MS: usize = 500;

/// The next hop to a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NextHop {
    pub(crate) mac: [u8; 6],
    pub(crate) hop_limit: u8,
}

/// A question on its way. The callback owns one reference.
#[pin_data]
struct Question {
    #[pin]
    answered: Completion,
    status: Atomic<i32>,
    #[pin]
    address: Opaque<bindings::rdma_dev_addr>,
}

// SAFETY: The address is written by the core until the callback ran, and read afterwards.
unsafe impl Send for Question {}

// SAFETY: As above.
unsafe impl Sync for Question {}

/// An IPv4 or IPv6 socket address.
#[repr(C)]
union SocketAddress {
    v4: bindings::sockaddr_in,
    v6: bindings::sockaddr_in6,
}

impl SocketAddress {
    fn of(gid: &Gid) -> Self {
        let mut address = Self {
            v6: pin_init::zeroed(),
        };
        let raw = bindings::ib_gid { raw: gid.0 };
        // SAFETY: The union has room for either kind.
        unsafe { bindings::rdma_gid2ip((&raw mut address).cast(), &raw) };
        address
    }
}

/// Asks the network stack for the next hop from the own GID at `gid_index` to `gid`.
///
/// Sleeps, for half a second and a little at most.
///
/// # Errors
///
/// - `EHOSTUNREACH`, `ENETUNREACH` and what else the stack says.
/// - `ETIMEDOUT`: no neighbour answered.
pub(crate) fn next_hop(
    device: &Device,
    port: PortNum,
    gid_index: u8,
    gid: &Gid,
) -> Result<NextHop> {
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    if let Some(answer) = super::fake::NEXT_HOP.get() {
        return answer.map(|mac| NextHop { mac, hop_limit: 64 });
    }
    // SAFETY: The device is live; C checks port and index.
    let attr = unsafe { bindings::rdma_get_gid_attr(device.as_raw(), port.0, gid_index.into()) };
    let attr = kernel::error::from_err_ptr(attr.cast_mut())?;
    // SAFETY: We hold a reference to the entry; all bytes of the union are plain data.
    let source = Gid(unsafe { (*attr).gid.raw });
    let answer = ask(&source, gid, attr);
    // SAFETY: The reference is ours to give back, and the question is answered.
    unsafe { bindings::rdma_put_gid_attr(attr) };
    answer
}

fn ask(source: &Gid, gid: &Gid, attr: *const bindings::ib_gid_attr) -> Result<NextHop> {
    let question = Arc::pin_init(
        pin_init!(Question {
            answered <- Completion::new(),
            status: Atomic::new(0),
            address <- Opaque::ffi_init(|address: *mut bindings::rdma_dev_addr| {
                // SAFETY: `address` is valid for writes.
                unsafe {
                    address.write(pin_init::zeroed());
                    (*address).net = &raw mut bindings::init_net;
                    (*address).sgid_attr = attr;
                }
            }),
        }),
        GFP_KERNEL,
    )?;
    let mut from = SocketAddress::of(source);
    let to = SocketAddress::of(gid);
    let context = Arc::into_raw(question.clone());
    // SAFETY: The socket addresses are copied; `address` lives in the context, of which the
    // callback owns a reference; it runs once if and only if this succeeds.
    let status = to_result(unsafe {
        bindings::rdma_resolve_ip(
            (&raw mut from).cast(),
            (&raw const to).cast(),
            (*context).address.get(),
            TIMEOUT_MS,
            Some(callback),
            true,
            context.cast_mut().cast(),
        )
    });
    if let Err(error) = status {
        // SAFETY: The callback will not run, so its reference is ours again.
        drop(unsafe { Arc::from_raw(context) });
        return Err(error);
    }
    question.answered.wait_for_completion();
    // The callback may still be on its way back, through code of this module: waits for that.
    // SAFETY: The address is that of the question.
    unsafe { bindings::rdma_addr_cancel(question.address.get()) };
    to_result(question.status.load(Relaxed))?;
    // SAFETY: The callback ran, so nobody writes the address any more.
    let address = unsafe { &*question.address.get() };
    let mut mac = [0; 6];
    mac.copy_from_slice(&address.dst_dev_addr[..6]);
    Ok(NextHop {
        mac,
        hop_limit: u8::try_from(address.hoplimit).unwrap_or(u8::MAX),
    })
}

/// # Safety
///
/// Called by C once, with the context that `ask` gave.
unsafe extern "C" fn callback(
    status: c_int,
    _source: *mut bindings::sockaddr,
    _address: *mut bindings::rdma_dev_addr,
    context: *mut c_void,
) {
    // SAFETY: `ask` leaked a reference for this call.
    let question = unsafe { Arc::from_raw(ptr::from_ref(&*context.cast::<Question>())) };
    question.status.store(status, Relaxed);
    question.answered.complete_all();
}
