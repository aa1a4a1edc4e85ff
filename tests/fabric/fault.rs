// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Faults of a HCA: which, how often, and how often they struck. Uses `core` only.

/// What can go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// A datagram is lost on the wire.
    Drop,
    /// A datagram arrives twice.
    Duplicate,
    /// A datagram arrives late, by the value in microseconds.
    Delay,
    /// A datagram waits until the next one has passed it, at most the value in microseconds.
    Reorder,
    /// The wire takes so many megabits per second: the value. Who sends more waits, in order.
    Bandwidth,
    /// A byte of a datagram, the value counts from the start, is inverted.
    Corrupt,
    /// A datagram leaves as if its sender had asked for another address: the value says what of it
    /// is inverted. 0 to 15: that byte of the destination's GID; 16: the queue pair number; 17: the
    /// Q_Key; 18: the service level; 19: the static rate.
    Misaddress,
    /// Posting a send fails with the value, a positive errno.
    FailPostSend,
    /// Posting a receive fails with the value, a positive errno.
    FailPostRecv,
    /// The same for a shared receive queue.
    FailPostSrq,
    /// A send completes with the value, an `ib_wc_status`, and is not executed.
    SendStatus,
    /// A receive completes with the value, an `ib_wc_status`.
    RecvStatus,
    /// The handler of a CQ is not called.
    LoseCqEvent,
    /// A send is not executed until the fault is taken away.
    StallSend,
    /// A message of a connection is answered as if there were no buffer for it.
    Rnr,
    /// These verbs fail with the value, a positive errno.
    CreateQp,
    CreateCq,
    CreateSrq,
    CreateAh,
    AttachMcast,
    GetDmaMr,
    QueryPort,
    QueryGid,
    QueryPkey,
    ModifyQpReset,
    ModifyQpInit,
    ModifyQpRtr,
    ModifyQpRts,
    ModifyQpErr,
}

impl Fault {
    pub(crate) const ALL: [(&'static str, Self); 29] = [
        ("drop", Self::Drop),
        ("dup", Self::Duplicate),
        ("delay", Self::Delay),
        ("reorder", Self::Reorder),
        ("bandwidth", Self::Bandwidth),
        ("corrupt", Self::Corrupt),
        ("misaddress", Self::Misaddress),
        ("fail_post_send", Self::FailPostSend),
        ("fail_post_recv", Self::FailPostRecv),
        ("fail_post_srq", Self::FailPostSrq),
        ("send_status", Self::SendStatus),
        ("recv_status", Self::RecvStatus),
        ("lose_cq_event", Self::LoseCqEvent),
        ("stall_send", Self::StallSend),
        ("rnr", Self::Rnr),
        ("create_qp", Self::CreateQp),
        ("create_cq", Self::CreateCq),
        ("create_srq", Self::CreateSrq),
        ("create_ah", Self::CreateAh),
        ("attach_mcast", Self::AttachMcast),
        ("get_dma_mr", Self::GetDmaMr),
        ("query_port", Self::QueryPort),
        ("query_gid", Self::QueryGid),
        ("query_pkey", Self::QueryPkey),
        ("modify_qp_reset", Self::ModifyQpReset),
        ("modify_qp_init", Self::ModifyQpInit),
        ("modify_qp_rtr", Self::ModifyQpRtr),
        ("modify_qp_rts", Self::ModifyQpRts),
        ("modify_qp_err", Self::ModifyQpErr),
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(have, _)| *have == name)
            .map(|(_, fault)| *fault)
    }

    /// Whether the value may be that.
    fn takes(self, value: u32) -> bool {
        match self {
            Self::Drop | Self::Duplicate | Self::LoseCqEvent => true,
            Self::StallSend | Self::Rnr => true,
            Self::Delay | Self::Reorder | Self::Corrupt => true,
            Self::Bandwidth => value != 0,
            Self::Misaddress => value <= 19,
            Self::SendStatus | Self::RecvStatus => (1..=21).contains(&value),
            // An errno.
            _ => (1..=4095).contains(&value),
        }
    }

    /// What the value is if none is given.
    pub(crate) fn default_value(self) -> u32 {
        match self {
            Self::Drop | Self::Duplicate | Self::LoseCqEvent => 0,
            Self::StallSend | Self::Rnr | Self::Misaddress => 0,
            Self::Delay => 1000,
            Self::Reorder => 1_000_000,
            Self::Bandwidth => 100,
            Self::Corrupt => 30,
            // IB_WC_LOC_QP_OP_ERR, IB_WC_LOC_PROT_ERR.
            Self::SendStatus => 2,
            Self::RecvStatus => 4,
            // EIO.
            _ => 5,
        }
    }
}

/// How often a fault strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rule {
    pub(crate) value: u32,
    /// How often at most.
    pub(crate) left: u64,
    /// Chances that pass before the first.
    pub(crate) skip: u64,
    /// Per million.
    pub(crate) ppm: u32,
}

impl Rule {
    /// `value=V n=N skip=S ppm=P`, in any order, each at most once; all but `n=1` may be left out.
    pub(crate) fn parse<'a>(fault: Fault, words: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut rule = Self {
            value: fault.default_value(),
            left: 1,
            skip: 0,
            ppm: 1_000_000,
        };
        for word in words {
            let (key, value) = word.split_once('=')?;
            match key {
                "value" => rule.value = value.parse().ok()?,
                "n" if value == "all" => rule.left = u64::MAX,
                "n" => rule.left = value.parse().ok()?,
                "skip" => rule.skip = value.parse().ok()?,
                "ppm" => rule.ppm = value.parse().ok().filter(|ppm| *ppm <= 1_000_000)?,
                _ => return None,
            }
        }
        fault.takes(rule.value).then_some(rule)
    }
}

/// The faults of a HCA.
pub(crate) struct Faults {
    rules: [Option<Rule>; Fault::ALL.len()],
    hits: [u64; Fault::ALL.len()],
    random: u64,
    /// Whether a datagram waits for the next one.
    holding: bool,
}

impl Faults {
    pub(crate) const fn new(seed: u64) -> Self {
        Self {
            rules: [None; Fault::ALL.len()],
            hits: [0; Fault::ALL.len()],
            random: seed | 1,
            holding: false,
        }
    }

    pub(crate) fn set(&mut self, fault: Fault, rule: Option<Rule>) {
        self.rules[fault as usize] = rule;
    }

    pub(crate) fn seed(&mut self, seed: u64) {
        self.random = seed | 1;
    }

    /// Whether any fault may strike, or has not ended.
    pub(crate) fn any(&self) -> bool {
        self.holding || self.rules.iter().any(Option::is_some)
    }

    /// A datagram waits for the next one from now on, or none does; returns what was before.
    pub(crate) fn hold(&mut self, on: bool) -> bool {
        core::mem::replace(&mut self.holding, on)
    }

    /// A chance for the fault; its value if it strikes.
    pub(crate) fn strike(&mut self, fault: Fault) -> Option<u32> {
        let slot = self.rules.get_mut(fault as usize)?;
        let rule = slot.as_mut()?;
        if rule.skip != 0 {
            rule.skip -= 1;
            return None;
        }
        if rule.ppm < 1_000_000 {
            // xorshift64
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            if (self.random >> 20) % 1_000_000 >= u64::from(rule.ppm) {
                return None;
            }
        }
        let value = rule.value;
        if rule.left != u64::MAX {
            rule.left = rule.left.saturating_sub(1);
            if rule.left == 0 {
                *slot = None;
            }
        }
        if let Some(hits) = self.hits.get_mut(fault as usize) {
            *hits += 1;
        }
        Some(value)
    }

    /// Name, hits and rule of each fault that was ever set or has struck.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, u64, Option<Rule>)> + '_ {
        Fault::ALL
            .iter()
            .zip(self.hits)
            .zip(self.rules)
            .map(|(((name, _), hits), rule)| (*name, hits, rule))
            .filter(|(_, hits, rule)| *hits != 0 || rule.is_some())
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_fault)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_order() {
        for (index, (name, fault)) in Fault::ALL.iter().enumerate() {
            assert_eq!(*fault as usize, index);
            assert_eq!(Fault::named(name), Some(*fault));
        }
        assert_eq!(Fault::named("nonsense"), None);
    }

    #[test]
    fn rules_are_read() {
        let parse = |text: &'static str| Rule::parse(Fault::Drop, text.split_whitespace());
        let rule = parse("");
        assert_eq!(rule.map(|rule| (rule.left, rule.skip)), Some((1, 0)));
        assert_eq!(parse("n=all").map(|rule| rule.left), Some(u64::MAX));
        assert_eq!(parse("value=7 skip=2").map(|rule| rule.value), Some(7));
        assert_eq!(parse("ppm=1000001"), None);
        assert_eq!(parse("n=-1"), None);
        assert_eq!(parse("what=1"), None);
        assert_eq!(parse("n"), None);
        let errno = |text: &'static str| Rule::parse(Fault::CreateQp, text.split_whitespace());
        assert_eq!(errno("").map(|rule| rule.value), Some(5));
        assert_eq!(errno("value=12").map(|rule| rule.value), Some(12));
        assert_eq!(errno("value=0"), None);
        assert_eq!(errno("value=2147483648"), None);
        let wire = |text: &'static str| Rule::parse(Fault::Bandwidth, text.split_whitespace());
        assert_eq!(wire("value=0"), None);
        assert_eq!(wire("value=40000").map(|rule| rule.value), Some(40_000));
        let wrong = |text: &'static str| Rule::parse(Fault::Misaddress, text.split_whitespace());
        assert_eq!(wrong("value=19").map(|rule| rule.value), Some(19));
        assert_eq!(wrong("value=20"), None);
    }

    #[test]
    fn one_that_waits_is_a_fault() {
        let mut faults = Faults::new(7);
        assert!(!faults.hold(true));
        assert!(faults.any());
        assert!(faults.hold(false));
        assert!(!faults.any());
    }

    #[test]
    fn strikes_as_often_as_asked() {
        let mut faults = Faults::new(7);
        assert!(!faults.any());
        assert_eq!(faults.strike(Fault::Drop), None);
        faults.set(
            Fault::Drop,
            Some(Rule {
                value: 9,
                left: 2,
                skip: 1,
                ppm: 1_000_000,
            }),
        );
        assert_eq!(faults.strike(Fault::Drop), None);
        assert_eq!(faults.strike(Fault::Drop), Some(9));
        assert_eq!(faults.strike(Fault::Duplicate), None);
        assert_eq!(faults.strike(Fault::Drop), Some(9));
        assert_eq!(faults.strike(Fault::Drop), None);
        assert!(!faults.any());
        assert_eq!(faults.each().next().map(|(_, hits, _)| hits), Some(2));
    }

    #[test]
    fn strikes_at_a_rate() {
        let mut faults = Faults::new(7);
        faults.set(
            Fault::Drop,
            Some(Rule {
                value: 0,
                left: u64::MAX,
                skip: 0,
                ppm: 100_000,
            }),
        );
        let hits = (0..10_000)
            .filter(|_| faults.strike(Fault::Drop).is_some())
            .count();
        assert!((800..1200).contains(&hits));
    }
}
