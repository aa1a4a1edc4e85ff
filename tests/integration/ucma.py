# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The RDMA connection manager as programs use it: /dev/infiniband/rdma_cm (include/uapi/rdma/rdma_user_cm.h).

librdmacm wants verbs of the device in user space, which the fabric has not; the kernel's interface does not.
"""

import collections
import ctypes
import itertools
import os
import select
import socket
import struct

import spaces
from lab import LabError, run

DEVICE = "/dev/infiniband/rdma_cm"
CREATE, BIND, RESOLVE_ADDRESS, RESOLVE_ROUTE, CONNECT, LISTEN, REJECT, EVENT = 0, 2, 3, 4, 6, 7, 9, 12
EVENTS = ("address", "no address", "route", "no route", "request", "response", "error", "unreachable", "rejected",
          "established", "disconnected", "removed")
PORT_SPACE_TCP = 0x0106
LONGEST = 256

Event = collections.namedtuple("Event", "name id status said")


def address_of(text, port=0):
    """A `struct sockaddr_in6` with an IP address."""
    if ":" in text:
        return struct.pack("=HHI16sI", socket.AF_INET6, socket.htons(port), 0, socket.inet_pton(socket.AF_INET6, text), 0)
    return struct.pack("=HH4s20x", socket.AF_INET, socket.htons(port), socket.inet_aton(text))


def described(data):
    return data.ljust(LONGEST, b"\0") + bytes([len(data)])


class Channel:
    """A file of the connection manager, in the namespace of a node."""

    def __init__(self, node):
        run("modprobe", "rdma_ucm")
        self.node = node
        self.fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        self.uids = itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)

    def command(self, number, body, answer=None):
        room = ctypes.create_string_buffer(answer or 1)
        if answer:
            body = body.replace(b"ANSWERED", struct.pack("=Q", ctypes.addressof(room)), 1)
        with spaces.inside(self.node.name):
            os.write(self.fd, struct.pack("=IHH", number, len(body), answer or 0) + body)
        return room.raw

    def create(self):
        """A new identifier."""
        body = struct.pack("=Q8sHB5x", next(self.uids), b"ANSWERED", PORT_SPACE_TCP, 0)
        return struct.unpack("=I", self.command(CREATE, body, 4))[0]

    def listen(self, address, port):
        """An identifier that waits for requests."""
        number = self.create()
        self.command(BIND, struct.pack("=Q28sI", 0, address_of(address, port), number))
        self.command(LISTEN, struct.pack("=II", number, 8))
        return number

    def resolve(self, address, port, timeout=5000):
        """An identifier that knows the way to an address."""
        number = self.create()
        to = address_of(address, port)
        # From whatever address: one of the same family without anything in it.
        self.command(RESOLVE_ADDRESS, struct.pack("=28s28sII", bytes(28), to, number, timeout))
        self.expect("address")
        self.command(RESOLVE_ROUTE, struct.pack("=II", number, timeout))
        self.expect("route")
        return number

    def connect(self, number, data, qpn=0x1234):
        """Sends a request. There is no queue pair of that number: nothing but words is to be exchanged."""
        parameters = struct.pack("=II257s7B", qpn, 0, described(data), 0, 0, 0, 0, 7, 7, 1)
        self.command(CONNECT, struct.pack("=272sIIII", parameters, number, 0, 0, 0))

    def reject(self, number, data):
        self.command(REJECT, struct.pack("=IBB2x256s", number, len(data), 28, data.ljust(LONGEST, b"\0")))

    def event(self, timeout=10):
        """The next event; None if there is none in time."""
        if not select.select([self.fd], [], [], timeout)[0]:
            return None
        raw = self.command(EVENT, struct.pack("=8s", b"ANSWERED"), 512)
        _, number, kind, status = struct.unpack_from("=QIIi", raw)
        said = raw[28:28 + LONGEST][:raw[28 + LONGEST]]
        return Event(EVENTS[kind] if kind < len(EVENTS) else kind, number, status, said)

    def expect(self, name, timeout=10):
        """The next event, which has to be of that name."""
        event = self.event(timeout)
        if event is None or event.name != name:
            raise LabError(f"{self.node} waited for '{name}' of the connection manager, and got {event}")
        return event
