// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The attributes of the kind of link: `ip -d link` shows them, `ip link set … type ipoib` changes
//! them.

use crate::{
    net::{
        device::{
            Device,
            Locked,
            UnregisteredDevice, //
        },
        rtnl::{
            Attributes,
            LinkKind,
            Rtnl,
            Wishes, //
        },
    },
    port::{
        self,
        Port, //
    },
    wire, //
};
use kernel::prelude::*;

/// `IFLA_IPOIB_PKEY`, `_MODE` and `_UMCAST` (`include/uapi/linux/if_link.h`).
const PKEY: u32 = 1;
const MODE: u32 = 2;
const UMCAST: u32 = 3;

const MODE_DATAGRAM: u16 = 0;
const MODE_CONNECTED: u16 = 1;

impl LinkKind for Port {
    const ATTRIBUTES: usize = 3;

    /// Without a P_Key a child has its parent's; many may have the same.
    fn create(
        rtnl: &Rtnl,
        parent: &Device<Self>,
        new: UnregisteredDevice<Self>,
        wishes: &Wishes<'_>,
    ) -> Result {
        let pkey = wishes.get_u16(PKEY).unwrap_or(parent.pkey());
        if !wire::is_valid_pkey(pkey) {
            return Err(wishes.refuse(c"no partition has P_Key 0", EINVAL));
        }
        let child = port::make_child(rtnl, parent, new, pkey, false).map_err(|error| {
            if error == EOPNOTSUPP {
                wishes.refuse(c"the port has no partitions", error)
            } else if error == EADDRNOTAVAIL {
                wishes.refuse(c"the address is not of the port's subnet", error)
            } else {
                error
            }
        })?;
        // Its lock is given up with the statement: removal takes it.
        let changed = Self::change(rtnl, &mut child.lock(), wishes);
        if changed.is_err() {
            parent.remove_child(rtnl, |other| other.id() == child.id());
        }
        changed
    }

    /// A P_Key is ignored, as the stock driver does. Nothing is changed after an error.
    fn change(rtnl: &Rtnl, locked: &mut Locked<'_, Self>, wishes: &Wishes<'_>) -> Result {
        let connected = match wishes.get_u16(MODE) {
            None => None,
            Some(MODE_DATAGRAM) => Some(false),
            Some(MODE_CONNECTED) => Some(true),
            Some(_) => return Err(wishes.refuse(c"mode is datagram or connected", EINVAL)),
        };
        if let Some(connected) = connected {
            port::set_mode(rtnl, locked, connected)
                .map_err(|error| wishes.refuse(c"the device cannot connect", error))?;
        }
        if let Some(umcast) = wishes.get_u16(UMCAST) {
            locked.dev().set_umcast(umcast != 0);
        }
        Ok(())
    }

    fn fill(dev: &Device<Self>, attributes: &mut Attributes<'_>) -> Result {
        attributes.put_u16(PKEY, dev.pkey())?;
        let mode = match dev.cm.is_connected() {
            true => MODE_CONNECTED,
            false => MODE_DATAGRAM,
        };
        attributes.put_u16(MODE, mode)?;
        attributes.put_u16(UMCAST, dev.umcast().into())
    }
}
