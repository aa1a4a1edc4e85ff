// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! RDMA devices and their ports.

use super::{
    Gid,
    PortNum, //
};
use crate::{
    bindings,
    net::{
        device::{
            DeviceId,
            DeviceRef,
            Neighbourhood,
            Parent, //
        },
        page_pool::PagePool, //
    }, //
};
use core::ptr::{
    self,
    NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// A registered RDMA device.
///
/// Unregistering waits until the last of these is gone; drop them in the client's `remove`.
///
/// # Invariants
///
/// The pointer is a live device of which this object holds a registration reference.
pub(crate) struct Device(NonNull<bindings::ib_device>);

// SAFETY: Devices may be used from any thread; the methods are thread-safe in C.
unsafe impl Send for Device {}

// SAFETY: As above.
unsafe impl Sync for Device {}

/// What a port is attached to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    InfiniBand,
    RoCE,
    Other,
}

/// A port's present state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PortAttr {
    pub(crate) active: bool,
    /// Bytes of the largest datagram payload now, and at most.
    pub(crate) mtu: u32,
    pub(crate) max_mtu: u32,
    pub(crate) gid_table_len: u32,
    /// 0 on RoCE.
    pub(crate) lid: u16,
    /// Megabits per second of the link; 0 if that is not known.
    pub(crate) mbps: u32,
}

impl PortAttr {
    /// Bytes that a datagram carries at most, as far as one can say.
    pub(crate) fn limit(&self) -> u32 {
        match self.active {
            true => self.mtu,
            // What is not active does not know yet.
            false => self.max_mtu,
        }
    }
}

/// Megabits per second of a link.
fn mbps(width: u8, speed: u16) -> u32 {
    let lanes = match width.into() {
        bindings::ib_port_width_IB_WIDTH_1X => 1,
        bindings::ib_port_width_IB_WIDTH_2X => 2,
        bindings::ib_port_width_IB_WIDTH_4X => 4,
        bindings::ib_port_width_IB_WIDTH_8X => 8,
        bindings::ib_port_width_IB_WIDTH_12X => 12,
        _ => 0,
    };
    let lane = match speed.into() {
        bindings::ib_port_speed_IB_SPEED_SDR => 2_500,
        bindings::ib_port_speed_IB_SPEED_DDR => 5_000,
        bindings::ib_port_speed_IB_SPEED_QDR | bindings::ib_port_speed_IB_SPEED_FDR10 => 10_000,
        bindings::ib_port_speed_IB_SPEED_FDR => 14_000,
        bindings::ib_port_speed_IB_SPEED_EDR => 25_000,
        bindings::ib_port_speed_IB_SPEED_HDR => 50_000,
        bindings::ib_port_speed_IB_SPEED_NDR => 100_000,
        bindings::ib_port_speed_IB_SPEED_XDR => 200_000,
        _ => 0,
    };
    lanes * lane
}

/// Megabits per second of a static rate as it is coded on the wire (IBA 1.4, table 224); `None` if
/// it is none.
pub(crate) fn rate_mbps(rate: u8) -> Option<u32> {
    Some(match rate {
        2 => 2_500,
        3 => 10_000,
        4 => 30_000,
        5 => 5_000,
        6 => 20_000,
        7 => 40_000,
        8 => 60_000,
        9 => 80_000,
        10 => 120_000,
        11 => 14_000,
        12 => 56_000,
        13 => 112_000,
        14 => 168_000,
        15 => 25_000,
        16 => 100_000,
        17 => 200_000,
        18 => 300_000,
        19 => 28_000,
        20 => 50_000,
        21 => 400_000,
        22 => 600_000,
        23 => 800_000,
        24 => 1_200_000,
        25 => 1_600_000,
        _ => return None,
    })
}

/// Bytes of an `enum ib_mtu`; the smallest for a value that is none.
pub(super) fn mtu_bytes(mtu: bindings::ib_mtu) -> u32 {
    match mtu {
        bindings::ib_mtu_IB_MTU_512 => 512,
        bindings::ib_mtu_IB_MTU_1024 => 1024,
        bindings::ib_mtu_IB_MTU_2048 => 2048,
        bindings::ib_mtu_IB_MTU_4096 => 4096,
        _ => 256,
    }
}

/// The `enum ib_mtu` of a number of bytes.
pub(super) fn mtu_code(bytes: u32) -> Option<bindings::ib_mtu> {
    Some(match bytes {
        256 => bindings::ib_mtu_IB_MTU_256,
        512 => bindings::ib_mtu_IB_MTU_512,
        1024 => bindings::ib_mtu_IB_MTU_1024,
        2048 => bindings::ib_mtu_IB_MTU_2048,
        4096 => bindings::ib_mtu_IB_MTU_4096,
        _ => return None,
    })
}

impl Device {
    /// Takes a reference.
    ///
    /// # Errors
    ///
    /// `ENODEV`: the device is being unregistered.
    ///
    /// # Safety
    ///
    /// `dev` is a live device.
    pub(super) unsafe fn get(dev: NonNull<bindings::ib_device>) -> Result<Self> {
        // SAFETY: As the caller promises.
        if !unsafe { bindings::ib_device_try_get(dev.as_ptr()) } {
            return Err(ENODEV);
        }
        // INVARIANT: We just got a reference.
        Ok(Self(dev))
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut bindings::ib_device {
        self.0.as_ptr()
    }

    /// A pool of about `size` pages that the device finds at [`PagePool::address`].
    pub(super) fn page_pool(&self, size: u32) -> Result<PagePool> {
        // SAFETY: The device is live; what does its DMA is fixed. None: the CPU does.
        match NonNull::new(unsafe { (*self.as_raw()).dma_device }) {
            // SAFETY: It lives as long as the device.
            Some(device) => unsafe { PagePool::new_mapped(size, device) },
            None => PagePool::new(size),
        }
    }

    fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: The device is live; its attributes do not change once it is registered.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// The device's name. A rename in between may tear it.
    pub(crate) fn name(&self) -> &CStr {
        // SAFETY: The device is live and its name is terminated.
        unsafe { CStr::from_char_ptr(bindings::ib_device_name(self.as_raw())) }
    }

    /// Writes the firmware version to `out`, and returns its length.
    pub(crate) fn firmware(&self, out: &mut [u8; 32]) -> usize {
        let mut text: [c_char; bindings::IB_FW_VERSION_NAME_MAX as usize] =
            [0; bindings::IB_FW_VERSION_NAME_MAX as usize];
        // SAFETY: The device is live, and the text has the size that C demands.
        unsafe { bindings::ib_get_device_fw_str(self.as_raw(), text.as_mut_ptr()) };
        let len = text
            .iter()
            .position(|&c| c == 0)
            .unwrap_or(text.len())
            .min(out.len());
        for (to, from) in out.iter_mut().zip(&text[..len]) {
            *to = *from;
        }
        len
    }

    /// The ports.
    pub(crate) fn ports(&self) -> impl Iterator<Item = PortNum> {
        // SAFETY: The device is live.
        let range = unsafe {
            bindings::rdma_start_port(self.as_raw())..=bindings::rdma_end_port(self.as_raw())
        };
        range.map(PortNum)
    }

    /// What `port` is attached to.
    pub(crate) fn protocol(&self, port: PortNum) -> Protocol {
        // SAFETY: The device is live; C checks nothing, but `PortNum`s come from `ports`.
        unsafe {
            if bindings::rdma_protocol_ib(self.as_raw(), port.0) {
                Protocol::InfiniBand
            } else if bindings::rdma_protocol_roce(self.as_raw(), port.0) {
                Protocol::RoCE
            } else {
                Protocol::Other
            }
        }
    }

    /// Scatter-gather entries of a send request, at most.
    pub(crate) fn max_send_sge(&self) -> u32 {
        self.attrs().max_send_sge
    }

    /// Whether checksums of TCP and UDP over IPv4 in datagrams are filled in, and verified.
    pub(crate) fn has_checksums(&self) -> bool {
        let flag = bindings::ib_device_cap_flags_IB_DEVICE_UD_IP_CSUM;
        self.attrs().device_cap_flags & flag as u64 != 0
    }

    /// Whether a datagram queue pair can cut TCP packets over IPv4.
    pub(crate) fn has_segmentation(&self) -> bool {
        let flag = bindings::ib_kernel_cap_flags_IBK_UD_TSO;
        self.attrs().kernel_cap_flags & u64::from(flag) != 0
    }

    /// Scatter-gather entries of a receive request, at most.
    pub(crate) fn max_recv_sge(&self) -> u32 {
        self.attrs().max_recv_sge
    }

    /// Whether there are shared receive queues.
    pub(crate) fn has_srq(&self) -> bool {
        #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
        if super::fake::NO_SRQ.is_on() {
            return false;
        }
        // SAFETY: The device is live; its operations are fixed.
        let create = unsafe { (*self.as_raw()).ops.create_srq };
        create.is_some() && self.attrs().max_srq > 0
    }

    /// Whether there is a communication manager on `port`.
    pub(crate) fn connects(&self, port: PortNum) -> bool {
        #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
        if super::fake::NO_CONNECTIONS.is_on() {
            return false;
        }
        // SAFETY: The device is live; `PortNum`s come from `ports`.
        unsafe { bindings::rdma_cap_ib_cm(self.as_raw(), port.0) }
    }

    /// Requests in a shared receive queue, at most.
    pub(crate) fn max_srq_wr(&self) -> u32 {
        self.attrs().max_srq_wr
    }

    /// Scatter-gather entries of a request in a shared receive queue, at most.
    pub(crate) fn max_srq_sge(&self) -> u32 {
        self.attrs().max_srq_sge
    }

    /// Requests in a queue of a queue pair, at most.
    pub(crate) fn max_qp_wr(&self) -> u32 {
        self.attrs().max_qp_wr
    }

    /// Completions in a completion queue, at most.
    pub(crate) fn max_cqe(&self) -> u32 {
        self.attrs().max_cqe
    }

    /// Asks for the state of `port`. Sleeps, and may take RTNL on RoCE.
    pub(crate) fn query_port(&self, port: PortNum) -> Result<PortAttr> {
        let mut attr = bindings::ib_port_attr::default();
        // SAFETY: The device is live and `attr` is valid for writes; C checks the port.
        to_result(unsafe { bindings::ib_query_port(self.as_raw(), port.0, &mut attr) })?;
        Ok(PortAttr {
            active: attr.state == bindings::ib_port_state_IB_PORT_ACTIVE,
            mtu: mtu_bytes(attr.active_mtu),
            max_mtu: mtu_bytes(attr.max_mtu),
            gid_table_len: attr.gid_tbl_len.max(0) as u32,
            lid: attr.lid as u16,
            mbps: mbps(attr.active_width, attr.active_speed),
        })
    }

    /// The GID at `index`, if there is one of RoCE v2.
    fn roce_v2_gid(&self, port: PortNum, index: u32) -> Option<Gid> {
        // SAFETY: The device is live; C checks port and index.
        let attr = unsafe { bindings::rdma_get_gid_attr(self.as_raw(), port.0, index as i32) };
        let attr = kernel::error::from_err_ptr(attr.cast_mut()).ok()?;
        // SAFETY: We hold a reference to the entry.
        let (kind, gid) = unsafe { ((*attr).gid_type, Gid((*attr).gid.raw)) };
        // SAFETY: The reference is ours to give back.
        unsafe { bindings::rdma_put_gid_attr(attr) };
        (kind == bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP).then_some(gid)
    }

    /// The GID at `index`.
    pub(crate) fn gid(&self, port: PortNum, index: u32) -> Result<Gid> {
        // SAFETY: The device is live; C checks port and index.
        let attr = unsafe { bindings::rdma_get_gid_attr(self.as_raw(), port.0, index as i32) };
        let attr = kernel::error::from_err_ptr(attr.cast_mut())?;
        // SAFETY: We hold a reference to the entry; all bytes of the union are plain data.
        let gid = Gid(unsafe { (*attr).gid.raw });
        // SAFETY: The reference is ours to give back.
        unsafe { bindings::rdma_put_gid_attr(attr) };
        Ok(gid)
    }

    /// The P_Key at `index`.
    pub(crate) fn pkey(&self, port: PortNum, index: u16) -> Result<u16> {
        let mut pkey = 0;
        // SAFETY: The device is live and `pkey` valid for writes; C checks port and index.
        to_result(unsafe { bindings::ib_query_pkey(self.as_raw(), port.0, index, &mut pkey) })?;
        Ok(pkey)
    }

    /// Where the P_Key table has `pkey`; an entry of full membership comes first.
    pub(crate) fn find_pkey(&self, port: PortNum, pkey: u16) -> Option<u16> {
        let mut index = 0;
        // SAFETY: The device is live and `index` valid for writes; ports come from `ports`.
        let status = unsafe { bindings::ib_find_pkey(self.as_raw(), port.0, pkey, &mut index) };
        (status == 0).then_some(index)
    }

    /// Where the table of an InfiniBand port has a GID.
    pub(crate) fn find_gid(&self, port: PortNum, wanted: &Gid) -> Option<u8> {
        let gid = bindings::ib_gid { raw: wanted.0 };
        let kind = bindings::ib_gid_type_IB_GID_TYPE_IB;
        // SAFETY: The device is live and `gid` valid for reads; ports come from `ports`.
        let attr = unsafe {
            bindings::rdma_find_gid_by_port(self.as_raw(), &gid, kind, port.0, ptr::null_mut())
        };
        let attr = kernel::error::from_err_ptr(attr.cast_mut()).ok()?;
        // SAFETY: We hold a reference to the entry.
        let index = unsafe { (*attr).index };
        // SAFETY: The reference is ours to give back.
        unsafe { bindings::rdma_put_gid_attr(attr) };
        // An address handle names its entry by a byte.
        u8::try_from(index).ok()
    }

    /// Where the RoCE v2 GID `wanted` is in the table of `len` entries.
    pub(crate) fn find_roce_v2_gid(&self, port: PortNum, len: u32, wanted: &Gid) -> Option<u8> {
        // An address handle names its entry by a byte.
        let index = (0..len.min(256)).find(|&at| self.roce_v2_gid(port, at) == Some(*wanted))?;
        u8::try_from(index).ok()
    }

    /// Has the core enter the GIDs of a RoCE port that are missing from its table.
    ///
    /// An entry that was deleted while somebody used it keeps its place until he lets go, and what
    /// was to replace it is not entered then. Sleeps, and takes RTNL.
    pub(crate) fn rescan_gids(&self, port: PortNum) {
        // SAFETY: The device is live and registered; C checks that the port is one of RoCE.
        unsafe { bindings::rdma_roce_rescan_port(self.as_raw(), port.0) };
    }

    /// The network device under a RoCE port.
    pub(crate) fn lower(&self, port: PortNum) -> Option<DeviceRef> {
        // SAFETY: The device is live; C checks the port.
        let dev = unsafe { bindings::ib_device_get_netdev(self.as_raw(), port.0) };
        // SAFETY: C gave us a reference.
        NonNull::new(dev).map(|dev| unsafe { DeviceRef::from_raw(dev) })
    }

    /// What identifies the network device under a RoCE port.
    pub(crate) fn lower_id(&self, port: PortNum) -> Option<DeviceId> {
        self.lower(port).map(|lower| lower.id())
    }

    /// The device that the adapter is on its bus, if it is on one.
    pub(crate) fn parent(&self) -> Parent<'_> {
        // SAFETY: The device is live; its parent is fixed.
        let parent = unsafe { (*self.as_raw()).__bindgen_anon_1.dev.as_ref().parent };
        // SAFETY: A device holds a reference to its parent.
        unsafe { Parent::from_raw(parent) }
    }

    /// The network namespace that the device is in: the initial one, unless the RDMA core keeps
    /// namespaces apart.
    pub(crate) fn neighbourhood(&self) -> Neighbourhood {
        // SAFETY: The device is live. It moves, also out of a namespace that is taken down, only
        // when the last registration reference is gone, and we have one.
        unsafe { Neighbourhood::from_raw(bindings::rdma_dev_net(self.as_raw())) }
    }

    /// Completion vectors.
    pub(crate) fn vectors(&self) -> u32 {
        // SAFETY: The device is live; the number is fixed.
        (unsafe { (*self.as_raw()).num_comp_vectors }).max(1) as u32
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { bindings::ib_device_put(self.as_raw()) };
    }
}
