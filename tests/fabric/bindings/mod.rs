// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Generated bindings to what a provider of verbs needs. Only `glue` names this module.

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

// SAFETY: It has no size.
unsafe impl<T> pin_init::Zeroable for __BindgenUnionField<T> {}

include!(concat!(env!("IBF_OUT"), "/bindings_generated.rs"));
include!(concat!(env!("IBF_OUT"), "/bindings_helpers_generated.rs"));
