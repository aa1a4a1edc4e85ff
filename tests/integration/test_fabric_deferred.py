# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The stock driver where sends are executed later, which then read their memory, and handlers are called from interrupts.

Addresses are physical, so that the debug kernel's DMA debugging sees what is unmapped too early.
"""

from fabric import DEBUG
from test_fabric_datagram import *  # noqa: F403

VM = ["--topology", "fabric", "--nodes", "3", "--driver", "stock",
      "--fabric-param", "deferred=1", "--fabric-param", "interrupts=1"]

del test_other_ways_to_execute  # noqa: F821 - it ends with what is not deferred


def test_the_mode(nodes):
    rows = (DEBUG / "state").read_text().splitlines()
    assert len(rows) == len(nodes)
    assert all("deferred=1 interrupts=1 physical=1" in row for row in rows), rows
