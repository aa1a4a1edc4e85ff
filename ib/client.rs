// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Clients: who wants to know of every RDMA device.

use super::{
    device::Device,
    Gid,
    PortNum, //
};
use crate::{
    bindings,
    net::device::DeviceRef, //
};
use core::{
    marker::PhantomData,
    net::{
        IpAddr,
        Ipv4Addr,
        Ipv6Addr, //
    },
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full, //
            },
            Atomic, //
        },
        Arc, //
    },
    types::Opaque,
};

/// Which interface a request for a connection was meant for, as the request has it.
pub(crate) struct Query {
    pub(crate) port: PortNum,
    pub(crate) pkey: u16,
    /// Our GID.
    pub(crate) gid: Option<Gid>,
    /// Our IP address.
    pub(crate) address: Option<IpAddr>,
}

/// A client.
pub(crate) trait Client: Send + Sync + Sized + 'static {
    /// What the client keeps for a device; dropping it, in process context, must let go of the
    /// device.
    type Data: Send + Sync + 'static;

    /// The client's name.
    const NAME: &'static CStr;

    /// Where the client's registration is found: a static of its own.
    fn registry() -> &'static Registry<Self>;

    /// A device came. Process context, RTNL not held.
    ///
    /// # Errors
    ///
    /// The device is none of the client's, or could not be attached to.
    fn add(&self, device: Arc<Device>) -> Result<Self::Data>;

    /// The network device that a request is for, of a port of InfiniBand: a listener of the RDMA
    /// connection manager hears of the request in the namespace of that device.
    ///
    /// The communication manager waits for the answer: no lock may be taken here that is held while
    /// an identifier is destroyed.
    fn find(_data: &Self::Data, _query: &Query) -> Option<DeviceRef> {
        None
    }
}

/// Finds the one registration of a client: C tells it which device came, but not to whom.
///
/// # Invariants
///
/// The value is 0 or the address of a live [`Registration<C>`].
pub(crate) struct Registry<C: Client>(Atomic<usize>, PhantomData<fn(C)>);

impl<C: Client> Registry<C> {
    pub(crate) const fn new() -> Self {
        // INVARIANT: 0.
        Self(Atomic::new(0), PhantomData)
    }
}

/// A registered client; dropping it removes the client from every device.
///
/// # Invariants
///
/// `raw` is registered and stays in place; the registry of `C` has the address of this object.
#[pin_data(PinnedDrop)]
pub(crate) struct Registration<C: Client> {
    #[pin]
    raw: Opaque<bindings::ib_client>,
    client: C,
}

// SAFETY: The client may be unregistered from any thread.
unsafe impl<C: Client> Send for Registration<C> {}

// SAFETY: A shared reference gives nothing away.
unsafe impl<C: Client> Sync for Registration<C> {}

impl<C: Client> Registration<C> {
    /// Registers `client`, and adds it to every device there is.
    ///
    /// # Errors
    ///
    /// `EBUSY`: the client is registered already.
    pub(crate) fn new(client: C) -> Result<Pin<KBox<Self>>> {
        KBox::try_pin_init(
            try_pin_init!(&this in Self {
                client,
                raw <- Opaque::ffi_init(|raw: *mut bindings::ib_client| {
                    // SAFETY: `raw` is valid for writes.
                    unsafe {
                        raw.write(bindings::ib_client {
                            name: C::NAME.as_char_ptr(),
                            add: Some(Self::add_callback),
                            remove: Some(Self::remove_callback),
                            get_net_dev_by_params: Some(Self::find_callback),
                            ..pin_init::zeroed()
                        })
                    }
                }),
                _: {
                    let address = this.as_ptr() as usize;
                    // INVARIANT: The object is complete and pinned.
                    C::registry().0.cmpxchg(0, address, Full).map_err(|_| EBUSY)?;
                    // SAFETY: `raw` is complete and pinned; `drop` unregisters.
                    to_result(unsafe { bindings::ib_register_client((*this.as_ptr()).raw.get()) })
                        .inspect_err(|_| C::registry().0.store(0, kernel::sync::atomic::ordering::Release))?;
                },
            }? Error),
            GFP_KERNEL,
        )
    }

    /// # Safety
    ///
    /// Called by C, between registration and unregistration, with a live device.
    unsafe extern "C" fn add_callback(device: *mut bindings::ib_device) -> c_int {
        let this = C::registry().0.load(Acquire) as *const Self;
        kernel::error::from_result(|| {
            // SAFETY: By the registry's invariant; C calls only while the client is registered.
            let this = unsafe { this.as_ref() }.ok_or(ENODEV)?;
            let live = NonNull::new(device).ok_or(EINVAL)?;
            // SAFETY: C gives a live device.
            let owned = Arc::new(unsafe { Device::get(live)? }, GFP_KERNEL)?;
            let data = KBox::new(this.client.add(owned)?, GFP_KERNEL)?;
            // SAFETY: The device is live and the client registered; `remove_callback` takes the
            // data back.
            unsafe {
                bindings::ib_set_client_data(device, this.raw.get(), KBox::into_raw(data).cast())
            };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Called by C once for each device that was added, with the data that `add_callback` set.
    unsafe extern "C" fn remove_callback(_device: *mut bindings::ib_device, data: *mut c_void) {
        if !data.is_null() {
            // SAFETY: The data came from a box in `add_callback`, and is given back once.
            drop(unsafe { KBox::from_raw(data.cast::<C::Data>()) });
        }
    }
}

impl<C: Client> Registration<C> {
    /// # Safety
    ///
    /// Called by C, while `remove_callback` is not, with the data that `add_callback` set; `gid` and
    /// `address` are null or valid, the latter as long as its family wants it.
    unsafe extern "C" fn find_callback(
        _device: *mut bindings::ib_device,
        port: u32,
        pkey: u16,
        gid: *const bindings::ib_gid,
        address: *const bindings::sockaddr,
        data: *mut c_void,
    ) -> *mut bindings::net_device {
        // SAFETY: C gives the data that was set; it stays for as long as this call takes.
        let Some(data) = (unsafe { data.cast::<C::Data>().as_ref() }) else {
            return ptr::null_mut();
        };
        let query = Query {
            port: PortNum(port),
            pkey,
            // SAFETY: It is null or valid; the union's members are plain bytes.
            gid: unsafe { gid.as_ref().map(|gid| Gid(gid.raw)) },
            // SAFETY: It is null or valid.
            address: unsafe { ip_address(address) },
        };
        C::find(data, &query).map_or(ptr::null_mut(), DeviceRef::into_raw)
    }
}

/// The IP address in a C one, if it is of IP.
///
/// # Safety
///
/// `address` is null, or valid and as long as its family wants it.
unsafe fn ip_address(address: *const bindings::sockaddr) -> Option<IpAddr> {
    // SAFETY: As the caller promises.
    let family = u32::from(unsafe { address.as_ref() }?.sa_family);
    match family {
        bindings::AF_INET => {
            let address = address.cast::<bindings::sockaddr_in>();
            // SAFETY: As above.
            let bytes = unsafe { (*address).sin_addr.s_addr }.to_ne_bytes();
            Some(IpAddr::V4(Ipv4Addr::from(bytes)))
        }
        bindings::AF_INET6 => {
            let address = address.cast::<bindings::sockaddr_in6>();
            // SAFETY: As above; the union's members are plain bytes.
            let bytes = unsafe { (*address).sin6_addr.in6_u.u6_addr8 };
            Some(IpAddr::V6(Ipv6Addr::from(bytes)))
        }
        _ => None,
    }
}

#[pinned_drop]
impl<C: Client> PinnedDrop for Registration<C> {
    fn drop(self: Pin<&mut Self>) {
        let registered = C::registry().0.load(Acquire);
        if !ptr::eq(registered as *const Self, &raw const *self) {
            return;
        }
        // SAFETY: By the type invariant the client is registered. No callback runs afterwards.
        unsafe { bindings::ib_unregister_client(self.raw.get()) };
        C::registry()
            .0
            .store(0, kernel::sync::atomic::ordering::Release);
    }
}
