// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A software InfiniBand fabric for tests: HCAs of one port, each plugged into one switch.
//!
//! The layers, from the top:
//!
//! - [`control`]: what tests write and read; [`fabric`]: HCAs, and the worker that carries MADs;
//! - [`hca`], [`qp`], [`srq`], [`cq`], [`mcast`]: the objects of verbs; [`ud`]: the way of a
//!   datagram; [`qp::rc`]: the way of a connection's messages;
//! - [`subnet`], [`switch`], [`sma`], [`pma`], [`port`], [`mad`]: what a subnet manager sees;
//! - [`offload`], [`fault`], [`filter`]: what hardware computes, and what goes wrong;
//! - [`null`], [`probe`]: a client that only posts and polls, to measure the fabric with, to see
//!   its faults and to do what is forbidden;
//! - [`glue`]: verbs as C sees them. Only this file holds unsafe code.

mod control;
mod cq;
mod fabric;
mod fault;
mod filter;
mod glue;
mod hca;
mod mad;
mod mcast;
mod null;
mod offload;
mod pma;
mod port;
mod probe;
mod qp;
mod sma;
mod srq;
mod subnet;
mod switch;
mod ud;

use fabric::Fabric;
use hca::HcaConfig;
use kernel::{
    prelude::*,
    sync::Arc, //
};
use port::PortCaps;
use subnet::MAX_HCAS;
use switch::SwitchConfig;

/// What the fabric's own objects are named after.
const NAME: &CStr = c"ibf";

module! {
    type: Ibf,
    name: "ibf",
    authors: ["The ipoib_rs developers"],
    description: "Software InfiniBand fabric for tests",
    license: "Dual BSD/GPL",
    params: {
        nr_hcas: u8 {
            default: 2,
            description: "HCAs to begin with, up to 68",
        },
        sw_ports: u8 {
            default: 16,
            description: "Ports of the switch, up to 72",
        },
        mtu: u8 {
            default: 5,
            description: "MTU of the ports: 1 is 256, 5 is 4096",
        },
        max_send_sge: u8 {
            default: 18,
            description: "Pieces of memory of a send",
        },
        max_srq_sge: u8 {
            default: 16,
            description: "Pieces of memory of a receive in a shared queue",
        },
        srq: u8 {
            default: 1,
            description: "Shared receive queues",
        },
        rnr_grace_us: u32 {
            default: 2000,
            description: "Microseconds that a message waits for a buffer before it counts",
        },
        vectors: u8 {
            default: 2,
            description: "Completion vectors",
        },
        csum: u8 {
            default: 0,
            description: "Checksum offload",
        },
        tso: u8 {
            default: 0,
            description: "Segmentation offload",
        },
        mcast_lb: u8 {
            default: 0,
            description: "Blocking of multicast loopback",
        },
        flow_steering: u8 {
            default: 0,
            description: "Queue pairs for network interfaces",
        },
        physical: u8 {
            default: 1,
            description: "DMA addresses are physical, not virtual",
        },
        deferred: u8 {
            default: 0,
            description: "Sends are executed later",
        },
        interrupts: u8 {
            default: 0,
            description: "Completion handlers are called from interrupts",
        },
        stock_mask: u64 {
            default: 0xffff_ffff_ffff_ffff,
            description: "HCAs, as bits, the last for all others, that the stock ib_ipoib may have",
        },
    },
}

impl HcaConfig {
    /// The configuration, if hardware could be like that.
    fn check(self) -> Result<Self> {
        let sound = (1..=Self::MAX_SEND_SGE).contains(&self.max_send_sge)
            && (1..=Self::MAX_RECV_SGE).contains(&self.max_srq_sge)
            && (1..=64).contains(&self.vectors)
            && (1..=5).contains(&self.mtu);
        if sound {
            Ok(self)
        } else {
            Err(EINVAL)
        }
    }
}

/// The module. Dropped in this order.
struct Ibf {
    _control: control::Control,
    fabric: Arc<Fabric>,
}

impl Drop for Ibf {
    fn drop(&mut self) {
        self.fabric.remove_all();
    }
}

impl kernel::Module for Ibf {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let count = usize::from(module_parameters::nr_hcas.value());
        let ports = module_parameters::sw_ports.value();
        if count > MAX_HCAS || count > usize::from(ports) {
            return Err(EINVAL);
        }
        let on = |value: u8| value != 0;
        let config = HcaConfig {
            max_send_sge: module_parameters::max_send_sge.value(),
            max_srq_sge: module_parameters::max_srq_sge.value(),
            srq: on(module_parameters::srq.value()),
            rnr_grace: module_parameters::rnr_grace_us.value(),
            vectors: module_parameters::vectors.value(),
            mtu: module_parameters::mtu.value(),
            csum: on(module_parameters::csum.value()),
            tso: on(module_parameters::tso.value()),
            mcast_lb: on(module_parameters::mcast_lb.value()),
            flow_steering: on(module_parameters::flow_steering.value()),
            physical: on(module_parameters::physical.value()),
            deferred: on(module_parameters::deferred.value()),
            interrupts: on(module_parameters::interrupts.value()),
            stock: true,
        }
        .check()?;
        let mut description = [0; 64];
        let name = b"ibf switch";
        description[..name.len()].copy_from_slice(name);
        let switch = SwitchConfig {
            ports,
            // Locally administered.
            guid: 0x021b_f000_0000_ff00,
            description,
            caps: PortCaps {
                mtu: config.mtu,
                ..PortCaps::DEFAULT
            },
        };
        let fabric = Fabric::new(&switch, config)?;
        let stock = module_parameters::stock_mask.value();
        for slot in 0..count {
            let config = HcaConfig {
                stock: stock >> slot.min(63) & 1 != 0,
                ..config
            };
            if let Err(error) = fabric.add(slot, config) {
                fabric.remove_all();
                return Err(error);
            }
        }
        let control = control::Control::new(&fabric).inspect_err(|_| fabric.remove_all())?;
        Ok(Self {
            _control: control,
            fabric,
        })
    }
}
