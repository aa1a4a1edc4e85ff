# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""From what both drivers took on the fabric to tables and a plot."""

import copy
import xml.dom.minidom

import comparison
import docutils.core
import figures
import pytest
from conftest import TOOLS
from house import Failure

NETWORK = {"ip_rcv"}
KNOWN = figures.symbols("""\
ffffffff81000000 T ip_rcv
ffffffff81001000 T memcpy_orig
ffffffffa0000000 t ibf_post\t[ibf]
ffffffffa0100000 t start_xmit\t[ib_ipoib]
ffffffffa0200000 t start_xmit\t[ipoib_rs]
""")


def counts(module, driver):
    """Before and after 100 frames of which each took the driver `driver` instructions, and others 1000."""
    return figures.snapshots(f"""\
snapshot 1 1000
{module} 5
snapshot 2 {1000 + 100 * (1000 + driver)}
{module} {5 + 100 * driver}
ffffffff81000000 50000
ffffffff81001000 20000
ffffffffa0000000 30000
""".splitlines())


def load(**changes):
    return {"sent": 100, "received": 100, "bytes": 6400, "nanoseconds": 100_000, "rx_packets": 100, "tx_packets": 100,
            "ip_receives": 100, "tx_posts": 0, "tx_sent_packets": 100, "marks": [1, 2], **changes}


def measured(driver, nanoseconds, **workloads):
    cold = {**load(), "questions": {"paths": 6, "joins": 0}}
    return {
        "driver": driver, "nodes": 4, "memory": {"idle": 80, "busy": 2000} if driver == "stock" else
        {"idle": 20, "busy": 1000}, "cold": {"first": cold, "reregister": cold},
        "link": {"down_ns": 2_000_000, "up_ns": 3_000_000},
        "raw": {"64": {"post_recv": 100.0, "post_send": 500.0, "poll": 400.0, "copy": 10.0, "client": 20.0}},
        "workloads": {"UDP 64 bytes, 1 flow": load(nanoseconds=nanoseconds), **workloads},
    }


@pytest.fixture
def found():
    stock = comparison.driver(measured("stock", 200_000, **{"TCP stream, TSO": load(bytes=100_000)}),
                              counts("ffffffffa0100000", 800), KNOWN, NETWORK)
    ours = comparison.driver(measured("rs", 180_000, **{"TCP stream, TSO": None}),
                             counts("ffffffffa0200000", 400), KNOWN, NETWORK)
    for side in (ours, stock):
        side["machine"] = {"kernel": "7.3.4", "flavour": "release", "cpu": "Westmere",
                           "rings": {"send": 128, "receive": 256}}
    return {"rs": ours, "stock": stock, "workloads": comparison.compare(ours, stock), "skipped": ["TCP stream, TSO"]}


def test_whose_instructions(found):
    (row,) = found["workloads"]
    assert row["stock"]["owners"] == {"driver": 800, "fabric": 300, "network": 500, "copies": 200, "user": 0, "other": 0}
    assert row["rs"]["owners"]["driver"] == 400 and row["rs"]["functions"] == {"start_xmit": 400.0}
    assert row["driver_ratio"] == 0.5


def test_ratio_and_its_bound(found):
    (row,) = found["workloads"]
    assert (row["stock"]["rate"], row["unit"] if "unit" in row else row["rs"]["unit"]) == (500_000, "packets/s")
    assert row["ratio"] == 1.111 and row["goal"] == 1.0
    assert row["bound"] == 1.8


@pytest.mark.parametrize("name, ratio, alone", [
    ("TCP stream, MTU 4092", 1.2, 0.6), ("TCP stream, MTU 4092, checksums", 1.2, 0.6),
    ("TCP stream, MTU 4092, checksums and TSO", 1.0, 0.6), ("UDP 64 bytes, 1 flow", 1.0, 0.6), ("multicast 64 bytes", 1.0, 0.6),
    ("TCP stream, connected, MTU 65520", 1.0, 0.7), ("TCP stream, connected, MTU 9000", 1.15, 0.7),
    ("TCP round trips, connected, MTU 65520", 1.0, 0.7),
])
def test_goals(name, ratio, alone):
    assert (comparison.ratio_goal(name), comparison.alone_goal(name)) == (ratio, alone)


@pytest.mark.parametrize("name, rate", [
    ("TCP stream, MTU 4092", (512.0, "Mbit/s")), ("TCP round trips", (500_000, "round trips/s")),
    ("UDP MTU-size, 1 flow", (1_000_000, "packets/s")),
])
def test_rates(name, rate):
    assert comparison.rate(name, load()) == rate


def test_nothing_received_is_a_failure():
    with pytest.raises(Failure, match="some workload"):
        comparison.workload("some workload", load(rx_packets=0), {"user": 1}, NETWORK)


def test_what_one_cannot_do_has_no_row(found):
    assert [row["workload"] for row in found["workloads"]] == ["UDP 64 bytes, 1 flow"]
    assert "could not: TCP stream, TSO" in "\n".join(comparison.tables(found, 250))


def test_tables_are_restructured_text(found):
    settings = {"halt_level": 2, "report_level": 2}
    lines = comparison.tables(found, 250)
    html = docutils.core.publish_string("\n".join(lines), writer="html", settings_overrides=settings).decode()
    assert html.count("<table") == 5
    text = "\n".join(lines)
    assert "HZ 250" in text and "rings of 128 and 256" in text and "4 nodes" in text
    assert "0.25, missed" in text and "0.50" in text and "1.111 " in text


def test_missed_goals_are_said(found):
    worse = copy.deepcopy(found)
    worse["workloads"][0].update(ratio=0.9, driver_ratio=0.7)
    text = "\n".join(comparison.tables(worse, 250))
    assert "0.900, missed" in text and "0.70, missed" in text


def test_the_plot_is_a_picture(found):
    svg = xml.dom.minidom.parseString(comparison.plot(found["workloads"]))
    bars = [rect for rect in svg.getElementsByTagName("rect") if rect.getAttribute("x") == str(comparison.LEFT)]
    widths = [float(bar.getAttribute("width")) for bar in bars if bar.getAttribute("width") != "12"]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


def test_the_real_document_has_its_marks():
    text = (TOOLS.parent / "Documentation/performance.rst").read_text()
    assert "new table" in figures.written(text, ["new table"], "drivers")
