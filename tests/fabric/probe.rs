// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The null client as a witness: what it sends and receives while the fabric is at fault, and what
//! the fabric makes of a client that does what is forbidden.

use crate::{
    glue::{
        self,
        Consumer,
        Device,
        Forgotten,
        Posting,
        Shape, //
    },
    qp::{
        Opcode,
        State,
        SEND_IP_CSUM, //
    },
    ud::GRH, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    },
};

const QKEY: u32 = 0x1b1c;
const MAX_BYTES: usize = 4096;
/// Datagrams of an exchange: their numbers are bits of a word.
const MAX_COUNT: u32 = 64;
/// Receives that are posted beyond those that are sent.
const SPARE: u32 = 8;
/// How long the client waits for news, in milliseconds, and at most.
const WAIT: u64 = 1000;
const MAX_WAIT: u64 = 60_000;
/// A group that nobody else has.
const MGID: [u8; 16] = [
    0xff, 0x12, 0xa0, 0x1c, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
];
const MLID: u16 = 0xc3ff;

/// What is to be sent.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    bytes: usize,
    count: u32,
    /// Datagrams that end the exchange when they have come.
    want: u32,
    /// Milliseconds without news that end it too.
    wait: u64,
    /// Whether the sender writes to its memory again before the sends complete.
    scribble: bool,
}

impl Order {
    /// `BYTES COUNT [want=N] [wait=MILLISECONDS] [scribble=1]`, the first two read already.
    pub(crate) fn parse<'a>(
        bytes: u64,
        count: u64,
        words: impl Iterator<Item = &'a str>,
    ) -> Option<Self> {
        let mut order = Self {
            bytes: usize::try_from(bytes).ok()?,
            count: u32::try_from(count).ok()?,
            want: u32::try_from(count).ok()?,
            wait: WAIT,
            scribble: false,
        };
        for word in words {
            match word.split_once('=')? {
                ("want", value) => order.want = value.parse().ok()?,
                ("wait", value) => order.wait = value.parse().ok()?,
                ("scribble", "1") => order.scribble = true,
                _ => return None,
            }
        }
        let sound = (1..=MAX_BYTES).contains(&order.bytes)
            && (1..=MAX_COUNT).contains(&order.count)
            && order.want <= order.count + SPARE
            && order.wait <= MAX_WAIT;
        sound.then_some(order)
    }

    /// One small datagram.
    const ONE: Self = Self {
        bytes: 256,
        count: 1,
        want: 1,
        wait: 50,
        scribble: false,
    };
}

/// What the client saw.
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    /// Sends that were accepted, and the last errno of one that was not.
    posted: u32,
    post_send_errno: i32,
    post_recv_errno: i32,
    /// Good completions, and the first bad status.
    sent: u32,
    send_status: u32,
    received: u32,
    recv_status: u32,
    /// Datagrams whose bytes were not those that were sent, that came before, that came after one
    /// that was sent later.
    wrong: u32,
    twice: u32,
    swapped: u32,
    /// Calls of the completion handlers, and of those for errors, of both queues.
    send_calls: u32,
    recv_calls: u32,
    cq_errors: u32,
    millis: u64,
    /// The numbers of the datagrams that came, as bits, and the highest.
    numbers: u64,
    highest: u32,
    completed: u32,
}

impl Seen {
    pub(crate) fn each(&self) -> [(&'static str, i64); 14] {
        [
            ("posted", self.posted.into()),
            ("post_send_errno", self.post_send_errno.into()),
            ("post_recv_errno", self.post_recv_errno.into()),
            ("sent", self.sent.into()),
            ("send_status", self.send_status.into()),
            ("received", self.received.into()),
            ("recv_status", self.recv_status.into()),
            ("wrong", self.wrong.into()),
            ("twice", self.twice.into()),
            ("swapped", self.swapped.into()),
            ("send_calls", self.send_calls.into()),
            ("recv_calls", self.recv_calls.into()),
            ("cq_errors", self.cq_errors.into()),
            ("millis", self.millis as i64),
        ]
    }

    /// Takes note of a datagram.
    fn note(&mut self, data: &[u8], order: &Order) {
        self.received += 1;
        let number = data.first().copied().unwrap_or(0);
        let whole = data.len() == order.bytes
            && u32::from(number) < order.count
            && data
                .iter()
                .enumerate()
                .all(|(at, byte)| *byte == pattern(number, at));
        if !whole {
            self.wrong += 1;
            return;
        }
        let bit = 1u64 << number;
        if self.numbers & bit != 0 {
            self.twice += 1;
        } else if u32::from(number) < self.highest {
            self.swapped += 1;
        }
        self.numbers |= bit;
        self.highest = self.highest.max(u32::from(number));
    }
}

/// Byte `at` of datagram `number`.
fn pattern(number: u8, at: usize) -> u8 {
    number.wrapping_add((at % 251) as u8)
}

/// Sends from one HCA to another, and tells what came of it. An error is that of the verb that
/// failed.
pub(crate) fn exchange(from: &Device, to: &Device, dlid: u16, order: &Order) -> Result<Seen> {
    let room = order.count + SPARE;
    let mut sender = Consumer::new(
        from,
        &Shape {
            slots: order.count,
            completions: order.count,
            places: order.count as usize,
            bytes: order.bytes,
            qkey: QKEY,
            lso: false,
        },
    )?;
    let mut receiver = Consumer::new(
        to,
        &Shape {
            slots: room,
            completions: room,
            places: room as usize,
            bytes: order.bytes + GRH,
            qkey: QKEY,
            lso: false,
        },
    )?;
    sender.look()?;
    sender.start()?;
    receiver.start()?;
    sender.attach(MGID, MLID, true)?;
    sender.aim(dlid)?;
    sender.arm(false)?;
    receiver.arm(true)?;
    let mut seen = Seen::default();
    for place in 0..room as usize {
        if let Err(error) = receiver.post_place(place, order.bytes + GRH, 1, 0) {
            seen.post_recv_errno = error.to_errno();
        }
    }
    let start = glue::now();
    for number in 0..order.count {
        for (at, byte) in sender.place(number as usize).iter_mut().enumerate() {
            *byte = pattern(number as u8, at);
        }
        match sender.post(&sound(number as usize, order.bytes, &receiver)) {
            Ok(()) => seen.posted += 1,
            Err(error) => seen.post_send_errno = error.to_errno(),
        }
        if order.scribble {
            sender.place(number as usize).fill(0xee);
        }
    }
    watch(&sender, &mut receiver, order, &mut seen);
    seen.millis = glue::now().saturating_sub(start) / 1_000_000;
    sender.modify(State::Err)?;
    sender.modify(State::Reset)?;
    Ok(seen)
}

/// A send that is as it should be.
fn sound<'a>(place: usize, len: usize, receiver: &Consumer<'_>) -> Posting<'a> {
    Posting {
        opcode: Opcode::Send,
        flags: 0,
        place,
        len,
        pieces: 1,
        key: 0,
        qpn: receiver.qpn(),
        qkey: QKEY,
        header: &[],
        mss: 0,
    }
}

/// Polls both ends until all has come, or nothing comes any more.
fn watch(sender: &Consumer<'_>, receiver: &mut Consumer<'_>, order: &Order, seen: &mut Seen) {
    let mut last = glue::now();
    loop {
        let before = (seen.completed, seen.received, seen.recv_status);
        while let Some(done) = sender.completion(false) {
            seen.completed += 1;
            match done.status {
                0 => seen.sent += 1,
                status if seen.send_status == 0 => seen.send_status = status,
                _ => {}
            }
        }
        while let Some(done) = receiver.completion(true) {
            match done.status {
                0 => {
                    let place = receiver.place(done.place);
                    let end = done.len.min(place.len());
                    seen.note(place.get(GRH..end).unwrap_or_default(), order);
                }
                status if seen.recv_status == 0 => seen.recv_status = status,
                _ => {}
            }
        }
        seen.send_calls = sender.calls(false);
        seen.recv_calls = receiver.calls(true);
        seen.cq_errors = sender.errors(false) + receiver.errors(true);
        let now = glue::now();
        // Handlers are called after there are completions, maybe on another CPU.
        let called = (seen.send_calls != 0 || seen.completed == 0)
            && (seen.recv_calls != 0 || seen.received == 0);
        if called && seen.completed >= seen.posted && seen.received >= order.want {
            return;
        }
        if before != (seen.completed, seen.received, seen.recv_status) {
            last = now;
        } else if now.saturating_sub(last) > order.wait * 1_000_000 {
            return;
        }
        fsleep(Delta::from_micros(200));
    }
}

/// What hardware does not forgive, by name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Misuse {
    SendKey,
    RecvKey,
    SendSlots,
    RecvSlots,
    SendState,
    RecvState,
    Transition,
    SendPieces,
    RecvPieces,
    ShortBuffer,
    /// A large send without having asked for them, or with nonsense for a header.
    LargeSend,
    LargeHeader,
    /// A checksum for what has none.
    Checksum,
    CqOverflow,
    Attached,
    Forget,
}

impl Misuse {
    const ALL: [(&'static str, Self); 16] = [
        ("send_key", Self::SendKey),
        ("recv_key", Self::RecvKey),
        ("send_slots", Self::SendSlots),
        ("recv_slots", Self::RecvSlots),
        ("send_state", Self::SendState),
        ("recv_state", Self::RecvState),
        ("transition", Self::Transition),
        ("send_pieces", Self::SendPieces),
        ("recv_pieces", Self::RecvPieces),
        ("short_buffer", Self::ShortBuffer),
        ("large_send", Self::LargeSend),
        ("large_header", Self::LargeHeader),
        ("checksum", Self::Checksum),
        ("cq_overflow", Self::CqOverflow),
        ("attached", Self::Attached),
        ("forget", Self::Forget),
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(have, _)| *have == name)
            .map(|(_, misuse)| *misuse)
    }
}

/// Does it, and tells what came of it.
pub(crate) fn misuse(
    from: &Device,
    to: &Device,
    dlid: u16,
    what: Misuse,
    keep: impl FnOnce(Forgotten) -> Result,
) -> Result<Seen> {
    const SLOTS: u32 = 4;
    let order = Order::ONE;
    let shape = |lso, completions| Shape {
        slots: SLOTS,
        completions,
        places: SLOTS as usize,
        bytes: order.bytes + GRH,
        qkey: QKEY,
        lso,
    };
    let completions = if what == Misuse::CqOverflow { 2 } else { SLOTS };
    let mut sender = Consumer::new(from, &shape(what == Misuse::LargeHeader, completions))?;
    let mut receiver = Consumer::new(to, &shape(false, SLOTS))?;
    sender.aim(dlid)?;
    let mut seen = Seen::default();
    if what == Misuse::Transition {
        seen.post_send_errno = errno(sender.modify(State::Rts));
        return Ok(seen);
    }
    if what == Misuse::RecvState {
        seen.post_recv_errno = errno(receiver.post_place(0, order.bytes, 1, 0));
        return Ok(seen);
    }
    receiver.start()?;
    match what {
        Misuse::SendState => sender.modify(State::Init)?,
        _ => sender.start()?,
    }
    for (at, byte) in sender.place(0).iter_mut().enumerate() {
        *byte = pattern(0, at);
    }
    let (len, pieces, key) = match what {
        Misuse::RecvKey => (order.bytes + GRH, 1, 0x100),
        Misuse::RecvPieces => (order.bytes + GRH, 2, 0),
        Misuse::ShortBuffer => (GRH + 10, 1, 0),
        _ => (order.bytes + GRH, 1, 0),
    };
    let receives = 1 + if what == Misuse::RecvSlots { SLOTS } else { 0 };
    for _ in 0..receives {
        if let Err(error) = receiver.post_place(0, len, pieces, key) {
            seen.post_recv_errno = error.to_errno();
        }
    }
    let header = [0x11; 44];
    let mut posting = sound(0, order.bytes, &receiver);
    match what {
        Misuse::SendKey => posting.key = 0x100,
        Misuse::SendPieces => posting.pieces = 2,
        Misuse::Checksum => posting.flags = SEND_IP_CSUM,
        Misuse::LargeSend | Misuse::LargeHeader => {
            posting.opcode = Opcode::Lso;
            posting.header = &header;
            posting.mss = 100;
        }
        Misuse::Attached => sender.attach(MGID, MLID, false)?,
        Misuse::Forget => keep(sender.forget()?)?,
        _ => {}
    }
    let sends = match what {
        Misuse::SendSlots => SLOTS + 1,
        Misuse::CqOverflow => SLOTS,
        _ => 1,
    };
    for _ in 0..sends {
        match sender.post(&posting) {
            Ok(()) => seen.posted += 1,
            Err(error) => seen.post_send_errno = error.to_errno(),
        }
    }
    watch(&sender, &mut receiver, &order, &mut seen);
    Ok(seen)
}

fn errno(result: Result) -> i32 {
    result.map_or_else(|error| error.to_errno(), |()| 0)
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_probe)]
mod tests {
    use super::*;

    fn order(bytes: u64, count: u64, text: &'static str) -> Option<Order> {
        Order::parse(bytes, count, text.split_whitespace())
    }

    #[test]
    fn orders_are_read() {
        assert_eq!(order(100, 3, "").map(|order| order.want), Some(3));
        let all = order(4096, 64, "want=72 wait=10");
        assert_eq!(all.map(|order| (order.want, order.wait)), Some((72, 10)));
        for text in ["want", "want=12", "wait=60001", "wait=-1", "colour=1"] {
            assert!(order(100, 3, text).is_none());
        }
        for (bytes, count) in [(0, 1), (4097, 1), (1, 0), (1, 65), (1 << 32, 1)] {
            assert!(order(bytes, count, "").is_none());
        }
    }

    #[test]
    fn a_witness_sees() {
        let Some(order) = order(5, 3, "") else {
            return assert!(false);
        };
        let data = |number: u8| [0, 1, 2, 3, 4].map(|at| pattern(number, at));
        let mut seen = Seen::default();
        for number in [0, 2, 1, 2] {
            seen.note(&data(number), &order);
        }
        assert_eq!((seen.received, seen.swapped, seen.twice), (4, 1, 1));
        let mut bad = data(1);
        bad[3] = !bad[3];
        seen.note(&bad, &order);
        seen.note(&data(1)[..4], &order);
        seen.note(&data(3), &order);
        assert_eq!((seen.received, seen.wrong), (7, 3));
    }
}
