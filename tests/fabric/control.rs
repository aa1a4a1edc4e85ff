// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The fabric's controls, in `/sys/kernel/debug/ibf`.
//!
//! A line written to `ctl` is a command; it fails with an error if it makes no sense. The other
//! files are for reading.

use crate::{
    fabric::Fabric,
    fault::{
        Fault,
        Rule, //
    },
    filter,
    hca::HcaConfig,
    port::{
        Event,
        Events, //
    },
    probe::{
        Misuse,
        Order, //
    },
    subnet::Attach,
    ud::{
        Header,
        GRH, //
    }, //
};
use core::str::SplitWhitespace;
use kernel::{
    debugfs::{
        Dir,
        File, //
    },
    fmt,
    prelude::*,
    sync::{
        atomic::ordering::Relaxed,
        Arc, //
    },
    uaccess::UserSliceReader, //
};

/// The longest command.
const LINE: usize = 512;

/// The files.
pub(crate) struct Control {
    _files: [Pin<KBox<File<Arc<Fabric>>>>; 8],
    _dir: Dir,
}

impl Control {
    pub(crate) fn new(fabric: &Arc<Fabric>) -> Result<Self> {
        let dir = Dir::new(c"ibf");
        Ok(Self {
            _files: [
                KBox::pin_init(
                    dir.write_callback_file(c"ctl", fabric.clone(), &write),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"state", fabric.clone(), &show_state),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"anomalies", fabric.clone(), &show_anomalies),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"faults", fabric.clone(), &show_faults),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"null", fabric.clone(), &show_null),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"probe", fabric.clone(), &show_probe),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"filters", fabric.clone(), &show_filters),
                    GFP_KERNEL,
                )?,
                KBox::pin_init(
                    dir.read_callback_file(c"sent", fabric.clone(), &show_sent),
                    GFP_KERNEL,
                )?,
            ],
            _dir: dir,
        })
    }
}

fn show_anomalies(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    fabric.show_anomalies(out)
}

fn show_null(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    match *fabric.measured().lock() {
        Some(figures) => writeln!(
            out,
            "packets={} post_recv_ns={} post_send_ns={} poll_ns={} copy_ns={} client_ns={}",
            figures.packets,
            figures.post_recv,
            figures.post_send,
            figures.poll,
            figures.copy,
            figures.client
        ),
        None => Ok(()),
    }
}

fn show_probe(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    if let Some(seen) = *fabric.seen().lock() {
        for (name, value) in seen.each() {
            writeln!(out, "{name} {value}")?;
        }
    }
    Ok(())
}

fn show_filters(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    fabric.filters().lock().show(out)
}

fn show_sent(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    fabric.show_sent(out)
}

fn show_faults(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    for slot in 0..crate::subnet::MAX_HCAS {
        let Ok(hca) = fabric.hca(slot) else { continue };
        let faults = hca.faults().lock();
        for (name, hits, rule) in faults.each() {
            write!(out, "ibf{slot} {name} hits={hits}")?;
            match rule {
                Some(rule) => writeln!(
                    out,
                    " value={} left={} skip={} ppm={}",
                    rule.value, rule.left, rule.skip, rule.ppm
                )?,
                None => writeln!(out, " off")?,
            }
        }
    }
    Ok(())
}

fn show_state(fabric: &Arc<Fabric>, out: &mut fmt::Formatter<'_>) -> core::fmt::Result {
    for slot in 0..crate::subnet::MAX_HCAS {
        let Ok(hca) = fabric.hca(slot) else { continue };
        let attach = fabric.net().lock().subnet.attach(slot);
        if let Ok(port) = hca.port() {
            write!(
                out,
                "ibf{slot} guid={:016x} state={} phys={} lid={} sm_lid={} mtu={}",
                hca.port_guid(),
                port.state,
                port.phys_state,
                port.lid,
                port.sm_lid,
                port.active_mtu
            )?;
        }
        match attach {
            Attach::Nothing => write!(out, " cable=none")?,
            Attach::Switch(number) => write!(out, " cable=switch:{number}")?,
            Attach::Ca(other) => write!(out, " cable=ibf{other}")?,
        }
        write!(
            out,
            " deferred={} interrupts={} physical={}",
            u8::from(hca.deferred()),
            u8::from(hca.interrupts()),
            u8::from(hca.config().physical)
        )?;
        for (name, count) in hca.objects.each() {
            write!(out, " {name}={count}")?;
        }
        for (name, count) in hca.lost().filter(|(_, count)| *count != 0) {
            write!(out, " lost_{name}={count}")?;
        }
        for (name, count) in hca.all_done().filter(|(_, count)| *count != 0) {
            write!(out, " did_{name}={count}")?;
        }
        for (name, count) in hca.told().filter(|(_, count)| *count != 0) {
            write!(out, " told_{name}={count}")?;
        }
        writeln!(
            out,
            " connected={} groups={}",
            hca.connected.load(Relaxed),
            hca.groups().lock().len()
        )?;
    }
    Ok(())
}

fn write(fabric: &Arc<Fabric>, reader: &mut UserSliceReader) -> Result {
    if reader.len() > LINE {
        return Err(EINVAL);
    }
    let mut bytes = KVec::from_elem(0, reader.len(), GFP_KERNEL)?;
    reader.read_slice(&mut bytes)?;
    let text = core::str::from_utf8(&bytes).map_err(|_| EINVAL)?;
    for line in text.lines() {
        if !line.trim().is_empty() {
            command(fabric, line)?;
        }
    }
    Ok(())
}

/// The rest of a command.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Result<&'a str> {
        self.0.next().ok_or(EINVAL)
    }

    fn number(&mut self) -> Result<u64> {
        number(self.word()?)
    }

    fn slot(&mut self) -> Result<usize> {
        let slot = self.number()? as usize;
        if slot < crate::subnet::MAX_HCAS {
            Ok(slot)
        } else {
            Err(EINVAL)
        }
    }

    fn end(mut self) -> Result {
        match self.0.next() {
            None => Ok(()),
            Some(_) => Err(EINVAL),
        }
    }
}

/// Decimal, or hexadecimal with 0x.
fn number(text: &str) -> Result<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
    .map_err(|_| EINVAL)
}

fn small<T: TryFrom<u64>>(value: u64) -> Result<T> {
    T::try_from(value).map_err(|_| EINVAL)
}

fn flag(value: u64) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(EINVAL),
    }
}

/// `key=value` words, over the fabric's defaults.
fn config(mut config: HcaConfig, words: SplitWhitespace<'_>) -> Result<HcaConfig> {
    for word in words {
        let (key, value) = word.split_once('=').ok_or(EINVAL)?;
        let value = number(value)?;
        match key {
            "max_send_sge" => config.max_send_sge = small(value)?,
            "max_srq_sge" => config.max_srq_sge = small(value)?,
            "srq" => config.srq = flag(value)?,
            "rnr_grace_us" => config.rnr_grace = small(value)?,
            "vectors" => config.vectors = small(value)?,
            "mtu" => config.mtu = small(value)?,
            "csum" => config.csum = flag(value)?,
            "tso" => config.tso = flag(value)?,
            "mcast_lb" => config.mcast_lb = flag(value)?,
            "flow_steering" => config.flow_steering = flag(value)?,
            "physical" => config.physical = flag(value)?,
            "deferred" => config.deferred = flag(value)?,
            "interrupts" => config.interrupts = flag(value)?,
            "stock" => config.stock = flag(value)?,
            _ => return Err(EINVAL),
        }
    }
    config.check()
}

fn command(fabric: &Arc<Fabric>, line: &str) -> Result {
    let mut words = Words(line.split_whitespace());
    let verb = words.word()?;
    match verb {
        "add" => {
            let slot = words.slot()?;
            return fabric.add(slot, config(fabric.default_config(), words.0)?);
        }
        "remove" => {
            let slot = words.slot()?;
            words.end()?;
            return fabric.remove(slot);
        }
        "filter" => return filters(fabric, line, words),
        "fault" => return fault(fabric, words),
        "inject" => return inject(fabric, words),
        "record" => {
            let on = flag(words.number()?)?;
            words.end()?;
            fabric.net().lock().record(on);
            return Ok(());
        }
        "null" => {
            let (from, to) = (words.slot()?, words.slot()?);
            let (bytes, count) = (small(words.number()?)?, small(words.number()?)?);
            words.end()?;
            return fabric.measure(from, to, bytes, count);
        }
        "probe" => {
            let (from, to) = (words.slot()?, words.slot()?);
            let order = Order::parse(words.number()?, words.number()?, words.0).ok_or(EINVAL)?;
            return fabric.exchange(from, to, &order);
        }
        "misuse" => {
            let (from, to) = (words.slot()?, words.slot()?);
            let what = Misuse::named(words.word()?).ok_or(EINVAL)?;
            words.end()?;
            return fabric.misuse(from, to, what);
        }
        "forgive" => {
            let (name, count) = (words.word()?, words.number()?);
            words.end()?;
            let all = fabric.anomalies.each();
            let (_, anomaly) = all.iter().find(|(have, _)| *have == name).ok_or(ENOENT)?;
            return if anomaly.forgive(count) {
                Ok(())
            } else {
                Err(EINVAL)
            };
        }
        _ => {}
    }
    if verb == "reset_switch" {
        words.end()?;
        fabric.net().lock().subnet.reset_switch();
        fabric.after();
        return Ok(());
    }
    if verb == "trap" {
        match words.number()? {
            128 => {
                words.end()?;
                fabric.net().lock().subnet.raise_switch_trap();
            }
            144 => {
                let slot = words.slot()?;
                words.end()?;
                let mut net = fabric.net().lock();
                net.subnet.ca_mut(slot).ok_or(ENODEV)?.raise_trap();
            }
            _ => return Err(EINVAL),
        }
        fabric.after();
        return Ok(());
    }
    let slot = words.slot()?;
    let hca = fabric.hca(slot)?;
    match verb {
        "seed" => {
            hca.seed(words.number()?);
            return words.end();
        }
        "deferred" => {
            hca.set_deferred(flag(words.number()?)?);
            return words.end();
        }
        "rnr" => {
            let grace = match words.word()? {
                "strict" => 0,
                micros => small(number(micros)?)?,
            };
            hca.set_rnr_grace(grace);
            return words.end();
        }
        "interrupts" => {
            hca.set_interrupts(flag(words.number()?)?);
            return words.end();
        }
        "qp_error" => {
            let number = small(words.number()?)?;
            words.end()?;
            hca.qp(number).ok_or(ENOENT)?.break_down();
            return Ok(());
        }
        "fatal" => {
            words.end()?;
            hca.gate().lock().dispatch_fatal();
            return Ok(());
        }
        _ => {}
    }
    {
        // All words are read before anything is changed.
        let (first, second) = match verb {
            "bounce" | "reregister" => (0, 0),
            "link" => match words.word()? {
                "up" => (1, 0),
                "down" => (0, 0),
                _ => return Err(EINVAL),
            },
            "set_lid" | "set_sm_lid" | "move" | "back_to_back" | "set_prefix" => {
                (words.number()?, 0)
            }
            "set_pkey" | "set_guid" => (words.number()?, words.number()?),
            _ => return Err(EINVAL),
        };
        words.end()?;
        let mut net = fabric.net().lock();
        let subnet = &mut net.subnet;
        let ca = subnet.ca_mut(slot).ok_or(ENODEV)?;
        let events = match verb {
            "set_lid" => ca.set_lid(unicast_lid(first)?),
            "set_sm_lid" => ca.set_sm_lid(unicast_lid(first)?),
            "set_pkey" => ca.set_p_key(small(first)?, small(second)?).ok_or(EINVAL)?,
            "set_guid" => ca.set_guid(small(first)?, second).ok_or(EINVAL)?,
            "set_prefix" => {
                ca.port.gid_prefix = first;
                Events::of(&[Event::GidChange])
            }
            "reregister" => Events::of(&[Event::ClientReregister]),
            "link" => {
                subnet.set_link(slot, first == 1).ok_or(ENODEV)?;
                Events::NONE
            }
            "bounce" => {
                subnet.bounce(slot).ok_or(ENODEV)?;
                Events::NONE
            }
            _ => {
                let to = match verb {
                    "move" => Attach::Switch(small(first)?),
                    _ => Attach::Ca(small(first)?),
                };
                let old = subnet.attach(slot);
                if let Attach::Ca(other) = to {
                    subnet.disconnect(other);
                }
                subnet.disconnect(slot);
                if let Err(error) = subnet.connect(slot, to) {
                    // Back where it was.
                    let _ = subnet.connect(slot, old);
                    return Err(error);
                }
                Events::NONE
            }
        };
        subnet.add_events(slot, events);
    }
    fabric.after();
    Ok(())
}

fn unicast_lid(value: u64) -> Result<u16> {
    small::<u16>(value).and_then(|lid| if lid < 0xc000 { Ok(lid) } else { Err(EINVAL) })
}

fn filters(fabric: &Arc<Fabric>, line: &str, mut words: Words<'_>) -> Result {
    match words.word()? {
        "add" => {
            let rule = line
                .trim_start()
                .strip_prefix("filter")
                .and_then(|rest| rest.trim_start().strip_prefix("add"))
                .and_then(filter::Rule::parse)
                .ok_or(EINVAL)?;
            fabric.filters().lock().add(rule).ok_or(ENOSPC)?;
            Ok(())
        }
        "del" => {
            let place = small(words.number()?)?;
            words.end()?;
            fabric.filters().lock().remove(place).ok_or(ENOENT)
        }
        "clear" => {
            words.end()?;
            fabric.filters().lock().clear();
            Ok(())
        }
        _ => Err(EINVAL),
    }
}

/// Hexadecimal digits, as many pairs as there is room, or fewer. Returns how many.
fn hex(text: &str, out: &mut [u8]) -> Result<usize> {
    let pairs = text.as_bytes().chunks(2);
    if text.len() % 2 != 0 || pairs.len() > out.len() {
        return Err(EINVAL);
    }
    let len = pairs.len();
    for (byte, pair) in out.iter_mut().zip(pairs) {
        for digit in pair {
            let digit = char::from(*digit).to_digit(16).ok_or(EINVAL)?;
            *byte = *byte << 4 | digit as u8;
        }
    }
    Ok(len)
}

/// `inject SLOT QPN HEX|- [qkey=K] [pkey=K] [src_qp=N] [dlid=LID] [grh=HEX]`: a datagram arrives
/// that nobody sent.
fn inject(fabric: &Arc<Fabric>, mut words: Words<'_>) -> Result {
    let slot = words.slot()?;
    let dest_qp = small(words.number()?)?;
    let text = words.word()?;
    let mut payload = [0; LINE / 2];
    let len = match text {
        "-" => 0,
        text => hex(text, &mut payload)?,
    };
    let lid = fabric.hca(slot)?.port()?.lid;
    let mut header = Header {
        slid: lid,
        dlid: lid,
        path_bits: 0,
        sl: 0,
        src_qp: 0,
        dest_qp,
        qkey: 0,
        pkey: 0xffff,
        solicited: false,
        csum_ok: false,
        imm: None,
        grh: None,
    };
    for word in words.0 {
        let (key, value) = word.split_once('=').ok_or(EINVAL)?;
        match key {
            "qkey" => header.qkey = small(number(value)?)?,
            "pkey" => header.pkey = small(number(value)?)?,
            "src_qp" => header.src_qp = small(number(value)?)?,
            "dlid" => header.dlid = small(number(value)?)?,
            "grh" => {
                let mut grh = [0; GRH];
                if hex(value, &mut grh)? != GRH {
                    return Err(EINVAL);
                }
                header.grh = Some(grh);
            }
            _ => return Err(EINVAL),
        }
    }
    let payload = payload.get(..len).ok_or(EINVAL)?;
    fabric.delay_data(slot, &header, payload, 0)
}

/// `fault SLOT NAME off`, or `fault SLOT NAME [value=V] [n=N|all] [skip=S] [ppm=P]`.
fn fault(fabric: &Arc<Fabric>, mut words: Words<'_>) -> Result {
    let hca = fabric.hca(words.slot()?)?;
    let fault = Fault::named(words.word()?).ok_or(EINVAL)?;
    let mut rest = words.0.clone().peekable();
    if rest.peek() == Some(&"off") {
        hca.set_fault(fault, None);
        return Ok(());
    }
    let rule = Rule::parse(fault, rest).ok_or(EINVAL)?;
    hca.set_fault(fault, Some(rule));
    Ok(())
}
