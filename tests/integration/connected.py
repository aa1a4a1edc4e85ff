# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Connected mode on the test fabric: for tests of either driver and of both together."""

import json
import re

import sockets
import traffic
from fabric import ACTIVE, DEBUG, control
from lab import INTERFACE_MTU, LabError, run, wait_for

MTU = 65520
# The largest, what needs as many pages as possible less one, a common one, and around a datagram's.
STEPS = (MTU, MTU - 4096, 9000, 4093, INTERFACE_MTU, 2044, 1280)
# IB_WC_RETRY_EXC_ERR: the peer did not answer.
SILENCE = 12
MODES = ("datagram", "connected")


def set_mode(node, mode):
    """Ours can be named differently for netlink, so the file is written, as every driver knows it."""
    path = f"/sys/class/net/{node.interface}/mode"
    node.run("sh", "-c", f"echo {mode} > {path}")
    if node.sysfs("mode") != mode:
        raise LabError(f"{node} does not go to {mode} mode")


def set_mtu(node, mtu):
    node.ip("link", "set", node.interface, "mtu", mtu)


def connect(*nodes, mtu=None):
    for node in nodes:
        set_mode(node, "connected")
        if mtu:
            set_mtu(node, mtu)


def datagrams(*nodes):
    for node in nodes:
        if node.link():
            set_mode(node, "datagram")
            set_mtu(node, INTERFACE_MTU)


def is_ours(node):
    return "driver: ipoib_rs" in node.run("ethtool", "-i", node.interface).stdout


def state(node):
    """What the fabric knows of a node's HCA."""
    line = next(line for line in (DEBUG / "state").read_text().splitlines() if line.startswith(f"{node.rdma} "))
    return dict(re.findall(r"(\w+)=(\S+)", line))


def connections(node):
    """Queue pairs that became able to send on a connection since the HCA was added."""
    return int(state(node)["connected"])


def queue_pairs(node):
    return int(state(node)["qp"])


def ends(node):
    """The queue pairs of a node's connections that are up, own number and the peer's."""
    rows = json.loads(run("rdma", "-j", "res", "show", "qp", "link", f"{node.rdma}/1").stdout or "[]")
    return [(row["lqpn"], row["rqpn"]) for row in rows if row.get("type") == "RC" and row.get("state") == "RTS"]


def numbers(node):
    return [own for own, _ in ends(node)]


def peers(node):
    return [peer for _, peer in ends(node)]


def hits(node, fault):
    """How often a fault has struck."""
    found = re.search(rf"^{node.rdma} {fault} hits=(\d+)", (DEBUG / "faults").read_text(), re.M)
    return int(found[1]) if found else 0


def answers(node, target, size=56, wait=1):
    return node.run("ping", "-n", "-c", 1, "-W", wait, "-s", size, target, check=False).returncode == 0


def comes_back(node, target, size=30000, timeout=30):
    wait_for(f"{target} to answer {node}", lambda: answers(node, target, size), timeout)


def sound(node, peer, size=30000, count=10):
    """Nothing is lost in either direction, once there are connections: the stock driver keeps three packets until then."""
    for one, other in ((node, peer), (peer, node)):
        comes_back(one, other.address4, size)
        done = traffic.ping(one, other.address4, count=count, size=size, interval=0.02)
        if done.lost or done.duplicates:
            raise LabError(f"{one} to {other}: {done}")


def replace_hca(node, *options):
    """Another HCA in place of a node's."""
    node.delete_rdma()
    node.add_rdma(*options)
    wait_for(f"{node.rdma} to be active", lambda: node.state() == "ACTIVE", 60)
    node.adopt_interface()
    node.wait_ready(60)


def verified(a, b, size, port=7400):
    """Bytes both ways at once, whose arrival is proved."""
    there = traffic.Transfer(a, b, size, port=port, address=b.address4)
    back = traffic.Transfer(b, a, size, port=port + 1, address=a.address6)
    there.verify()
    back.verify()


def not_ready(sender, receiver):
    """A receiver without a buffer, once. Its driver has said how often that is forgiven: the stock one's never, ours always."""
    sound(sender, receiver)
    made, before = connections(sender), hits(receiver, "rnr")
    control(f"fault {receiver.index} rnr n=1")
    answered = answers(sender, receiver.address4, 30000)
    wait_for("the fault", lambda: hits(receiver, "rnr") > before)
    if is_ours(receiver):
        if not answered or connections(sender) != made:
            raise LabError(f"{sender} lost its connection to {receiver} for want of one buffer")
    else:
        # Datagrams may carry the pings until then.
        wait_for("another connection", lambda: answers(sender, receiver.address4, 30000) and connections(sender) > made, 30)
    sound(sender, receiver)


def silence(sender, receiver):
    """A message that is not acknowledged: once, which only our driver tries again, and then no more."""
    sound(sender, receiver)
    account = sockets.Account(sender) if is_ours(sender) else None
    made, before = connections(sender), hits(sender, "drop")
    control(f"fault {sender.index} drop n=1")
    answered = answers(sender, receiver.address4, 30000, wait=3)
    wait_for("the fault", lambda: hits(sender, "drop") > before)
    if is_ours(sender):
        if not answered or connections(sender) != made:
            raise LabError(f"{sender} lost its connection to {receiver} with one message")
        control(f"fault {sender.index} drop n=all")
        wait_for("all retries", lambda: answers(sender, receiver.address4, 30000) or hits(sender, "drop") > before + 8)
        control(f"fault {sender.index} drop off")
    wait_for("another connection", lambda: answers(sender, receiver.address4, 30000) and connections(sender) > made, 30)
    sound(sender, receiver)
    # The queue pair of datagrams has nothing to do with it.
    if account and (account["qp_restarts"] or not account["conn_broken"]):
        raise LabError(f"{sender} counts {account.grown()}")


def move(lab, node, lid):
    """The manager gives a node another LID."""
    old = node.lid()
    lab.manager.kill()
    records = lab.manager.folder / "guid2lid"
    text = records.read_text()
    records.write_text(re.sub(rf"^({node.port_guid():#018x}) .*$", rf"\1 {lid:#06x} {lid:#06x}", text, flags=re.M))
    lab.manager.start()
    wait_for("the new LID", lambda: node.lid() == lid != old, ACTIVE[lab.flavour])


class Churn:
    """Connections that break and are made anew: each costs its sender one message."""

    def __init__(self, sender, receiver, port=7500):
        self.sender, self.receiver = sender, receiver
        self.out = sockets.udp(sender)
        self.ear = sockets.udp(receiver, port=port)
        self.to = (receiver.address4, port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.out.close()
        self.ear.close()

    def message(self, number, size=60000):
        self.out.sendto(number.to_bytes(4, "big") * (size // 4), self.to)

    def arrives(self, number, limit=30):
        """Sends until this message arrives, and proves that all that comes is what was sent."""
        def some():
            self.message(number)
            found = sockets.received(self.ear, 1, limit=0.02)
            for data in found:
                if data != data[:4] * (len(data) // 4):
                    raise LabError(f"something else arrives than what was sent, while message {number} is waited for")
            return any(data[:4] == number.to_bytes(4, "big") for data in found)

        wait_for(f"message {number}", some, limit, every=0)

    def break_once(self, number):
        """The next message is not acknowledged: its connection is over."""
        before = hits(self.sender, "send_status")
        control(f"fault {self.sender.index} send_status value={SILENCE} n=1")
        self.message(number)
        wait_for("the message to be lost", lambda: hits(self.sender, "send_status") > before, every=0.001)

    def by_breaking(self, count):
        """Makes so many connections one after the other. The sender is the stock one's: our driver takes its time before
        it connects to a peer again that it lost so soon, and the message to be lost would be a datagram."""
        if is_ours(self.sender):
            raise LabError(f"{self.sender} would send datagrams meanwhile")
        made = connections(self.sender)
        number = 0
        while connections(self.sender) - made < count:
            number += 1
            sockets.nothing_waits(self.ear)
            self.arrives(number)
            self.break_once(number)
        self.arrives(number + 1)
        return number

    def by_mode(self, count):
        """The same for every driver: a connection ends with the mode."""
        made = connections(self.sender)
        number = 0
        while connections(self.sender) - made < count:
            number += 1
            self.sender.write_sysfs("mode", "datagram\n")
            self.sender.write_sysfs("mode", "connected\n")
            self.arrives(number)
        return number
