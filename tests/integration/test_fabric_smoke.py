# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The test fabric in short.

It is managed by OpenSM, looked at by the diagnostics, used by the stock driver, at fault, misused and fed with
nonsense: some tests of the suites that the full tier runs, in one guest.
"""

import traffic
from fabric import SOON
from test_fabric_fuzz import test_control_of_nonsense, test_illegal_port_states, test_out_of_range  # noqa: F401
from test_fabric_management import (  # noqa: F401
    test_forwarding_tables, test_iblinkinfo, test_ibnetdiscover, test_perfquery, test_saquery, test_smpquery)

# Last: its HCAs stay until the end.
from test_fabric_faults import *  # noqa: F403

VM = ["--topology", "fabric", "--nodes", "3", "--driver", "stock", "--fabric-param", "sw_ports=16"]


def test_active_soon(no_driver):
    """HCAs that nobody has managed yet, and a new manager: all ports are active in ten seconds."""
    no_driver.manager.kill()
    no_driver.unload_fabric()
    no_driver.load_fabric()
    no_driver.manager.start()
    no_driver.wait_wire(SOON[no_driver.flavour])


def test_everybody_is_reached(nodes):
    """By each other, over IPv4 and IPv6, and as a group."""
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                for target in (peer.address4, peer.address6):
                    done = traffic.ping(node, target)
                    assert (done.lost, done.duplicates) == (0, 0), str(done)
    done = traffic.ping(nodes[0], f"ff02::1%{nodes[0].interface}", count=10, interval=0.05, responders=3)
    assert done.replies == 30, str(done)
