// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! RTNL, and what `ip -d link` shows of a kind of link.
//!
//! C headers: [`include/linux/rtnetlink.h`](srctree/include/linux/rtnetlink.h),
//! [`include/net/rtnetlink.h`](srctree/include/net/rtnetlink.h)

use super::device::{
    setup_callback,
    Device,
    Driver,
    Locked,
    Private,
    UnregisteredDevice, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    mem::{
        size_of,
        ManuallyDrop, //
    },
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc,
    types::{
        NotThreadSafe,
        Opaque, //
    },
};

/// Evidence that RTNL is held.
pub(crate) struct Rtnl(NotThreadSafe);

impl Rtnl {
    /// Takes RTNL. Sleeps; no instance lock may be held.
    pub(crate) fn lock() -> Self {
        // SAFETY: Takes a mutex in process context.
        unsafe { bindings::rtnl_lock() };
        Self(NotThreadSafe)
    }

    /// Takes RTNL if nobody has it.
    pub(crate) fn try_lock() -> Option<Self> {
        // SAFETY: Takes a mutex in process context.
        let taken = unsafe { bindings::rtnl_trylock() } != 0;
        // Not `then_some()`: an object made in vain would unlock what somebody else holds.
        if taken {
            Some(Self(NotThreadSafe))
        } else {
            None
        }
    }
}

/// Whether the task may administrate networks, of all namespaces.
pub(crate) fn may_administrate() -> bool {
    // SAFETY: Looks at the current task.
    unsafe { bindings::capable(bindings::CAP_NET_ADMIN as i32) }
}

impl Rtnl {
    /// Evidence for a callback that is called with RTNL held.
    ///
    /// # Safety
    ///
    /// RTNL is held for as long as the result lives.
    pub(super) unsafe fn borrowed() -> ManuallyDrop<Self> {
        ManuallyDrop::new(Self(NotThreadSafe))
    }
}

impl Drop for Rtnl {
    fn drop(&mut self) {
        // SAFETY: This object stands for the held mutex.
        unsafe { bindings::rtnl_unlock() };
    }
}

/// Attributes of a link, being written into a netlink message.
pub(crate) struct Attributes<'a>(NonNull<bindings::sk_buff>, PhantomData<&'a mut ()>);

impl Attributes<'_> {
    /// Appends a 16-bit attribute.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`: the message is full.
    pub(crate) fn put_u16(&mut self, attribute: u32, value: u16) -> Result {
        // SAFETY: The message is live and ours to append to during the call.
        to_result(unsafe { bindings::nla_put_u16(self.0.as_ptr(), attribute as i32, value) })
    }
}

/// 16-bit attributes that an administrator wants a link to have.
///
/// # Invariants
///
/// `table` has an entry for each number up to `max`: null, or an attribute of two bytes that lives
/// as long as `'a`.
pub(crate) struct Wishes<'a> {
    table: *mut *mut bindings::nlattr,
    max: u32,
    extack: *mut bindings::netlink_ext_ack,
    _table: PhantomData<&'a ()>,
}

impl Wishes<'_> {
    /// The attribute's value, if it is wanted.
    pub(crate) fn get_u16(&self, attribute: u32) -> Option<u16> {
        if self.table.is_null() || attribute > self.max {
            return None;
        }
        // SAFETY: By the type invariant the table has that entry.
        let attribute = unsafe { *self.table.add(attribute as usize) };
        // SAFETY: By the type invariant the attribute is live and has two bytes.
        (!attribute.is_null()).then(|| unsafe { bindings::nla_get_u16(attribute) })
    }

    /// Says why it cannot be; for `?`.
    pub(crate) fn refuse(&self, why: &'static CStr, error: Error) -> Error {
        if !self.extack.is_null() {
            // SAFETY: C gives a live place for messages, or null; the text is static.
            unsafe { bindings::nl_set_err_msg(self.extack, why.as_char_ptr()) };
        }
        error
    }
}

/// A driver whose devices are of a kind of link. Its attributes are 16 bits wide.
pub(crate) trait LinkKind: Driver {
    /// The highest number of an attribute. [`Self::fill`] writes that many at most.
    const ATTRIBUTES: usize;

    /// Makes a device that is a child of `parent` and registers it. May sleep.
    fn create(
        _rtnl: &Rtnl,
        _parent: &Device<Self>,
        _new: UnregisteredDevice<Self>,
        _wishes: &Wishes<'_>,
    ) -> Result {
        Err(EOPNOTSUPP)
    }

    /// Changes a device. May sleep.
    fn change(_rtnl: &Rtnl, _locked: &mut Locked<'_, Self>, _wishes: &Wishes<'_>) -> Result {
        Err(EOPNOTSUPP)
    }

    /// Describes a device. RTNL is held.
    fn fill(dev: &Device<Self>, attributes: &mut Attributes<'_>) -> Result;
}

/// A registered kind of link. Netlink makes and deletes children of its devices; to delete one that
/// is not a child does nothing.
///
/// A device goes back to the initial network namespace when its own is taken down.
///
/// Dropping it takes the locks of the network namespaces and RTNL.
///
/// # Invariants
///
/// `ops` is initialised, registered, and stays in place.
#[pin_data(PinnedDrop)]
pub(crate) struct LinkOps<T: Driver> {
    #[pin]
    ops: Opaque<bindings::rtnl_link_ops>,
    _driver: PhantomData<fn(T)>,
}

// SAFETY: The kind may be registered and unregistered from any thread.
unsafe impl<T: Driver> Send for LinkOps<T> {}

// SAFETY: There is nothing to do with a shared reference but to name the kind.
unsafe impl<T: Driver> Sync for LinkOps<T> {}

/// More attributes than any kind has.
const POLICIES: usize = 8;

impl<T: LinkKind> LinkOps<T> {
    /// All are 16 bits wide.
    const POLICY: [bindings::nla_policy; POLICIES] = {
        const_assert!(T::ATTRIBUTES < POLICIES);
        [bindings::nla_policy {
            type_: bindings::NLA_U16 as u8,
            ..pin_init::zeroed()
        }; POLICIES]
    };

    /// Registers a kind.
    ///
    /// # Errors
    ///
    /// `EEXIST`: the kind is taken.
    pub(crate) fn register(kind: &'static CStr) -> Result<Arc<Self>> {
        Arc::pin_init(
            try_pin_init!(Self {
                ops <- Opaque::try_ffi_init(|ops: *mut bindings::rtnl_link_ops| {
                    // SAFETY: `ops` is valid for writes.
                    unsafe {
                        ops.write(bindings::rtnl_link_ops {
                            kind: kind.as_char_ptr(),
                            netns_refund: true,
                            maxtype: T::ATTRIBUTES as u32,
                            policy: Self::POLICY.as_ptr(),
                            priv_size: size_of::<Private<T>>(),
                            setup: Some(setup_callback::<T>),
                            newlink: Some(Self::newlink_callback),
                            dellink: Some(Self::dellink_callback),
                            changelink: Some(Self::changelink_callback),
                            get_size: Some(Self::get_size_callback),
                            fill_info: Some(Self::fill_info_callback),
                            ..pin_init::zeroed()
                        })
                    };
                    // SAFETY: `ops` is complete, pinned, and unregistered before it is dropped.
                    to_result(unsafe { bindings::rtnl_link_register(ops) })
                }),
                _driver: PhantomData,
            }? Error),
            GFP_KERNEL,
        )
    }

    /// # Safety
    ///
    /// Called by C for a device of this kind.
    unsafe extern "C" fn get_size_callback(_dev: *const bindings::net_device) -> usize {
        // SAFETY: Pure arithmetic.
        T::ATTRIBUTES * unsafe { bindings::nla_total_size(2) }
    }

    /// # Safety
    ///
    /// Called by C under RTNL, with a device that it made for this kind and frees after an error,
    /// and the attributes that the policy allows.
    unsafe extern "C" fn newlink_callback(
        dev: *mut bindings::net_device,
        params: *mut bindings::rtnl_newlink_params,
        extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: RTNL is held during the call.
        let rtnl = unsafe { Rtnl::borrowed() };
        // INVARIANT: C has checked the attributes by the policy.
        let wishes = Wishes {
            // SAFETY: C gives live parameters.
            table: unsafe { (*params).data },
            max: T::ATTRIBUTES as u32,
            extack,
            _table: PhantomData,
        };
        kernel::error::from_result(|| {
            // SAFETY: C gives a table of attributes with an entry for this one, of four bytes.
            let link = unsafe { *(*params).tb.add(bindings::IFLA_LINK as usize) };
            if link.is_null() {
                return Err(wishes.refuse(c"a child needs its parent: link NAME", EINVAL));
            }
            // SAFETY: As above; the namespace is live.
            let parent = unsafe {
                let net = bindings::rtnl_newlink_link_net(params);
                bindings::__dev_get_by_index(net, bindings::nla_get_u32(link) as i32)
            };
            // SAFETY: C made both; RTNL keeps the parent registered.
            let ours = !parent.is_null()
                && unsafe { ptr::eq((*parent).rtnl_link_ops, (*dev).rtnl_link_ops) };
            if !ours {
                return Err(wishes.refuse(c"the parent is no interface of this driver", ENODEV));
            }
            // SAFETY: Only registered devices of `T` are of this kind.
            let parent = unsafe { Device::<T>::from_raw(parent) };
            if parent.parent().is_some() {
                return Err(wishes.refuse(c"the parent is a child itself", EINVAL));
            }
            let new = NonNull::new(dev).ok_or(EINVAL)?;
            // SAFETY: C made the device for this kind, and frees it after an error.
            let new = unsafe { UnregisteredDevice::<T>::lent(new)? };
            T::create(&rtnl, parent, new, &wishes).map(|()| 0)
        })
    }

    /// # Safety
    ///
    /// Called by C for a device of this kind, under RTNL, with a list of devices to unregister.
    unsafe extern "C" fn dellink_callback(
        dev: *mut bindings::net_device,
        list: *mut bindings::list_head,
    ) {
        // SAFETY: Only registered devices of `T` are of this kind.
        if unsafe { Device::<T>::from_raw(dev) }.parent().is_some() {
            // SAFETY: The device is registered, and RTNL is held.
            unsafe { bindings::unregister_netdevice_queue(dev, list) };
        }
    }

    /// # Safety
    ///
    /// Called by C for a device of this kind, under RTNL, with the attributes that the policy
    /// allows.
    unsafe extern "C" fn changelink_callback(
        dev: *mut bindings::net_device,
        _tb: *mut *mut bindings::nlattr,
        data: *mut *mut bindings::nlattr,
        extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: Only registered devices of `T` are of this kind.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // INVARIANT: C has checked the attributes by the policy.
        let wishes = Wishes {
            table: data,
            max: T::ATTRIBUTES as u32,
            extack,
            _table: PhantomData,
        };
        // SAFETY: RTNL is held during the call.
        let rtnl = unsafe { Rtnl::borrowed() };
        kernel::error::from_result(|| T::change(&rtnl, &mut dev.lock(), &wishes).map(|()| 0))
    }

    /// # Safety
    ///
    /// Called by C for a device of this kind, with a live message, under RTNL.
    unsafe extern "C" fn fill_info_callback(
        skb: *mut bindings::sk_buff,
        dev: *const bindings::net_device,
    ) -> c_int {
        // SAFETY: Only registered devices of `T` are of this kind.
        let dev = unsafe { Device::<T>::from_raw(dev.cast_mut()) };
        kernel::error::from_result(|| {
            let skb = NonNull::new(skb).ok_or(EINVAL)?;
            T::fill(dev, &mut Attributes(skb, PhantomData)).map(|()| 0)
        })
    }
}

impl<T: Driver> LinkOps<T> {
    pub(super) fn as_raw(&self) -> *const bindings::rtnl_link_ops {
        self.ops.get()
    }
}

#[pinned_drop]
impl<T: Driver> PinnedDrop for LinkOps<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the kind is registered. Registrations of devices hold a
        // reference to this object, so none is left.
        unsafe { bindings::rtnl_link_unregister(self.ops.get()) };
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_rtnl)]
mod tests {
    use super::*;

    /// Who does not get the lock leaves it to its holder.
    #[test]
    fn tried_in_vain() {
        let rtnl = Rtnl::lock();
        let taken = [Rtnl::try_lock().is_some(), Rtnl::try_lock().is_some()];
        drop(rtnl);
        // A failed assertion ends the task, so nothing may be held.
        assert_eq!(taken, [false; 2]);
    }
}
