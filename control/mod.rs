// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What administrators see and change.

mod ethtool;
mod link;
pub(crate) mod sysfs;
