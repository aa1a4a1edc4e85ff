// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Notifications about other network devices.
//!
//! C header: [`include/linux/netdevice.h`](srctree/include/linux/netdevice.h)

use super::device::DeviceId;
use crate::bindings;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What happened to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// It came up, or its carrier or MTU changed.
    Changed,
    /// Its hardware address changed.
    Address,
}

/// Receives notifications.
pub(crate) trait Listener: Send + Sync + 'static {
    /// Something happened to `dev`. RTNL is held, other locks may be.
    fn notify(&self, dev: DeviceId, event: Event);
}

/// A registered listener; dropping it unregisters.
///
/// Registering and unregistering take the locks of the network namespaces and RTNL, and report all
/// devices there are.
///
/// # Invariants
///
/// `block` is registered and stays in place.
#[repr(C)]
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<L: Listener> {
    #[pin]
    block: Opaque<bindings::notifier_block>,
    listener: Arc<L>,
}

// SAFETY: The notifier may be unregistered from any thread.
unsafe impl<L: Listener> Send for Notifier<L> {}

// SAFETY: A shared reference gives `&L` at most, which is `Sync`.
unsafe impl<L: Listener> Sync for Notifier<L> {}

impl<L: Listener> Notifier<L> {
    /// Registers `listener`.
    pub(crate) fn new(listener: Arc<L>) -> Result<Pin<KBox<Self>>> {
        KBox::try_pin_init(
            try_pin_init!(&this in Self {
                listener,
                block <- Opaque::ffi_init(|block: *mut bindings::notifier_block| {
                    // SAFETY: `block` is valid for writes.
                    unsafe {
                        block.write(bindings::notifier_block {
                            notifier_call: Some(Self::callback),
                            ..pin_init::zeroed()
                        })
                    }
                }),
                _: {
                    // SAFETY: All fields are initialised and pinned; `drop` unregisters.
                    to_result(unsafe {
                        bindings::register_netdevice_notifier((*this.as_ptr()).block.get())
                    })?;
                },
            }? Error),
            GFP_KERNEL,
        )
    }

    /// # Safety
    ///
    /// Called by C with the `block` of a live `Self` and the info of the event.
    unsafe extern "C" fn callback(
        block: *mut bindings::notifier_block,
        event: usize,
        info: *mut c_void,
    ) -> c_int {
        // CAST: `block` is the first field of `Self`, and `Opaque` has the layout of its content.
        // SAFETY: As C promises; it unregisters before `Self` is dropped.
        let this = unsafe { &*block.cast::<Self>() };
        // SAFETY: Every notification of the chain starts with this structure.
        let dev = unsafe { (*info.cast::<bindings::netdev_notifier_info>()).dev };
        let event = match event as u32 {
            bindings::netdev_cmd_NETDEV_UP
            | bindings::netdev_cmd_NETDEV_CHANGE
            | bindings::netdev_cmd_NETDEV_CHANGEMTU => Event::Changed,
            bindings::netdev_cmd_NETDEV_CHANGEADDR => Event::Address,
            _ => return bindings::NOTIFY_DONE as c_int,
        };
        this.listener.notify(DeviceId::of_raw(dev), event);
        bindings::NOTIFY_DONE as c_int
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the block is registered. No callback runs afterwards.
        unsafe { bindings::unregister_netdevice_notifier(self.block.get()) };
    }
}
