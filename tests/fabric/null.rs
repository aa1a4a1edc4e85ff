// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The null client: posts, polls, and looks at the clock.

use crate::{
    glue::{
        self,
        Consumer,
        Device,
        Shape, //
    },
    ud::GRH, //
};
use kernel::prelude::*;

const QKEY: u32 = 0x1b1b;
const MAX_BYTES: usize = 4096;
/// Packets at a time.
const BATCH: u32 = 64;

/// What was measured, in nanoseconds for all packets together.
#[derive(Clone, Copy, Default)]
pub(crate) struct Figures {
    pub(crate) packets: u32,
    /// Posting receives.
    pub(crate) post_recv: u64,
    /// Posting sends, with all that follows from it.
    pub(crate) post_send: u64,
    /// Polling both ends.
    pub(crate) poll: u64,
    /// What copying the data alone takes.
    pub(crate) copy: u64,
    /// What the client itself takes.
    pub(crate) client: u64,
}

/// Sends datagrams of `bytes`, at least `count`: receives are posted, sends are posted, and both
/// are polled one at a time. The HCAs must not defer sends.
pub(crate) fn measure(
    from: &Device,
    to: &Device,
    dlid: u16,
    bytes: usize,
    count: u32,
) -> Result<Figures> {
    if bytes == 0 || bytes > MAX_BYTES || count == 0 {
        return Err(EINVAL);
    }
    let shape = |bytes| Shape {
        slots: BATCH,
        completions: BATCH,
        places: 1,
        bytes,
        qkey: QKEY,
        lso: false,
    };
    let mut sender = Consumer::new(from, &shape(bytes))?;
    let mut receiver = Consumer::new(to, &shape(bytes + GRH))?;
    sender.start()?;
    receiver.start()?;
    sender.aim(dlid)?;
    let mut figures = Figures::default();
    // The first warms up.
    batch(&mut sender, &mut receiver, bytes, &mut figures)?;
    figures = Figures::default();
    for _ in 0..count.div_ceil(BATCH) {
        batch(&mut sender, &mut receiver, bytes, &mut figures)?;
    }
    let start = glue::now();
    for _ in 0..figures.packets {
        sender.copy_to(&mut receiver, bytes);
    }
    figures.copy = glue::now().saturating_sub(start);
    sender.hollow();
    receiver.hollow();
    let mut client = Figures::default();
    while client.packets < figures.packets {
        batch(&mut sender, &mut receiver, bytes, &mut client)?;
    }
    figures.client = client.post_recv + client.post_send + client.poll;
    Ok(figures)
}

fn batch(
    sender: &mut Consumer<'_>,
    receiver: &mut Consumer<'_>,
    bytes: usize,
    figures: &mut Figures,
) -> Result {
    let qpn = receiver.qpn();
    let start = glue::now();
    for _ in 0..BATCH {
        receiver.post_recv()?;
    }
    let posted = glue::now();
    for _ in 0..BATCH {
        sender.post_send(bytes, qpn, QKEY)?;
    }
    let sent = glue::now();
    for _ in 0..BATCH {
        if !(sender.poll(false)? && receiver.poll(true)?) {
            // Deferred, or lost.
            return Err(EAGAIN);
        }
    }
    let polled = glue::now();
    figures.packets += BATCH;
    figures.post_recv += posted.saturating_sub(start);
    figures.post_send += sent.saturating_sub(posted);
    figures.poll += polled.saturating_sub(sent);
    Ok(())
}
