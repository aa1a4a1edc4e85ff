// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Network devices with a single transmit queue and a driver in Rust.
//!
//! Life cycle: [`UnregisteredDevice::new`] → [`UnregisteredDevice::register`] → [`Registration`],
//! whose drop unregisters. The driver's data is made before the device becomes visible and dropped
//! by the device's `priv_destructor`, which C calls when the last user is gone.
//!
//! Devices made here are ops-locked: C calls `ndo_open`, `ndo_stop`, `ndo_change_mtu` and
//! `ndo_set_rx_mode_async` with RTNL and the instance lock held, ethtool operations with the
//! instance lock only.
//!
//! Work that outlives a call reaches its device through a [`Link`], never by keeping a reference:
//! `unregister_netdevice` waits for references.
//!
//! C header: [`include/linux/netdevice.h`](srctree/include/linux/netdevice.h)

use super::{
    ethtool,
    rtnl::{
        LinkOps,
        Rtnl, //
    },
    skb::{
        Skb,
        MAX_FRAGS, //
    },
};
use crate::bindings;
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    mem::{
        align_of,
        size_of,
        ManuallyDrop, //
    },
    net::IpAddr,
    ops::{
        Deref,
        DerefMut, //
    },
    ptr::{
        self,
        NonNull, //
    },
    slice, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Release, //
            },
            Atomic, //
        },
        new_mutex,
        new_spinlock,
        rcu,
        Arc,
        Mutex,
        SpinLock, //
    },
    types::{
        NotThreadSafe,
        Opaque, //
    },
};

/// A network device driver.
///
/// The type itself is what every context shares; see the table in [`crate::net`] for the rest.
pub(crate) trait Driver: ethtool::Ops + Sized + Send + Sync + 'static {
    /// Owned by the instance lock.
    type Control: Send + 'static;

    /// Owned by the transmit lock.
    type Tx: Send + 'static;

    /// Bytes of a hardware address.
    const ADDRESS_LEN: usize;

    /// Bytes of the link header.
    const HEADER_LEN: usize;

    /// Brings the interface up. RTNL and the instance lock are held; may sleep.
    fn open(locked: &mut Locked<'_, Self>) -> Result;

    /// Takes the interface down. RTNL and the instance lock are held; may sleep, briefly.
    fn stop(locked: &mut Locked<'_, Self>);

    /// Sends a packet or drops it. The transmit lock is held, softirqs are off.
    fn start_xmit(dev: &Device<Self>, tx: &mut Self::Tx, skb: Skb);

    /// Transmission stalled. Softirqs are off.
    fn tx_timeout(dev: &Device<Self>);

    /// The multicast list changed. RTNL and the instance lock are held; may sleep. After an error C
    /// calls again later.
    fn groups_changed(locked: &mut Locked<'_, Self>, rtnl: &Rtnl, groups: Groups<'_>) -> Result;

    /// The administrator asks for another MTU, within the device's limits. The return value is the
    /// MTU to use. RTNL and the instance lock are held.
    fn change_mtu(locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32>;

    /// The administrator asks for another hardware address, which has [`Self::ADDRESS_LEN`] bytes;
    /// it is set, and the stack told, after `Ok`. RTNL and the instance lock are held.
    fn change_address(_locked: &mut Locked<'_, Self>, _rtnl: &Rtnl, _address: &[u8]) -> Result {
        Err(EOPNOTSUPP)
    }

    /// Whether packets go, at present, where the hardware neither fills in checksums nor cuts. May be
    /// called before the device is registered.
    fn goes_without_offloads(_dev: &Device<Self>) -> bool {
        false
    }

    /// Adds up the statistics. RCU read side; must not sleep.
    fn stats(dev: &Device<Self>, stats: &mut Stats);

    /// Writes the link header, which has [`Self::HEADER_LEN`] bytes, for a destination of
    /// [`Self::ADDRESS_LEN`] bytes.
    fn write_header(header: &mut [u8], ethertype: u16, destination: &[u8]);
}

/// What the hardware does for packets of TCP and UDP over IPv4.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Offloads {
    /// Fills in checksums, and verifies them.
    pub(crate) checksum: bool,
    /// Cuts TCP packets into segments; only of use with checksums.
    pub(crate) segmentation: bool,
    /// Pieces of memory that a packet to be cut may have at most.
    pub(crate) pieces: usize,
}

/// What `ip -s link` shows.
#[derive(Default)]
pub(crate) struct Stats {
    pub(crate) rx_packets: u64,
    pub(crate) rx_bytes: u64,
    pub(crate) rx_errors: u64,
    pub(crate) rx_dropped: u64,
    pub(crate) rx_length_errors: u64,
    pub(crate) multicast: u64,
    pub(crate) tx_packets: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) tx_errors: u64,
    pub(crate) tx_dropped: u64,
}

/// The private area of the C device.
#[repr(C)]
pub(super) struct Private<T: Driver> {
    shared: T,
    family: Arc<Family<T>>,
    link: Arc<Link<T>>,
    control: UnsafeCell<T::Control>,
    tx: UnsafeCell<T::Tx>,
    users: UnsafeCell<Option<Arc<Users>>>,
    /// The parent, if it is a child.
    _parent: Option<Held<T>>,
    /// Of [`Offloads`].
    pieces: usize,
}

/// Counts, by its references, the objects that hang in the C device's lists.
pub(crate) struct Users(());

/// A registered device and its driver.
///
/// # Invariants
///
/// The C device was made by [`UnregisteredDevice::new`] for the same `T`, and its private area is
/// initialised.
#[repr(transparent)]
pub(crate) struct Device<T: Driver>(Opaque<bindings::net_device>, PhantomData<T>);

// SAFETY: The methods are those that C allows from any context, or ask for evidence; `T` is `Sync`.
unsafe impl<T: Driver> Sync for Device<T> {}

impl<T: Driver> Deref for Device<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant the private area is initialised.
        unsafe { &(*self.private()).shared }
    }
}

impl<T: Driver> Device<T> {
    /// # Safety
    ///
    /// `dev` satisfies the type invariant for as long as `'a`.
    #[inline]
    pub(crate) unsafe fn from_raw<'a>(dev: *mut bindings::net_device) -> &'a Self {
        // SAFETY: As the caller promises; the layout is that of the C device.
        unsafe { &*dev.cast() }
    }

    #[inline]
    pub(crate) fn as_raw(&self) -> *mut bindings::net_device {
        self.0.get()
    }

    #[inline]
    fn private(&self) -> *mut Private<T> {
        // SAFETY: The C device is live.
        unsafe { bindings::netdev_priv(self.as_raw()) }.cast()
    }

    /// What tells it apart from other devices.
    pub(crate) fn id(&self) -> DeviceId {
        DeviceId(self.as_raw() as usize)
    }

    /// Whether it has been registered, and is not being unregistered.
    pub(crate) fn is_registered(&self, _rtnl: &Rtnl) -> bool {
        // SAFETY: The C device is live; RTNL protects the field.
        let state = unsafe { (*self.as_raw()).reg_state };
        u32::from(state) == bindings::netdev_reg_state_NETREG_REGISTERED
    }

    /// Sets the interface up or down, as an administrator would. Its instance lock is not held.
    pub(crate) fn set_up(&self, rtnl: &Rtnl, up: bool) -> Result {
        if !self.is_registered(rtnl) {
            return Err(ENODEV);
        }
        if up {
            // SAFETY: The device is registered, and RTNL is held.
            return to_result(unsafe { bindings::dev_open(self.as_raw(), ptr::null_mut()) });
        }
        // SAFETY: As above.
        unsafe { bindings::dev_close(self.as_raw()) };
        Ok(())
    }

    fn family(&self) -> &Family<T> {
        // SAFETY: By the type invariant the private area is initialised.
        unsafe { &(*self.private()).family }
    }

    /// The device that this one is a child of.
    pub(crate) fn parent(&self) -> Option<&Device<T>> {
        let head = self.family().head.load(Acquire) as *const Device<T>;
        // SAFETY: By the invariant of the family the head outlives its children, of which this is
        // one: it holds a reference to it.
        (!ptr::eq(head, self) && !head.is_null()).then(|| unsafe { &*head })
    }

    /// Calls `visit` for each child.
    pub(crate) fn each_child(&self, rtnl: &Rtnl, mut visit: impl FnMut(&Device<T>)) {
        let mut at = 0;
        while let Some(child) = self.child(rtnl, at) {
            visit(child);
            at += 1;
        }
    }

    /// The child at a place in the family, which changes when a child is made or removed.
    fn child<'a>(&self, rtnl: &'a Rtnl, at: usize) -> Option<&'a Device<T>> {
        let child = match self.parent() {
            None => *self.family().children(rtnl).get(at)?,
            Some(_) => return None,
        };
        // SAFETY: By the invariant of the family the child is registered. Should it be unregistered
        // meanwhile it is not freed before RTNL is given up.
        Some(unsafe { child.as_ref() })
    }

    /// Unregisters the first child that `is_it` picks; false if there is none. The last of it goes
    /// when RTNL is given up.
    pub(crate) fn remove_child(
        &self,
        rtnl: &Rtnl,
        mut is_it: impl FnMut(&Device<T>) -> bool,
    ) -> bool {
        let mut at = 0;
        while let Some(child) = self.child(rtnl, at) {
            if is_it(child) && child.is_registered(rtnl) {
                // SAFETY: The child is registered and RTNL is held.
                unsafe { bindings::unregister_netdevice_queue(child.as_raw(), ptr::null_mut()) };
                return true;
            }
            at += 1;
        }
        false
    }

    pub(crate) fn carrier(&self) -> bool {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_carrier_ok(self.as_raw()) }
    }

    /// The interface's name at this moment.
    pub(crate) fn name(&self) -> &CStr {
        // SAFETY: The C device is live and its name is always terminated; a rename in between may
        // tear it, which a reader of names has to live with.
        unsafe { CStr::from_char_ptr((*self.as_raw()).name.as_ptr()) }
    }

    /// The hardware address at this moment; a change in between may tear it.
    pub(crate) fn hardware_address<const LEN: usize>(&self) -> [u8; LEN] {
        const { assert!(LEN == T::ADDRESS_LEN) };
        // SAFETY: The C device is live, and its address has that many bytes.
        unsafe { (*self.as_raw()).dev_addr.cast::<[u8; LEN]>().read() }
    }

    /// Who has an IP address of those that packets for this interface may be meant for: itself, or
    /// an interface upon it, such as a bond. Any context.
    pub(crate) fn holder_of(&self, address: IpAddr) -> Option<DeviceRef> {
        let mut search = Search {
            address,
            found: None,
        };
        let mut private = bindings::netdev_nested_priv {
            flags: 0,
            data: (&raw mut search).cast(),
        };
        let guard = rcu::read_lock();
        // SAFETY: The C device is live; the pointer is to the search.
        if unsafe { Search::callback(self.as_raw(), &mut private) } == 0 {
            // SAFETY: As above, and RCU is held; the callback gets live devices.
            unsafe {
                bindings::netdev_walk_all_upper_dev_rcu(
                    self.as_raw(),
                    Some(Search::callback),
                    &mut private,
                )
            };
        }
        drop(guard);
        search.found
    }

    /// What this interface is a part of, such as a bond, or itself. Any context.
    pub(crate) fn master(&self) -> DeviceRef {
        let _guard = rcu::read_lock();
        // SAFETY: The C device is live, and RCU is held.
        let master = unsafe { bindings::netdev_master_upper_dev_get_rcu(self.as_raw()) };
        let dev = NonNull::new(master).unwrap_or(NonNull::from(self).cast());
        // SAFETY: Both are live while RCU is held.
        unsafe { DeviceRef::of(dev) }
    }

    /// Takes the instance lock. Sleeps; RTNL must not be taken while it is held.
    pub(crate) fn lock(&self) -> Locked<'_, T> {
        // SAFETY: The C device is live.
        unsafe { bindings::netdev_lock(self.as_raw()) };
        Locked {
            dev: self,
            owned: true,
            _not_send: NotThreadSafe,
        }
    }

    /// Takes the transmit lock, with softirqs off.
    pub(crate) fn tx_lock(&self) -> TxGuard<'_, T> {
        // SAFETY: The C device is live and has a transmit queue.
        unsafe { bindings::netif_tx_lock_bh(self.as_raw()) };
        TxGuard {
            dev: self,
            _not_send: NotThreadSafe,
        }
    }

    /// Turns the carrier on or off. Any context.
    pub(crate) fn set_carrier(&self, on: bool) {
        if on {
            // SAFETY: The C device is live and registered.
            unsafe { bindings::netif_carrier_on(self.as_raw()) };
        } else {
            // SAFETY: As above.
            unsafe { bindings::netif_carrier_off(self.as_raw()) };
        }
    }

    #[inline]
    pub(crate) fn mtu(&self) -> u32 {
        // SAFETY: The C device is live; a racing change gives the old or the new value.
        unsafe { (&raw const (*self.as_raw()).mtu).read_volatile() }
    }

    /// Whether verified checksums are wanted (`ethtool -K … rx`).
    #[inline]
    pub(crate) fn wants_verified(&self) -> bool {
        // SAFETY: The C device is live; a racing change gives the old or the new value.
        let features = unsafe { self.features().read_volatile() };
        features & bindings::NETIF_F_RXCSUM != 0
    }

    #[inline]
    fn features(&self) -> *mut bindings::netdev_features_t {
        let dev = self.as_raw();
        // SAFETY: The C device is live; only the address of a field is taken.
        unsafe { &raw mut (*dev).features }
    }

    #[inline]
    pub(crate) fn start_queue(&self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_start_queue(self.as_raw()) };
    }

    #[inline]
    pub(crate) fn stop_queue(&self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_stop_queue(self.as_raw()) };
    }

    #[inline]
    pub(crate) fn queue_stopped(&self) -> bool {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_queue_stopped(self.as_raw()) }
    }

    #[inline]
    pub(crate) fn wake_queue(&self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_wake_queue(self.as_raw()) };
    }

    /// Reports bytes given to the hardware; true if it should be told now.
    #[inline]
    pub(crate) fn sent(&self, bytes: u32, more: bool) -> bool {
        // SAFETY: The C device is live; callers hold the transmit lock, which serialises reports.
        unsafe { bindings::netdev_sent_queue(self.as_raw(), bytes, more) }
    }

    /// Reports packets that the hardware is done with. One context at a time.
    #[inline]
    pub(crate) fn completed(&self, packets: u32, bytes: u32) {
        // SAFETY: The C device is live; only the completion context of the queue reports.
        unsafe { bindings::netdev_completed_queue(self.as_raw(), packets, bytes) };
    }

    /// Whether the stack has more packets for us right behind this one. Softirqs are off.
    #[inline]
    pub(crate) fn xmit_more() -> bool {
        // SAFETY: Reads a per-CPU flag.
        unsafe { bindings::netdev_xmit_more() }
    }
}

/// Evidence that the instance lock is held.
///
/// # Invariants
///
/// The current thread holds the lock; if `owned`, dropping this object gives it up.
pub(crate) struct Locked<'a, T: Driver> {
    dev: &'a Device<T>,
    owned: bool,
    _not_send: NotThreadSafe,
}

impl<'a, T: Driver> Locked<'a, T> {
    /// # Safety
    ///
    /// The current thread holds the instance lock for as long as the result lives, and no other
    /// `Locked` of this device is in use meanwhile.
    pub(super) unsafe fn borrowed(dev: &'a Device<T>) -> Self {
        // INVARIANT: As the caller promises.
        Self {
            dev,
            owned: false,
            _not_send: NotThreadSafe,
        }
    }

    /// The device.
    pub(crate) fn dev(&self) -> &'a Device<T> {
        self.dev
    }

    /// The data that the lock owns.
    pub(crate) fn control(&mut self) -> &mut T::Control {
        // SAFETY: By the type invariant the lock is held, and the borrow of `self` excludes any
        // other reference made through it.
        unsafe { &mut *(*self.dev.private()).control.get() }
    }

    /// Waits for a running `start_xmit` and keeps the stack from calling it.
    pub(crate) fn disable_queue(&mut self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_tx_disable(self.dev.as_raw()) };
    }

    /// Forgets the bytes that were reported as sent. The queue is disabled and the completion
    /// context is stopped.
    pub(crate) fn reset_queue(&mut self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netdev_reset_queue(self.dev.as_raw()) };
    }

    /// Lets the watchdog start anew.
    pub(crate) fn restart_watchdog(&mut self) {
        // SAFETY: The C device is live.
        unsafe { bindings::netif_trans_update(self.dev.as_raw()) };
    }

    /// Changes the MTU as an administrator would.
    pub(crate) fn set_mtu(&mut self, _rtnl: &Rtnl, mtu: u32) -> Result {
        // SAFETY: RTNL and the instance lock are held, as this function wants them.
        to_result(unsafe { bindings::netif_set_mtu(self.dev.as_raw(), mtu as i32) })
    }

    /// Has the stack ask [`Driver::goes_without_offloads`] anew.
    pub(crate) fn update_features(&mut self, _rtnl: &Rtnl) {
        // SAFETY: The C device is live; RTNL and the instance lock are held, as C wants them.
        unsafe { bindings::netdev_update_features(self.dev.as_raw()) };
    }

    /// Changes the limits within which an administrator may choose.
    pub(crate) fn set_mtu_limits(&mut self, _rtnl: &Rtnl, min: u32, max: u32) {
        // SAFETY: The C device is live; RTNL, which protects the fields, is held.
        unsafe {
            (&raw mut (*self.dev.as_raw()).min_mtu).write_volatile(min);
            (&raw mut (*self.dev.as_raw()).max_mtu).write_volatile(max);
        }
    }

    /// Has packets come with the way that the stack routed them by: see
    /// [`Skb::too_big`]. Not undone.
    pub(crate) fn keep_routes(&mut self, _rtnl: &Rtnl) {
        // SAFETY: The C device is live; RTNL, which protects the flags, is held.
        unsafe { bindings::netif_keep_dst(self.dev.as_raw()) };
    }

    /// Changes the hardware address and tells the stack.
    pub(crate) fn set_address(&mut self, _rtnl: &Rtnl, address: &[u8]) {
        let dev = self.dev.as_raw();
        let len = address.len().min(T::ADDRESS_LEN);
        // SAFETY: The C device is live and RTNL is held; `len` bytes of the address are replaced.
        unsafe { bindings::dev_addr_mod(dev, 0, address.as_ptr().cast(), len) };
        // SAFETY: RTNL is held, as notifiers want it.
        unsafe {
            bindings::call_netdevice_notifiers(bindings::netdev_cmd_NETDEV_CHANGEADDR as usize, dev)
        };
    }

    /// The broadcast address, which an administrator may change without asking.
    pub(crate) fn broadcast(&self, _rtnl: &Rtnl) -> &[u8] {
        // SAFETY: The C device is live, and RTNL, which protects the address, is held.
        let broadcast = unsafe { &(*self.dev.as_raw()).broadcast };
        broadcast.get(..T::ADDRESS_LEN).unwrap_or_default()
    }

    /// Changes the broadcast address, to which the stack looks when it needs it.
    pub(crate) fn set_broadcast(&mut self, _rtnl: &Rtnl, address: &[u8]) {
        let len = address.len().min(T::ADDRESS_LEN);
        // SAFETY: The C device is live, and RTNL, which protects the address, is held.
        let broadcast = unsafe { &mut (*self.dev.as_raw()).broadcast };
        broadcast[..len].copy_from_slice(&address[..len]);
    }

    /// Has the stack tell the neighbours where the interface is now, and its groups again.
    pub(crate) fn announce(&mut self, _rtnl: &Rtnl) {
        let dev = self.dev.as_raw();
        for event in [
            bindings::netdev_cmd_NETDEV_NOTIFY_PEERS,
            bindings::netdev_cmd_NETDEV_RESEND_IGMP,
        ] {
            // SAFETY: RTNL is held, as notifiers want it.
            unsafe { bindings::call_netdevice_notifiers(event as usize, dev) };
        }
    }

    /// Whether this is the lock of the device at `dev`.
    pub(crate) fn is_of(&self, dev: *const bindings::net_device) -> bool {
        ptr::eq(self.dev.as_raw(), dev)
    }
}

impl<T: Driver> Drop for Locked<'_, T> {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: By the type invariant the lock is held and ours to give up.
            unsafe { bindings::netdev_unlock(self.dev.as_raw()) };
        }
    }
}

/// The transmit lock, held.
pub(crate) struct TxGuard<'a, T: Driver> {
    dev: &'a Device<T>,
    _not_send: NotThreadSafe,
}

impl<T: Driver> Deref for TxGuard<'_, T> {
    type Target = T::Tx;

    fn deref(&self) -> &T::Tx {
        // SAFETY: The transmit lock, which owns the data, is held.
        unsafe { &*(*self.dev.private()).tx.get() }
    }
}

impl<T: Driver> DerefMut for TxGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T::Tx {
        // SAFETY: The transmit lock, which owns the data, is held.
        unsafe { &mut *(*self.dev.private()).tx.get() }
    }
}

impl<T: Driver> Drop for TxGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: This object stands for the held lock.
        unsafe { bindings::netif_tx_unlock_bh(self.dev.as_raw()) };
    }
}

/// The search for who has an IP address.
struct Search {
    address: IpAddr,
    found: Option<DeviceRef>,
}

impl Search {
    /// Whether a device has the address.
    ///
    /// # Safety
    ///
    /// The device is live, and RCU is held.
    unsafe fn has(&self, dev: *mut bindings::net_device) -> bool {
        // SAFETY: As the caller promises.
        let net = unsafe { bindings::dev_net(dev) };
        match self.address {
            IpAddr::V4(address) => {
                // SAFETY: As above.
                let inet = unsafe { bindings::in_dev_get_rcu(dev) };
                let wanted = u32::from_ne_bytes(address.octets());
                let scope = bindings::rt_scope_t_RT_SCOPE_HOST as c_int;
                // SAFETY: Under RCU both live on.
                !inet.is_null()
                    && unsafe { bindings::inet_confirm_addr(net, inet, 0, wanted, scope) } != 0
            }
            IpAddr::V6(address) => {
                let wanted = ipv6_address(&address.octets());
                // SAFETY: As above; 1: a tentative one does not count.
                unsafe { bindings::ipv6_chk_addr(net, &wanted, dev, 1) != 0 }
            }
        }
    }

    /// Takes a device that has the address; then the result is not 0, and the walk ends.
    ///
    /// # Safety
    ///
    /// The device is live, RCU is held, and `private` has the address of a search that nobody else
    /// uses.
    unsafe extern "C" fn callback(
        dev: *mut bindings::net_device,
        private: *mut bindings::netdev_nested_priv,
    ) -> c_int {
        // SAFETY: As the caller promises.
        let search = unsafe { &mut *(*private).data.cast::<Self>() };
        // SAFETY: As above.
        let has = unsafe { search.has(dev) };
        let Some(dev) = NonNull::new(dev).filter(|_| has) else {
            return 0;
        };
        // SAFETY: As above.
        search.found = Some(unsafe { DeviceRef::of(dev) });
        1
    }
}

/// A list of multicast hardware addresses.
///
/// # Invariants
///
/// The list is live and does not change for as long as `'a`.
pub(crate) struct Groups<'a> {
    list: *const bindings::netdev_hw_addr_list,
    address_len: usize,
    _list: PhantomData<&'a ()>,
}

impl Groups<'_> {
    /// Calls `visit` for each address.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&[u8])) {
        // SAFETY: By the type invariant the list is live.
        let head = unsafe { &raw const (*self.list).list };
        // SAFETY: As above.
        let mut at = unsafe { (*head).next.cast_const() };
        while !ptr::eq(at, head) {
            // SAFETY: All nodes but the head are the `list` fields of addresses.
            let entry = unsafe { kernel::container_of!(at, bindings::netdev_hw_addr, list) };
            // SAFETY: As above; an address has room for the longest kind.
            visit(unsafe { &(&(*entry).addr)[..self.address_len] });
            // SAFETY: As above.
            at = unsafe { (*at).next };
        }
    }
}

/// Reaches a device from work that outlives it.
///
/// The device cannot go away while [`Self::with`] runs, which holds a reference meanwhile; but it
/// may be unregistered: who takes RTNL asks [`Device::is_registered`] before telling the stack
/// anything. The last of a device goes when RTNL is not held.
#[pin_data]
pub(crate) struct Link<T: Driver> {
    #[pin]
    turn: Mutex<()>,
    /// A device that is registered, or being unregistered and not yet past `ndo_uninit`.
    #[pin]
    dev: SpinLock<Option<LinkedDevice<T>>>,
}

struct LinkedDevice<T: Driver>(NonNull<Device<T>>);

// SAFETY: `Device<T>` is `Sync`, and the pointer is only used as a shared reference.
unsafe impl<T: Driver> Send for LinkedDevice<T> {}

impl<T: Driver> Link<T> {
    /// A link that leads nowhere yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            turn <- new_mutex!((), "net::Link::turn"),
            dev <- new_spinlock!(None, "net::Link::dev"),
        })
    }

    /// Calls `f` with the device, if it is there. Sleeps; calls are made one after the other.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Device<T>) -> R) -> Option<R> {
        let _turn = self.turn.lock();
        self.glance(f)
    }

    /// As [`Self::with`], but waits for nobody. For what is done at once.
    pub(crate) fn glance<R>(&self, f: impl FnOnce(&Device<T>) -> R) -> Option<R> {
        let held = {
            let guard = self.dev.lock();
            let dev = guard.as_ref()?.0;
            // SAFETY: `ndo_uninit` takes the pointer away under the lock that we hold, and the
            // device is not freed before.
            unsafe { bindings::dev_hold(dev.as_ptr().cast()) };
            Held(dev)
        };
        // SAFETY: We have a reference, and the private area lives until the last is given up.
        Some(f(unsafe { held.0.as_ref() }))
    }
}

/// A reference to a device, for a short time.
///
/// # Invariants
///
/// The reference is ours.
struct Held<T: Driver>(NonNull<Device<T>>);

impl<T: Driver> Drop for Held<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { bindings::dev_put(self.0.as_ptr().cast()) };
    }
}

/// A device and its children, which go before it does.
///
/// # Invariants
///
/// - `head` is 0, or the address of the device that is not a child, and then constant: it is
///   unregistered after all children, and freed after them, which hold references to it.
/// - `children` belongs to RTNL. Each is registered, and leaves in `ndo_uninit`.
pub(crate) struct Family<T: Driver> {
    head: Atomic<usize>,
    children: UnsafeCell<KVec<NonNull<Device<T>>>>,
}

// SAFETY: The list belongs to RTNL, and `Device<T>` is `Sync`.
unsafe impl<T: Driver> Send for Family<T> {}

// SAFETY: As above.
unsafe impl<T: Driver> Sync for Family<T> {}

impl<T: Driver> Family<T> {
    fn new() -> Result<Arc<Self>> {
        // INVARIANT: Nobody is in it.
        let this = Self {
            head: Atomic::new(0),
            children: UnsafeCell::new(KVec::new()),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    fn children<'a>(&'a self, _rtnl: &'a Rtnl) -> &'a [NonNull<Device<T>>] {
        // SAFETY: By the type invariant RTNL, which is held, owns the list; who changes it lets no
        // reference out, and is not called while this one is in use.
        unsafe { &*self.children.get() }
    }

    /// Makes room for one more.
    fn reserve(&self, _rtnl: &Rtnl) -> Result {
        // SAFETY: As above.
        unsafe { (*self.children.get()).reserve(1, GFP_KERNEL) }.map_err(Error::from)
    }

    /// Takes in a child that was just registered. There is room.
    fn add(&self, _rtnl: &Rtnl, child: NonNull<Device<T>>) {
        // INVARIANT: It is registered.
        // SAFETY: As above.
        let _ = unsafe { (*self.children.get()).push_within_capacity(child) };
    }

    /// Lets go of a child.
    fn remove(&self, _rtnl: &Rtnl, child: *const bindings::net_device) {
        // SAFETY: As above.
        unsafe { (*self.children.get()).retain(|at| !ptr::eq(at.as_ptr().cast(), child)) };
    }
}

/// What a network device belongs to, or nothing.
///
/// # Invariants
///
/// The pointer is null or a device that is live for as long as `'a`.
#[derive(Clone, Copy)]
pub(crate) struct Parent<'a>(*mut bindings::device, PhantomData<&'a ()>);

impl<'a> Parent<'a> {
    /// Its name on its bus, if it belongs to something.
    pub(crate) fn name(&self) -> Option<&'a CStr> {
        // SAFETY: By the type invariant the device is live. Names of devices do not change where
        // network devices belong to them.
        (!self.0.is_null()).then(|| unsafe { CStr::from_char_ptr(bindings::dev_name(self.0)) })
    }

    /// It belongs to nothing.
    pub(crate) fn none() -> Self {
        // INVARIANT: Null.
        Self(ptr::null_mut(), PhantomData)
    }

    /// # Safety
    ///
    /// `parent` satisfies the type invariant.
    pub(crate) unsafe fn from_raw(parent: *mut bindings::device) -> Self {
        // INVARIANT: As the caller promises.
        Self(parent, PhantomData)
    }
}

/// How a device starts.
pub(crate) struct Setup<'a> {
    /// The hardware address.
    pub(crate) address: &'a [u8],
    /// The broadcast address.
    pub(crate) broadcast: &'a [u8],
    /// An `ARPHRD_` number.
    pub(crate) hardware_type: u16,
    pub(crate) mtu: u32,
    pub(crate) min_mtu: u32,
    pub(crate) max_mtu: u32,
    /// What it belongs to.
    pub(crate) parent: Parent<'a>,
    /// Zero-based number of the port on its adapter.
    pub(crate) port: u16,
    /// Whether packets in several pieces are taken.
    pub(crate) scatter_gather: bool,
    pub(crate) offloads: Offloads,
    /// Seconds until a stalled transmission is reported.
    pub(crate) watchdog: u32,
}

/// A device that nobody sees yet, without a driver's data.
///
/// # Invariants
///
/// The pointer is a live C device, not registered, that nobody else uses. This object owns it,
/// unless it is `lent` by a caller that frees it if it does not get registered.
pub(crate) struct UnregisteredDevice<T: Driver> {
    dev: NonNull<bindings::net_device>,
    users: Option<Arc<Users>>,
    lent: bool,
    _driver: PhantomData<T>,
}

// SAFETY: An unregistered device may be handed to another thread.
unsafe impl<T: Driver> Send for UnregisteredDevice<T> {}

/// # Safety
///
/// Called by `alloc_netdev_mqs` with the device that it just made.
pub(super) unsafe extern "C" fn setup_callback<T: Driver>(dev: *mut bindings::net_device) {
    const_assert!(align_of::<Private<T>>() <= bindings::NETDEV_ALIGN as usize);
    // SAFETY: The device is the caller's alone.
    unsafe {
        (*dev).flags =
            bindings::net_device_flags_IFF_BROADCAST | bindings::net_device_flags_IFF_MULTICAST;
        (*dev).tx_queue_len = 1000;
        (*dev).features = bindings::NETIF_F_HIGHDMA | bindings::NETIF_F_VLAN_CHALLENGED;
        (*dev).request_ops_lock = true;
        // Freed when the last user is gone, however it is unregistered.
        (*dev).needs_free_netdev = true;
        (*dev).netdev_ops = &VTable::<T>::NETDEV;
        (*dev).header_ops = &VTable::<T>::HEADER;
        (*dev).ethtool_ops = &ethtool::VTable::<T>::VTABLE;
        (*dev).hard_header_len = T::HEADER_LEN as u16;
        (*dev).addr_len = T::ADDRESS_LEN as u8;
    }
}

impl<T: Driver> UnregisteredDevice<T> {
    /// Allocates a device; `name` may hold a `%d`.
    pub(crate) fn new(name: &CStr) -> Result<Self> {
        let users = Arc::new(Users(()), GFP_KERNEL)?;
        // SAFETY: `name` is a C string that is copied; the setup function fits.
        let dev = unsafe {
            bindings::alloc_netdev_mqs(
                size_of::<Private<T>>() as i32,
                name.as_char_ptr(),
                bindings::NET_NAME_UNKNOWN as u8,
                Some(setup_callback::<T>),
                1,
                1,
            )
        };
        let dev = NonNull::new(dev).ok_or(ENOMEM)?;
        // INVARIANT: The device was just made, and nobody else has it.
        let this = Self {
            dev,
            users: Some(users),
            lent: false,
            _driver: PhantomData,
        };
        this.name_locks();
        Ok(this)
    }

    /// A device to be registered for the caller, who frees it if that fails.
    ///
    /// # Safety
    ///
    /// `dev` was made with [`setup_callback`] of `T` and a private area of the size of
    /// [`Private<T>`], is not registered, and used by nobody else until the result is gone.
    pub(super) unsafe fn lent(dev: NonNull<bindings::net_device>) -> Result<Self> {
        // INVARIANT: As the caller promises.
        let this = Self {
            dev,
            users: Some(Arc::new(Users(()), GFP_KERNEL)?),
            lent: true,
            _driver: PhantomData,
        };
        this.name_locks();
        Ok(this)
    }

    /// Tells lockdep that C may hold the instance locks of many of these devices at a time, as it
    /// does when it unregisters them together.
    fn name_locks(&self) {
        // SAFETY: By the type invariant the device is ours, and none of its locks is held.
        unsafe { bindings::netdev_lockdep_set_classes(self.dev.as_ptr()) };
    }

    /// The MTU that an administrator has asked for already.
    pub(crate) fn wished_mtu(&self) -> Option<u32> {
        // SAFETY: By the type invariant the device is live and nobody else's.
        let mtu = unsafe { (*self.dev.as_ptr()).mtu };
        (mtu != 0).then_some(mtu)
    }

    /// The hardware address that an administrator has asked for already.
    pub(crate) fn wished_address(&self) -> Option<&[u8]> {
        let dev = self.dev.as_ptr();
        // SAFETY: By the type invariant the device is live and nobody else's; an address has room
        // for the longest kind.
        let (assigned, address) = unsafe {
            let address = slice::from_raw_parts((*dev).dev_addr, T::ADDRESS_LEN);
            ((*dev).addr_assign_type, address)
        };
        (u32::from(assigned) == bindings::NET_ADDR_SET).then_some(address)
    }

    /// What tells it apart from other devices.
    pub(crate) fn id(&self) -> DeviceId {
        DeviceId::of_raw(self.dev.as_ptr())
    }

    /// Gives it files of the driver's own.
    pub(super) fn set_sysfs_group(&mut self, group: &'static bindings::attribute_group) {
        // SAFETY: By the type invariant the device is ours and not registered.
        unsafe { (*self.dev.as_ptr()).sysfs_groups[0] = group };
    }

    /// The C device and the mark that its list members hold.
    pub(crate) fn attach_point(&self) -> (NonNull<bindings::net_device>, Option<Arc<Users>>) {
        (self.dev, self.users.clone())
    }

    /// Gives the device its data and makes it visible in a namespace. Takes RTNL.
    #[allow(clippy::too_many_arguments, reason = "what a device is made of")]
    pub(crate) fn register(
        self,
        setup: &Setup<'_>,
        beside: &Neighbourhood,
        link_ops: Arc<LinkOps<T>>,
        link: Arc<Link<T>>,
        shared: impl PinInit<T, Error>,
        control: T::Control,
        tx: T::Tx,
    ) -> Result<Registration<T>> {
        let family = Family::new()?;
        let rtnl = Rtnl::lock();
        // SAFETY: By the type invariant the device is ours alone.
        unsafe { bindings::dev_net_set(self.dev.as_ptr(), beside.0) };
        let kind = link_ops.as_raw();
        let dev =
            self.register_with(&rtnl, setup, kind, family, None, link, shared, control, tx)?;
        Ok(Registration {
            dev,
            _link_ops: link_ops,
        })
    }

    /// Gives the device its data and makes it visible, as a child of `parent` and of its kind of
    /// link, in the parent's namespace unless it was lent. It stays until it is removed, or its
    /// parent is.
    #[allow(clippy::too_many_arguments, reason = "what a device is made of")]
    pub(crate) fn register_child<'a>(
        self,
        rtnl: &'a Rtnl,
        parent: &Device<T>,
        setup: &Setup<'_>,
        link: Arc<Link<T>>,
        shared: impl PinInit<T, Error>,
        control: T::Control,
        tx: T::Tx,
    ) -> Result<&'a Device<T>> {
        if !parent.is_registered(rtnl) || parent.parent().is_some() {
            return Err(EINVAL);
        }
        // SAFETY: By the type invariant the parent's private area is initialised.
        let family = unsafe { (*parent.private()).family.clone() };
        family.reserve(rtnl)?;
        // SAFETY: The parent is live; the device is ours alone.
        let kind = unsafe {
            if !self.lent {
                let net = bindings::dev_net(parent.as_raw());
                bindings::dev_net_set(self.dev.as_ptr(), net);
            }
            (*parent.as_raw()).rtnl_link_ops
        };
        // SAFETY: The parent is live.
        unsafe { bindings::dev_hold(parent.as_raw()) };
        // INVARIANT: We just got the reference.
        let held = Some(Held(NonNull::from(parent)));
        let dev = self.register_with(
            rtnl,
            setup,
            kind,
            family.clone(),
            held,
            link,
            shared,
            control,
            tx,
        )?;
        family.add(rtnl, dev);
        // SAFETY: It is registered, and RTNL keeps that from changing.
        Ok(unsafe { dev.as_ref() })
    }

    /// `kind` is registered, and will not be unregistered before the device.
    #[allow(clippy::too_many_arguments, reason = "what a device is made of")]
    fn register_with(
        mut self,
        _rtnl: &Rtnl,
        setup: &Setup<'_>,
        kind: *const bindings::rtnl_link_ops,
        family: Arc<Family<T>>,
        parent: Option<Held<T>>,
        link: Arc<Link<T>>,
        shared: impl PinInit<T, Error>,
        control: T::Control,
        tx: T::Tx,
    ) -> Result<NonNull<Device<T>>> {
        let dev = self.dev.as_ptr();
        // SAFETY: The device is ours alone.
        let private = unsafe { bindings::netdev_priv(dev) }.cast::<Private<T>>();
        // SAFETY: The private area has the size and alignment of `Private<T>` and stays in place.
        unsafe { pin_init::raw_try_init(&raw mut (*private).shared, shared)? };
        // SAFETY: As above; the fields are not initialised yet.
        unsafe {
            (&raw mut (*private).control).write(UnsafeCell::new(control));
            (&raw mut (*private).tx).write(UnsafeCell::new(tx));
            (&raw mut (*private).users).write(UnsafeCell::new(None));
            (&raw mut (*private).pieces).write(setup.offloads.pieces);
            (&raw mut (*private).family).write(family.clone());
            (&raw mut (*private).link).write(link.clone());
            (&raw mut (*private)._parent).write(parent);
        }
        // SAFETY: The device is ours alone.
        unsafe {
            (*dev).dev.parent = setup.parent.0;
            (*dev).rtnl_link_ops = kind;
            // However many were allocated.
            (*dev).real_num_tx_queues = 1;
            (*dev).real_num_rx_queues = 1;
            (*dev).type_ = setup.hardware_type;
            (*dev).mtu = setup.mtu;
            (*dev).min_mtu = setup.min_mtu;
            (*dev).max_mtu = setup.max_mtu;
            (*dev).dev_port = setup.port;
            (*dev).dev_id = setup.port;
            (*dev).watchdog_timeo = setup.watchdog.saturating_mul(bindings::HZ as u32) as i32;
            if setup.scatter_gather {
                (*dev).features |= bindings::NETIF_F_SG;
            }
            if setup.offloads.checksum {
                let mut offered = bindings::NETIF_F_IP_CSUM | bindings::NETIF_F_RXCSUM;
                if setup.offloads.segmentation && setup.scatter_gather {
                    offered |= bindings::NETIF_F_TSO;
                    if setup.offloads.pieces <= MAX_FRAGS {
                        (*dev).netdev_ops = &VTable::<T>::NETDEV_OF_FEW_PIECES;
                    }
                }
                (*dev).hw_features |= offered;
                (*dev).features |= offered;
            }
            let len = setup.broadcast.len().min(T::ADDRESS_LEN);
            (&mut (*dev).broadcast)[..len].copy_from_slice(&setup.broadcast[..len]);
            let len = setup.address.len().min(T::ADDRESS_LEN);
            bindings::dev_addr_mod(dev, 0, setup.address.as_ptr().cast(), len);
            bindings::netif_carrier_off(dev);
        }
        let head = family.head.cmpxchg(0, dev as usize, Full).is_ok();
        // SAFETY: The device is complete, and RTNL is held.
        let status = to_result(unsafe { bindings::register_netdevice(dev) });
        // SAFETY: The device is live.
        let state = unsafe { (*dev).reg_state };
        // If its place in sysfs was refused it is unregistered at once, and without its destructor.
        let begun = !matches!(
            state.into(),
            bindings::netdev_reg_state_NETREG_UNINITIALIZED
                | bindings::netdev_reg_state_NETREG_UNREGISTERED
        );
        if !begun {
            if head {
                family.head.store(0, Release);
            }
            // SAFETY: A device that was not registered is ours again, and no callback runs any more.
            unsafe { ptr::drop_in_place(private) };
        } else {
            // SAFETY: Only the destructor, which runs once and last, touches the field.
            unsafe { *(*private).users.get() = self.users.take() };
            // SAFETY: From here on C drops the private area: also when a notifier refused the
            // device, which is then being unregistered, and freed when RTNL is given up.
            unsafe { (*dev).priv_destructor = Some(destructor_callback::<T>) };
        }
        status?;
        let dev = ManuallyDrop::new(self).dev.cast();
        *link.dev.lock() = Some(LinkedDevice(dev));
        Ok(dev)
    }
}

impl<T: Driver> Drop for UnregisteredDevice<T> {
    fn drop(&mut self) {
        if self.lent {
            if self.users.is_some() && !unused(self.users.take()) {
                // SAFETY: By the type invariant the device is live, not registered, and nobody
                // else's. C takes it for one that is freed later, which this one never is.
                unsafe {
                    (*self.dev.as_ptr()).reg_state =
                        bindings::netdev_reg_state_NETREG_UNREGISTERING as u8;
                }
            }
            return;
        }
        // The mark was given to the device if that is being unregistered.
        if self.users.is_none() || unused(self.users.take()) {
            // SAFETY: By the type invariant the device is ours and not registered any more; if it
            // is being unregistered C frees it later.
            unsafe { bindings::free_netdev(self.dev.as_ptr()) };
        }
    }
}

/// Whether the mark's last reference was given; if not, the device must be leaked.
fn unused(users: Option<Arc<Users>>) -> bool {
    let unused = users.is_some_and(|users| Arc::into_unique_or_drop(users).is_some());
    if !unused {
        pr_err!("a NAPI context outlives its network device, which is leaked\n");
    }
    unused
}

/// A device in the network stack. Dropping it unregisters and waits for the last user.
///
/// Sleeps and takes RTNL.
pub(crate) struct Registration<T: Driver> {
    dev: NonNull<Device<T>>,
    // Outlives the device. Not the device's own: C waits, when a kind is unregistered, for the end
    // of all devices that are being unregistered.
    _link_ops: Arc<LinkOps<T>>,
}

// SAFETY: A registration may be used and dropped from any thread.
unsafe impl<T: Driver> Send for Registration<T> {}

// SAFETY: `Device<T>` is `Sync`.
unsafe impl<T: Driver> Sync for Registration<T> {}

impl<T: Driver> Deref for Registration<T> {
    type Target = Device<T>;

    fn deref(&self) -> &Device<T> {
        // SAFETY: The device is registered until this object is dropped.
        unsafe { self.dev.as_ref() }
    }
}

impl<T: Driver> Drop for Registration<T> {
    fn drop(&mut self) {
        let rtnl = Rtnl::lock();
        let mut list = bindings::list_head {
            next: ptr::null_mut(),
            prev: ptr::null_mut(),
        };
        let head = &raw mut list;
        // INVARIANT: Children go first.
        // SAFETY: All devices are registered, RTNL is held, and the list is this call's.
        unsafe {
            (*head).next = head;
            (*head).prev = head;
            for child in (*self.dev.as_ptr()).family().children(&rtnl) {
                bindings::unregister_netdevice_queue(child.as_ptr().cast(), head);
            }
            bindings::unregister_netdevice_queue(self.dev.as_ptr().cast(), head);
            bindings::unregister_netdevice_many(head);
        }
    }
}

/// A network namespace to be born in.
///
/// # Invariants
///
/// The pointer is a network namespace that lives at least as long as this object.
pub(crate) struct Neighbourhood(*mut bindings::net);

impl Neighbourhood {
    /// The first namespace, which is always there.
    pub(crate) fn initial() -> Self {
        // INVARIANT: The initial namespace is never freed.
        Self(&raw mut bindings::init_net)
    }

    /// The namespace, or the initial one if it is just being taken down.
    ///
    /// # Safety
    ///
    /// `net` is not freed during the call.
    pub(crate) unsafe fn from_raw(net: *mut bindings::net) -> Self {
        // SAFETY: As the caller promises.
        let net = unsafe { bindings::maybe_get_net(net) };
        if net.is_null() {
            return Self::initial();
        }
        // INVARIANT: We hold a reference.
        Self(net)
    }

    /// Where `lower` is now; the initial namespace if that one is just being taken down.
    pub(crate) fn of(lower: &DeviceRef) -> Self {
        let _rtnl = Rtnl::lock();
        // SAFETY: The device is live, and under RTNL its namespace does not change.
        unsafe { Self::from_raw(bindings::dev_net(lower.0.as_ptr())) }
    }
}

impl Drop for Neighbourhood {
    fn drop(&mut self) {
        if !ptr::eq(self.0, &raw const bindings::init_net) {
            // SAFETY: A namespace other than the initial one was taken with a reference.
            unsafe { bindings::put_net(self.0) };
        }
    }
}

/// A network device of whatever driver, for a short time: it cannot be unregistered meanwhile.
///
/// # Invariants
///
/// The pointer is a live device of which this object holds a reference.
pub(crate) struct DeviceRef(NonNull<bindings::net_device>);

impl DeviceRef {
    /// Takes over a reference.
    ///
    /// # Safety
    ///
    /// The caller gives up a reference on the live device.
    pub(crate) unsafe fn from_raw(dev: NonNull<bindings::net_device>) -> Self {
        // INVARIANT: As the caller promises.
        Self(dev)
    }

    /// Takes a reference of its own.
    ///
    /// # Safety
    ///
    /// The device is live.
    unsafe fn of(dev: NonNull<bindings::net_device>) -> Self {
        // SAFETY: As the caller promises.
        unsafe { bindings::dev_hold(dev.as_ptr()) };
        // INVARIANT: The reference was just taken.
        Self(dev)
    }

    /// Gives the reference away.
    pub(crate) fn into_raw(self) -> *mut bindings::net_device {
        ManuallyDrop::new(self).0.as_ptr()
    }

    /// What tells devices apart; of use only while the device is known to be there.
    pub(crate) fn id(&self) -> DeviceId {
        DeviceId(self.0.as_ptr() as usize)
    }

    /// The first six bytes of the hardware address, if it has that many.
    pub(crate) fn mac(&self) -> Option<[u8; 6]> {
        let dev = self.0.as_ptr();
        // SAFETY: The device is live; a racing change of the address may tear the result, and is
        // followed by a notification.
        unsafe {
            ((*dev).addr_len == 6).then(|| {
                let mut mac = [0; 6];
                ptr::copy_nonoverlapping((*dev).dev_addr, mac.as_mut_ptr(), 6);
                mac
            })
        }
    }

    /// Joins an IPv6 group on the device. Sleeps; RTNL need not be held.
    pub(crate) fn join_ipv6(&self, group: &[u8; 16]) -> Result {
        let group = ipv6_address(group);
        // SAFETY: The device is live, the address is copied.
        to_result(unsafe { bindings::ipv6_dev_mc_inc(self.0.as_ptr(), &group) })
    }

    /// Undoes [`Self::join_ipv6`].
    pub(crate) fn leave_ipv6(&self, group: &[u8; 16]) -> Result {
        let group = ipv6_address(group);
        // SAFETY: As above.
        to_result(unsafe { bindings::ipv6_dev_mc_dec(self.0.as_ptr(), &group) })
    }
}

fn ipv6_address(bytes: &[u8; 16]) -> bindings::in6_addr {
    let mut address = bindings::in6_addr::default();
    address.in6_u.u6_addr8 = *bytes;
    address
}

impl Drop for DeviceRef {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { bindings::dev_put(self.0.as_ptr()) };
    }
}

/// Tells network devices apart without keeping them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceId(usize);

impl DeviceId {
    pub(super) fn of_raw(dev: *const bindings::net_device) -> Self {
        Self(dev as usize)
    }
}

/// # Safety
///
/// Called by C once, after the last user of a device that `register` completed.
unsafe extern "C" fn destructor_callback<T: Driver>(dev: *mut bindings::net_device) {
    // SAFETY: The device is live.
    let private = unsafe { bindings::netdev_priv(dev) }.cast::<Private<T>>();
    // SAFETY: As above; nobody else touches the field.
    let users = unsafe { (*(*private).users.get()).take() };
    // SAFETY: As above; the private area is initialised and not used again.
    unsafe { ptr::drop_in_place(private) };
    if !unused(users) {
        // SAFETY: The device is still ours to decide about: C reads the flag after this.
        unsafe { (*dev).needs_free_netdev = false };
    }
}

struct VTable<T: Driver>(PhantomData<T>);

impl<T: Driver> VTable<T> {
    const NETDEV: bindings::net_device_ops = bindings::net_device_ops {
        ndo_open: Some(Self::open_callback),
        ndo_stop: Some(Self::stop_callback),
        ndo_start_xmit: Some(Self::start_xmit_callback),
        ndo_tx_timeout: Some(Self::tx_timeout_callback),
        ndo_set_rx_mode_async: Some(Self::set_rx_mode_callback),
        ndo_change_mtu: Some(Self::change_mtu_callback),
        ndo_set_mac_address: Some(Self::set_mac_address_callback),
        ndo_get_stats64: Some(Self::get_stats64_callback),
        ndo_fix_features: Some(Self::fix_features_callback),
        ndo_uninit: Some(Self::uninit_callback),
        ndo_get_iflink: Some(Self::get_iflink_callback),
        ..pin_init::zeroed()
    };

    const NETDEV_OF_FEW_PIECES: bindings::net_device_ops = bindings::net_device_ops {
        ndo_features_check: Some(Self::features_check_callback),
        ..Self::NETDEV
    };

    const HEADER: bindings::header_ops = bindings::header_ops {
        create: Some(Self::header_create_callback),
        ..pin_init::zeroed()
    };

    /// # Safety
    ///
    /// Called by C with RTNL and the instance lock of the registered `dev` held.
    unsafe extern "C" fn open_callback(dev: *mut bindings::net_device) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        kernel::error::from_result(|| T::open(&mut locked).map(|()| 0))
    }

    /// # Safety
    ///
    /// As [`Self::open_callback`].
    unsafe extern "C" fn stop_callback(dev: *mut bindings::net_device) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        T::stop(&mut locked);
        0
    }

    /// # Safety
    ///
    /// Called by C with the transmit lock of the registered `dev` held and softirqs off; `skb` is
    /// given away.
    unsafe extern "C" fn start_xmit_callback(
        skb: *mut bindings::sk_buff,
        dev: *mut bindings::net_device,
    ) -> bindings::netdev_tx_t {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: The transmit lock, which owns the data, is held during the call.
        let tx = unsafe { &mut *(*dev.private()).tx.get() };
        if let Some(skb) = NonNull::new(skb) {
            // SAFETY: C gives the buffer away, outside of any list.
            T::start_xmit(dev, tx, unsafe { Skb::from_raw(skb) });
        }
        bindings::netdev_tx_NETDEV_TX_OK
    }

    /// # Safety
    ///
    /// Called by C for the registered `dev`, softirqs off.
    unsafe extern "C" fn tx_timeout_callback(dev: *mut bindings::net_device, _queue: c_uint) {
        // SAFETY: A registered device of ours satisfies the invariant.
        T::tx_timeout(unsafe { Device::<T>::from_raw(dev) });
    }

    /// # Safety
    ///
    /// As [`Self::open_callback`]; `mc` is a list of addresses that is not changed meanwhile.
    unsafe extern "C" fn set_rx_mode_callback(
        dev: *mut bindings::net_device,
        _uc: *mut bindings::netdev_hw_addr_list,
        mc: *mut bindings::netdev_hw_addr_list,
    ) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        // INVARIANT: As C promises.
        let groups = Groups {
            list: mc,
            address_len: T::ADDRESS_LEN,
            _list: PhantomData,
        };
        // SAFETY: RTNL is held during the call.
        let rtnl = unsafe { Rtnl::borrowed() };
        kernel::error::from_result(|| T::groups_changed(&mut locked, &rtnl, groups).map(|()| 0))
    }

    /// # Safety
    ///
    /// As [`Self::open_callback`].
    unsafe extern "C" fn change_mtu_callback(dev: *mut bindings::net_device, mtu: c_int) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        kernel::error::from_result(|| {
            let mtu = T::change_mtu(&mut locked, u32::try_from(mtu)?)?;
            // SAFETY: The C device is live; RTNL, which protects the field, is held.
            unsafe { (&raw mut (*dev.as_raw()).mtu).write_volatile(mtu) };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// As [`Self::open_callback`]; `storage` is a `sockaddr_storage` with a hardware address.
    unsafe extern "C" fn set_mac_address_callback(
        dev: *mut bindings::net_device,
        storage: *mut c_void,
    ) -> c_int {
        // SAFETY: A registered device of ours satisfies the invariant.
        let dev = unsafe { Device::<T>::from_raw(dev) };
        // SAFETY: RTNL is held during the call.
        let rtnl = unsafe { Rtnl::borrowed() };
        // SAFETY: The lock is held during the call.
        let mut locked = unsafe { Locked::borrowed(dev) };
        // SAFETY: As C promises; the address follows the family, and the rest of the structure is
        // larger than any address.
        let address = unsafe {
            let data = storage.cast::<u8>().add(size_of::<bindings::sa_family_t>());
            slice::from_raw_parts(data, T::ADDRESS_LEN)
        };
        kernel::error::from_result(|| {
            T::change_address(&mut locked, &rtnl, address)?;
            // SAFETY: The C device is live and RTNL is held.
            unsafe {
                bindings::dev_addr_mod(dev.as_raw(), 0, address.as_ptr().cast(), address.len())
            };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Called by C with RTNL held, with a `dev` whose private area is initialised.
    unsafe extern "C" fn uninit_callback(dev: *mut bindings::net_device) {
        // SAFETY: RTNL is held during the call.
        let rtnl = unsafe { Rtnl::borrowed() };
        // SAFETY: As C promises.
        let private = unsafe { &*Device::<T>::from_raw(dev).private() };
        *private.link.dev.lock() = None;
        private.family.remove(&rtnl, dev);
    }

    /// # Safety
    ///
    /// Called by C with a live `dev` whose private area is initialised.
    unsafe extern "C" fn get_iflink_callback(dev: *const bindings::net_device) -> c_int {
        // SAFETY: As C promises.
        let this = unsafe { Device::<T>::from_raw(dev.cast_mut()) };
        let head = this.parent().unwrap_or(this).as_raw();
        // SAFETY: The device is live; a racing change gives the old or the new value.
        unsafe { (&raw const (*head).ifindex).read_volatile() }
    }

    /// # Safety
    ///
    /// Called by C with a `dev` whose private area is initialised.
    unsafe extern "C" fn fix_features_callback(
        dev: *mut bindings::net_device,
        features: bindings::netdev_features_t,
    ) -> bindings::netdev_features_t {
        // SAFETY: As C promises.
        match T::goes_without_offloads(unsafe { Device::<T>::from_raw(dev) }) {
            true => features & !(bindings::NETIF_F_IP_CSUM | bindings::NETIF_F_TSO),
            false => features,
        }
    }

    /// What the hardware can do for a packet: with too many pieces it is better cut by the stack
    /// than copied into one.
    ///
    /// # Safety
    ///
    /// Called by C for the registered `dev` with a live `skb`.
    unsafe extern "C" fn features_check_callback(
        skb: *mut bindings::sk_buff,
        dev: *mut bindings::net_device,
        features: bindings::netdev_features_t,
    ) -> bindings::netdev_features_t {
        // SAFETY: A registered device of ours satisfies the invariant.
        let pieces = unsafe { (*Device::<T>::from_raw(dev).private()).pieces };
        // SAFETY: The buffer is live, so its shared info is too.
        let frags = unsafe { (*bindings::skb_shinfo(skb)).nr_frags };
        match usize::from(frags) < pieces {
            true => features,
            false => features & !bindings::NETIF_F_GSO_MASK,
        }
    }

    /// # Safety
    ///
    /// Called by C for the registered `dev` with `storage` valid for writes, zeroed.
    unsafe extern "C" fn get_stats64_callback(
        dev: *mut bindings::net_device,
        storage: *mut bindings::rtnl_link_stats64,
    ) {
        let mut stats = Stats::default();
        // SAFETY: A registered device of ours satisfies the invariant.
        T::stats(unsafe { Device::<T>::from_raw(dev) }, &mut stats);
        let values = bindings::rtnl_link_stats64 {
            rx_packets: stats.rx_packets,
            rx_bytes: stats.rx_bytes,
            rx_errors: stats.rx_errors,
            rx_dropped: stats.rx_dropped,
            rx_length_errors: stats.rx_length_errors,
            multicast: stats.multicast,
            tx_packets: stats.tx_packets,
            tx_bytes: stats.tx_bytes,
            tx_errors: stats.tx_errors,
            tx_dropped: stats.tx_dropped,
            ..pin_init::zeroed()
        };
        // SAFETY: As C promises. In a netlink message the structure is aligned to four bytes only.
        unsafe { storage.write_unaligned(values) };
    }

    /// # Safety
    ///
    /// Called by C with a live `skb`; `daddr` is null or points at a hardware address.
    unsafe extern "C" fn header_create_callback(
        skb: *mut bindings::sk_buff,
        _dev: *mut bindings::net_device,
        ethertype: c_ushort,
        daddr: *const c_void,
        _saddr: *const c_void,
        _len: c_uint,
    ) -> c_int {
        let len = T::HEADER_LEN;
        // SAFETY: The buffer is live; this makes the head room private and large enough.
        let status = unsafe { bindings::skb_cow_head(skb, len as u32) };
        if status < 0 {
            return status;
        }
        // SAFETY: The buffer has the head room.
        let header = unsafe { bindings::skb_push(skb, len as u32) };
        // SAFETY: `skb_push` gave `len` bytes in front, which nobody shares.
        let header = unsafe { slice::from_raw_parts_mut(header.cast::<u8>(), len) };
        if daddr.is_null() {
            header.fill(0);
            return -(len as c_int);
        }
        // SAFETY: As C promises.
        let daddr = unsafe { slice::from_raw_parts(daddr.cast::<u8>(), T::ADDRESS_LEN) };
        T::write_header(header, ethertype, daddr);
        len as c_int
    }
}
