// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Neighbours: from a hardware address to the way there.
//!
//! An entry starts without a way; packets wait in it, bounded, until the resolver found one, and
//! leave in order. Entries are read under RCU. All changes of an entry's queue happen under the
//! transmit lock, so that no packet overtakes the waiting ones.
//!
//! Lock order: transmit lock, then [`Neigh::waiting`] or [`Table::todo`].

use crate::{
    ib::{
        ah::Ah,
        Gid,
        Qpn, //
    },
    net::skb::{
        Skb,
        SkbQueue, //
    },
    sync::{
        elapsed,
        jiffies,
        lock::{
            new_spinlock_bh,
            SpinLockBh, //
        },
        rcu_map::{
            self,
            RcuMap,
            Removed,
            Share, //
        },
        HZ, //
    },
    wire::{
        self,
        Address, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        rcu,
        SetOnce, //
    },
};

/// Packets that wait for one destination, at most.
const MAX_WAITING: usize = 64;

/// Bytes that wait for one destination, at most.
const MAX_WAITING_BYTES: usize = 128 << 10;

/// Packets that wait for all destinations together, at most.
const MAX_WAITING_IN_ALL: usize = 4096;

/// Of these, packets to groups: anybody may send to as many groups as they like.
const MAX_WAITING_FOR_GROUPS: usize = MAX_WAITING_IN_ALL / 2;

/// Destinations, at most.
const MAX_NEIGHBOURS: i32 = 16384;

/// Of these, groups.
const MAX_GROUPS: i32 = MAX_NEIGHBOURS / 2;

/// An entry unused for so long goes.
const IDLE: usize = 60 * HZ;

/// After a failure packets are dropped for so long before the way is looked for again.
const NEGATIVE: usize = HZ;

/// Destinations noted for the resolver one by one; beyond, it looks at all.
const TODO: usize = 256;

/// A destination as the table's key.
#[derive(Clone, Copy, Eq, zerocopy_derive::IntoBytes, zerocopy_derive::Immutable)]
#[repr(transparent)]
pub(crate) struct Key([u32; 5]);

impl Key {
    /// The destination at the front of a packet; `None` if it is cut short.
    #[inline]
    pub(crate) fn read(head: &[u8], pkey: u16) -> Option<Self> {
        wire::key(head, pkey).map(Self)
    }

    pub(crate) fn address(&self) -> Address {
        Address::of_key(&self.0)
    }

    pub(crate) fn gid(&self) -> Gid {
        Gid(self.address().gid())
    }

    /// Whether it is one of the many groups. The broadcast group is none, as ports are looked for
    /// through it.
    fn is_group(&self) -> bool {
        let gid = self.gid();
        gid.is_multicast() && !wire::is_broadcast_mgid(&gid.0)
    }
}

impl PartialEq for Key {
    // One branch and no call: this is done for each packet.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        pairs.fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

/// The way to a destination.
pub(crate) struct Path {
    pub(crate) ah: Ah,
    pub(crate) qpn: Qpn,
    /// The group that packets to one that is not there go to.
    pub(crate) detour: Option<Gid>,
}

struct Waiting {
    queue: SkbQueue,
    /// When the resolver gave up last, in jiffies.
    failed: Option<usize>,
}

/// A destination.
#[pin_data]
pub(crate) struct Neigh {
    path: SetOnce<Path>,
    /// Whether it is one of the many groups.
    is_group: bool,
    /// Packets that wait. Written under the transmit lock.
    backlog: Atomic<usize>,
    /// When the entry was used last, in jiffies.
    used: Atomic<usize>,
    #[pin]
    waiting: SpinLockBh<Waiting>,
}

/// What became of a packet that had to wait; it is dropped unless it waits.
pub(crate) enum Queued {
    /// It waits; the resolver must be told if it is the first.
    Waits { first: bool },
    /// Too many wait already.
    Full,
    /// There was no way a moment ago.
    Failed,
}

impl Neigh {
    fn new(is_group: bool) -> impl PinInit<Self> {
        pin_init!(Self {
            path: SetOnce::new(),
            is_group,
            backlog: Atomic::new(0),
            used: Atomic::new(jiffies()),
            waiting <- new_spinlock_bh!(
                Waiting {
                    queue: SkbQueue::new(),
                    failed: None,
                },
                c"Neigh::waiting"
            ),
        })
    }

    /// The way, if it is known and no packet waits for it.
    #[inline]
    pub(crate) fn ready(&self) -> Option<&Path> {
        let path = self.path.as_ref()?;
        if self.backlog.load(Relaxed) != 0 {
            return None;
        }
        let now = jiffies();
        if self.used.load(Relaxed) != now {
            self.used.store(now, Relaxed);
        }
        Some(path)
    }

    /// The way, if it is known.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_ref()
    }

    /// Notes the way.
    pub(crate) fn set_path(&self, path: Path) {
        // If there is one already it is as good; the handle retires.
        let _ = self.path.populate(path);
    }

    /// Lets a packet wait. The transmit lock is held.
    pub(crate) fn wait(&self, all: &Waiters, skb: Skb) -> Queued {
        let mut waiting = self.waiting.lock();
        if waiting.failed.is_some_and(|then| elapsed(then) < NEGATIVE) {
            return Queued::Failed;
        }
        waiting.failed = None;
        let queue = &mut waiting.queue;
        if queue.packets() >= MAX_WAITING
            || queue.bytes().saturating_add(skb.len()) > MAX_WAITING_BYTES
            || all.is_full(self.is_group)
        {
            return Queued::Full;
        }
        let first = queue.packets() == 0;
        queue.push(skb);
        all.more(self.is_group);
        self.backlog.store(queue.packets(), Relaxed);
        Queued::Waits { first }
    }

    /// Takes the packet that waits longest. The transmit lock is held.
    pub(crate) fn next_waiting(&self, all: &Waiters) -> Option<Skb> {
        let mut waiting = self.waiting.lock();
        let skb = waiting.queue.pop()?;
        all.fewer(self.is_group, 1);
        self.backlog.store(waiting.queue.packets(), Relaxed);
        Some(skb)
    }

    /// Whether the packet that waits longest is of a kind, which `is` tells by its first bytes.
    pub(crate) fn first_waiting(&self, is: impl FnOnce(&[u8]) -> bool) -> bool {
        let mut waiting = self.waiting.lock();
        let Some(skb) = waiting.queue.pop() else {
            return false;
        };
        let answer = is(skb.head());
        waiting.queue.push_front(skb);
        answer
    }

    /// Puts back what [`Self::next_waiting`] took. The transmit lock is held.
    pub(crate) fn wait_again(&self, all: &Waiters, skb: Skb) {
        let mut waiting = self.waiting.lock();
        waiting.queue.push_front(skb);
        all.more(self.is_group);
        self.backlog.store(waiting.queue.packets(), Relaxed);
    }

    /// There is no way: drops what waits, and returns how many packets that were. The transmit
    /// lock is held.
    pub(crate) fn fail(&self, all: &Waiters) -> usize {
        let lost;
        {
            let mut waiting = self.waiting.lock();
            lost = core::mem::replace(&mut waiting.queue, SkbQueue::new());
            waiting.failed = Some(jiffies());
            self.backlog.store(0, Relaxed);
        }
        all.fewer(self.is_group, lost.packets());
        lost.packets()
    }

    fn waits(&self) -> bool {
        self.backlog.load(Relaxed) != 0
    }

    fn is_idle(&self) -> bool {
        !self.waits() && elapsed(self.used.load(Relaxed)) > IDLE
    }
}

/// Sorts, by a heap. What `core` sorts by, objtool does not understand.
pub(crate) fn sort(gids: &mut [Gid]) {
    fn sink(heap: &mut [Gid], mut at: usize) {
        loop {
            let left = 2 * at + 1;
            let larger = match (heap.get(left), heap.get(left + 1)) {
                (Some(one), Some(other)) if one < other => left + 1,
                (Some(_), _) => left,
                _ => return,
            };
            if heap[larger] <= heap[at] {
                return;
            }
            heap.swap(at, larger);
            at = larger;
        }
    }
    for at in (0..gids.len() / 2).rev() {
        sink(gids, at);
    }
    for end in (1..gids.len()).rev() {
        gids.swap(0, end);
        sink(&mut gids[..end], 0);
    }
}

/// How many packets wait in all entries of a table.
pub(crate) struct Waiters {
    all: Atomic<usize>,
    groups: Atomic<usize>,
}

impl Waiters {
    const fn new() -> Self {
        Self {
            all: Atomic::new(0),
            groups: Atomic::new(0),
        }
    }

    fn is_full(&self, group: bool) -> bool {
        self.all.load(Relaxed) >= MAX_WAITING_IN_ALL
            || group && self.groups.load(Relaxed) >= MAX_WAITING_FOR_GROUPS
    }

    fn more(&self, group: bool) {
        self.all.add(1, Relaxed);
        if group {
            self.groups.add(1, Relaxed);
        }
    }

    fn fewer(&self, group: bool, packets: usize) {
        self.all.fetch_sub(packets, Relaxed);
        if group {
            self.groups.fetch_sub(packets, Relaxed);
        }
    }
}

/// The link header of a packet.
#[derive(Clone, Copy, Eq)]
pub(crate) struct Header([u64; 3]);

impl Header {
    /// The header at the front of a packet; `None` if it is cut short.
    #[inline]
    pub(crate) fn read(head: &[u8]) -> Option<Self> {
        let bytes: &[u8; wire::HEADER_LEN] = head.first_chunk()?;
        let (words, _) = bytes.as_chunks();
        Some(Self([
            u64::from_ne_bytes(words[0]),
            u64::from_ne_bytes(words[1]),
            u64::from_ne_bytes(words[2]),
        ]))
    }

    /// Where it is remembered: the last bytes of QPN and GUID tell ports from each other.
    #[inline]
    fn place(&self) -> usize {
        let [a, _, c] = self.0;
        ((a ^ c).to_le() >> 24) as usize % RECENT
    }
}

impl PartialEq for Header {
    // One branch and no call, as for a key.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        let [a, b, c] = self.0;
        let [x, y, z] = other.0;
        (a ^ x) | (b ^ y) | (c ^ z) == 0
    }
}

/// Headers that are remembered.
const RECENT: usize = 64;

/// The destinations of the last packets.
pub(crate) struct Cache {
    last: rcu_map::Cache<Key, Neigh>,
    recent: rcu_map::Tags<Header, Neigh>,
}

impl Cache {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            last: rcu_map::Cache::new(),
            recent: rcu_map::Tags::new(RECENT, Header([0; 3]))?,
        })
    }

    /// Notes that packets with `header` go to `neigh`, if that was found last.
    pub(crate) fn note(&mut self, header: Header, neigh: &Neigh) {
        self.recent.note(header.place(), header, &self.last, neigh);
    }
}

struct Todo {
    keys: KVVec<Key>,
    all: bool,
}

/// What the resolver has to do.
pub(crate) enum Work {
    /// These.
    Keys(KVVec<Key>),
    /// Look at every entry.
    All,
}

/// The neighbours of an interface.
#[pin_data]
pub(crate) struct Table {
    #[pin]
    map: RcuMap<Key, Neigh>,
    pub(crate) waiters: Waiters,
    #[pin]
    todo: SpinLockBh<Todo>,
}

impl Table {
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            map <- RcuMap::with_share(
                MAX_NEIGHBOURS,
                Share {
                    has: Key::is_group,
                    max: MAX_GROUPS,
                },
            ),
            waiters: Waiters::new(),
            todo <- new_spinlock_bh!(
                Todo {
                    keys: KVVec::new(),
                    all: false,
                },
                c"neigh::Table::todo"
            ),
        })
    }

    /// The entry of `key`, made if there is none. Atomic context is allowed.
    #[inline]
    pub(crate) fn find<'g>(
        &'g self,
        cache: &mut Cache,
        key: &Key,
        guard: &'g rcu::Guard,
    ) -> Result<&'g Neigh> {
        match self.map.get_cached(&mut cache.last, key, guard) {
            Some(neigh) => Ok(neigh),
            None => self
                .map
                .get_or_insert(key, Neigh::new(key.is_group()), guard),
        }
    }

    /// The entry that was noted for `header`.
    #[inline]
    pub(crate) fn again<'g>(
        &'g self,
        cache: &Cache,
        header: &Header,
        guard: &'g rcu::Guard,
    ) -> Option<&'g Neigh> {
        self.map
            .get_tagged(&cache.recent, header.place(), header, guard)
    }

    /// The entry of `key`.
    pub(crate) fn get<'g>(&'g self, key: &Key, guard: &'g rcu::Guard) -> Option<&'g Neigh> {
        self.map.get(key, guard)
    }

    /// Notes that `key` wants the resolver. Atomic context is allowed.
    pub(crate) fn want(&self, key: &Key) {
        let mut todo = self.todo.lock();
        if todo.keys.len() >= TODO || todo.keys.push(*key, GFP_ATOMIC).is_err() {
            todo.all = true;
        }
    }

    /// Notes that the resolver must look at every entry in which packets wait.
    pub(crate) fn want_all(&self) {
        self.todo.lock().all = true;
    }

    /// Whether packets wait in any entry.
    pub(crate) fn anyone_waits(&self) -> bool {
        self.waiters.all.load(Relaxed) != 0
    }

    /// Takes the resolver's work.
    pub(crate) fn take_work(&self) -> Work {
        let mut todo = self.todo.lock();
        let keys = core::mem::replace(&mut todo.keys, KVVec::new());
        match core::mem::replace(&mut todo.all, false) {
            true => Work::All,
            false => Work::Keys(keys),
        }
    }

    /// The entries in which packets wait, up to as many as fit into `keys`.
    pub(crate) fn waiting(&self, keys: &mut KVVec<Key>) {
        self.map.for_each(|key, neigh| {
            if neigh.waits() {
                let _ = keys.push_within_capacity(*key);
            }
        });
    }

    /// Takes out the entries that nobody used for a while. Sleeps.
    pub(crate) fn expire(&self) -> Removed<Key, Neigh> {
        self.map.remove_if(|_, neigh| neigh.is_idle())
    }

    /// Takes out all entries. Sleeps.
    pub(crate) fn clear(&self) -> Removed<Key, Neigh> {
        self.map.remove_if(|_, _| true)
    }

    /// Takes out those of groups whose way is known. Sleeps.
    pub(crate) fn clear_groups(&self) -> Removed<Key, Neigh> {
        self.map
            .remove_if(|key, neigh| key.gid().is_multicast() && neigh.path().is_some())
    }

    /// Takes out those whose way is known and leads to ports and groups in a sorted list. Sleeps.
    pub(crate) fn clear_ways_to(&self, gids: &[Gid]) -> Removed<Key, Neigh> {
        let named = |gid: &Gid| gids.binary_search(gid).is_ok();
        self.map.remove_if(|key, neigh| {
            neigh
                .path()
                .is_some_and(|path| named(&key.gid()) || path.detour.as_ref().is_some_and(named))
        })
    }

    /// The ports and groups that all entries are of or lead to, sorted.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn gids(&self) -> Result<KVVec<Gid>> {
        // Entries that come meanwhile are young.
        let room = self.len().saturating_add(64).saturating_mul(2);
        let mut gids = KVVec::with_capacity(room, GFP_KERNEL)?;
        self.map.for_each(|key, neigh| {
            let _ = gids.push_within_capacity(key.gid());
            if let Some(detour) = neigh.path().and_then(|path| path.detour) {
                let _ = gids.push_within_capacity(detour);
            }
        });
        sort(&mut gids);
        Ok(gids)
    }

    /// Calls `visit` for each entry.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn for_each(&self, visit: impl FnMut(&Key, &Neigh)) {
        self.map.for_each(visit);
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_neigh)]
mod tests {
    use super::*;
    use crate::net::skb::{
        NewSkb,
        PacketType, //
    };
    use core::ptr;
    use kernel::sync::Arc;

    fn packet(len: usize) -> Result<Skb> {
        let mut skb = NewSkb::alloc(len).ok_or(ENOMEM)?;
        for _ in 0..len / 100 {
            assert!(skb.append(&[0; 100]));
        }
        Ok(skb.finish(0, 0, PacketType::Host))
    }

    /// Packets of `len` bytes that an entry takes until it refuses one.
    fn taken(neigh: &Neigh, all: &Waiters, len: usize) -> Result<usize> {
        for count in 0..2 * MAX_WAITING_IN_ALL {
            match neigh.wait(all, packet(len)?) {
                Queued::Waits { first } => assert_eq!(first, count == 0),
                Queued::Full => return Ok(count),
                Queued::Failed => return Err(EHOSTUNREACH),
            }
        }
        Err(EOVERFLOW)
    }

    /// B15: packets, bytes, and packets of all entries are bounded; what fails gives everything back.
    #[test]
    fn waiting_is_bounded() -> Result {
        let all = Waiters::new();
        let neigh = Arc::pin_init(Neigh::new(false), GFP_KERNEL)?;
        assert_eq!(taken(&neigh, &all, 100)?, MAX_WAITING);
        assert_eq!(neigh.fail(&all), MAX_WAITING);
        // Nothing is taken right after a failure.
        assert!(matches!(neigh.wait(&all, packet(100)?), Queued::Failed));

        let neigh = Arc::pin_init(Neigh::new(false), GFP_KERNEL)?;
        assert_eq!(taken(&neigh, &all, 4000)?, MAX_WAITING_BYTES / 4000);
        assert_eq!(neigh.fail(&all), MAX_WAITING_BYTES / 4000);
        assert_eq!(all.all.load(Relaxed), 0);

        // As if many others were full.
        all.all.store(MAX_WAITING_IN_ALL - 10, Relaxed);
        let neigh = Arc::pin_init(Neigh::new(false), GFP_KERNEL)?;
        assert_eq!(taken(&neigh, &all, 100)?, 10);
        let late = Arc::pin_init(Neigh::new(false), GFP_KERNEL)?;
        assert_eq!(taken(&late, &all, 100)?, 0);
        assert_eq!(neigh.fail(&all), 10);
        assert_eq!(taken(&late, &all, 100)?, 10);
        assert_eq!(late.fail(&all), 10);
        assert_eq!(all.all.load(Relaxed), MAX_WAITING_IN_ALL - 10);
        Ok(())
    }

    /// B15: packets to groups, to which anybody may send, leave room for those to ports.
    #[test]
    fn groups_leave_room_for_waiting() -> Result {
        let all = Waiters::new();
        let (group, port) = (Neigh::new(true), Neigh::new(false));
        let group = Arc::pin_init(group, GFP_KERNEL)?;
        let port = Arc::pin_init(port, GFP_KERNEL)?;
        // As if 64 others were full.
        for _ in 0..MAX_WAITING_FOR_GROUPS - 10 {
            all.more(true);
        }
        assert_eq!(taken(&group, &all, 100)?, 10);
        assert_eq!(taken(&port, &all, 100)?, MAX_WAITING);
        assert!(group.next_waiting(&all).is_some());
        assert!(matches!(
            group.wait(&all, packet(100)?),
            Queued::Waits { first: false }
        ));
        assert_eq!(group.fail(&all), 10);
        assert_eq!(port.fail(&all), MAX_WAITING);
        assert_eq!(all.groups.load(Relaxed), MAX_WAITING_FOR_GROUPS - 10);
        assert_eq!(all.all.load(Relaxed), MAX_WAITING_FOR_GROUPS - 10);
        Ok(())
    }

    /// B15: so do the entries of groups.
    #[test]
    fn groups_leave_room() -> Result {
        const PKEY: u16 = 0x8001;
        let group = |number: u32| {
            let mut mgid = wire::broadcast_mgid(2, PKEY);
            mgid[12..].copy_from_slice(&number.to_be_bytes());
            Key::read(&Address::group(&mgid).0, PKEY).ok_or(EINVAL)
        };
        let port = |number| Key([number, 2, 3, 4, 5]);
        let table = Arc::pin_init(Table::new(), GFP_KERNEL)?;
        let mut cache = Cache::new()?;
        for number in 0..MAX_GROUPS as u32 {
            let guard = rcu::read_lock();
            table.find(&mut cache, &group(number)?, &guard)?;
        }
        let guard = rcu::read_lock();
        let late = table.find(&mut cache, &group(u32::MAX - 1)?, &guard);
        assert_eq!(late.err(), Some(ENOSPC));
        // One that is there is found.
        assert!(table.find(&mut cache, &group(0)?, &guard).is_ok());
        assert!(!table.find(&mut cache, &port(1), &guard)?.is_group);
        assert!(!table.find(&mut cache, &group(u32::MAX)?, &guard)?.is_group);
        drop(guard);
        assert_eq!(table.len(), MAX_GROUPS as usize + 2);
        table.clear().each(|_, _| {});
        let guard = rcu::read_lock();
        assert!(table.find(&mut cache, &group(7)?, &guard)?.is_group);
        Ok(())
    }

    #[test]
    fn sorting() -> Result {
        let mut seed = 1u32;
        for len in 0..70 {
            let mut gids = KVec::with_capacity(len, GFP_KERNEL)?;
            for _ in 0..len {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                // Some are the same.
                let mut gid = [0xfe; 16];
                gid[15] = (seed >> 26) as u8;
                gids.push(Gid(gid), GFP_KERNEL)?;
            }
            let mut before = [0; 64];
            let mut after = [0; 64];
            gids.iter()
                .for_each(|gid| before[usize::from(gid.0[15])] += 1);
            sort(&mut gids);
            gids.iter()
                .for_each(|gid| after[usize::from(gid.0[15])] += 1);
            assert_eq!(before, after);
            assert!(gids.windows(2).all(|pair| pair[0] <= pair[1]));
        }
        Ok(())
    }

    /// A header finds the entry that it was noted for, and none once any entry was removed.
    #[test]
    fn a_header_finds_its_entry_only() -> Result {
        let table = Arc::pin_init(Table::new(), GFP_KERNEL)?;
        let (key, other) = (Key([1, 2, 3, 4, 5]), Key([1, 2, 3, 4, 6]));
        // The first two have one place.
        let (header, rival) = (Header([1, 2, 3]), Header([1, 4, 3]));
        let elsewhere = Header([1, 2, 1 << 24]);
        assert_eq!(header.place(), rival.place());
        assert_ne!(header.place(), elsewhere.place());
        let mut cache = Cache::new()?;
        {
            let guard = rcu::read_lock();
            let again =
                |cache: &Cache, header| table.again(cache, header, &guard).map(ptr::from_ref);
            assert_eq!(again(&cache, &Header([0; 3])), None);
            // One that was just made was not found.
            let made = table.find(&mut cache, &key, &guard)?;
            cache.note(header, made);
            assert_eq!(again(&cache, &header), None);
            let found = table.find(&mut cache, &key, &guard)?;
            cache.note(header, found);
            assert_eq!(again(&cache, &header), Some(ptr::from_ref(made)));
            assert_eq!(again(&cache, &rival), None);
            table.find(&mut cache, &other, &guard)?;
            let last = table.find(&mut cache, &other, &guard)?;
            assert_eq!(again(&cache, &header), Some(ptr::from_ref(made)));
            // It is not the one found last any more.
            cache.note(elsewhere, found);
            assert_eq!(again(&cache, &elsewhere), None);
            cache.note(rival, last);
            assert_eq!(again(&cache, &rival), Some(ptr::from_ref(last)));
            assert_eq!(again(&cache, &header), None);
        }
        table.clear().each(|_, _| {});
        let guard = rcu::read_lock();
        assert!(table.again(&cache, &rival, &guard).is_none());
        Ok(())
    }

    /// B15: packets for a destination without a way do not keep its entry.
    #[test]
    fn waiting_is_no_use() -> Result {
        let table = Arc::pin_init(Table::new(), GFP_KERNEL)?;
        let key = Key([1, 2, 3, 4, 5]);
        let (first, second) = (packet(100)?, packet(100)?);
        let long_ago = jiffies().wrapping_sub(IDLE + 2);
        let mut cache = Cache::new()?;
        {
            let guard = rcu::read_lock();
            let neigh = table.find(&mut cache, &key, &guard)?;
            neigh.used.store(long_ago, Relaxed);
            assert!(matches!(
                neigh.wait(&table.waiters, first),
                Queued::Waits { first: true }
            ));
            assert!(neigh.ready().is_none());
        }
        // It stays as long as packets wait in it.
        table.expire().each(|_, _| {});
        assert_eq!(table.len(), 1);
        {
            let guard = rcu::read_lock();
            let neigh = table.find(&mut cache, &key, &guard)?;
            assert_eq!(neigh.fail(&table.waiters), 1);
            assert!(matches!(neigh.wait(&table.waiters, second), Queued::Failed));
        }
        let mut gone = 0;
        table.expire().each(|_, _| gone += 1);
        assert_eq!((gone, table.len()), (1, 0));
        Ok(())
    }
}
