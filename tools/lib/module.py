# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Test kernels, the driver's module and the test fabric's, built when they are missing or stale."""

import pathlib
import subprocess

import house
from house import Failure

FABRIC = house.TOP / "tests/fabric"


def kernel(flavour):
    """The folder of a finished test kernel, built first if it is not in the cache."""
    tool = house.TOP / "tools/kernel"
    found = subprocess.run([tool, "path", flavour], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if found.returncode:
        if subprocess.run([tool, "build", flavour]).returncode:
            raise Failure(f"the {flavour} kernel could not be built, see above")
        found = subprocess.run([tool, "path", flavour], text=True, stdout=subprocess.PIPE, check=True)
    return pathlib.Path(found.stdout.strip())


def folder(flavour, kunit):
    return house.TOP / "build" / (f"{flavour}-kunit" if kunit else flavour)


def build(flavour, kunit=False, bench=False):
    """Builds ipoib_rs.ko for a test kernel, raw_verbs.ko beside it with `bench`, and returns its path."""
    variables = ["IPOIB_RS_KUNIT=1"] * kunit + ["IPOIB_RS_BENCH=1"] * bench
    return make(house.TOP, flavour, folder(flavour, kunit), variables) / "ipoib_rs.ko"


def build_fabric(flavour, kunit=False):
    """Builds ibf.ko, the software InfiniBand fabric, for a test kernel and returns its path."""
    return make(FABRIC, flavour, folder(flavour, kunit) / "fabric", ["IBF_KUNIT=1"] if kunit else []) / "ibf.ko"


def make(source, flavour, out, variables):
    """Builds the module of a folder with a Kbuild file."""
    if not (source / "Kbuild").is_file():
        raise Failure(f"there is no Kbuild in {source}: nothing to build a module from")
    tree = kernel(flavour)
    with house.locked(f"module{str(out).replace('/', '-')}"):
        out.mkdir(parents=True, exist_ok=True)
        argv = ["make", "-C", tree, f"M={source}", f"MO={out}", f"LLVM={house.LLVM}", *variables]
        log = out / "build.log"
        with open(log, "w") as handle:
            status = house.reap(house.launch([*argv, "modules"], env=house.build_env(), stdin=subprocess.DEVNULL,
                                             stdout=handle, stderr=subprocess.STDOUT))
        if status:
            raise Failure(f"the module in {source} does not build for the {flavour} kernel. "
                          f"{log} ends with:\n{house.tail(log, 60)}")
        return out
