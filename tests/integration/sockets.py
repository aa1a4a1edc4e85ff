# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Sockets that live in the nodes' namespaces and belong to the test itself; and what the kernel counts there."""

import concurrent.futures
import contextlib
import hashlib
import os
import random
import re
import socket
import struct
import threading
import time

import spaces
from lab import LabError, patience

ETH_P_ALL = 0x0003
ETH_P_ARP = 0x0806
ETH_P_IP = 0x0800
BROADCAST = "00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00:00:00:00:00:ff:ff:ff:ff"
SO_RCVBUFFORCE = 33


def inside(node):
    """Sockets that this thread makes meanwhile belong to the node's namespace, and stay there."""
    return spaces.inside(node.name)


def make(node, family, kind, protocol=0):
    with inside(node):
        return socket.socket(family, kind, protocol)


def index_of(node, name=None):
    with inside(node):
        return socket.if_nametoindex(name or node.interface)


def wish_for_link(node, values, new=None):
    """Asks over netlink to change the interface, or to make it a child `new`, with attributes for the driver by number;
    gives the errno, and what the kernel says about it."""
    def attribute(kind, payload):
        return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)

    index = index_of(node)
    body, flags = struct.pack("=BxHiII", 0, 0, 0 if new else index, 0, 0), 5  # NLM_F_REQUEST | NLM_F_ACK
    if new:
        flags |= 0x600  # NLM_F_CREATE | NLM_F_EXCL
        body += attribute(3, new.encode() + b"\0") + attribute(5, struct.pack("=I", index))  # IFLA_IFNAME, IFLA_LINK
    # IFLA_LINKINFO with IFLA_INFO_KIND and IFLA_INFO_DATA.
    data = b"".join(attribute(kind, value) for kind, value in values.items())
    body += attribute(18, attribute(1, b"ipoib\0") + attribute(2, data))
    with inside(node):
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    with netlink:
        netlink.setsockopt(270, 11, 1)  # NETLINK_EXT_ACK
        netlink.send(struct.pack("=IHHII", 16 + len(body), 16, flags, 1, 0) + body)  # RTM_NEWLINK
        answer = netlink.recv(65536)
    error, = struct.unpack_from("=i", answer, 16)
    found = re.search(rb"[a-z][a-z ]{9,}(?=\0)", answer[20:])
    return -error, found and found[0].decode()


def udp(node, port=0, family=socket.AF_INET, address=""):
    """A UDP socket with room for all that comes while nobody reads."""
    sock = make(node, family, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    sock.bind((address, port))
    return sock


def packet(node, name=None, kind=socket.SOCK_RAW, protocol=ETH_P_ALL):
    """A packet socket that hears `protocol` on a link."""
    with inside(node):
        sock = socket.socket(socket.AF_PACKET, kind, socket.htons(protocol))
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        sock.bind((name or node.interface, protocol))
    return sock


def send_to(sock, index, protocol, address, data):
    """Sends on a packet socket to a link address of 20 bytes, which Python's own `sendto` refuses."""
    raw = bytes.fromhex(address.replace(":", ""))
    to = struct.pack("=HHiHBB", socket.AF_PACKET, socket.htons(protocol), index, 0, 0, len(raw)) + raw
    return spaces.checked(spaces.libc.sendto(sock.fileno(), data, len(data), 0, to, len(to)))


def received(sock, count, limit=10, settle=0.0):
    """Up to `count` datagrams that arrive within `limit` seconds; `settle` later ones are looked for too."""
    end = time.monotonic() + limit * patience
    found = []
    while len(found) < count and (left := end - time.monotonic()) > 0:
        sock.settimeout(left)
        with contextlib.suppress(TimeoutError):
            found.append(sock.recv(65536))
    while settle:
        sock.settimeout(settle)
        try:
            found.append(sock.recv(65536))
        except TimeoutError:
            break
    return found


def nothing_waits(sock):
    """Throws away what has arrived by now."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.recv(65536)
    sock.setblocking(True)


class Stream:
    """A TCP connection between two nodes. Its far end hashes what comes, and `finish` returns that."""

    def __init__(self, sender, receiver, port, address=None):
        address = address or receiver.address4
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with inside(receiver):
            self.listener = socket.create_server((address, port), family=family)
        self.sock = make(sender, family, socket.SOCK_STREAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 60 * patience, 0))
        self.digest = hashlib.sha256()
        self.thread = threading.Thread(target=self.receive, daemon=True)
        self.thread.start()
        self.sock.connect((address, port))

    def receive(self):
        connection, _ = self.listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                self.digest.update(data)

    def finish(self):
        self.sock.shutdown(socket.SHUT_WR)
        self.thread.join(120 * patience)
        if self.thread.is_alive():
            raise LabError("a stream does not end")
        self.sock.close()
        self.listener.close()
        return self.digest.hexdigest()


def pump(stream, wanted):
    """Sends random bytes while `wanted(how many were sent)`, and proves that they arrived."""
    chance, digest, sent = random.Random(id(stream)), hashlib.sha256(), 0
    while wanted(sent):
        data = chance.randbytes(1 << 16)
        stream.sock.sendall(data)
        digest.update(data)
        sent += len(data)
    if stream.finish() != digest.hexdigest():
        raise LabError(f"{sent} bytes were sent, and others arrived")
    return sent


def exchange(streams, size):
    """Sends `size` bytes and a few over each stream at the same time, and proves that they arrived."""
    with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
        for done in [pool.submit(pump, stream, lambda sent: sent < size) for stream in streams]:
            done.result()


@contextlib.contextmanager
def background(streams):
    """Sends over each stream meanwhile, and proves in the end that everything arrived, and that it was not nothing."""
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(pump, stream, lambda sent: not (sent and over.is_set())) for stream in streams]
        try:
            yield
        finally:
            over.set()
        for done in running:
            done.result()


def verify_datagrams(sender, receiver, port, lengths, family=socket.AF_INET):
    """Sends UDP datagrams of these lengths, and proves that each arrives as it was."""
    target = receiver.address4 if family == socket.AF_INET else receiver.address6
    with udp(receiver, port, family) as there, udp(sender, family=family) as here:
        for number, length in enumerate(lengths):
            data = hashlib.shake_128(b"%d" % number).digest(length)
            here.sendto(data, (target, port))
            if (found := received(there, 1)) != [data]:
                raise LabError(f"of a datagram of {length} bytes arrived {[len(other) for other in found]}, or others")


def frame(address, protocol, data):
    """A frame as packet sockets send it: destination, encapsulation header, packet."""
    return bytes.fromhex(address.replace(":", "")) + struct.pack("!HH", protocol, 0) + data


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2])) + (data[-1] << 8 if len(data) % 2 else 0)
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


def udp_packet(source, target, port, data):
    """An IPv4 packet with a UDP datagram."""
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    length = 8 + len(data)
    body = struct.pack("!HHHH", 999, port, length, 0) + data
    total = checksum(addresses + struct.pack("!BBH", 0, 17, length) + body) or 0xffff
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, 17, 0) + addresses
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + body[:6] + struct.pack("!H", total) + body[8:]


def announce(node, address):
    """A gratuitous ARP request, as `arping -U` sends it."""
    own = bytes.fromhex(node.link()["address"].replace(":", ""))
    ip = socket.inet_aton(address)
    body = struct.pack("!HHBBH", 32, ETH_P_IP, 20, 4, 1) + own + ip + bytes(20) + ip
    with packet(node, protocol=ETH_P_ARP) as sock:
        sock.send(frame(BROADCAST, ETH_P_ARP, body))


def counters(node):
    """`ethtool -S`."""
    text = node.run("ethtool", "-S", node.interface).stdout
    return {name: int(value) for name, value in re.findall(r"^\s+(\w+): (\d+)$", text, re.M)}


class Account:
    """What an interface's counters have grown by."""

    def __init__(self, node):
        self.node = node
        self.before = counters(node)

    def __getitem__(self, name):
        return self.all()[name]

    def all(self):
        return {name: value - self.before[name] for name, value in counters(self.node).items()}

    def grown(self, prefix=""):
        return {name: value for name, value in self.all().items() if value and name.startswith(prefix)}


def snmp(node, protocol, name):
    """A counter of /proc/net/snmp."""
    rows = [line.split() for line in spaces.read(node.name, "/proc/thread-self/net/snmp").splitlines()
            if line.startswith(protocol + ":")]
    if not rows:
        raise LabError(f"{node} counts nothing for {protocol}")
    return int(rows[1][rows[0].index(name)])
