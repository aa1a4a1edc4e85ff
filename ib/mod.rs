// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Safe verbs over ib_core, as far as a datagram protocol needs them that also connects.
//!
//! Objects own what they need: a [`qp::Qp`] its completion queues and protection domain, these
//! their [`device::Device`]. So they go in the right order whoever drops them last; a device waits
//! in `ib_unregister_device` until its objects are gone.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

pub(crate) mod ah;
pub(crate) mod client;
pub(crate) mod cm;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod pd;
pub(crate) mod qp;
pub(crate) mod queue;
pub(crate) mod resolve;
pub(crate) mod sa;
pub(crate) mod srq;

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
pub(crate) mod fake;
#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
mod selftest;
#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
pub(crate) mod selftest_rc;

use core::fmt;

/// A global identifier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

impl Gid {
    /// Whether it names a group.
    #[inline]
    pub(crate) fn is_multicast(&self) -> bool {
        self.0[0] == 0xff
    }
}

impl kernel::fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pair) in self.0.chunks_exact(2).enumerate() {
            let colon = if index == 0 { "" } else { ":" };
            f.write_fmt(format_args!(
                "{colon}{:x}",
                u16::from_be_bytes([pair[0], pair[1]])
            ))?;
        }
        Ok(())
    }
}

/// A port of a device, from 1 (0 on a switch).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PortNum(pub(crate) u32);

/// The number of a queue pair, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Qpn(pub(crate) u32);

/// Tells queue pairs apart that are there at the same time.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, zerocopy_derive::IntoBytes, zerocopy_derive::Immutable,
)]
#[repr(transparent)]
pub(crate) struct QpId(usize);

/// A key that a datagram and its receiver must share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QKey(pub(crate) u32);
