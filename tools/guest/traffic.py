# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Traffic between nodes: ping, iperf3, and bytes whose arrival is proved by a hash."""

import contextlib
import dataclasses
import json
import pathlib
import re
import sys

import spaces
from lab import LabError, wait_for


@dataclasses.dataclass
class Ping:
    """What ping counted."""

    sent: int
    received: int
    duplicates: int
    replies: int  # as the kernel counts them
    missing: list
    average_ms: float
    summary: str

    @property
    def lost(self):
        return self.sent - self.received

    def __str__(self):
        return f"{self.summary}; not answered: {self.missing[:20]}"


def echo_replies(node):
    """Echo replies that the node's kernel has received, over IPv4 and IPv6."""
    text = "".join(spaces.read(node.name, f"/proc/thread-self/net/{name}") for name in ("snmp", "snmp6"))
    names, values = (line.split() for line in text.splitlines() if line.startswith("Icmp:"))
    return int(values[names.index("InEchoReps")]) + int(re.search(r"^Icmp6InEchoReplies\s+(\d+)", text, re.M)[1])


def ping(node, target, count=3, size=56, interval=0.002, wait=10, responders=1, options=()):
    """Pings from a node. `size` counts the data bytes of the echo request; without an `interval` the
    next request waits for the reply. A target with many `responders` gets as many replies.

    ping loses replies of its own: when its socket's small buffer is full, and after the last request,
    when it waits for twice the longest round trip only. So the kernel's counter has the final word.
    """
    before = echo_replies(node)
    pace = ("-i", interval) if interval else ("-A",)
    done = node.run("ping", "-n", "-c", count, "-s", size, *pace, "-W", wait, *options, target,
                    check=False, timeout=60 + count)
    numbers = re.search(r"(\d+) packets transmitted, (\d+) received(?:, \+(\d+) duplicates)?", done.stdout)
    if not numbers:
        raise LabError(f"ping {target} from {node} says: {done.stdout.strip()}")
    sent, received, duplicates = (int(number or 0) for number in numbers.groups())
    answered = {int(number) for number in re.findall(r"icmp_seq=(\d+) ttl", done.stdout)}
    missing = sorted(set(range(1, sent + 1)) - answered)
    with contextlib.suppress(LabError):
        wait_for("the other replies", lambda: echo_replies(node) - before >= sent * responders, wait, may_fail=True)
    replies = echo_replies(node) - before
    if replies >= sent * responders:
        received, missing = sent, []
    average = re.search(r"rtt [^=]*= [\d.]+/([\d.]+)/", done.stdout)
    return Ping(sent, received, duplicates, replies, missing, float(average[1]) if average else float("nan"),
                " ".join(done.stdout.split(" ---\n")[-1].split()))


def listening(node, port, kind="t"):
    """Whether somebody listens on a TCP port, or has a UDP socket on it with kind "u"."""
    base, state = ("tcp", "0A") if kind == "t" else ("udp", "07")
    rows = [line.split() for name in (base, base + "6")
            for line in spaces.read(node.name, f"/proc/thread-self/net/{name}").splitlines()[1:]]
    return any(row[3] == state and int(row[1].rsplit(":", 1)[1], 16) == port for row in rows)


def wait_listening(node, port, kind="t"):
    wait_for(f"{node} to listen on port {port}", lambda: listening(node, port, kind))


class Iperf:
    """An iperf3 server on one node and clients on others."""

    def __init__(self, server, port=5201):
        self.server = server
        self.port = port

    def __enter__(self):
        self.process = self.server.start("iperf3", "-s", "-p", self.port)
        wait_listening(self.server, self.port)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def client(self, node, *options, seconds=5, blocks=None, address=None):
        """Starts a client for a time, or until it has sent so many blocks; `result` waits for it."""
        address = address or self.server.address4
        end = ("-k", blocks) if blocks else ("-t", seconds)
        return node.start("iperf3", "-J", "-c", address, "-p", self.port, *end, *options)

    @staticmethod
    def result(process, timeout=120):
        text, _ = process.communicate(timeout=timeout)
        try:
            report = json.loads(text)
        except ValueError:
            raise LabError(f"iperf3 printed no report: {text[-500:]}")
        if "error" in report:
            raise LabError(f"iperf3: {report['error']}")
        return report["end"]

    def run(self, node, *options, **kwargs):
        return self.result(self.client(node, *options, **kwargs))


def mbit(summary):
    return summary["bits_per_second"] / 1e6


PEER = pathlib.Path(__file__).with_name("peer.py")


class Transfer:
    """Random bytes over TCP from one node to another; both ends report length and SHA-256."""

    def __init__(self, sender, receiver, size, port=7000, address=None):
        self.size = size
        self.receiving = receiver.start(sys.executable, PEER, "receive", port)
        wait_listening(receiver, port)
        self.sending = sender.start(sys.executable, PEER, "send", port, address or receiver.address4, size)

    def verify(self, timeout=300):
        """Waits for the end and raises if the bytes that arrived are not those that were sent."""
        sent, _ = self.sending.communicate(timeout=timeout)
        received, _ = self.receiving.communicate(timeout=timeout)
        if not sent.strip() or sent != received or int(sent.split()[0]) != self.size:
            raise LabError(f"sent {sent.strip()!r}, received {received.strip()!r}")
