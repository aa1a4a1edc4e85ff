// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Module parameters declared in `params.c`.

use core::ptr;
use kernel::{
    ffi,
    prelude::*, //
};

unsafe extern "C" {
    static mut ipoib_rs_send_queue_size: ffi::c_int;
    static mut ipoib_rs_recv_queue_size: ffi::c_int;
    static ipoib_rs_max_connections: ffi::c_int;
    static ipoib_rs_roce: bool;
    static ipoib_rs_hcas: *const ffi::c_char;
}

/// `send_queue_size` as given.
pub(crate) fn send_queue_size() -> i32 {
    // SAFETY: The parameter is not writable in sysfs: after loading only `publish` writes it.
    unsafe { ptr::read_volatile(&raw const ipoib_rs_send_queue_size) }
}

/// `recv_queue_size` as given.
pub(crate) fn recv_queue_size() -> i32 {
    // SAFETY: As above.
    unsafe { ptr::read_volatile(&raw const ipoib_rs_recv_queue_size) }
}

/// Shows in sysfs the sizes that are used.
pub(crate) fn publish_queue_sizes(send: i32, recv: i32) {
    // SAFETY: An aligned integer; sysfs reads the old or the new value.
    unsafe { ptr::write_volatile(&raw mut ipoib_rs_send_queue_size, send) };
    // SAFETY: As above.
    unsafe { ptr::write_volatile(&raw mut ipoib_rs_recv_queue_size, recv) };
}

/// `max_connections` as given.
pub(crate) fn max_connections() -> i32 {
    // SAFETY: Written before the module's init function runs, never after.
    unsafe { ipoib_rs_max_connections }
}

/// `roce`.
pub(crate) fn roce() -> bool {
    // SAFETY: Written before the module's init function runs, never after.
    unsafe { ipoib_rs_roce }
}

/// `hcas`.
pub(crate) fn hcas() -> &'static [u8] {
    // SAFETY: Written before the module's init function runs, never after; a string that lives as
    // long as the module.
    unsafe { CStr::from_char_ptr(ipoib_rs_hcas) }.to_bytes()
}
