// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Generated bindings to ib_core and to the parts of the network stack that the `kernel` crate
//! does not bind.
//!
//! Only `ib/`, `net/` and `sync/` name this module. A type that is not generated here comes from
//! [`kernel::bindings`], so that a value can cross into the `kernel` crate's API.

#![allow(
    clippy::all,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    unused_imports,
    improper_ctypes,
    unnecessary_transmutes
)]

use kernel::{
    bindings::*,
    ffi, //
};
use pin_init::MaybeZeroable;

pub(crate) use kernel::bindings::*;

// SAFETY: A bit field is bytes.
unsafe impl<S: pin_init::Zeroable> pin_init::Zeroable for __BindgenBitfieldUnit<S> {}

include!(concat!(env!("IPOIB_RS_OUT"), "/bindings_generated.rs"));
include!(concat!(
    env!("IPOIB_RS_OUT"),
    "/bindings_helpers_generated.rs"
));
