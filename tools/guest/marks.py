# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Marks between which the emulator's counts are taken: see tools/count.c."""

import ctypes
import mmap


class Marks:
    """Makes the emulator note its counts: see tools/count.c."""

    def __init__(self):
        self.page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        self.last = 0

    def set(self):
        """Returns the snapshot's number."""
        self.last += 1
        at = 8 * self.last
        self.page[at : at + 8] = bytes([0x0F, 0x1F, 0x80, self.last, 0x4F, 0x50, 0x49, 0xC3])
        ctypes.CFUNCTYPE(None)(self.start + at)()
        return self.last
