# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What a suite of the archive has, and the emulator that comes from one."""

import sys

import pytest
from conftest import TOOLS

sys.path.insert(0, str(TOOLS / "lib"))
import archive  # noqa: E402
import emulator  # noqa: E402
import house  # noqa: E402

POLICY = """\
qemu-system-x86:
  Installed: 1:7.2+dfsg-7
  Candidate: 1:7.2+dfsg-7
  Version table:
     1:10.0.2+ds-2~bpo12+1 100
        100 http://deb.example.org/debian bookworm-backports/main amd64 Packages
 *** 1:7.2+dfsg-7 500
        500 http://deb.example.org/debian bookworm/main amd64 Packages
        100 /var/lib/dpkg/status
"""


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """The suite bookworm-backports of a mirror where apt-cache says what POLICY says."""
    def output_of(argv, **_):
        return "Debian oldstable http://deb.example.org/debian\n" if "indextargets" in argv else POLICY

    monkeypatch.setenv("IPOIB_RS_CACHE", str(tmp_path))
    monkeypatch.setattr(house, "output_of", output_of)
    monkeypatch.setattr(house, "step", lambda *_, **__: 0)
    return archive.Suite


def test_version_of_the_suite_not_of_the_machine(suite):
    assert suite("bookworm-backports").candidate("qemu-system-x86") == "1:10.0.2+ds-2~bpo12+1"
    assert suite("bookworm").candidate("qemu-system-x86") == "1:7.2+dfsg-7"
    assert suite("trixie").candidate("qemu-system-x86") is None


def test_no_mirror(monkeypatch):
    monkeypatch.setattr(house, "output_of", lambda *_, **__: "Debian oldstable-security http://deb.example.org/s\n")
    with pytest.raises(house.Failure, match="no Debian mirror"):
        archive.mirror()


def test_mirror_without_the_emulator(suite, monkeypatch):
    monkeypatch.setattr(emulator, "SUITE", "trixie")
    with pytest.raises(house.Failure, match="does this mirror carry"):
        emulator.program()
    assert not (house.cache() / "qemu").exists()


def test_emulator_is_complete_or_not_there(suite, monkeypatch):
    """What died half way is no emulator; what starts is moved into place as a whole."""
    def unpack(self, packages, place, title):
        place.with_name(place.name + ".packages").mkdir()
        (place / "usr/bin").mkdir(parents=True)
        (place / emulator.PROGRAM).write_text("#!/bin/sh\n")
        (place / "usr/lib/x/qemu").mkdir(parents=True)

    def refuse(argv, **_):
        if str(argv[0]).endswith(emulator.PROGRAM):
            raise OSError("no such library")
        return known(argv)

    known = house.output_of
    monkeypatch.setattr(archive.Suite, "unpack", unpack)
    monkeypatch.setattr(house, "output_of", refuse)
    with pytest.raises(house.Failure, match="does not start here"):
        emulator.program()
    assert not (house.cache() / "qemu").exists()
    monkeypatch.setattr(house, "output_of", known)
    assert emulator.program() == house.cache() / "qemu" / emulator.PROGRAM
    assert emulator.environment() == [f"QEMU_MODULE_DIR={house.cache() / 'qemu/usr/lib/x/qemu'}"]
    assert not list(house.cache().glob("*.packages"))
