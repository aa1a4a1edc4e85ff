# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Looking into network namespaces without a program: the same answers as those of `ip`."""

import json
import subprocess

import pytest
import spaces

NAME = "ipoib-test-spaces"


def ip(*words):
    return subprocess.run(["ip", "-n", NAME, *words], check=True, text=True, stdout=subprocess.PIPE).stdout


@pytest.fixture
def namespace():
    if subprocess.run(["ip", "netns", "add", NAME], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine makes no network namespaces")
    try:
        ip("link", "set", "lo", "up")
        yield NAME
    finally:
        subprocess.run(["ip", "netns", "del", NAME], check=True)


def test_links(namespace):
    ours, theirs = spaces.links(namespace), {row["ifname"]: row for row in json.loads(ip("-d", "-j", "link"))}
    assert list(ours) == list(theirs)
    for name, row in theirs.items():
        assert set(ours[name]["flags"]) == set(row["flags"])
        for key in ("ifindex", "link_type", "mtu", "min_mtu", "max_mtu", "address", "broadcast", "operstate", "txqlen", "qdisc"):
            assert ours[name][key] == row[key], key


def test_addresses(namespace):
    ip("addr", "add", "10.9.8.7/24", "dev", "lo")
    ip("addr", "add", "fd00::9/64", "dev", "lo")
    rows = spaces.addresses(namespace)[spaces.links(namespace)["lo"]["ifindex"]]
    found = {(row["family"], row["local"], row["prefixlen"]) for row in rows}
    assert {("inet", "10.9.8.7", 24), ("inet6", "fd00::9", 64), ("inet", "127.0.0.1", 8), ("inet6", "::1", 128)} == found
    assert not any(row["tentative"] or row["dadfailed"] for row in rows)


def test_files_of_the_namespace(namespace):
    """sysfs and /proc show the namespace, and we are back afterwards."""
    before = spaces.links()
    with spaces.sysfs(namespace):
        assert spaces.read_sysfs(namespace, "class/net/lo/mtu").strip() == "65536"
    spaces.write_sysfs(namespace, "class/net/lo/mtu", b"4000")
    assert spaces.links(namespace)["lo"]["mtu"] == 4000
    with pytest.raises(OSError):
        spaces.write_sysfs(namespace, "class/net/lo/mtu", b"nonsense")
    assert spaces.read(namespace, "/proc/thread-self/net/dev").count(":") == 1
    assert spaces.links() == before


def test_no_such_namespace():
    with pytest.raises(spaces.LabError, match="nowhere"):
        spaces.links("nowhere")
