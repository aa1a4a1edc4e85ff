// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the verbs can do without a driver: the ceiling for `make bench`.
//!
//! Loading the module sends datagrams, or messages of a connection, from the first RoCE device to the
//! second, over the same `ib/` that the driver is made of, and logs how many arrived. [`end`] and
//! [`rc`] have the two ends. Nothing is left running afterwards; a device that is removed meanwhile
//! waits for the end.

#[path = "../../bindings/mod.rs"]
mod bindings;
mod end;
#[expect(dead_code, reason = "the driver needs more of it")]
#[path = "../../ib/mod.rs"]
mod ib;
#[expect(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "the driver needs more of it"
)]
#[path = "../../net/mod.rs"]
mod net;
mod rc;
#[expect(dead_code, reason = "the driver needs more of it")]
#[path = "../../ring.rs"]
mod ring;
#[expect(dead_code, reason = "the driver needs more of it")]
#[path = "../../sync/mod.rs"]
mod sync;

use end::{
    End,
    Plan,
    Role, //
};
use ib::{
    client::{
        self,
        Client,
        Registry, //
    },
    device::{
        Device,
        Protocol, //
    },
    PortNum, //
};
use kernel::{
    prelude::*,
    sync::{
        new_mutex,
        Arc,
        Mutex, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    },
};
use net::rtnl::LinkOps;

module! {
    type: RawVerbs,
    name: "raw_verbs",
    authors: ["The ipoib_rs developers"],
    description: "Raw UD and RC verbs between two RoCE devices, measured at load",
    license: "Dual BSD/GPL",
    params: {
        size: u32 {
            default: 4096,
            description: "Bytes of a datagram, 1 to the MTU of the ports, or of a message, 1 to 65524 (default 4096)",
        },
        window: u32 {
            default: 128,
            description: "Datagrams or messages on their way, a power of two in 64..1024 (default 128)",
        },
        milliseconds: u32 {
            default: 4000,
            description: "Time to measure (default 4000)",
        },
        connected: bool {
            default: false,
            description: "Stream over a reliable connection (default off)",
        },
        round_trips: bool {
            default: false,
            description: "Send one datagram to and fro instead of a stream (default off)",
        },
    },
}

/// Seconds until something that must happen counts as failed.
const PATIENCE: u32 = 10;

/// Waits until `done` holds, so many `seconds` at most.
fn within(seconds: u32, done: impl Fn() -> bool) -> bool {
    for _ in 0..seconds * 100 {
        if done() {
            return true;
        }
        fsleep(Delta::from_millis(10));
    }
    done()
}

/// Collects the devices.
struct Finder(Arc<Found>);

#[pin_data]
struct Found {
    #[pin]
    ports: Mutex<KVec<(Arc<Device>, PortNum)>>,
}

impl Client for Finder {
    type Data = ();

    const NAME: &'static CStr = c"raw_verbs";

    fn registry() -> &'static Registry<Self> {
        static REGISTRY: Registry<Finder> = Registry::new();
        &REGISTRY
    }

    fn add(&self, device: Arc<Device>) -> Result {
        for port in device.ports() {
            if device.protocol(port) == Protocol::RoCE && device.query_port(port)?.active {
                self.0
                    .ports
                    .lock()
                    .push((device.clone(), port), GFP_KERNEL)?;
            }
        }
        // The reference lasts without the client.
        Err(EOPNOTSUPP)
    }
}

/// The active RoCE ports.
fn ports() -> Result<KVec<(Arc<Device>, PortNum)>> {
    let found = Arc::pin_init(
        pin_init!(Found { ports <- new_mutex!(KVec::new()) }),
        GFP_KERNEL,
    )?;
    drop(client::Registration::new(Finder(found.clone()))?);
    let ports = core::mem::take(&mut *found.ports.lock());
    Ok(ports)
}

/// The plan that the parameters ask for.
fn plan() -> Result<Plan> {
    let plan = Plan {
        size: module_parameters::size.value() as usize,
        window: module_parameters::window.value(),
    };
    let longest = match module_parameters::connected.value() {
        true => rc::MAX_SIZE,
        false => end::MAX_SIZE,
    };
    if plan.size == 0 || plan.size > longest {
        pr_err!("size={} is refused: give 1 to {}\n", plan.size, longest);
        return Err(EINVAL);
    }
    if !plan.window.is_power_of_two() || !(64..=1024).contains(&plan.window) {
        pr_err!(
            "window={} is refused: give a power of two from 64 to 1024\n",
            plan.window
        );
        return Err(EINVAL);
    }
    Ok(plan)
}

/// What an end tells.
trait Ends {
    fn sent(&self) -> u64;
    fn received(&self) -> u64;
    fn posts(&self) -> u64;
    fn failures(&self) -> u64;
    fn finish(&self) -> bool;
}

macro_rules! ends {
    ($($end:ty),*) => {
        $(impl Ends for $end {
            fn sent(&self) -> u64 {
                <$end>::sent(self)
            }

            fn received(&self) -> u64 {
                <$end>::received(self)
            }

            fn posts(&self) -> u64 {
                <$end>::posts(self)
            }

            fn failures(&self) -> u64 {
                <$end>::failures(self)
            }

            fn finish(&self) -> bool {
                <$end>::finish(self)
            }
        })*
    };
}

ends!(End, rc::End);

/// Sends from `a` to `b`, or to and fro, and logs the figures.
fn measure(a: &impl Ends, b: &impl Ends, kind: &str, plan: &Plan) -> Result {
    let alive = || a.failures() == 0 && b.failures() == 0;
    // Neighbours below are found and caches are warm once a window has arrived.
    if !within(PATIENCE, || b.received() >= plan.window.into() || !alive()) || !alive() {
        pr_err!(
            "no {}: {} of {} datagrams arrived\n",
            kind,
            b.received(),
            a.sent()
        );
        return Err(EIO);
    }
    let before = (b.received(), a.posts());
    let start = Instant::<Monotonic>::now();
    fsleep(Delta::from_millis(
        module_parameters::milliseconds.value().into(),
    ));
    let after = (b.received(), a.posts());
    let nanoseconds = start.elapsed().as_nanos();
    if !(a.finish() && b.finish() && alive()) {
        pr_err!("the {} broke off\n", kind);
        return Err(EIO);
    }
    // What is on its way below arrives now or never.
    let _ = within(1, || b.received() == a.sent());
    pr_info!(
        "{} size={} window={} received={} posts={} nanoseconds={} lost={}\n",
        kind,
        plan.size,
        plan.window,
        after.0 - before.0,
        after.1 - before.1,
        nanoseconds,
        a.sent().saturating_sub(b.received())
    );
    Ok(())
}

struct RawVerbs;

impl kernel::Module for RawVerbs {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let plan = plan()?;
        let ports = ports()?;
        let [a, b, ..] = &*ports else {
            pr_err!(
                "two RoCE devices with active ports are needed, there are {}\n",
                ports.len()
            );
            return Err(ENODEV);
        };
        if module_parameters::connected.value() {
            let link_ops = LinkOps::register(c"raw_verbs")?;
            let (a, b) = (
                rc::End::new(&a.0, a.1, &link_ops, &plan)?,
                rc::End::new(&b.0, b.1, &link_ops, &plan)?,
            );
            a.connect(&b)?;
            a.begin();
            measure(&a, &b, "connection", &plan)?;
            return Ok(Self);
        }
        let (kind, roles) = if module_parameters::round_trips.value() {
            ("round_trips", (Role::Answers, Role::Answers))
        } else {
            ("stream", (Role::Streams, Role::Listens))
        };
        let link_ops = LinkOps::register(c"raw_verbs")?;
        let a = End::new(&a.0, a.1, &link_ops, roles.0, &plan)?;
        let b = End::new(&b.0, b.1, &link_ops, roles.1, &plan)?;
        a.connect(&b)?;
        b.connect(&a)?;
        b.start()?;
        a.start()?;
        a.begin();
        measure(&a, &b, kind, &plan)?;
        Ok(Self)
    }
}
