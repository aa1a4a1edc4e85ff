# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The QEMU that guests run in whose CPUs take turns, or run at once.

Debian 12's own gives one CPU all the time until the next timer, over and over, if it never waits: the other one, which
may hold the lock that the first spins for, gets none. Since version 8.1 the CPUs share that time. So a newer one, built
for Debian 12, is unpacked into the cache; its libraries are those of Debian 12's QEMU, which is installed.
"""

import shutil
import subprocess

import archive
import house
from house import Failure

SUITE = "bookworm-backports"
PROGRAM = "usr/bin/qemu-system-x86_64"
PACKAGES = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios")


def folder():
    """Where it is unpacked. It is fetched if it is not there."""
    place = house.cache() / "qemu"
    if not (place / PROGRAM).is_file():
        with house.locked("qemu"):
            if not (place / PROGRAM).is_file():
                fetch(place)
    return place


def program():
    return folder() / PROGRAM


def options():
    """Its own firmware, without which it would take what is installed."""
    return [word for part in ("qemu", "seabios") for word in ("-L", str(folder() / "usr/share" / part))]


def environment():
    """The same for the parts that it loads, for env(1)."""
    return [f"QEMU_MODULE_DIR={next(folder().glob('usr/lib/*/qemu'))}"]


def fetch(place):
    work = place.with_name(".qemu-unpacking")
    for left in (work, work.with_name(work.name + ".packages")):
        shutil.rmtree(left, ignore_errors=True)
    house.need_space(house.cache(), 1, "QEMU")
    suite = archive.Suite(SUITE)
    found = {name: suite.candidate(name) for name in PACKAGES}
    if missing := [name for name, version in found.items() if version is None]:
        raise Failure(f"{SUITE} at {archive.mirror()} has no {', '.join(missing)}: does this mirror carry that suite?")
    suite.unpack(found, work, f"QEMU {found[PACKAGES[0]]}")
    try:
        house.output_of([work / PROGRAM, "--version"])
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failure(f"QEMU of {SUITE} does not start here ({error}). Run tools/setup: it installs its libraries.")
    shutil.rmtree(work.with_name(work.name + ".packages"))
    work.rename(place)
