# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Network namespaces from inside this process.

A program started for every look at an interface costs an emulated debug kernel a second, most of it for the mount
namespace that `ip netns exec` makes for a sysfs. A thread may step into a network namespace for itself instead: the
sockets it makes, the files of /proc/thread-self it opens and the programs it starts meanwhile belong there.
"""

import contextlib
import ctypes
import os
import socket
import struct

CLONE_NEWNET = 0x40000000
FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432
FSCONFIG_CMD_CREATE = 6
libc = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """The laboratory is not in the state it should be in."""


def checked(result):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@contextlib.contextmanager
def inside(namespace):
    """This thread is in a network namespace meanwhile; None is the one it is in anyway."""
    if namespace is None:
        yield
        return
    with open("/proc/thread-self/ns/net") as home:
        try:
            with open(f"/run/netns/{namespace}") as there:
                checked(libc.setns(there.fileno(), CLONE_NEWNET))
        except OSError as error:
            raise LabError(f"there is no network namespace {namespace}: {error}") from None
        try:
            yield
        finally:
            checked(libc.setns(home.fileno(), CLONE_NEWNET))


def read(namespace, path):
    """A file that shows a namespace, such as /proc/thread-self/net/snmp or /proc/sys/net/…"""
    with inside(namespace), open(path) as file:
        return file.read()


def write(namespace, path, text):
    with inside(namespace), open(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def sysfs(namespace):
    """A descriptor of the root of a namespace's sysfs. It is mounted nowhere, and gone in the end."""
    with inside(namespace):
        context = checked(libc.syscall(FSOPEN, b"sysfs", 0))
        try:
            checked(libc.syscall(FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0))
            root = checked(libc.syscall(FSMOUNT, context, 0, 0))
        finally:
            os.close(context)
    try:
        yield root
    finally:
        os.close(root)


def read_sysfs(namespace, path):
    """A file of a namespace's sysfs; `path` is relative to its root."""
    with sysfs(namespace) as root, open(os.open(path, os.O_RDONLY, dir_fd=root)) as file:
        return file.read()


def write_sysfs(namespace, path, data):
    """Writes bytes with a single system call. What the kernel refuses is an OSError."""
    with sysfs(namespace) as root:
        file = os.open(path, os.O_WRONLY, dir_fd=root)
        try:
            os.write(file, data)
        finally:
            os.close(file)


# What `ip -d -j link` and `ip -j addr` tell, as far as anybody here asks for it, under the same names.

RTM_GETLINK, RTM_GETADDR = 18, 22
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_DUMP = 1, 0x300
NLA_TYPE = 0x3fff
IFA_F_TENTATIVE, IFA_F_DADFAILED = 0x40, 0x08
FLAGS = {"UP": 1, "BROADCAST": 1 << 1, "LOOPBACK": 1 << 3, "POINTOPOINT": 1 << 4, "NOARP": 1 << 7, "PROMISC": 1 << 8,
         "ALLMULTI": 1 << 9, "MULTICAST": 1 << 12, "LOWER_UP": 1 << 16, "DORMANT": 1 << 17}
KINDS = {1: "ether", 32: "infiniband", 772: "loopback"}
STATES = ("UNKNOWN", "NOTPRESENT", "DOWN", "LOWERLAYERDOWN", "TESTING", "DORMANT", "UP")


def number(data):
    return int.from_bytes(data, "little")


def text(data):
    return data.rstrip(b"\0").decode()


def mac(data):
    return data.hex(":")


# Attributes of a link: number, name, how to read it.
LINK = {1: ("address", mac), 2: ("broadcast", mac), 3: ("ifname", text), 4: ("mtu", number), 5: ("link", number),
        6: ("qdisc", text),
        13: ("txqlen", number), 16: ("operstate", lambda data: STATES[data[0]]), 50: ("min_mtu", number),
        51: ("max_mtu", number)}
LINK_INFO = 18
IPOIB = {1: ("key", lambda data: f"{number(data):#06x}"), 2: ("mode", lambda data: ("datagram", "connected")[number(data)]),
         3: ("umcast", lambda data: f"{number(data):04x}")}


def attributes(data):
    """Numbers and contents of a run of netlink attributes."""
    found, at = {}, 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & NLA_TYPE] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def dump(namespace, kind, body):
    """The bodies of all messages with which the kernel answers a dump request."""
    with inside(namespace):
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    with sock:
        sock.send(struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + body)
        while True:
            data, at = sock.recv(1 << 16), 0
            while at + 16 <= len(data):
                length, what = struct.unpack_from("=IH", data, at)
                if what == NLMSG_DONE:
                    return
                if what == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", data, at + 16)[0]
                    raise OSError(code, os.strerror(code))
                yield data[at + 16 : at + length]
                at += (length + 3) & ~3


def named(table, found):
    return {name: read(found[kind]) for kind, (name, read) in table.items() if kind in found}


def link_row(message):
    kind, index, flags = struct.unpack_from("=xxHiI", message)
    found = attributes(message[16:])
    row = {"ifindex": index, "link_type": KINDS.get(kind, str(kind)),
           "flags": [name for name, bit in FLAGS.items() if flags & bit], **named(LINK, found)}
    info = attributes(found.get(LINK_INFO, b""))
    if 1 in info:
        row["linkinfo"] = {"info_kind": text(info[1])}
        if row["linkinfo"]["info_kind"].startswith("ipoib") and 2 in info:
            row["linkinfo"]["info_data"] = named(IPOIB, attributes(info[2]))
    return row


def links(namespace=None):
    """All links of a namespace by name."""
    rows = [link_row(message) for message in dump(namespace, RTM_GETLINK, bytes(16))]
    return {row["ifname"]: row for row in rows}


def addresses(namespace=None):
    """Addresses by the index of their link: the address, its family, whether it is tentative or a duplicate."""
    found = {}
    for message in dump(namespace, RTM_GETADDR, bytes(8)):
        family, length, short, _, index = struct.unpack_from("=BBBBi", message)
        values = attributes(message[8:])
        flags = number(values[8]) if 8 in values else short
        local = values.get(2, values.get(1))
        found.setdefault(index, []).append({
            "family": "inet" if family == socket.AF_INET else "inet6", "local": socket.inet_ntop(family, local),
            "prefixlen": length, "tentative": bool(flags & IFA_F_TENTATIVE), "dadfailed": bool(flags & IFA_F_DADFAILED)})
    return found
