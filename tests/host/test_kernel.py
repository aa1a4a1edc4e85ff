# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""A kernel build that ends too early leaves nothing that a later one takes for a kernel."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import TOOLS

sys.path.insert(0, str(TOOLS / "lib"))
import house  # noqa: E402

# A stand-in for make: writes what a build would, and ends as $ENDING says.
MAKE = """#!/bin/sh
for word; do
    case $word in
    O=*) out=${word#O=} ;;
    INSTALL_MOD_PATH=*) modules=${word#INSTALL_MOD_PATH=} ;;
    tinyconfig) : >$out/.config; echo "O = $out" >$out/Makefile; exit ;;
    olddefconfig) exit ;;
    bzImage)
        echo half >$out/vmlinux
        echo $ENDING >$out/$ENDING
        case $ENDING in
        full) echo "write error: No space left on device" >&2; exit 2 ;;
        hanging) echo started; exec sleep 600 ;;
        esac
        echo whole >$out/vmlinux
        exit ;;
    modules_install)
        mkdir -p $modules/lib
        test $ENDING != late
        exit ;;
    esac
done
exit 3
"""
VERSION = "#!/bin/sh\necho version 1\n"


class Kernels:
    """tools/kernel with a cache of its own, a source that is there, and tools that do nothing."""

    def __init__(self, folder):
        self.cache = folder
        tools = folder / "bindgen/bin"
        tools.mkdir(parents=True)
        (folder / "source/linux-source-7.3_1").mkdir(parents=True)
        for name in ("make", "rustc", "bindgen", f"clang{house.LLVM}", f"ld.lld{house.LLVM}"):
            (tools / name).write_text(MAKE if name == "make" else VERSION)
            (tools / name).chmod(0o755)

    def start(self, *words, ending="well"):
        """Interrupts reach it even if they are ignored here, as they are by a shell's command in the background."""
        env = {**os.environ, "IPOIB_RS_CACHE": str(self.cache), "ENDING": ending, "KERNEL_SERIES": "7.3"}
        return subprocess.Popen([sys.executable, "-B", TOOLS / "kernel", *words], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def run(self, *words, ending="well"):
        process = self.start(*words, ending=ending)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output

    def finished(self):
        return list((self.cache / "kernels").glob("[!.]*"))


@pytest.fixture
def kernels(tmp_path):
    return Kernels(tmp_path)


def is_made_anew(kernels, ending):
    """Nobody takes what there is for a kernel, and the next build makes a whole one, without any leftover."""
    assert kernels.finished() == []
    status, output = kernels.run("path", "release")
    assert status == 1 and "is not built" in output
    assert kernels.run("list") == (0, "")
    status, output = kernels.run("build", "release")
    assert status == 0, output
    [final] = kernels.finished()
    assert (final / "vmlinux").read_text() == "whole\n"
    assert not (final / ending).exists()
    assert (final / "Makefile").read_text() == f"O = {final}\n"
    assert kernels.run("path", "release") == (0, f"{final}\n")


@pytest.mark.parametrize("ending", ["full", "late"])
def test_build_that_fails(kernels, ending):
    status, output = kernels.run("build", "release", ending=ending)
    assert status == 1 and "error: release kernel" in output
    if ending == "full":
        assert "No space left on device" in output
    is_made_anew(kernels, ending)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_build_that_is_interrupted(kernels, how):
    process = kernels.start("build", "release", ending="hanging")
    log = kernels.cache / "logs/build-release.log"
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, how)
    process.communicate(timeout=30)
    assert process.returncode != 0
    is_made_anew(kernels, "hanging")


def test_prune_removes_what_was_left_behind(kernels):
    kernels.run("build", "release", ending="full")
    assert (kernels.cache / "kernels/.building-release").is_dir()
    (kernels.cache / "kernels/release-of-last-year").mkdir()
    assert kernels.run("build", "debug")[0] == 0
    assert kernels.run("prune")[0] == 0
    assert [path.name.split("-")[0] for path in (kernels.cache / "kernels").iterdir()] == ["debug"]


def test_finished_kernel_is_not_built_again(kernels):
    assert kernels.run("build", "release")[0] == 0
    status, output = kernels.run("build", "release", ending="full")
    assert status == 0 and "cached" in output


def test_disk_without_room(tmp_path):
    with pytest.raises(house.Failure, match="needs 999999 GiB in .* are free"):
        house.need_space(tmp_path, 999999, "Something")
