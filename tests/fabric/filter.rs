// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Rules that hold up, lose, double or falsify MADs on their way.
//!
//! A rule is a line of words: what to match (`class=`, `method=`, `attr=`, `src=`, `dst=`, each a
//! number, the last two slots, and `match=OFFSET:HEXBYTES`, twice at most), how often (`count=`, always if left
//! out) and one action: `drop`, `delay=MICROSECONDS`, `dup`, `status=NUMBER` or
//! `patch=OFFSET:HEXBYTES`.
//!
//! ```text
//! class=3 method=0x81 attr=0x35 dst=1 count=2 drop
//! ```

use core::fmt::{
    self,
    Write, //
};

use crate::mad::{
    Mad,
    LEN, //
};
use crate::subnet::MAX_HCAS;

/// Rules in a table.
pub(crate) const RULES: usize = 16;

/// Bytes that one rule can patch.
const PATCH: usize = 16;

/// The longest delay: a minute.
const MAX_DELAY: u32 = 60_000_000;

/// What becomes of a MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Pass,
    Drop,
    /// Deliver it so many microseconds later.
    Delay(u32),
    /// Deliver it twice.
    Duplicate,
}

/// Bytes somewhere in a MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bytes {
    at: usize,
    bytes: [u8; PATCH],
    len: usize,
}

impl Bytes {
    fn get(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn are_in(&self, mad: &Mad) -> bool {
        mad.0.get(self.at..self.at + self.len) == Some(self.get())
    }

    fn show(&self, name: &str, out: &mut dyn Write) -> fmt::Result {
        write!(out, "{name}={}:", self.at)?;
        for byte in self.get() {
            write!(out, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Drop,
    Delay(u32),
    Duplicate,
    Status(u16),
    Patch(Bytes),
}

/// What matches which MADs, and what to do with them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rule {
    class: Option<u8>,
    method: Option<u8>,
    attribute: Option<u16>,
    src: Option<usize>,
    dst: Option<usize>,
    bytes: [Option<Bytes>; 2],
    /// How often it applies yet. None: always.
    left: Option<u32>,
    action: Action,
    hits: u64,
}

/// A decimal or, with 0x in front, hexadecimal number.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        // from_str_radix() takes a sign, a number here has none.
        Some(digits) if !digits.starts_with('+') => u32::from_str_radix(digits, 16).ok(),
        None if !text.starts_with('+') => text.parse().ok(),
        _ => None,
    }
}

fn slot(text: &str) -> Option<usize> {
    number(text)
        .map(|slot| slot as usize)
        .filter(|slot| *slot < MAX_HCAS)
}

fn bytes(text: &str) -> Option<Bytes> {
    let (at, hex) = text.split_once(':')?;
    let at = number(at)? as usize;
    let len = hex.len() / 2;
    if hex.len() % 2 != 0 || len == 0 || len > PATCH || at.checked_add(len)? > LEN {
        return None;
    }
    let mut bytes = [0; PATCH];
    for (byte, digits) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
        for digit in digits {
            *byte = *byte << 4 | char::from(*digit).to_digit(16)? as u8;
        }
    }
    Some(Bytes { at, bytes, len })
}

impl Rule {
    /// Reads a rule; None if it says nothing sensible.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut rule = Self {
            class: None,
            method: None,
            attribute: None,
            src: None,
            dst: None,
            bytes: [None; 2],
            left: None,
            action: Action::Drop,
            hits: 0,
        };
        let mut actions = 0u32;
        for word in line.split_ascii_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let action = match key {
                "class" => {
                    rule.class = Some(number(value)?.try_into().ok()?);
                    continue;
                }
                "method" => {
                    rule.method = Some(number(value)?.try_into().ok()?);
                    continue;
                }
                "attr" => {
                    rule.attribute = Some(number(value)?.try_into().ok()?);
                    continue;
                }
                "src" => {
                    rule.src = Some(slot(value)?);
                    continue;
                }
                "dst" => {
                    rule.dst = Some(slot(value)?);
                    continue;
                }
                "match" => {
                    let free = rule.bytes.iter_mut().find(|bytes| bytes.is_none())?;
                    *free = Some(bytes(value)?);
                    continue;
                }
                "count" => {
                    rule.left = Some(number(value)?);
                    continue;
                }
                "drop" if word == key => Action::Drop,
                "dup" if word == key => Action::Duplicate,
                "delay" => Action::Delay(number(value).filter(|delay| *delay <= MAX_DELAY)?),
                "status" => Action::Status(number(value)?.try_into().ok()?),
                "patch" => Action::Patch(bytes(value)?),
                _ => return None,
            };
            rule.action = action;
            actions = actions.wrapping_add(1);
        }
        (actions == 1).then_some(rule)
    }

    fn matches(&self, src: Option<usize>, dst: usize, mad: &Mad) -> bool {
        self.left != Some(0)
            && self.class.is_none_or(|class| class == mad.class())
            && self.method.is_none_or(|method| method == mad.method())
            && self
                .attribute
                .is_none_or(|attribute| attribute == mad.attribute())
            && self.src.is_none_or(|wanted| Some(wanted) == src)
            && self.dst.is_none_or(|wanted| wanted == dst)
            && self.bytes.iter().flatten().all(|bytes| bytes.are_in(mad))
    }

    fn show(&self, out: &mut dyn Write) -> fmt::Result {
        if let Some(class) = self.class {
            write!(out, "class={class:#04x} ")?;
        }
        if let Some(method) = self.method {
            write!(out, "method={method:#04x} ")?;
        }
        if let Some(attribute) = self.attribute {
            write!(out, "attr={attribute:#06x} ")?;
        }
        if let Some(src) = self.src {
            write!(out, "src={src} ")?;
        }
        if let Some(dst) = self.dst {
            write!(out, "dst={dst} ")?;
        }
        for bytes in self.bytes.iter().flatten() {
            bytes.show("match", out)?;
            write!(out, " ")?;
        }
        if let Some(left) = self.left {
            write!(out, "count={left} ")?;
        }
        match self.action {
            Action::Drop => write!(out, "drop")?,
            Action::Delay(delay) => write!(out, "delay={delay}")?,
            Action::Duplicate => write!(out, "dup")?,
            Action::Status(status) => write!(out, "status={status:#06x}")?,
            Action::Patch(bytes) => bytes.show("patch", out)?,
        }
        writeln!(out, " hits={}", self.hits)
    }
}

/// The rules of a subnet.
pub(crate) struct FilterTable {
    rules: [Option<Rule>; RULES],
}

impl FilterTable {
    pub(crate) const fn new() -> Self {
        Self {
            rules: [None; RULES],
        }
    }

    /// Adds a rule behind the others and returns its place, None if there is no room.
    pub(crate) fn add(&mut self, rule: Rule) -> Option<usize> {
        let place = self.rules.iter().position(Option::is_none)?;
        self.rules[place] = Some(rule);
        Some(place)
    }

    /// Takes a rule out; None if there is none at this place.
    pub(crate) fn remove(&mut self, place: usize) -> Option<()> {
        self.rules.get_mut(place)?.take().map(|_| ())
    }

    pub(crate) fn clear(&mut self) {
        self.rules = [None; RULES];
    }

    /// Applies all rules to a MAD from a slot, or from the switch, to a slot. Those that falsify
    /// it go on to the next rule, the first other one decides.
    pub(crate) fn apply(&mut self, src: Option<usize>, dst: usize, mad: &mut Mad) -> Verdict {
        for rule in self.rules.iter_mut().flatten() {
            if !rule.matches(src, dst, mad) {
                continue;
            }
            rule.hits = rule.hits.wrapping_add(1);
            if let Some(left) = &mut rule.left {
                *left = left.saturating_sub(1);
            }
            match rule.action {
                Action::Drop => return Verdict::Drop,
                Action::Delay(delay) => return Verdict::Delay(delay),
                Action::Duplicate => return Verdict::Duplicate,
                Action::Status(status) => mad.set_status_code(status),
                Action::Patch(bytes) => crate::mad::put(&mut mad.0, bytes.at, bytes.get()),
            }
        }
        Verdict::Pass
    }

    /// One line per rule: its place, what it says, how often it did so.
    pub(crate) fn show(&self, out: &mut dyn Write) -> fmt::Result {
        for (place, rule) in self.rules.iter().enumerate() {
            if let Some(rule) = rule {
                write!(out, "{place}: ")?;
                rule.show(out)?;
            }
        }
        Ok(())
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_filter)]
mod tests {
    use super::*;
    use crate::mad::{
        class,
        method, //
    };

    struct Text {
        bytes: [u8; 256],
        len: usize,
    }

    impl Write for Text {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let end = self.len + text.len();
            self.bytes
                .get_mut(self.len..end)
                .ok_or(fmt::Error)?
                .copy_from_slice(text.as_bytes());
            self.len = end;
            Ok(())
        }
    }

    fn table(lines: &[&str]) -> FilterTable {
        let mut table = FilterTable::new();
        for line in lines {
            table.add(Rule::parse(line).unwrap());
        }
        table
    }

    fn response() -> Mad {
        Mad::request(0x03, method::GET_RESP, 0x35, 0)
    }

    #[test]
    fn matching() {
        let mut table = table(&["class=3 method=0x81 attr=0x0035 src=0 dst=1 drop"]);
        assert_eq!(table.apply(Some(0), 1, &mut response()), Verdict::Drop);
        let others = [
            (Some(1), 1, response()),
            (None, 1, response()),
            (Some(0), 0, response()),
            (Some(0), 1, Mad::request(0x04, method::GET_RESP, 0x35, 0)),
            (Some(0), 1, Mad::request(0x03, method::GET, 0x35, 0)),
            (Some(0), 1, Mad::request(0x03, method::GET_RESP, 0x38, 0)),
        ];
        for (src, dst, mut mad) in others {
            assert_eq!(table.apply(src, dst, &mut mad), Verdict::Pass);
        }
    }

    #[test]
    fn matching_bytes() {
        let mut table = table(&["match=254:abcd match=0:01 drop"]);
        let mut mad = response();
        assert_eq!(table.apply(None, 0, &mut mad), Verdict::Pass);
        mad.0[254..].copy_from_slice(&[0xab, 0xcd]);
        assert_eq!(table.apply(None, 0, &mut mad), Verdict::Drop);
        mad.0[0] = 2;
        assert_eq!(table.apply(None, 0, &mut mad), Verdict::Pass);
    }

    #[test]
    fn so_many_times() {
        let mut table = table(&["count=2 dup", "delay=7"]);
        for verdict in [Verdict::Duplicate, Verdict::Duplicate, Verdict::Delay(7)] {
            assert_eq!(table.apply(None, 0, &mut response()), verdict);
        }
    }

    #[test]
    fn falsifying() {
        let mut table = table(&["status=0x001c", "patch=254:abCD", "drop"]);
        let mut mad = Mad::request(class::SUBN_DIRECTED, method::GET_RESP, 0x15, 0);
        mad.set_returning();
        assert_eq!(table.apply(None, 0, &mut mad), Verdict::Drop);
        assert_eq!(mad.status(), 0x801c);
        assert_eq!(mad.0[253..], [0, 0xab, 0xcd]);
    }

    #[test]
    fn nonsense() {
        let lines = [
            "",
            "class=3",
            "class=3 drop dup",
            "class=256 drop",
            "attr=0x10000 drop",
            "src=68 drop",
            "drop=1",
            "delay",
            "delay=60000001",
            "delay=-1",
            "count=+1 drop",
            "status=0x+1",
            "patch=254:abcdef",
            "patch=1:a",
            "patch=1:",
            "patch=1:zz",
            "patch=4294967295:00",
            "patch=0:000102030405060708090a0b0c0d0e0f10",
            "match=0:01",
            "match=254:abcdef drop",
            "match=1 drop",
            "match=1:00 match=2:00 match=3:00 drop",
            "colour=3 drop",
        ];
        for line in lines {
            assert_eq!(Rule::parse(line), None);
        }
    }

    #[test]
    fn showing() {
        let mut table = table(&["dst=3 count=5 drop", "class=7 match=3:0a patch=24:00ff"]);
        table.apply(None, 3, &mut response());
        let mut text = Text {
            bytes: [0; 256],
            len: 0,
        };
        table.show(&mut text).unwrap();
        let wanted =
            "0: dst=3 count=4 drop hits=1\n1: class=0x07 match=3:0a patch=24:00ff hits=0\n";
        assert_eq!(&text.bytes[..text.len], wanted.as_bytes());
    }

    #[test]
    fn places() {
        let mut table = FilterTable::new();
        let rule = Rule::parse("drop").unwrap();
        for place in 0..RULES {
            assert_eq!(table.add(rule), Some(place));
        }
        assert_eq!(table.add(rule), None);
        assert_eq!(table.remove(3), Some(()));
        assert_eq!(table.remove(3), None);
        assert_eq!(table.remove(RULES), None);
        assert_eq!(table.add(rule), Some(3));
        table.clear();
        assert_eq!(table.remove(0), None);
    }
}
