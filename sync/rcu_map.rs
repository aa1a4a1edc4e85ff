// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A hash table that is read under RCU, over the kernel's resizable hash table.
//!
//! Lookups take no lock. Insertion is atomic: of two inserters of one key one wins and the other
//! gets the winner's value. Removal happens in process context and waits for the readers, so a
//! removed value is dropped where sleeping is allowed.
//!
//! C header: [`include/linux/rhashtable.h`](srctree/include/linux/rhashtable.h)

use crate::bindings;
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    mem::{
        offset_of,
        size_of, //
    },
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        rcu, //
    },
    types::Opaque,
};

/// One entry. The table sees `head` and the bytes of `key`.
#[repr(C)]
#[pin_data]
struct Node<K, V> {
    head: Opaque<bindings::rhash_head>,
    key: K,
    next_removed: UnsafeCell<*mut Node<K, V>>,
    #[pin]
    value: V,
}

/// Keys of which a map takes fewer than of others.
pub(crate) struct Share<K> {
    /// Whether a key is one of them.
    pub(crate) has: fn(&K) -> bool,
    /// Entries, about, at most.
    pub(crate) max: i32,
}

/// Where the next map's generations start. 0 is no map's.
static GENERATIONS: Atomic<u64> = Atomic::new(1 << 32);

/// A map from `K` to `V`; keys are compared byte by byte, so `K` must have no padding.
///
/// # Invariants
///
/// - `table` is initialised with [`Self::PARAMS`] and holds only nodes made by this map.
/// - A node is freed only after it left the table, `generation` changed and a grace period passed,
///   in this order, or with the map.
#[pin_data(PinnedDrop)]
pub(crate) struct RcuMap<K, V> {
    #[pin]
    table: Opaque<bindings::rhashtable>,
    /// Changes with each removal. No two maps ever have the same.
    generation: Atomic<u64>,
    len: Atomic<i32>,
    max: i32,
    share: Share<K>,
    /// Entries of the share.
    shared: Atomic<i32>,
    _owns: PhantomData<Node<K, V>>,
}

// SAFETY: The map owns its keys and values, and readers on any CPU get only `&V`.
unsafe impl<K: Send, V: Send + Sync> Send for RcuMap<K, V> {}

// SAFETY: As above; the table's own operations are thread-safe.
unsafe impl<K: Send + Sync, V: Send + Sync> Sync for RcuMap<K, V> {}

impl<K: Copy + zerocopy::IntoBytes + zerocopy::Immutable, V> RcuMap<K, V> {
    const PARAMS: bindings::rhashtable_params = bindings::rhashtable_params {
        key_len: size_of::<K>() as u16,
        key_offset: offset_of!(Node<K, V>, key) as u16,
        head_offset: offset_of!(Node<K, V>, head) as u16,
        automatic_shrinking: true,
        nelem_hint: 64,
        ..pin_init::zeroed()
    };

    /// An empty map that takes at most about `max` entries.
    pub(crate) fn new(max: i32) -> impl PinInit<Self, Error> {
        let has = |_: &K| false;
        Self::with_share(max, Share { has, max })
    }

    /// The same, and of those with certain keys at most about as many as `share` says.
    pub(crate) fn with_share(max: i32, share: Share<K>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            table <- Opaque::try_ffi_init(|table| {
                let params = Self::PARAMS;
                // SAFETY: `table` is valid for writes and pinned, `params` is copied.
                to_result(unsafe { bindings::rhashtable_init(table, &params) })
            }),
            generation: Atomic::new(GENERATIONS.fetch_add(1 << 32, Relaxed)),
            len: Atomic::new(0),
            max,
            share,
            shared: Atomic::new(0),
            _owns: PhantomData,
        })
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Relaxed).max(0) as usize
    }

    /// The value of `key`, for as long as the guard is held.
    #[inline]
    pub(crate) fn get<'g>(&'g self, key: &K, _guard: &'g rcu::Guard) -> Option<&'g V> {
        let params = Self::PARAMS;
        // SAFETY: By the type invariants the table is initialised with these parameters; `key`
        // points at `key_len` bytes; the guard keeps the RCU read side.
        let node = unsafe {
            bindings::rhashtable_lookup(self.table.get(), ptr::from_ref(key).cast(), &params)
        };
        let node = node.cast::<Node<K, V>>();
        // SAFETY: A non-null result is a node of this table, and by the type invariants it lives
        // until after the guard is gone.
        unsafe { node.as_ref() }.map(|node| &node.value)
    }

    /// As [`Self::get`], asking `cache` first and leaving the result there.
    #[inline]
    pub(crate) fn get_cached<'g>(
        &'g self,
        cache: &mut Cache<K, V>,
        key: &K,
        guard: &'g rcu::Guard,
    ) -> Option<&'g V>
    where
        K: PartialEq,
    {
        let generation = self.generation.load(Acquire);
        if cache.generation == generation && cache.key.as_ref() == Some(key) {
            // SAFETY: The value was found in this map when the generation was the present one. Who
            // removes it changes the generation and then waits for the end of our read-side
            // section, in which we saw the present one.
            return Some(unsafe { cache.value.as_ref() });
        }
        let value = self.get(key, guard)?;
        *cache = Cache {
            generation,
            key: Some(*key),
            value: NonNull::from(value),
        };
        Some(value)
    }

    /// What was noted in `tags` for `tag`, at its place.
    #[inline]
    pub(crate) fn get_tagged<'g, T: PartialEq>(
        &'g self,
        tags: &Tags<T, V>,
        place: usize,
        tag: &T,
        _guard: &'g rcu::Guard,
    ) -> Option<&'g V> {
        let entry = tags.0.get(place)?;
        if entry.generation != self.generation.load(Acquire) || entry.tag != *tag {
            return None;
        }
        // SAFETY: As in `get_cached`.
        Some(unsafe { entry.value.as_ref() })
    }

    /// The value of `key`, made by `init` if there was none. Atomic context is allowed.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - `ENOSPC`: the map is full, or its share for such keys.
    pub(crate) fn get_or_insert<'g>(
        &'g self,
        key: &K,
        init: impl PinInit<V>,
        _guard: &'g rcu::Guard,
    ) -> Result<&'g V> {
        let shares = (self.share.has)(key);
        if self.len.load(Relaxed) >= self.max
            || shares && self.shared.load(Relaxed) >= self.share.max
        {
            return Err(ENOSPC);
        }
        let key = *key;
        let node = KBox::pin_init(
            pin_init!(Node {
                head: pin_init::zeroed(),
                key,
                next_removed: UnsafeCell::new(ptr::null_mut()),
                value <- init,
            }),
            GFP_ATOMIC,
        )?;
        // SAFETY: The node is not moved out of its box: it goes into the table as it is.
        let raw = KBox::into_raw(unsafe { Pin::into_inner_unchecked(node) });
        // SAFETY: `raw` was just made.
        let head = unsafe { (*raw).head.get() };
        let params = Self::PARAMS;
        // SAFETY: By the type invariants the table is initialised with these parameters, and
        // `head` is the hash head of a live node that is in no table.
        let found =
            unsafe { bindings::rhashtable_lookup_get_insert_fast(self.table.get(), head, &params) };
        if found.is_null() {
            self.len.add(1, Relaxed);
            if shares {
                self.shared.add(1, Relaxed);
            }
            // SAFETY: The node is in the table, and by the type invariants it lives until after
            // the guard is gone.
            return Ok(unsafe { &(*raw).value });
        }
        // SAFETY: The node did not get into the table, so it is still ours, and it came from a box.
        drop(unsafe { KBox::from_raw(raw) });
        let found = kernel::error::from_err_ptr(found)?.cast::<Node<K, V>>();
        // SAFETY: The table gave a node of its own, which lives until after the guard is gone.
        Ok(unsafe { &(*found).value })
    }

    /// Calls `visit` for the entries; one may be missed or seen twice while the table is resized.
    ///
    /// `visit` runs in an RCU read-side section and must not sleep.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&K, &V)) {
        // SAFETY: `visit` only borrows the node, within the read-side section.
        self.walk(|node| unsafe { visit(&(*node.as_ptr()).key, &(*node.as_ptr()).value) });
    }

    /// Takes out the entries that `unwanted` names, and waits until no reader has them.
    ///
    /// Sleeps; `unwanted` itself must not. Of two removals at a time each gets what it took out.
    pub(crate) fn remove_if(&self, mut unwanted: impl FnMut(&K, &V) -> bool) -> Removed<K, V> {
        let params = Self::PARAMS;
        let mut removed = Removed {
            first: ptr::null_mut(),
        };
        self.walk(|node| {
            let node = node.as_ptr();
            // SAFETY: The walk gives live nodes, inside a read-side section.
            if !unsafe { unwanted(&(*node).key, &(*node).value) } {
                return;
            }
            // SAFETY: The table is initialised with these parameters and the head is a live
            // node's.
            let status = unsafe {
                bindings::rhashtable_remove_fast(self.table.get(), (*node).head.get(), &params)
            };
            if status == 0 {
                self.len.add(-1, Relaxed);
                // SAFETY: The node lives until after this read-side section.
                if (self.share.has)(unsafe { &(*node).key }) {
                    self.shared.add(-1, Relaxed);
                }
                // SAFETY: The node left the table by our call, so only we use its link.
                unsafe { *(*node).next_removed.get() = removed.first };
                removed.first = node;
            }
        });
        if !removed.first.is_null() {
            self.generation.fetch_add(1, Full);
            crate::net::synchronize();
        }
        removed
    }

    fn walk(&self, mut visit: impl FnMut(NonNull<Node<K, V>>)) {
        let iter = Opaque::<bindings::rhashtable_iter>::uninit();
        // SAFETY: The table is initialised; `iter` stays where it is until the exit below.
        unsafe { bindings::rhashtable_walk_enter(self.table.get(), iter.get()) };
        // SAFETY: `iter` was entered.
        unsafe { bindings::rhashtable_walk_start(iter.get()) };
        loop {
            // SAFETY: The walk was started.
            let node = unsafe { bindings::rhashtable_walk_next(iter.get()) };
            match kernel::error::from_err_ptr(node) {
                Ok(node) => match NonNull::new(node.cast::<Node<K, V>>()) {
                    Some(node) => visit(node),
                    None => break,
                },
                // EAGAIN: the table is being resized and the walk goes over it again.
                Err(_) => continue,
            }
        }
        // SAFETY: The walk was started.
        unsafe { bindings::rhashtable_walk_stop(iter.get()) };
        // SAFETY: The walk was entered and stopped.
        unsafe { bindings::rhashtable_walk_exit(iter.get()) };
    }
}

/// # Safety
///
/// Called by the table, at its end, once for each of its nodes.
unsafe extern "C" fn free_callback<K, V>(node: *mut c_void, _arg: *mut c_void) {
    // SAFETY: Nodes come from boxes, and no reader is left when the map is dropped.
    drop(unsafe { KBox::from_raw(node.cast::<Node<K, V>>()) });
}

#[pinned_drop]
impl<K, V> PinnedDrop for RcuMap<K, V> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The table is initialised, and `&mut self` shows that nobody reads it any more.
        unsafe {
            bindings::rhashtable_free_and_destroy(
                self.table.get(),
                Some(free_callback::<K, V>),
                ptr::null_mut(),
            )
        };
    }
}

/// The last entry that someone found.
///
/// # Invariants
///
/// `generation` is 0, or that of a map in which `key` was found then, with `value`.
pub(crate) struct Cache<K, V> {
    generation: u64,
    key: Option<K>,
    value: NonNull<V>,
}

// SAFETY: The pointers are used by `RcuMap` only, which gives `&V`.
unsafe impl<K: Send, V: Send + Sync> Send for Cache<K, V> {}

impl<K, V> Cache<K, V> {
    /// Without an entry.
    pub(crate) const fn new() -> Self {
        // INVARIANT: Nothing was found.
        Self {
            generation: 0,
            key: None,
            value: NonNull::dangling(),
        }
    }
}

/// An entry that someone found, and something else by which to find it again, cheaper than by its
/// key.
///
/// # Invariants
///
/// `generation` is 0, or that of a map in which `value` was found then.
struct Tag<T, V> {
    generation: u64,
    tag: T,
    value: NonNull<V>,
}

/// Entries that someone found lately, each at the place of its tag.
pub(crate) struct Tags<T, V>(KVec<Tag<T, V>>);

// SAFETY: The pointers are used by `RcuMap` only, which gives `&V`.
unsafe impl<T: Send, V: Send + Sync> Send for Tags<T, V> {}

impl<T: Copy, V> Tags<T, V> {
    /// `places` places without an entry; `tag` is any.
    pub(crate) fn new(places: usize, tag: T) -> Result<Self> {
        let mut tags = KVec::with_capacity(places, GFP_KERNEL)?;
        for _ in 0..places {
            // INVARIANT: Nothing was found.
            let none = Tag {
                generation: 0,
                tag,
                value: NonNull::dangling(),
            };
            tags.push(none, GFP_KERNEL)?;
        }
        Ok(Self(tags))
    }

    /// Notes `tag` for the entry that was found last, if that is `value`.
    pub(crate) fn note<K>(&mut self, place: usize, tag: T, last: &Cache<K, V>, value: &V) {
        if !ptr::eq(last.value.as_ptr(), value) {
            return;
        }
        if let Some(entry) = self.0.get_mut(place) {
            // INVARIANT: It was found when the generation was this one.
            *entry = Tag {
                generation: last.generation,
                tag,
                value: last.value,
            };
        }
    }
}

/// Entries that were taken out of a map and that no reader has any more.
///
/// # Invariants
///
/// `first` starts a list of nodes that came from boxes and belong to this object.
pub(crate) struct Removed<K, V> {
    first: *mut Node<K, V>,
}

impl<K: Copy, V> Removed<K, V> {
    /// Gives each value to `visit` before it is dropped.
    pub(crate) fn each(mut self, mut visit: impl FnMut(&K, &V)) {
        while let Some(node) = self.pop() {
            visit(&node.key, &node.value);
        }
    }
}

impl<K, V> Removed<K, V> {
    fn pop(&mut self) -> Option<KBox<Node<K, V>>> {
        let node = NonNull::new(self.first)?;
        // SAFETY: By the type invariant the node is live and ours.
        self.first = unsafe { *node.as_ref().next_removed.get() };
        // SAFETY: By the type invariant it came from a box; it just left the list.
        Some(unsafe { KBox::from_raw(node.as_ptr()) })
    }
}

impl<K, V> Drop for Removed<K, V> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
