// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What stands in for the subnet administrator on a RoCE port.
//!
//! The wire profile is fixed (Documentation/design.rst): RoCE v2 from the port's EUI-64 link-local
//! GID, MGIDs as on InfiniBand, one Q_Key and P_Key. A group is joined by attaching the queue pair
//! and by an IPv6 membership of the MGID on the Ethernet below.

use crate::{
    ib::{
        ah,
        device::Device,
        qp::Qp,
        resolve,
        Gid,
        PortNum,
        QKey, //
    },
    net::device::DeviceId,
    path::{
        Fabric,
        Profile,
        Terms,
        View, //
    },
    wire, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

const PROFILE: Profile = Profile {
    pkey: 0xffff,
    scope: 2,
};

const QKEY: QKey = QKey(0x0000_0b1b);

const HOP_LIMIT: u8 = 64;

/// A RoCE port.
pub(crate) struct Roce {
    device: Arc<Device>,
    port: PortNum,
}

impl Roce {
    pub(crate) fn new(device: Arc<Device>, port: PortNum) -> Self {
        Self { device, port }
    }
}

/// The Ethernet address that a GID contains.
fn contained_mac(gid: &Gid) -> Option<[u8; 6]> {
    if gid.is_multicast() {
        Some(wire::mac_of_mgid(&gid.0))
    } else {
        wire::mac_of_gid(&gid.0)
    }
}

/// The way to `gid`, from the own GID at `gid_index`.
///
/// The destination's Ethernet address is always filled in: software devices tolerate zero,
/// hardware does not.
fn attr(gid: &Gid, gid_index: u8, dmac: [u8; 6]) -> ah::Attr {
    ah::Attr {
        gid: *gid,
        global: true,
        sgid_index: gid_index,
        hop_limit: HOP_LIMIT,
        dmac,
        ..ah::Attr::default()
    }
}

impl Fabric for Roce {
    fn profile(&self) -> Profile {
        PROFILE
    }

    fn view(&self) -> Result<View> {
        let attr = self.device.query_port(self.port)?;
        let mac = self
            .device
            .lower(self.port)
            .and_then(|lower| lower.mac())
            .ok_or(ENODEV)?;
        let gid = Gid(wire::gid_of_mac(&mac));
        let gid_index = self
            .device
            .find_roce_v2_gid(self.port, attr.gid_table_len, &gid);
        Ok(View {
            active: attr.active && gid_index.is_some(),
            ib_mtu: attr.mtu,
            mbps: attr.mbps,
            gid,
            gid_index,
            pkey: PROFILE.pkey,
            pkey_index: Some(0),
        })
    }

    fn find_gid(&self) {
        self.device.rescan_gids(self.port);
    }

    fn join(&self, qp: &Qp, group: &Gid) -> Result {
        let lower = self.device.lower(self.port).ok_or(ENODEV)?;
        qp.attach(group, 0)?;
        lower.join_ipv6(&group.0).inspect_err(|_| {
            // The attachment alone receives nothing.
            let _ = qp.detach(group, 0);
        })
    }

    fn leave(&self, qp: &Qp, group: &Gid) {
        // The Ethernet below, or its IPv6, may be gone already, and the membership with it.
        if let Some(lower) = self.device.lower(self.port) {
            let _ = lower.leave_ipv6(&group.0);
        }
        if let Err(error) = qp.detach(group, 0) {
            pr_warn!("detaching from {} failed: {:?}\n", group, error);
        }
    }

    fn terms(&self) -> Option<Terms> {
        Some(Terms {
            qkey: QKEY,
            ib_mtu: wire::MAX_IB_MTU,
        })
    }

    fn knows(&self, gid: &Gid) -> bool {
        contained_mac(gid).is_some()
    }

    fn path(&self, gid: &Gid, gid_index: u8) -> Result<ah::Attr> {
        let dmac = match contained_mac(gid) {
            Some(mac) => mac,
            None => resolve::next_hop(&self.device, self.port, gid_index, gid)?.mac,
        };
        Ok(attr(gid, gid_index, dmac))
    }

    fn lower(&self) -> Option<DeviceId> {
        self.device.lower_id(self.port)
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_roce)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_an_ethernet_address_and_a_hop_limit() {
        let mac = [0x02, 0, 0, 0, 0, 7];
        let unicast = Gid(wire::gid_of_mac(&mac));
        assert_eq!(contained_mac(&unicast), Some(mac));
        let group = Gid(wire::broadcast_mgid(2, 0xffff));
        assert_eq!(
            contained_mac(&group),
            Some([0x33, 0x33, 0xff, 0xff, 0xff, 0xff])
        );
        let attr = attr(&unicast, 3, mac);
        assert_eq!(attr.dmac, mac);
        assert_eq!(attr.hop_limit, 64);
        assert_eq!(attr.sgid_index, 3);
        assert_eq!((attr.traffic_class, attr.flow_label, attr.sl), (0, 0, 0));
    }

    #[test]
    fn other_gids_are_asked_for() {
        assert_eq!(contained_mac(&Gid([0; 16])), None);
    }
}
