// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Socket buffers, owned.
//!
//! An [`Skb`] has one owner; dropping it frees it as lost, [`Skb::consume`] as delivered. A packet
//! to be received is built as a [`NewSkb`], which nobody shares and whose bytes may be written.
//!
//! C header: [`include/linux/skbuff.h`](srctree/include/linux/skbuff.h)

use super::page_pool::Page;
use crate::bindings;
use core::{
    mem::ManuallyDrop,
    ptr::{
        self,
        NonNull, //
    },
    slice, //
};
use kernel::prelude::*;

/// Fragments a socket buffer has at most.
pub(crate) const MAX_FRAGS: usize = bindings::MAX_SKB_FRAGS;

/// A socket buffer.
///
/// # Invariants
///
/// The pointer is a live `sk_buff` of which this object holds one reference, and which is in no
/// list. Its data may be shared with clones.
pub(crate) struct Skb(NonNull<bindings::sk_buff>);

// SAFETY: A socket buffer may be used and freed on any CPU.
unsafe impl Send for Skb {}

/// What is left to the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Offload {
    Nothing,
    /// The checksum of the transport header.
    Checksum,
    /// To cut a TCP packet over IPv4 into segments: `mss` bytes of data each, behind a copy of the
    /// first `header` bytes, which are in the linear part.
    Segments {
        header: usize,
        mss: u32,
    },
}

/// A piece of a socket buffer outside its linear part.
#[derive(Clone, Copy)]
pub(crate) struct Frag {
    pub(super) page: *mut bindings::page,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Frag {
    /// The page, for mapping.
    pub(crate) fn raw(&self) -> (*mut bindings::page, usize, usize) {
        (self.page, self.offset, self.len)
    }
}

impl Skb {
    /// Takes over a reference.
    ///
    /// # Safety
    ///
    /// `skb` is a live `sk_buff`, in no list, and the caller gives up one reference to it.
    #[inline]
    pub(crate) unsafe fn from_raw(skb: NonNull<bindings::sk_buff>) -> Self {
        // INVARIANT: As the caller promises.
        Self(skb)
    }

    /// Gives the reference away.
    #[inline]
    pub(crate) fn into_raw(self) -> *mut bindings::sk_buff {
        ManuallyDrop::new(self).0.as_ptr()
    }

    #[inline]
    pub(crate) fn as_raw(&self) -> *mut bindings::sk_buff {
        self.0.as_ptr()
    }

    /// Bytes in all.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        // SAFETY: By the type invariant the buffer is live.
        unsafe { (*self.as_raw()).len as usize }
    }

    /// The linear part.
    #[inline]
    pub(crate) fn head(&self) -> &[u8] {
        // SAFETY: By the type invariant the buffer is live.
        let (data, len) = unsafe { ((*self.as_raw()).data, bindings::skb_headlen(self.as_raw())) };
        // SAFETY: `skb_headlen` bytes from `data` are the linear part. Clones may share it, but
        // writers copy it first (`skb_cow`).
        unsafe { slice::from_raw_parts(data, len as usize) }
    }

    /// Number of fragments.
    #[inline]
    pub(crate) fn frag_count(&self) -> usize {
        // SAFETY: By the type invariant the buffer is live, so its shared info is too.
        unsafe { (*bindings::skb_shinfo(self.as_raw())).nr_frags as usize }
    }

    /// Whether there are parts that cannot be gathered: a list of further buffers, or pages that
    /// the CPU cannot read.
    #[inline]
    pub(crate) fn is_complex(&self) -> bool {
        // SAFETY: By the type invariant the buffer is live, so its shared info is too.
        unsafe {
            !(*bindings::skb_shinfo(self.as_raw())).frag_list.is_null()
                || !bindings::skb_frags_readable(self.as_raw())
        }
    }

    /// The fragments.
    #[inline]
    pub(crate) fn frags(&self) -> impl Iterator<Item = Frag> + '_ {
        let count = self.frag_count().min(MAX_FRAGS);
        // SAFETY: By the type invariant the buffer is live, so its shared info is too.
        let first = unsafe { (&raw const (*bindings::skb_shinfo(self.as_raw())).frags).cast() };
        // SAFETY: The first `count` fragments are live, and nobody changes them.
        let frags: &[bindings::skb_frag_t] = unsafe { slice::from_raw_parts(first, count) };
        // SAFETY: `frag` is a live fragment.
        frags.iter().map(|frag| unsafe {
            Frag {
                page: bindings::skb_frag_page(frag),
                offset: bindings::skb_frag_off(frag) as usize,
                len: bindings::skb_frag_size(frag) as usize,
            }
        })
    }

    /// Drops `count` bytes from the front of the linear part; false if it has fewer.
    #[inline]
    pub(crate) fn pull(&mut self, count: usize) -> bool {
        if self.head().len() < count {
            return false;
        }
        let skb = self.as_raw();
        // SAFETY: By the type invariant the buffer is live; the linear part is long enough.
        unsafe {
            (*skb).len = (*skb).len.wrapping_sub(count as u32);
            (*skb).data = (*skb).data.add(count);
        }
        true
    }

    /// Whether something is left to the hardware.
    #[inline]
    pub(crate) fn wants_offload(&self) -> bool {
        // SAFETY: By the type invariant the buffer is live.
        let headers = unsafe { (*self.as_raw()).__bindgen_anon_4.headers.as_ref() };
        u32::from(headers.ip_summed()) == bindings::CHECKSUM_PARTIAL || self.is_large()
    }

    /// Whether it is to be cut into segments.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        // SAFETY: By the type invariant the buffer is live.
        unsafe { bindings::skb_is_gso(self.as_raw()) }
    }

    /// Whether the segments of a large packet have at most `mtu` bytes, from the IP header on.
    pub(crate) fn segments_fit(&self, mtu: u32) -> bool {
        // SAFETY: By the type invariant the buffer is live; it came from the stack with its headers
        // known, which C reads only as far as they are there.
        self.is_large() && unsafe { bindings::skb_gso_validate_network_len(self.as_raw(), mtu) }
    }

    /// What is left to the hardware. Headers that it needs are moved to the linear part.
    ///
    /// # Errors
    ///
    /// `EPROTO`: it is to be cut, but is no TCP packet over IPv4 with data. `ENOMEM`.
    pub(crate) fn offload(&mut self) -> Result<Offload> {
        if !self.is_large() {
            return Ok(match self.wants_offload() {
                true => Offload::Checksum,
                false => Offload::Nothing,
            });
        }
        let skb = self.as_raw();
        // SAFETY: By the type invariant the buffer is live, so its shared info is too.
        let (mss, kind) = unsafe {
            let info = bindings::skb_shinfo(skb);
            ((*info).gso_size, (*info).gso_type)
        };
        // SAFETY: The buffer is live.
        let known = unsafe { bindings::skb_transport_header_was_set(skb) };
        if !known || kind & bindings::SKB_GSO_TCPV4 as u32 == 0 {
            return Err(EPROTO);
        }
        // SAFETY: The buffer is live, and its transport header is known.
        let tcp = usize::try_from(unsafe { bindings::skb_transport_offset(skb) })?;
        // The upper half of a TCP header's byte 12 is its length in words.
        self.need_head(tcp.saturating_add(20))?;
        let words = self.head().get(tcp + 12).ok_or(EPROTO)? >> 4;
        let header = tcp + usize::from(words) * 4;
        if words < 5 || header >= self.len() {
            return Err(EPROTO);
        }
        self.need_head(header)?;
        Ok(Offload::Segments {
            header,
            mss: mss.into(),
        })
    }

    /// Makes the linear part at least `len` bytes long.
    fn need_head(&mut self, len: usize) -> Result {
        if len > self.len() {
            return Err(EPROTO);
        }
        // SAFETY: By the type invariant the buffer is live, and it is in no list.
        match unsafe { bindings::pskb_may_pull(self.as_raw(), len as u32) } {
            true => Ok(()),
            false => Err(ENOMEM),
        }
    }

    /// Another buffer of the same bytes; `None` if there is no memory. As long as it lives, they do.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn share(&self) -> Option<Self> {
        // SAFETY: By the type invariant the buffer is live.
        let skb = unsafe { bindings::skb_clone(self.as_raw(), bindings::GFP_ATOMIC) };
        // INVARIANT: The new buffer's only reference is ours.
        NonNull::new(skb).map(Self)
    }

    /// Copies all fragments into the linear part.
    pub(crate) fn linearize(&mut self) -> Result {
        // SAFETY: By the type invariant the buffer is live, and it is in no list.
        kernel::error::to_result(unsafe { bindings::skb_linearize(self.as_raw()) })
    }

    /// Tells the sender of an IP packet that it may be `mtu` bytes long at most, and drops it: the
    /// route learns it, and an ICMP or ICMPv6 message is sent. `protocol` is its ethertype.
    ///
    /// The packet came from the stack, whose network header is still known. Not with the transmit
    /// lock held: the message may be sent by the same device.
    pub(crate) fn too_big(self, protocol: u16, mtu: u32) {
        let skb = self.as_raw();
        // What is there now is not what the stack would look for.
        // SAFETY: By the type invariant the buffer is live; its control block belongs to us.
        unsafe { (*skb).cb = pin_init::zeroed() };
        // SAFETY: The buffer is live.
        unsafe { bindings::skb_dst_update_pmtu(skb, mtu) };
        match u32::from(protocol) {
            // SAFETY: The buffer is live and came with its network header.
            bindings::ETH_P_IP => unsafe {
                bindings::icmp_send(
                    skb,
                    bindings::ICMP_DEST_UNREACH as i32,
                    bindings::ICMP_FRAG_NEEDED as i32,
                    mtu.to_be(),
                )
            },
            // SAFETY: As above.
            bindings::ETH_P_IPV6 => unsafe {
                bindings::icmpv6_send(skb, bindings::ICMPV6_PKT_TOOBIG as u8, 0, mtu)
            },
            _ => {}
        }
    }

    /// Takes the software transmit time stamp, if the sender asked for one.
    #[inline]
    pub(crate) fn tx_timestamp(&mut self) {
        // SAFETY: By the type invariant the buffer is live.
        unsafe { bindings::skb_tx_timestamp(self.as_raw()) };
    }

    /// Frees the buffer as delivered. `budget` is the NAPI budget, 0 outside NAPI.
    #[inline]
    pub(crate) fn consume(self, budget: usize) {
        // SAFETY: By the type invariant the reference is ours; it is given up here.
        unsafe { bindings::napi_consume_skb(self.into_raw(), budget as i32) };
    }
}

impl Drop for Skb {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours; it is given up here.
        unsafe { bindings::dev_kfree_skb_any(self.as_raw()) };
    }
}

/// A received packet in the making.
///
/// # Invariants
///
/// The buffer is shared with nobody.
pub(crate) struct NewSkb(Skb);

/// What a received frame was addressed to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PacketType {
    Host,
    Broadcast,
    Multicast,
}

impl NewSkb {
    /// Takes over a buffer that was just allocated.
    ///
    /// # Safety
    ///
    /// As [`Skb::from_raw`], and the buffer is shared with nobody.
    pub(crate) unsafe fn from_raw(skb: NonNull<bindings::sk_buff>) -> Self {
        // INVARIANT: As the caller promises.
        // SAFETY: As the caller promises.
        Self(unsafe { Skb::from_raw(skb) })
    }

    /// An empty buffer with room for `len` bytes. Process context.
    #[cfg(any(CONFIG_IPOIB_RS_KUNIT_TEST, IPOIB_RS_BENCH))]
    pub(crate) fn alloc(len: usize) -> Option<Self> {
        // SAFETY: Allocates; process context may sleep.
        let skb = unsafe { bindings::alloc_skb(len as u32, bindings::GFP_KERNEL) };
        // SAFETY: The buffer was just made.
        NonNull::new(skb).map(|skb| unsafe { Self::from_raw(skb) })
    }

    /// Room behind the linear part.
    fn tailroom(&self) -> usize {
        let skb = self.0.as_raw();
        // SAFETY: The buffer is live; a buffer with fragments has no usable tail room.
        unsafe {
            match (*skb).data_len {
                0 => (*skb).end.saturating_sub((*skb).tail) as usize,
                _ => 0,
            }
        }
    }

    /// Appends `bytes` to the linear part; false if there is no room.
    #[inline]
    pub(crate) fn append(&mut self, bytes: &[u8]) -> bool {
        if self.tailroom() < bytes.len() {
            return false;
        }
        let (skb, len) = (self.0.as_raw(), bytes.len());
        // SAFETY: The buffer is live, there is tail room, and by the type invariant nobody shares
        // it.
        unsafe {
            let tail = (*skb).head.add((*skb).tail as usize);
            (*skb).tail = (*skb).tail.wrapping_add(len as u32);
            (*skb).len = (*skb).len.wrapping_add(len as u32);
            ptr::copy_nonoverlapping(bytes.as_ptr(), tail, len);
        }
        true
    }

    /// Puts a link header in front of an empty buffer, which stays empty; false if there is no room.
    #[inline]
    pub(crate) fn put_header<const N: usize>(&mut self, header: &[u8; N]) -> bool {
        if self.0.len() != 0 || self.tailroom() < N {
            return false;
        }
        let skb = self.0.as_raw();
        // SAFETY: The buffer is live, empty, there is tail room, and by the type invariant nobody
        // shares it.
        unsafe {
            let tail = (*skb).head.add((*skb).tail as usize);
            (*skb).tail = (*skb).tail.wrapping_add(N as u32);
            (*skb).data = tail.add(N);
            ptr::copy_nonoverlapping(header.as_ptr(), tail, N);
        }
        true
    }

    /// Appends a page's first `len` bytes as a fragment, the page going with it.
    #[inline]
    pub(crate) fn add_page(&mut self, page: Page, len: usize) {
        // A new buffer has no fragment, so there is room for this one.
        self.attach(page, self.0.frag_count(), 0, len);
    }

    /// Appends the `len` bytes of a page behind the first `offset` as a fragment, the page going
    /// with it; false, and the page is lost, if there is no room for one more.
    #[inline]
    pub(crate) fn add_part(&mut self, page: Page, offset: usize, len: usize) -> bool {
        let count = self.0.frag_count();
        if count >= MAX_FRAGS {
            return false;
        }
        self.attach(page, count, offset.min(Page::SIZE), len);
        true
    }

    /// Appends fragment number `count`, for which there is room; `offset` is in the page.
    #[inline(always)]
    fn attach(&mut self, page: Page, count: usize, offset: usize, len: usize) {
        let skb = self.0.as_raw();
        // SAFETY: The buffer is live and has room for the fragment, which lies in the page. The
        // page is a page pool's, which the mark tells the stack; its reference goes along.
        unsafe {
            bindings::skb_add_rx_frag(
                skb,
                count as i32,
                page.into_raw(),
                offset as i32,
                len.min(Page::SIZE - offset) as i32,
                Page::SIZE as u32,
            );
            bindings::skb_mark_for_recycle(skb);
        }
    }

    /// The hardware has verified the checksum of the transport header.
    #[inline]
    pub(crate) fn set_verified(&mut self) {
        // SAFETY: The buffer is live, and by the type invariant nobody shares it.
        let headers = unsafe { (*self.0.as_raw()).__bindgen_anon_4.headers.as_mut() };
        headers.set_ip_summed(bindings::CHECKSUM_UNNECESSARY as u8);
    }

    /// Ends the link header: the first `header` bytes become it, `protocol` (host order) names
    /// what follows.
    #[inline]
    pub(crate) fn finish(mut self, header: usize, protocol: u16, kind: PacketType) -> Skb {
        let header = if self.0.pull(header) { header } else { 0 };
        self.finish_behind(header, protocol, kind)
    }

    /// As [`Self::finish`], with the link header in the `header` bytes in front of the data, where
    /// [`Self::put_header`] put it.
    #[inline]
    pub(crate) fn finish_behind(self, header: usize, protocol: u16, kind: PacketType) -> Skb {
        let skb = self.0.as_raw();
        let kind = match kind {
            PacketType::Host => bindings::PACKET_HOST,
            PacketType::Broadcast => bindings::PACKET_BROADCAST,
            PacketType::Multicast => bindings::PACKET_MULTICAST,
        };
        // SAFETY: The buffer is live, and by the type invariant nobody shares it.
        let headers = unsafe { (*skb).__bindgen_anon_4.headers.as_mut() };
        headers.protocol = protocol.to_be();
        headers.set_pkt_type(kind as u8);
        // SAFETY: As above; the data lie behind the head of the same buffer.
        let place = unsafe { (*skb).data.offset_from((*skb).head) } as usize;
        headers.mac_header = place.saturating_sub(header) as u16;
        // SAFETY: As above.
        unsafe { bindings::skb_record_rx_queue(skb, 0) };
        self.0
    }
}

/// A first-in first-out queue of socket buffers that knows its size.
///
/// # Invariants
///
/// `first` to `last` are linked through `next`, owned by the queue, `packets` of them with `bytes`
/// bytes; both are null when it is empty.
pub(crate) struct SkbQueue {
    first: *mut bindings::sk_buff,
    last: *mut bindings::sk_buff,
    packets: usize,
    bytes: usize,
}

// SAFETY: The queue owns its buffers, which may be sent.
unsafe impl Send for SkbQueue {}

impl SkbQueue {
    pub(crate) const fn new() -> Self {
        Self {
            first: ptr::null_mut(),
            last: ptr::null_mut(),
            packets: 0,
            bytes: 0,
        }
    }

    pub(crate) fn packets(&self) -> usize {
        self.packets
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn next_of(skb: *mut bindings::sk_buff) -> *mut *mut bindings::sk_buff {
        // SAFETY: Callers pass live buffers of the queue; only the address of a field is taken.
        unsafe { &raw mut (*skb).__bindgen_anon_1.__bindgen_anon_1.next }
    }

    /// Appends.
    pub(crate) fn push(&mut self, skb: Skb) {
        self.packets += 1;
        self.bytes = self.bytes.saturating_add(skb.len());
        let skb = skb.into_raw();
        // SAFETY: `skb` is live and ours.
        unsafe { *Self::next_of(skb) = ptr::null_mut() };
        if self.last.is_null() {
            self.first = skb;
        } else {
            // SAFETY: By the type invariant `last` is live and ours.
            unsafe { *Self::next_of(self.last) = skb };
        }
        self.last = skb;
    }

    /// Puts a buffer back to where [`Self::pop`] took it from.
    pub(crate) fn push_front(&mut self, skb: Skb) {
        self.packets += 1;
        self.bytes = self.bytes.saturating_add(skb.len());
        let skb = skb.into_raw();
        // SAFETY: `skb` is live and ours.
        unsafe { *Self::next_of(skb) = self.first };
        if self.last.is_null() {
            self.last = skb;
        }
        self.first = skb;
    }

    /// Takes the first.
    pub(crate) fn pop(&mut self) -> Option<Skb> {
        let skb = NonNull::new(self.first)?;
        let next = Self::next_of(skb.as_ptr());
        // SAFETY: By the type invariant the buffer is live and ours.
        self.first = unsafe { *next };
        // SAFETY: As above; a buffer outside a list has no successor.
        unsafe { *next = ptr::null_mut() };
        if self.first.is_null() {
            self.last = ptr::null_mut();
        }
        // SAFETY: By the type invariant the queue owned the buffer, and it is in no list now.
        let skb = unsafe { Skb::from_raw(skb) };
        self.packets -= 1;
        self.bytes = self.bytes.saturating_sub(skb.len());
        Some(skb)
    }
}

impl Drop for SkbQueue {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
