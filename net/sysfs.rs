// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Text files of network devices in `/sys/class/net/<name>/`.
//!
//! C headers: [`include/linux/sysfs.h`](srctree/include/linux/sysfs.h),
//! [`include/linux/device.h`](srctree/include/linux/device.h)

use super::{
    device::{
        Device,
        Driver,
        UnregisteredDevice, //
    },
    rtnl::Rtnl, //
};
use crate::bindings;
use core::{
    fmt,
    marker::PhantomData,
    ptr,
    slice, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    },
};

/// How long who comes too early waits.
const PAUSE: Delta = Delta::from_millis(1);

/// What a file says, less than a page.
pub(crate) struct Text<'a> {
    page: &'a mut [u8],
    len: usize,
}

impl fmt::Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.page.get_mut(self.len..).ok_or(fmt::Error)?;
        let room = room.get_mut(..text.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

/// Writes a file's text.
pub(crate) type Show<T> = fn(&Device<T>, &mut Text<'_>) -> fmt::Result;

/// Takes what was written to a file. May sleep, but must not unregister a device: who unregisters
/// this one waits for the file with RTNL held, and giving RTNL up here would wait for the users of
/// the other, which may want RTNL.
///
/// # Errors
///
/// `ERESTARTNOINTR`: it is too early; RTNL is given up, and the call made again.
pub(crate) type Store<T> = fn(&Rtnl, &Device<T>, &[u8]) -> Result;

/// A file of the devices of a driver.
///
/// # Invariants
///
/// `raw` calls the callbacks below.
#[repr(C)]
pub(crate) struct File<T: Driver> {
    raw: bindings::device_attribute,
    show: Option<Show<T>>,
    store: Option<Store<T>>,
}

// SAFETY: Nothing of it is ever changed.
unsafe impl<T: Driver> Sync for File<T> {}

impl<T: Driver> File<T> {
    /// A file that is read, or written, or both.
    #[allow(clippy::needless_update, reason = "lockdep adds fields")]
    pub(crate) const fn new(
        name: &'static CStr,
        show: Option<Show<T>>,
        store: Option<Store<T>>,
    ) -> Self {
        let mode = match (&show, &store) {
            (Some(_), Some(_)) => 0o644,
            (Some(_), None) => 0o444,
            (None, _) => 0o200,
        };
        // INVARIANT: As written here.
        Self {
            raw: bindings::device_attribute {
                attr: bindings::attribute {
                    name: name.to_bytes_with_nul().as_ptr().cast(),
                    mode,
                    ..pin_init::zeroed()
                },
                __bindgen_anon_1: bindings::device_attribute__bindgen_ty_1 {
                    show: Some(Self::show_callback),
                },
                __bindgen_anon_2: bindings::device_attribute__bindgen_ty_2 {
                    store: Some(Self::store_callback),
                },
            },
            show,
            store,
        }
    }

    /// # Safety
    ///
    /// `dev` is the `dev` of a registered net device of `T`.
    unsafe fn device<'a>(dev: *mut bindings::device) -> &'a Device<T> {
        // SAFETY: As the caller promises.
        let dev = unsafe { kernel::container_of!(dev, bindings::net_device, dev) };
        // SAFETY: As the caller promises.
        unsafe { Device::from_raw(dev) }
    }

    /// # Safety
    ///
    /// Called by C for a registered device of `T`, with the `raw` of a file and a page of zeros.
    unsafe extern "C" fn show_callback(
        dev: *mut bindings::device,
        file: *mut bindings::device_attribute,
        text: *mut c_char,
    ) -> isize {
        // CAST: `raw` is the first field.
        // SAFETY: As C promises.
        let this = unsafe { &*file.cast::<Self>() };
        // SAFETY: As C promises; the last byte of the page stays zero.
        let page = unsafe { slice::from_raw_parts_mut(text.cast(), kernel::page::PAGE_SIZE - 1) };
        let mut text = Text { page, len: 0 };
        // SAFETY: As C promises.
        let dev = unsafe { Self::device(dev) };
        match this.show.map(|show| show(dev, &mut text)) {
            Some(Ok(())) => text.len as isize,
            _ => EIO.to_errno() as isize,
        }
    }

    /// # Safety
    ///
    /// Called by C for a device of `T` that is, or was, registered, with the `raw` of a file and
    /// `len` bytes at `text`.
    unsafe extern "C" fn store_callback(
        dev: *mut bindings::device,
        file: *mut bindings::device_attribute,
        text: *const c_char,
        len: usize,
    ) -> isize {
        // CAST: `raw` is the first field.
        // SAFETY: As C promises.
        let this = unsafe { &*file.cast::<Self>() };
        let Some(store) = this.store else {
            return EIO.to_errno() as isize;
        };
        // Who unregisters the device has RTNL, and waits for us.
        let Some(rtnl) = Rtnl::try_lock() else {
            // SAFETY: Process context, on the way back to user space.
            return unsafe { bindings::restart_syscall() } as isize;
        };
        // SAFETY: As C promises.
        let dev = unsafe { Self::device(dev) };
        // SAFETY: As C promises.
        let text = unsafe { slice::from_raw_parts(text.cast::<u8>(), len) };
        if !dev.is_registered(&rtnl) {
            return EPERM.to_errno() as isize;
        }
        match store(&rtnl, dev, text) {
            Ok(()) => len as isize,
            Err(error) if error == ERESTARTNOINTR => {
                drop(rtnl);
                fsleep(PAUSE);
                // SAFETY: Process context, on the way back to user space.
                (unsafe { bindings::restart_syscall() }) as isize
            }
            Err(error) => error.to_errno() as isize,
        }
    }
}

/// The files of a device, the last entry none.
///
/// # Invariants
///
/// The last pointer is null; each is, or is the `attr` of a static [`File<T>`].
pub(crate) struct Files<T: Driver, const N: usize>(
    [*const bindings::attribute; N],
    PhantomData<fn(T)>,
);

// SAFETY: Nothing of it is ever changed.
unsafe impl<T: Driver, const N: usize> Sync for Files<T, N> {}

impl<T: Driver, const N: usize> Files<T, N> {
    pub(crate) const fn new(files: [Option<&'static File<T>>; N]) -> Self {
        assert!(N > 0 && files[N - 1].is_none());
        let mut pointers = [ptr::null(); N];
        let mut at = 0;
        while at < N {
            // One that is missing ends the list early.
            if let Some(file) = files[at] {
                pointers[at] = &raw const file.raw.attr;
            }
            at += 1;
        }
        // INVARIANT: The last is null, as just checked.
        Self(pointers, PhantomData)
    }
}

/// The group of a device's files.
pub(crate) struct Group<T: Driver>(bindings::attribute_group, PhantomData<fn(T)>);

// SAFETY: Nothing of it is ever changed.
unsafe impl<T: Driver> Sync for Group<T> {}

impl<T: Driver> Group<T> {
    pub(crate) const fn new<const N: usize>(files: &'static Files<T, N>) -> Self {
        Self(
            bindings::attribute_group {
                __bindgen_anon_2: bindings::attribute_group__bindgen_ty_2 {
                    attrs_const: files.0.as_ptr(),
                },
                ..pin_init::zeroed()
            },
            PhantomData,
        )
    }
}

/// Gives `dev` its files, once it is registered.
pub(crate) fn add_files<T: Driver>(dev: &mut UnregisteredDevice<T>, group: &'static Group<T>) {
    dev.set_sysfs_group(&group.0);
}
