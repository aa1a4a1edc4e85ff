# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Who uses the RDMA connection manager finds its peer by IP addresses of the interfaces.

The RDMA core asks the driver of an IPoIB interface in which namespace, and on which interface, a request arrives.
test_fabric_both asks in the same way from each driver to the other.
"""

import contextlib
import itertools

import pytest
import ucma
from lab import Node, run, wait_for
from test_fabric_datagram import anomalies, child  # noqa: F401

VM = ["--topology", "fabric", "--nodes", "3"]
PORT = 4242


def ask(source, target, address, listener=None, port=PORT):
    """Asks for a connection, and is refused: true if both ends heard of each other."""
    any_address = "::" if ":" in address else "0.0.0.0"
    with ucma.Channel(target) as server, ucma.Channel(source) as client:
        server.listen(listener or any_address, port)
        client.connect(client.resolve(address, port), b"anybody there?")
        request = server.event(timeout=5)
        if request is None:
            return False
        assert (request.name, request.said[:14]) == ("request", b"anybody there?")
        server.reject(request.id, b"not for you")
        answer = client.expect("rejected")
        assert (answer.status, answer.said[:11]) == (28, b"not for you")
        return True


@pytest.mark.parametrize("bound", [False, True], ids=["any", "bound"])
@pytest.mark.parametrize("family", [4, 6])
def test_requests_arrive(nodes, family, bound):
    for source, target in itertools.permutations(nodes, 2):
        address = getattr(target, f"address{family}")
        assert ask(source, target, address, address if bound else None)


def test_children_are_told_apart(nodes):
    """Interfaces of one partition on one port have one GID: the address decides."""
    a, b, _ = nodes
    with child(a, 0x8001, "10.1.0.1"), child(b, 0x8001, "10.1.0.2"):
        assert ask(b, a, "10.1.0.1") and ask(a, b, "10.1.0.2")
        # A second one of the same partition, in a namespace of its own.
        with other_namespace() as other:
            twin = f"{a.interface}.twin"
            a.ip("link", "add", "link", a.interface, "name", twin, "type", "ipoib", "pkey", "0x8001")
            a.ip("link", "set", twin, "netns", other.name)
            other.ip("addr", "add", "10.1.0.3/24", "dev", twin)
            other.ip("link", "set", twin, "up")
            wait_for("the twin's carrier", lambda: other.carrier(twin))
            assert ask(b, other, "10.1.0.3") and ask(b, a, "10.1.0.1")
            assert not ask_in_vain(b, other, "10.1.0.1")
            other.ip("link", "del", twin)


def ask_in_vain(source, listener, address):
    """Whether somebody who listens elsewhere hears a request for an address."""
    with ucma.Channel(listener) as server, ucma.Channel(source) as client:
        server.listen("0.0.0.0", PORT)
        client.connect(client.resolve(address, PORT), b"hello")
        # The port of the address answers: nobody listens there.
        client.expect("rejected", timeout=30)
        return server.event(timeout=0) is not None


@contextlib.contextmanager
def other_namespace():
    other = Node(9)
    run("ip", "netns", "add", other.name)
    try:
        yield other
    finally:
        run("ip", "netns", "del", other.name)


def test_bond(nodes):
    """The address is on a bond, not on the interface: the request is for the bond's listeners."""
    a, b, _ = nodes
    run("modprobe", "bonding", "max_bonds=0")
    a.ip("link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "100")
    try:
        a.ip("link", "set", a.interface, "down")
        a.ip("link", "set", a.interface, "master", "bond0")
        a.ip("addr", "add", "10.9.0.1/24", "dev", "bond0")
        a.ip("link", "set", "bond0", "up")
        b.ip("addr", "add", "10.9.0.2/24", "dev", b.interface)
        wait_for("the bond's carrier", lambda: a.carrier("bond0"))
        assert ask(b, a, "10.9.0.1") and ask(a, b, "10.9.0.2")
    finally:
        b.ip("addr", "del", "10.9.0.2/24", "dev", b.interface, check=False)
        a.ip("link", "del", "bond0")


def test_nobody_while_down(nodes):
    """An interface that is down has no requests; they arrive again when it is up."""
    a, b, _ = nodes
    with ucma.Channel(a) as server, ucma.Channel(b) as client:
        server.listen("0.0.0.0", PORT)
        number = client.resolve(a.address4, PORT)
        a.ip("link", "set", a.interface, "down")
        client.connect(number, b"hello")
        assert client.event(timeout=30).name in ("rejected", "unreachable")
        assert server.event(timeout=0) is None
    a.repair()
    a.wait_ready()
    assert ask(b, a, a.address4)
