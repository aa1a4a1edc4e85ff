// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What `ethtool` asks.
//!
//! C header: [`include/linux/ethtool.h`](srctree/include/linux/ethtool.h)

use super::device::{
    Device,
    Driver,
    Locked, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    slice, //
};
use kernel::prelude::*;

/// Who drives a device (`ethtool -i`).
pub(crate) struct Info<'a> {
    raw: &'a mut bindings::ethtool_drvinfo,
}

fn fill(field: &mut [c_char], text: &[u8]) {
    let len = text.len().min(field.len().saturating_sub(1));
    for (to, from) in field.iter_mut().zip(&text[..len]) {
        *to = *from as c_char;
    }
}

impl Info<'_> {
    pub(crate) fn driver(&mut self, text: &[u8]) {
        fill(&mut self.raw.driver, text);
    }

    pub(crate) fn firmware(&mut self, text: &[u8]) {
        fill(&mut self.raw.fw_version, text);
    }

    pub(crate) fn bus(&mut self, text: &[u8]) {
        fill(&mut self.raw.bus_info, text);
    }
}

/// Sizes of the rings (`ethtool -g`).
pub(crate) struct Rings {
    pub(crate) rx: u32,
    pub(crate) rx_max: u32,
    pub(crate) tx: u32,
    pub(crate) tx_max: u32,
}

/// A driver's answers. The instance lock is held, RTNL may not be.
pub(crate) trait Ops: Sized {
    /// Names of the counters, in order, at most 31 bytes each.
    const COUNTERS: &'static [&'static str];

    fn info(dev: &Device<Self>, info: &mut Info<'_>)
    where
        Self: Driver;

    /// Megabits per second; `None` if that is not known. Of a full-duplex link with a carrier.
    fn speed(_locked: &mut Locked<'_, Self>) -> Option<u32>
    where
        Self: Driver,
    {
        None
    }

    fn rings(dev: &Device<Self>) -> Rings
    where
        Self: Driver;

    /// Writes the counters, as many as [`Self::COUNTERS`] names.
    fn counters(dev: &Device<Self>, values: &mut [u64])
    where
        Self: Driver;
}

pub(super) struct VTable<T: Driver>(PhantomData<T>);

impl<T: Driver> VTable<T> {
    pub(super) const VTABLE: bindings::ethtool_ops = bindings::ethtool_ops {
        get_drvinfo: Some(Self::get_drvinfo_callback),
        get_link: Some(bindings::ethtool_op_get_link),
        // It runs the work of a carrier that changed, which wants RTNL.
        op_needs_rtnl: bindings::ETHTOOL_OP_NEEDS_RTNL_GLINK,
        get_link_ksettings: Some(Self::get_link_ksettings_callback),
        get_ts_info: Some(bindings::ethtool_op_get_ts_info),
        get_ringparam: Some(Self::get_ringparam_callback),
        get_strings: Some(Self::get_strings_callback),
        get_sset_count: Some(Self::get_sset_count_callback),
        get_ethtool_stats: Some(Self::get_ethtool_stats_callback),
        ..pin_init::zeroed()
    };

    /// # Safety
    ///
    /// Called by C for the registered `dev`, with `info` valid and zeroed.
    unsafe extern "C" fn get_drvinfo_callback(
        dev: *mut bindings::net_device,
        info: *mut bindings::ethtool_drvinfo,
    ) {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev.cast()) };
        // SAFETY: As C promises.
        let raw = unsafe { &mut *info };
        T::info(dev, &mut Info { raw });
    }

    /// # Safety
    ///
    /// Called by C for the registered `dev` with its instance lock held, with `settings` valid and
    /// zeroed.
    unsafe extern "C" fn get_link_ksettings_callback(
        dev: *mut bindings::net_device,
        settings: *mut bindings::ethtool_link_ksettings,
    ) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev.cast()) };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        // SAFETY: As C promises.
        let base = unsafe { &mut (*settings).base };
        base.port = bindings::PORT_OTHER as u8;
        let speed = match dev.carrier() {
            true => T::speed(&mut locked),
            false => None,
        };
        let Some(speed) = speed else {
            base.speed = bindings::SPEED_UNKNOWN as u32;
            base.duplex = bindings::DUPLEX_UNKNOWN as u8;
            return 0;
        };
        base.speed = speed;
        base.duplex = bindings::DUPLEX_FULL as u8;
        base.autoneg = bindings::AUTONEG_ENABLE as u8;
        // There is none to talk to.
        base.phy_address = u8::MAX;
        0
    }

    /// # Safety
    ///
    /// Called by C for the registered `dev`, with `param` valid.
    unsafe extern "C" fn get_ringparam_callback(
        dev: *mut bindings::net_device,
        param: *mut bindings::ethtool_ringparam,
        _kernel_param: *mut bindings::kernel_ethtool_ringparam,
        _extack: *mut bindings::netlink_ext_ack,
    ) {
        // SAFETY: A registered device of ours satisfies the invariant.
        let rings = T::rings(unsafe { Device::<T>::from_raw(dev.cast()) });
        // SAFETY: As C promises.
        let param = unsafe { &mut *param };
        param.rx_pending = rings.rx;
        param.rx_max_pending = rings.rx_max;
        param.tx_pending = rings.tx;
        param.tx_max_pending = rings.tx_max;
    }

    /// # Safety
    ///
    /// Called by C with room for the names that `get_sset_count_callback` promised.
    unsafe extern "C" fn get_strings_callback(
        _dev: *mut bindings::net_device,
        set: u32,
        data: *mut u8,
    ) {
        if set != bindings::ethtool_stringset_ETH_SS_STATS {
            return;
        }
        let width = bindings::ETH_GSTRING_LEN as usize;
        // SAFETY: As C promises.
        let out = unsafe { slice::from_raw_parts_mut(data, width * T::COUNTERS.len()) };
        for (field, name) in out.chunks_exact_mut(width).zip(T::COUNTERS) {
            let len = name.len().min(width - 1);
            field.fill(0);
            field[..len].copy_from_slice(&name.as_bytes()[..len]);
        }
    }

    /// # Safety
    ///
    /// Called by C.
    unsafe extern "C" fn get_sset_count_callback(
        _dev: *mut bindings::net_device,
        set: c_int,
    ) -> c_int {
        if set as u32 == bindings::ethtool_stringset_ETH_SS_STATS {
            T::COUNTERS.len() as c_int
        } else {
            EOPNOTSUPP.to_errno()
        }
    }

    /// # Safety
    ///
    /// Called by C for the registered `dev` with room for the counters.
    unsafe extern "C" fn get_ethtool_stats_callback(
        dev: *mut bindings::net_device,
        _stats: *mut bindings::ethtool_stats,
        data: *mut u64,
    ) {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev.cast()) };
        // SAFETY: As C promises.
        let out = unsafe { slice::from_raw_parts_mut(data, T::COUNTERS.len()) };
        T::counters(dev, out);
    }
}
