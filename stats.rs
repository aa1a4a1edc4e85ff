// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Counters of an interface. Every lost packet is counted once, under its cause.
//!
//! The hot counters have one writer each and are no read-modify-write: transmission counts under
//! the transmit lock, completion and both ways of reception in their NAPI contexts.

use kernel::sync::atomic::{
    ordering::Relaxed,
    Atomic, //
};

/// A 64-bit counter.
pub(crate) struct Counter(Atomic<u64>);

impl Counter {
    pub(crate) const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// Adds, where there is one writer at a time.
    #[inline]
    pub(crate) fn add_single(&self, count: u64) {
        self.0
            .store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// Adds.
    pub(crate) fn add(&self, count: u64) {
        self.0.add(count, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($(#[$all:meta])* struct $set:ident; $($(#[$doc:meta])* $name:ident,)*) => {
        $(#[$all])*
        pub(crate) struct $set {
            $($(#[$doc])* pub(crate) $name: Counter,)*
        }

        impl $set {
            pub(crate) const fn new() -> Self {
                Self { $($name: Counter::new(),)* }
            }

            /// Names, in order.
            pub(crate) const NAMES: &'static [&'static str] = &[$(stringify!($name),)*];

            /// Values, in the order of the names.
            pub(crate) fn each(&self, mut visit: impl FnMut(u64)) {
                $(visit(self.$name.get());)*
            }
        }
    };
}

counters! {
    /// The counters of an interface.
    struct Counters;
    /// Packets sent.
    tx_sent_packets,
    /// Bytes sent, the encapsulation header included.
    tx_sent_bytes,
    /// Requests handed to the queue pair in one go.
    tx_posts,
    /// Completions polled from the send queue.
    tx_completions,
    /// Packets given to connections, and requests handed to their queue pairs in one go; among the
    /// above.
    tx_conn_packets,
    tx_conn_posts,
    /// Times the ring filled up and the queue was stopped.
    tx_ring_full,
    /// Times a full queue did not move, so that the queue pair was rebuilt.
    tx_timeouts,
    /// Packets that the hardware did not send, or that were posted when the queue pair died.
    tx_failed,
    /// Dropped: no memory to gather or map the packet.
    tx_no_memory,
    /// Dropped: the queue was full although the stack thought otherwise.
    tx_no_room,
    /// Dropped: longer than the MTU.
    tx_oversize,
    /// Dropped: shorter than the link header.
    tx_runt,
    /// Dropped: neither IP, ARP, RARP nor TIPC.
    tx_bad_protocol,
    /// Dropped: to be cut into segments, but no TCP packet over IPv4.
    tx_bad_offload,
    /// Dropped: too many packets wait for the way to their destination.
    tx_neigh_queue_full,
    /// Dropped: no way to the destination was found.
    tx_neigh_failed,
    /// Dropped: too many destinations, or no memory for another.
    tx_neigh_overflow,
    /// Dropped: longer than its way allows, which its sender was told.
    tx_too_big,
    /// Packets whose checksum the hardware filled in.
    tx_checksum_packets,
    /// TCP packets that the hardware cut into segments; each is one in all other counters.
    tx_large_packets,
    /// Packets delivered to the stack.
    rx_delivered_packets,
    /// Bytes delivered, without the encapsulation header.
    rx_delivered_bytes,
    /// Delivered packets that were sent to a group, the broadcast group excepted.
    rx_multicast_packets,
    /// Delivered packets whose checksums the hardware found right.
    rx_checksum_packets,
    /// Packets and bytes delivered that came by connections; not among the above.
    rx_conn_packets,
    rx_conn_bytes,
    /// Receive completions polled, of datagrams.
    rx_completions,
    /// Lost: the hardware reported an error.
    rx_failed,
    /// Lost: too short for the headers, or longer than a datagram can be.
    rx_bad_length,
    /// Lost: no memory to pass the packet on.
    rx_no_memory,
    /// Lost: received, but not looked at before the queue pair was reset.
    rx_unread,
    /// Own packets that came back from a group; not a loss.
    rx_own_echo,
    /// Times fresh receive buffers could not be had or posted.
    rx_refill_failed,
    /// Completions that named no posted request.
    bad_completions,
    /// Times the queue pair was rebuilt.
    qp_restarts,
    /// Joins of a group that failed.
    join_failed,
    /// Times packets to a group that is not there were sent to the routers instead.
    group_detours,
    /// Connections that we opened.
    conn_opened,
    /// Connections of peers that we accepted.
    conn_accepted,
    /// Requests of peers that we rejected.
    conn_rejected,
    /// Of these, requests that came when `max_connections` were there.
    conn_over_limit,
    /// Requests of peers, and answers to ours, that made no sense; they were rejected.
    conn_bad_message,
    /// Our attempts to connect that failed.
    conn_failed,
    /// Connections that broke, or that nobody used.
    conn_broken,
    /// Completions of connections that are gone; not a loss.
    conn_stale,
    /// Receives for connections that a dying connection took along, and were replaced.
    rx_lost_slots,
}

counters! {
    /// What was asked of the subnet administrator, and what came of it.
    struct Questions;
    /// Questions for a path.
    sa_paths_asked,
    /// Those that were refused, not answered, or answered by nonsense.
    sa_paths_failed,
    /// Requests to be let into a group.
    sa_joins_asked,
    /// Those that were refused, not answered, or answered by nonsense.
    sa_joins_failed,
    /// Answers that were nonsense; they are among the failed.
    sa_answers_bad,
    /// Answers that promised more than the port can do.
    sa_answers_clamped,
}
