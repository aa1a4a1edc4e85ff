// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Safe network devices: what a driver needs of `linux/netdevice.h` and its neighbours.
//!
//! A driver implements [`device::Driver`]. Its data lives in the device's private area in three
//! parts, each reached by showing how it is protected:
//!
//! | part | reached through | protected by |
//! |---|---|---|
//! | the driver itself | [`device::Device`] (derefs to it) | its own means |
//! | [`device::Driver::Tx`] | `start_xmit`, [`device::TxGuard`] | the transmit lock |
//! | [`device::Driver::Control`] | [`device::Locked`] | the device's instance lock |
//!
//! Lock order: RTNL, instance lock, transmit lock (softirqs off).

pub(crate) mod device;
pub(crate) mod ethtool;
pub(crate) mod notifier;
pub(crate) mod page_pool;
pub(crate) mod rtnl;
pub(crate) mod skb;
pub(crate) mod sysfs;

use crate::bindings;

/// Whether a message caused by traffic may be logged now (the network stack's common limit).
pub(crate) fn ratelimit() -> bool {
    // SAFETY: Always safe to call.
    unsafe { bindings::net_ratelimit() != 0 }
}

/// Waits for all RCU readers, quickly if RTNL is held. Sleeps.
pub(crate) fn synchronize() {
    // SAFETY: Process context, as the caller sees to.
    unsafe { bindings::synchronize_net() };
}

/// Waits for all RCU readers, quickly. For the end of things, where another waits. Sleeps.
pub(crate) fn synchronize_expedited() {
    // SAFETY: Process context, as the caller sees to.
    unsafe { bindings::synchronize_rcu_expedited() };
}

/// Logs a warning unless the rate limit forbids it.
macro_rules! warn_ratelimited {
    ($($arg:tt)*) => {
        if $crate::net::ratelimit() {
            kernel::pr_warn!($($arg)*);
        }
    };
}
pub(crate) use warn_ratelimited;

/// Logs a warning about what a peer or a user does wrong: each place in the code does so once in
/// ten seconds.
macro_rules! warn_seldom {
    ($($arg:tt)*) => {{
        static LIMIT: $crate::sync::Seldom = $crate::sync::Seldom::new();
        if LIMIT.may(10 * $crate::sync::HZ) {
            kernel::pr_warn!($($arg)*);
        }
    }};
}
pub(crate) use warn_seldom;

/// How the IP stack maps groups to hardware addresses.
#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
pub(crate) mod mapping {
    use crate::bindings;

    /// The address of an IPv4 group on the link with this broadcast address.
    pub(crate) fn ipv4(group: [u8; 4], broadcast: &[u8; 20]) -> [u8; 20] {
        let mut address = [0; 20];
        let group = u32::from_ne_bytes(group);
        // SAFETY: Both addresses have the length of an InfiniBand hardware address.
        unsafe { bindings::ip_ib_mc_map(group, broadcast.as_ptr(), address.as_mut_ptr().cast()) };
        address
    }

    /// The address of an IPv6 group on the link with this broadcast address.
    pub(crate) fn ipv6(group: &[u8; 16], broadcast: &[u8; 20]) -> [u8; 20] {
        let mut address = [0; 20];
        let mut ip = bindings::in6_addr::default();
        ip.in6_u.u6_addr8 = *group;
        // SAFETY: Both addresses have the length of an InfiniBand hardware address.
        unsafe { bindings::ipv6_ib_mc_map(&ip, broadcast.as_ptr(), address.as_mut_ptr().cast()) };
        address
    }
}
