# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""MADs from user space through /dev/infiniband/umad*: raw ones, that no library has looked at."""

import fcntl
import itertools
import os
import pathlib
import select
import struct

ENABLE_P_KEY = 0x1B03
REGISTER_AGENT2 = 0xC0281B04
HEADER = struct.Struct("=IIIIIIIHBBBBBB16sIHxxxxxx")
LEN = 256

SUBN, SUBN_DIRECTED, SA, PERF = 0x01, 0x81, 0x03, 0x04
GET, SET, SEND, TRAP, REPRESS, GET_RESP = 0x01, 0x02, 0x03, 0x05, 0x07, 0x81
NODE_DESCRIPTION, NODE_INFO, SWITCH_INFO, GUID_INFO, PORT_INFO, P_KEY_TABLE = 0x10, 0x11, 0x12, 0x14, 0x15, 0x16
LINEAR, MULTICAST, SM_INFO = 0x19, 0x1B, 0x20


def mad(kind, method, attribute, modifier=0, data=b"", path=()):
    """256 bytes. A directed one takes its path, a list of ports."""
    out = bytearray(LEN)
    struct.pack_into(">BBBBHBBQHHI", out, 0, 1, kind, 1, method, 0, 0, len(path), 0, attribute, 0, modifier)
    if kind == SUBN_DIRECTED:
        struct.pack_into(">HH", out, 32, 0xFFFF, 0xFFFF)
        out[129 : 129 + len(path)] = bytes(path)
    out[64 : 64 + len(data)] = data
    return out


def status(answer):
    """Without the direction bit."""
    return struct.unpack_from(">H", answer, 4)[0] & 0x7FFF


class Umad:
    """A file of the user MAD device of an HCA, with one agent on queue pair 0 or 1."""

    def __init__(self, rdma, qpn=0):
        base = pathlib.Path("/sys/class/infiniband_mad")
        name = next(path.parent.name for path in base.glob("umad*/ibdev") if path.read_text().strip() == rdma)
        self.file = os.open(f"/dev/infiniband/{name}", os.O_RDWR)
        self.qpn = qpn
        self.tids = itertools.count(1)
        fcntl.ioctl(self.file, ENABLE_P_KEY)
        request = bytearray(struct.pack("=IIBBHIQQIB3x", 0, qpn, 0, 0, 0, 0, 0, 0, 0, 0))
        fcntl.ioctl(self.file, REGISTER_AGENT2, request)
        self.agent = struct.unpack_from("=I", request)[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.file)

    def send(self, packet, lid=0xFFFF, timeout_ms=0, retries=0, remote=None):
        remote = self.qpn if remote is None else remote
        header = HEADER.pack(self.agent, 0, timeout_ms, retries, 0, network_order(remote, 4),
                             network_order(0x80010000, 4), network_order(lid, 2), 0, 0, 0, 0, 0, 0, bytes(16), 0, 0)
        os.write(self.file, header + bytes(packet))

    def tell(self, packet, lid=0xFFFF):
        """Sends what nobody answers. The kernel refuses a transaction id twice."""
        packet = bytearray(packet)
        packet[12:16] = next(self.tids).to_bytes(4, "big")
        self.send(packet, lid)

    def receive(self, seconds):
        """A packet, None if it timed out where the kernel waits for it, or nothing came at all."""
        if not select.select([self.file], [], [], seconds)[0]:
            return None
        data = os.read(self.file, HEADER.size + LEN)
        return data[HEADER.size :] if not HEADER.unpack_from(data)[1] else None

    def ask(self, packet, lid=0xFFFF, seconds=5):
        """The answer, None if there is none. The kernel refuses a transaction id that it still waits for."""
        packet = bytearray(packet)
        packet[12:16] = next(self.tids).to_bytes(4, "big")
        self.send(packet, lid, timeout_ms=int(seconds * 1000))
        return self.receive(seconds + 5)


def network_order(value, size):
    """A number whose bytes in memory are in network order."""
    return int.from_bytes(value.to_bytes(size, "big"), "little")
