// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! IP over InfiniBand (RFC 4391, RFC 4392).
//!
//! One network interface for each port of each RDMA device. The layers, from the top:
//!
//! - [`control`]: what administrators see; [`port`]: an interface's life;
//! - [`neigh`], [`path`], [`multicast`]: where packets go; [`roce`], [`sa`]: who knows the way;
//! - [`ud`]: datagrams; [`cm`]: connections; [`wire`], [`ring`]: formats and arithmetic;
//! - [`ib`], [`net`], [`sync`]: safe verbs, network devices and locks. Only they, and
//!   [`bindings`], hold unsafe code.

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[macro_use]
mod selftest;

mod bindings;
mod cm;
mod control;
#[allow(dead_code, reason = "a layer of its own, and the tests use all of it")]
mod ib;
mod multicast;
mod neigh;
mod net;
#[path = "bindings/params.rs"]
mod params;
mod path;
mod port;
mod ring;
mod roce;
mod sa;
mod stats;
mod sync;
mod ud;
mod wire;

use ib::{
    client::{
        self,
        Client,
        Query,
        Registry, //
    },
    device::Device as Hca, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};
use net::{
    device::DeviceRef,
    notifier::Notifier,
    rtnl::LinkOps, //
};
use port::{
    Attached,
    Config,
    Port, //
    Watchers,
};
use ud::RingSizes;

/// Smallest and largest rings, powers of two.
pub(crate) const SEND_RING: (u32, u32) = (128, 8192);
pub(crate) const RECV_RING: (u32, u32) = (2, 8192);

/// Connections of peers, per interface.
const MAX_CONNECTIONS: (i32, i32) = (0, 65536);

/// The kind of link, and what it is called when another driver has that name.
const KINDS: [&CStr; 2] = [c"ipoib", c"ipoib_rs"];

module! {
    type: Ipoib,
    name: "ipoib_rs",
    authors: ["The ipoib_rs developers"],
    description: "IP over InfiniBand",
    license: "Dual BSD/GPL",
    alias: ["rtnl-link-ipoib"],
}

/// Attaches to RDMA devices.
struct IpoibClient {
    config: Config,
    link_ops: Arc<LinkOps<Port>>,
    watchers: Arc<Watchers>,
}

impl Client for IpoibClient {
    type Data = KVec<Attached>;

    const NAME: &'static CStr = c"ipoib_rs";

    fn registry() -> &'static Registry<Self> {
        static REGISTRY: Registry<IpoibClient> = Registry::new();
        &REGISTRY
    }

    fn add(&self, hca: Arc<Hca>) -> Result<Self::Data> {
        if !is_named(hca.name().to_bytes(), params::hcas()) {
            return Err(EOPNOTSUPP);
        }
        let mut attached = KVec::new();
        for number in hca.ports() {
            match port::attach(&hca, number, &self.config, &self.link_ops, &self.watchers) {
                Ok(port) => attached.push(port, GFP_KERNEL)?,
                Err(error) if error == EOPNOTSUPP => {}
                // One port's failure is not the others'.
                Err(error) => pr_err!(
                    "{} port {}: attaching failed: {:?}\n",
                    hca.name(),
                    number.0,
                    error
                ),
            }
        }
        if attached.is_empty() {
            return Err(EOPNOTSUPP);
        }
        Ok(attached)
    }

    fn find(attached: &Self::Data, query: &Query) -> Option<DeviceRef> {
        attached.iter().find_map(|port| port.find(query))
    }
}

/// Whether a comma separated list has the name; an empty one has every name.
fn is_named(name: &[u8], list: &[u8]) -> bool {
    list.is_empty() || list.split(|&byte| byte == b',').any(|entry| entry == name)
}

/// The size that a queue gets when `asked` for, with a line in the log if it is another.
fn queue_size(what: &str, asked: i32, limits: (u32, u32)) -> Result<u32> {
    let Some(size) = ring::queue_size(asked, limits.0, limits.1) else {
        pr_err!(
            "{}={} is refused: give a number from {} to {}\n",
            what,
            asked,
            limits.0,
            limits.1
        );
        return Err(EINVAL);
    };
    if i64::from(size) != i64::from(asked) {
        pr_info!("{}={} becomes {}\n", what, asked, size);
    }
    Ok(size)
}

/// The connections that peers may open.
fn max_connections(asked: i32) -> Result<usize> {
    let (min, max) = MAX_CONNECTIONS;
    match usize::try_from(asked) {
        Ok(limit) if asked <= max => Ok(limit),
        _ => {
            pr_err!(
                "max_connections={} is refused: give a number from {} to {}\n",
                asked,
                min,
                max
            );
            Err(EINVAL)
        }
    }
}

/// The module. Dropped in this order: devices go before what they are notified by and shown as.
struct Ipoib {
    _client: Pin<KBox<client::Registration<IpoibClient>>>,
    _notifier: Pin<KBox<Notifier<Watchers>>>,
    _link_ops: Arc<LinkOps<Port>>,
}

impl kernel::Module for Ipoib {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let send = queue_size("send_queue_size", params::send_queue_size(), SEND_RING)?;
        let recv = queue_size("recv_queue_size", params::recv_queue_size(), RECV_RING)?;
        params::publish_queue_sizes(send as i32, recv as i32);
        let config = Config {
            rings: RingSizes { send, recv },
            max_connections: max_connections(params::max_connections())?,
            roce: params::roce(),
        };
        let link_ops = match LinkOps::register(KINDS[0]) {
            Err(error) if error == EEXIST => {
                pr_info!("link kind ipoib is taken, ours is ipoib_rs\n");
                LinkOps::register(KINDS[1])?
            }
            other => other?,
        };
        let watchers = Watchers::new()?;
        let notifier = Notifier::new(watchers.clone())?;
        let client = client::Registration::new(IpoibClient {
            config,
            link_ops: link_ops.clone(),
            watchers,
        })?;
        Ok(Self {
            _client: client,
            _notifier: notifier,
            _link_ops: link_ops,
        })
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_root)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_connections() {
        for (asked, want) in [
            (0, Ok(0)),
            (4096, Ok(4096)),
            (65536, Ok(65536)),
            (65537, Err(EINVAL)),
            (i32::MAX, Err(EINVAL)),
            (-1, Err(EINVAL)),
            (i32::MIN, Err(EINVAL)),
        ] {
            assert_eq!(max_connections(asked), want);
        }
    }

    #[test]
    fn names_in_a_list() {
        assert!(is_named(b"rxe0", b""));
        assert!(is_named(b"rxe0", b"rxe0"));
        assert!(is_named(b"rxe0", b"mlx5_0,rxe0"));
        assert!(!is_named(b"rxe0", b"rxe01,rxe"));
        assert!(!is_named(b"rxe0", b","));
    }
}
