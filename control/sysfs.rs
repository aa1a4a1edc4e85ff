// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `/sys/class/net/<name>/`: `mode`, `pkey` and `umcast`; `create_child` and `delete_child` of a
//! port's interface, `parent` of a child.

use crate::{
    net::{
        device::{
            Device,
            UnregisteredDevice, //
        },
        rtnl::{
            may_administrate,
            Rtnl, //
        },
        sysfs::{
            self,
            File,
            Files,
            Group,
            Text, //
        },
    },
    port::{
        self,
        Port, //
    },
    wire, //
};
use core::fmt::{
    self,
    Write as _, //
};
use kernel::{
    prelude::*,
    str::CString, //
};

static MODE: File<Port> = File::new(c"mode", Some(show_mode), Some(store_mode));
static PKEY: File<Port> = File::new(c"pkey", Some(show_pkey), None);
static UMCAST: File<Port> = File::new(c"umcast", Some(show_umcast), Some(store_umcast));
static CREATE: File<Port> = File::new(c"create_child", None, Some(create_child));
static DELETE: File<Port> = File::new(c"delete_child", None, Some(delete_child));
static PARENT: File<Port> = File::new(c"parent", Some(show_parent), None);

static OF_PORT: Files<Port, 6> = Files::new([
    Some(&MODE),
    Some(&PKEY),
    Some(&UMCAST),
    Some(&CREATE),
    Some(&DELETE),
    None,
]);
static OF_CHILD: Files<Port, 5> =
    Files::new([Some(&MODE), Some(&PKEY), Some(&UMCAST), Some(&PARENT), None]);
static PORT: Group<Port> = Group::new(&OF_PORT);
static CHILD: Group<Port> = Group::new(&OF_CHILD);

/// Gives an interface its files, once it is registered.
pub(crate) fn add_files(dev: &mut UnregisteredDevice<Port>, is_child: bool) {
    sysfs::add_files(dev, if is_child { &CHILD } else { &PORT });
}

fn show_mode(dev: &Device<Port>, text: &mut Text<'_>) -> fmt::Result {
    text.write_str(match dev.cm.is_connected() {
        true => "connected\n",
        false => "datagram\n",
    })
}

/// The mode's name, with or without the end of the line.
fn store_mode(rtnl: &Rtnl, dev: &Device<Port>, text: &[u8]) -> Result {
    let connected = match text.strip_suffix(b"\n").unwrap_or(text) {
        b"datagram" => false,
        b"connected" => true,
        _ => return Err(EINVAL),
    };
    port::set_mode(rtnl, &mut dev.lock(), connected)
}

fn show_pkey(dev: &Device<Port>, text: &mut Text<'_>) -> fmt::Result {
    writeln!(text, "{:#06x}", dev.pkey())
}

fn show_umcast(dev: &Device<Port>, text: &mut Text<'_>) -> fmt::Result {
    writeln!(text, "{}", u8::from(dev.umcast()))
}

fn store_umcast(_rtnl: &Rtnl, dev: &Device<Port>, text: &[u8]) -> Result {
    dev.set_umcast(number(text).ok_or(EINVAL)? > 0);
    Ok(())
}

fn show_parent(dev: &Device<Port>, text: &mut Text<'_>) -> fmt::Result {
    let name = dev.parent().map_or(c"", |parent| parent.name());
    writeln!(text, "{}", name.to_str().unwrap_or("?"))
}

/// A P_Key, as it was written.
fn written_pkey(text: &[u8]) -> Result<u16> {
    if !may_administrate() {
        return Err(EPERM);
    }
    let number = u16::try_from(number(text).ok_or(EINVAL)?)?;
    Ok(number)
}

/// Makes a child that is named after the P_Key, as it was written. Each key is there once; one that
/// was [deleted](delete_child) is waited for, because its name may be the same.
fn create_child(rtnl: &Rtnl, dev: &Device<Port>, text: &[u8]) -> Result {
    let written = written_pkey(text)?;
    if !wire::is_valid_pkey(written) {
        return Err(EINVAL);
    }
    let pkey = wire::full(written);
    let (mut taken, mut going) = (dev.pkey() == pkey, false);
    dev.each_child(rtnl, |child| {
        let same = child.legacy && child.pkey() == pkey;
        taken |= same && !child.is_condemned();
        going |= same && child.is_condemned();
    });
    if taken {
        return Err(ENOTUNIQ);
    }
    if going {
        return Err(ERESTARTNOINTR);
    }
    let name = dev.name().to_bytes();
    let name = core::str::from_utf8(&name[..name.len().min(10)]).map_err(|_| EINVAL)?;
    let name = CString::try_from_fmt(format_args!("{name}.{written:04x}"))?;
    let new = UnregisteredDevice::new(&name)?;
    port::make_child(rtnl, dev, new, pkey, true).map(|_| ())
}

/// Has a child deleted that was made by [`create_child`]; it goes soon.
fn delete_child(rtnl: &Rtnl, dev: &Device<Port>, text: &[u8]) -> Result {
    let pkey = wire::full(written_pkey(text)?);
    let mut found = false;
    dev.each_child(rtnl, |child| {
        if child.legacy && child.pkey() == pkey && !child.is_condemned() {
            child.condemn();
            found = true;
        }
    });
    if !found {
        return Err(ENODEV);
    }
    dev.delete_condemned();
    Ok(())
}

/// The number at the front of a text, as `scanf` reads it with `%i`: decimal, or hexadecimal behind
/// 0x, or octal behind 0. What follows is ignored.
fn number(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii_start();
    let (sign, text) = match text {
        [b'-', rest @ ..] => (-1, rest),
        [b'+', rest @ ..] => (1, rest),
        _ => (1, text),
    };
    let (radix, digits) = match text {
        [b'0', b'x' | b'X', digit, ..] if digit.is_ascii_hexdigit() => (16, &text[2..]),
        [b'0', ..] => (8, text),
        _ => (10, text),
    };
    let mut value: Option<i64> = None;
    for &byte in digits {
        let Some(digit) = char::from(byte).to_digit(radix) else {
            break;
        };
        let so_far = value.unwrap_or(0);
        value = Some(
            so_far
                .checked_mul(radix.into())?
                .checked_add(digit.into())?,
        );
    }
    value.map(|value| sign * value)
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_sysfs)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        for (text, value) in [
            (&b"0x8001\n"[..], Some(0x8001)),
            (b"32769", Some(32769)),
            (b" 0X1", Some(1)),
            (b"010", Some(8)),
            (b"0", Some(0)),
            (b"-1", Some(-1)),
            (b"0x8001abcz", Some(0x0800_1abc)),
            (b"7junk", Some(7)),
            (b"0x", Some(0)),
            (b"junk", None),
            (b"", None),
            (b"-", None),
            (b"99999999999999999999", None),
        ] {
            assert_eq!(number(text), value);
        }
    }
}
