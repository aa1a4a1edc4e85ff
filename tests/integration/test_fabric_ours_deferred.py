# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Our driver where sends are executed later, which then read their memory, and handlers are called from interrupts.

Addresses are physical, so that the debug kernel's DMA debugging sees what is unmapped too early.
"""

# The order matters: the last one's fixtures are all tests'.
from test_fabric_deferred import test_the_mode  # noqa: F401
from test_fabric_ours import *  # noqa: F403
from test_fabric_offloads import *  # noqa: F403
from test_partitions import *  # noqa: F403

VM = ["--topology", "fabric", "--nodes", "3", "--fabric-param", "csum=1", "--fabric-param", "tso=1",
      "--fabric-param", "deferred=1", "--fabric-param", "interrupts=1"]

del test_other_ways_to_execute  # noqa: F821 - it ends with what is not deferred
