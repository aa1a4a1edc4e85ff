// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Asynchronous events of a device.

use super::{
    device::Device,
    PortNum, //
};
use crate::bindings;
use kernel::{
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What happened to a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    PortActive,
    PortError,
    LidChange,
    PKeyChange,
    SmChange,
    ClientReregister,
    GidChange,
    /// The device works no more; of each of its ports.
    DeviceFatal,
    Other,
}

/// Receives events.
pub(crate) trait Listener: Send + Sync + 'static {
    /// Something happened. Process context, but locks of the RDMA core are held: no verbs.
    fn event(&self, port: PortNum, event: Event);
}

/// A registered listener; dropping it waits for a running call.
///
/// # Invariants
///
/// `raw` is registered on `device` and stays in place.
#[repr(C)]
#[pin_data(PinnedDrop)]
pub(crate) struct Handler<L: Listener> {
    #[pin]
    raw: Opaque<bindings::ib_event_handler>,
    listener: L,
    device: Arc<Device>,
}

// SAFETY: The handler may be unregistered from any thread.
unsafe impl<L: Listener> Send for Handler<L> {}

// SAFETY: A shared reference gives nothing away.
unsafe impl<L: Listener> Sync for Handler<L> {}

impl<L: Listener> Handler<L> {
    /// Registers `listener` for events of `device`.
    pub(crate) fn new(device: Arc<Device>, listener: L) -> Result<Pin<KBox<Self>>> {
        let raw_device = device.as_raw();
        KBox::try_pin_init(
            try_pin_init!(&this in Self {
                listener,
                device,
                raw <- Opaque::ffi_init(|raw| {
                    // SAFETY: `raw` is valid for writes, the device is live.
                    unsafe {
                        bindings::INIT_IB_EVENT_HANDLER(raw, raw_device, Some(Self::callback))
                    }
                }),
                _: {
                    // SAFETY: All fields are initialised and pinned; `drop` unregisters.
                    unsafe { bindings::ib_register_event_handler((*this.as_ptr()).raw.get()) };
                },
            }? Error),
            GFP_KERNEL,
        )
    }

    /// # Safety
    ///
    /// Called by C with the `raw` of a live `Self` and the event.
    unsafe extern "C" fn callback(
        raw: *mut bindings::ib_event_handler,
        event: *mut bindings::ib_event,
    ) {
        // CAST: `raw` is the first field of `Self`, and `Opaque` has the layout of its content.
        // SAFETY: As C promises; it unregisters before `Self` is dropped.
        let this = unsafe { &*raw.cast::<Self>() };
        // SAFETY: As C promises; the events below are about ports.
        let (kind, port) = unsafe { ((*event).event, (*event).element.port_num) };
        let kind = match kind {
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE => Event::PortActive,
            bindings::ib_event_type_IB_EVENT_PORT_ERR => Event::PortError,
            bindings::ib_event_type_IB_EVENT_LID_CHANGE => Event::LidChange,
            bindings::ib_event_type_IB_EVENT_PKEY_CHANGE => Event::PKeyChange,
            bindings::ib_event_type_IB_EVENT_SM_CHANGE => Event::SmChange,
            bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER => Event::ClientReregister,
            bindings::ib_event_type_IB_EVENT_GID_CHANGE => Event::GidChange,
            bindings::ib_event_type_IB_EVENT_DEVICE_FATAL => {
                for port in this.device.ports() {
                    this.listener.event(port, Event::DeviceFatal);
                }
                return;
            }
            _ => return this.listener.event(PortNum(0), Event::Other),
        };
        this.listener.event(PortNum(port), kind);
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Handler<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the handler is registered, and `device` is still live.
        unsafe { bindings::ib_unregister_event_handler(self.raw.get()) };
    }
}
