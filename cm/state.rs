// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What events make of a neighbour and of a connection: decisions only, as tables.
//!
//! [`super`] keeps what belongs to a state, and does what a table says.

use crate::{
    ib::cm::Reason,
    wire, //
};

/// Where a neighbour is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Nobody asked for a connection yet, or a good one came to its end.
    New,
    /// A connection is asked for; packets wait.
    Asked,
    /// There is one.
    Up,
    /// It came to nothing; datagrams for a while.
    Refused,
}

/// What happens to a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// There is a packet for it. `rested`: the pause after a refusal is over.
    Packet { rested: bool },
    /// The peer has accepted.
    Accepted,
    /// There is no connection, or no more. `held`: it was up for a while.
    Ended { held: bool },
}

/// What is to be done about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    /// Post the packet.
    Post,
    /// Have a connection asked for, and let the packet wait for it.
    Ask,
    /// Let the packet wait.
    Wait,
    /// Send the packet as a datagram.
    Datagram,
    /// Post what waits.
    Release,
    /// Send what waits as datagrams, and pause.
    FallBack,
    /// Send what waits as datagrams; the next packet may ask again at once.
    Forget,
    /// The connection is not wanted: end it.
    Part,
    Nothing,
}

/// What a neighbour becomes, and what is to be done.
#[inline]
pub(super) fn next(phase: Phase, event: Event) -> (Phase, Action) {
    match (phase, event) {
        (Phase::New, Event::Packet { .. }) => (Phase::Asked, Action::Ask),
        (Phase::Asked, Event::Packet { .. }) => (Phase::Asked, Action::Wait),
        (Phase::Up, Event::Packet { .. }) => (Phase::Up, Action::Post),
        (Phase::Refused, Event::Packet { rested: true }) => (Phase::Asked, Action::Ask),
        (Phase::Refused, Event::Packet { rested: false }) => (Phase::Refused, Action::Datagram),

        (Phase::Asked, Event::Accepted) => (Phase::Up, Action::Release),
        // Given up meanwhile, or there is another already.
        (Phase::New | Phase::Up | Phase::Refused, Event::Accepted) => (phase, Action::Part),

        (Phase::Up, Event::Ended { held: true }) => (Phase::New, Action::Forget),
        // One that breaks at once is as good as refused.
        (Phase::Up, Event::Ended { held: false }) | (Phase::Asked, Event::Ended { .. }) => {
            (Phase::Refused, Action::FallBack)
        }
        (Phase::New | Phase::Refused, Event::Ended { .. }) => (phase, Action::Nothing),
    }
}

/// How often a peer is asked again that knows an older connection.
const MAX_STALE: u32 = 3;

/// The smallest path MTU that there is.
const MIN_PATH_MTU: u32 = 256;

/// What a peer is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) service: u64,
    /// Bytes of a packet of the connection.
    pub(super) mtu: u32,
}

/// What to ask for next, after `tries` earlier requests, when `asked` was rejected; `None` if that
/// is an answer. Without a `reason` nobody answered.
pub(super) fn ask_again(reason: Option<Reason>, asked: Request, tries: u32) -> Option<Request> {
    let Request { service, mtu } = asked;
    match reason {
        Some(Reason::NO_SERVICE) if service == wire::SERVICE_LINUX => Some(Request {
            service: wire::SERVICE_RFC,
            mtu,
        }),
        // The core of the peer has forgotten the old one by now.
        Some(Reason::STALE) if tries < MAX_STALE => Some(asked),
        Some(Reason::MTU) if mtu > MIN_PATH_MTU => Some(Request {
            service,
            mtu: mtu / 2,
        }),
        _ => None,
    }
}

/// What is known of a connection that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Remains {
    /// The device said that it takes no more from the receive queue.
    pub(super) received: bool,
    /// All its sends have completed.
    pub(super) sent: bool,
    /// Since when it is over, in jiffies.
    pub(super) age: usize,
}

/// What may become of its queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Wait,
    Destroy,
    /// Destroy it; sends that did not complete have to be accounted for.
    GiveUp,
}

/// How long, in jiffies, the last receive and the last completion of a send are waited for: events
/// get lost.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    pub(super) receive: usize,
    pub(super) send: usize,
}

/// Whether a queue pair may be destroyed.
pub(super) fn fate(remains: Remains, patience: Patience) -> Fate {
    let received = remains.received || remains.age > patience.receive;
    match (received, remains.sent) {
        (true, true) => Fate::Destroy,
        (true, false) if remains.age > patience.send => Fate::GiveUp,
        _ => Fate::Wait,
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_cm_state)]
mod tests {
    use super::*;

    const PHASES: [Phase; 4] = [Phase::New, Phase::Asked, Phase::Up, Phase::Refused];

    /// Event by state, all of them.
    #[test]
    fn neighbours() {
        use Action::*;
        use Phase::*;
        let table = [
            (
                Event::Packet { rested: false },
                [(Asked, Ask), (Asked, Wait), (Up, Post), (Refused, Datagram)],
            ),
            (
                Event::Packet { rested: true },
                [(Asked, Ask), (Asked, Wait), (Up, Post), (Asked, Ask)],
            ),
            (
                Event::Accepted,
                [(New, Part), (Up, Release), (Up, Part), (Refused, Part)],
            ),
            (
                Event::Ended { held: false },
                [
                    (New, Nothing),
                    (Refused, FallBack),
                    (Refused, FallBack),
                    (Refused, Nothing),
                ],
            ),
            (
                Event::Ended { held: true },
                [
                    (New, Nothing),
                    (Refused, FallBack),
                    (New, Forget),
                    (Refused, Nothing),
                ],
            ),
        ];
        for (event, row) in table {
            for (phase, want) in PHASES.into_iter().zip(row) {
                assert_eq!(next(phase, event), want);
            }
        }
    }

    /// Nothing waits where nobody would send it, whatever happens in whatever order: packets wait
    /// in [`Phase::Asked`] only, and each way out of it releases them.
    #[test]
    fn nothing_waits_for_ever() {
        let events = [
            Event::Packet { rested: false },
            Event::Packet { rested: true },
            Event::Accepted,
            Event::Ended { held: false },
            Event::Ended { held: true },
        ];
        for phase in PHASES {
            for event in events {
                let (after, action) = next(phase, event);
                let waits = matches!(action, Action::Ask | Action::Wait);
                assert!(!waits || after == Phase::Asked);
                let leaves = phase == Phase::Asked && after != Phase::Asked;
                assert!(!leaves || matches!(action, Action::Release | Action::FallBack));
                // Who asks was not asking.
                assert!(action != Action::Ask || phase != Phase::Asked);
            }
        }
    }

    #[test]
    fn rejections() {
        let (linux, rfc) = (wire::SERVICE_LINUX, wire::SERVICE_RFC);
        let table = [
            (Some(Reason::NO_SERVICE), linux, 0, Some((rfc, 4096))),
            (Some(Reason::NO_SERVICE), rfc, 1, None),
            (Some(Reason::STALE), linux, 0, Some((linux, 4096))),
            (Some(Reason::STALE), rfc, 2, Some((rfc, 4096))),
            (Some(Reason::STALE), linux, 3, None),
            (Some(Reason::STALE), linux, u32::MAX, None),
            (Some(Reason::MTU), linux, 0, Some((linux, 2048))),
            (Some(Reason::MTU), rfc, u32::MAX, Some((rfc, 2048))),
            (Some(Reason::NO_QP), linux, 0, None),
            (Some(Reason::CONSUMER), linux, 0, None),
            (Some(Reason(u32::MAX)), linux, 0, None),
            (None, linux, 0, None),
            (None, rfc, 0, None),
        ];
        for (reason, service, tries, want) in table {
            let asked = Request { service, mtu: 4096 };
            let want = want.map(|(service, mtu)| Request { service, mtu });
            assert_eq!(ask_again(reason, asked, tries), want);
        }
        for mtu in [256, 255, 1, 0] {
            let asked = Request {
                service: linux,
                mtu,
            };
            assert_eq!(ask_again(Some(Reason::MTU), asked, 0), None);
        }
    }

    /// A peer that always says the same is asked a few times at most, and so is one that changes its
    /// mind each time.
    #[test]
    fn asking_ends() {
        let reasons = [
            Reason::NO_SERVICE,
            Reason::STALE,
            Reason::MTU,
            Reason::CONSUMER,
        ];
        let count = |reason_of: &dyn Fn(u32) -> Reason| {
            let mut asked = Request {
                service: wire::SERVICE_LINUX,
                mtu: 4096,
            };
            let mut tries = 0;
            while let Some(next) = ask_again(Some(reason_of(tries)), asked, tries) {
                asked = next;
                tries += 1;
                assert!(tries <= 8);
            }
            tries
        };
        for reason in reasons {
            assert!(count(&|_| reason) <= 4);
        }
        for first in 0..reasons.len() as u32 {
            count(&|tries| reasons[(first.wrapping_add(tries) % 3) as usize]);
        }
    }

    /// B44: lost events delay the end, and do not prevent it.
    #[test]
    fn ends() {
        let patience = Patience {
            receive: 10,
            send: 40,
        };
        let table = [
            (true, true, 0, Fate::Destroy),
            (true, false, 0, Fate::Wait),
            (true, false, 40, Fate::Wait),
            (true, false, 41, Fate::GiveUp),
            (false, true, 0, Fate::Wait),
            (false, true, 10, Fate::Wait),
            (false, true, 11, Fate::Destroy),
            (false, false, 11, Fate::Wait),
            (false, false, 41, Fate::GiveUp),
            (false, false, usize::MAX, Fate::GiveUp),
        ];
        for (received, sent, age, want) in table {
            let remains = Remains {
                received,
                sent,
                age,
            };
            assert_eq!(fate(remains, patience), want);
        }
    }
}
