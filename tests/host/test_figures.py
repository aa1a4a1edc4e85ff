# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""From counts and counters to the tables of Documentation/performance.rst."""

import copy

import docutils.core
import figures
import pytest
from conftest import TOOLS
from house import Failure

NETWORK = {"ip_rcv", "skb_copy_bits", "tcp_ack"}
SEND = "ipoib_rs _RNvMNtC1_13ipoib_rs_main2udNtB2_2Tx4send"
RECEIVE = "ipoib_rs _RNvXs2_NtC1_13ipoib_rs_main2udNtB5_8RecvPollNtNtNtB7_2ib2cq4Poll4poll"
STREAM = "[  7.1] raw_verbs: stream size=4096 window=128 received=240000 posts=15000 nanoseconds=4000000000 lost=3"
TRIPS = "[  7.1] raw_verbs: round_trips size=64 window=128 received=40000 posts=40001 nanoseconds=2000000000 lost=0"


def node(sent=0, received=0, posts=0, ip=0):
    return {"tx_sent_packets": sent, "rx_delivered_packets": received, "tx_posts": posts, "ip_receives": ip}


KALLSYMS = f"""\
ffffffff81000000 T ip_rcv
ffffffff81001000 T crc32_le
ffffffff81002000 D data
ffffffffa0000000 t rxe_sender\t[rdma_rxe]
ffffffffa0100000 t {SEND.split()[1]}\t[ipoib_rs]
ffffffffa0101000 t {RECEIVE.split()[1]}\t[ipoib_rs]
"""
RAW_VERBS = "ffffffffa0200000 t pump\t[raw_verbs]"
COUNTS = """\
snapshot 1 1000
ffffffff81000010 100
snapshot 2 5100
ffffffff81000010 100
ffffffff81001000 500
ffffffffa0000004 2500
ffffffffa0200008 1000
snapshot 3 10000
snapshot 4 1960000
ffffffff81000000 800000
ffffffff81000ffc 100000
ffffffffa0100000 200000
ffffffffa0100004 300000
ffffffffa0101000 450000
""".splitlines()


def workload(end_to_end, counters):
    return {"end_to_end": end_to_end, "counters": counters, "marks": [3, 4]}


def raw(line):
    return {"log": line, "marks": [1, 2], "symbols": RAW_VERBS}


MEASURED = {
    "kernel": "7.3.4-ipoib-release", "flavour": "release", "cpu": "Westmere", "hz": 250, "command": "make bench",
    "rings": {"send": 128, "receive": 256}, "mtu": 4092,
    "raw": {"stream of 4096": raw(STREAM), "stream of 64": raw(STREAM.replace("4096", "64")),
            "round trips of 64": raw(TRIPS)},
    "workloads": {
        "TCP stream": workload({"Mbit/s": 983.0}, [node(sent=900, received=100, posts=100, ip=90),
                                                   node(sent=100, received=900, posts=100, ip=90)]),
        "UDP 64 bytes": workload({"Mbit/s": 1.0, "packets/s": 20_000}, [node(sent=800, posts=800),
                                                                       node(received=800, ip=800)]),
        "TCP round trips": workload({"round trips/s": 5000}, [node(500, 500, 500, 500), node(500, 500, 500, 500)]),
    },
}


def figures_of(measured):
    return figures.figures(measured, figures.snapshots(COUNTS), figures.symbols(KALLSYMS), NETWORK)


@pytest.fixture(scope="module")
def found():
    return figures_of(MEASURED)


def row(found, name):
    return next(row for row in found["workloads"] if row["workload"] == name)


@pytest.mark.parametrize("place, whose", [
    ("user", "user"),
    ("ipoib_rs anything_crc32", "driver"),
    ("raw_verbs anything", "driver"),
    ("rdma_rxe rxe_receiver", "rxe"),
    ("vmlinux crc32_lsb_pclmul_sse", "CRC"),
    ("vmlinux memcpy_orig", "copies"),
    ("vmlinux rep_movs_alternative", "copies"),
    ("vmlinux csum_partial", "copies"),
    ("vmlinux _copy_to_iter", "copies"),
    ("vmlinux ip_rcv", "network"),
    ("vmlinux ip_rcv.cold", "network"),
    ("vmlinux finish_task_switch", "other"),
    ("virtio_net xmit", "other"),
])
def test_owners(place, whose):
    assert figures.owner(place, NETWORK) == whose


def test_network_functions_come_from_the_source(tmp_path):
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / "net/ipv4/x.c").write_text(
        "/* not(this) */\n#define NOT_THIS(x) x\nstatic int ip_one(int a)\n{\n\treturn not_this(a);\n}\n"
        "struct sk_buff *ip_two(void)\n{\n}\n")
    assert figures.network_functions(tmp_path) == {"ip_one", "ip_two"}
    with pytest.raises(Failure):
        figures.network_functions(tmp_path / "net/ipv6")


@pytest.mark.parametrize("place, direction", [
    (SEND, "transmit"), (RECEIVE, "receive"), ("ipoib_rs _RNvNtC1_13ipoib_rs_main2ud6refill", "receive"),
    ("ipoib_rs cleanup", "other"), ("vmlinux RecvPoll", None), ("user", None),
])
def test_ways(place, direction):
    assert figures.way(place) == direction


def test_raw_stream():
    assert figures.raw_figures(STREAM) == {
        "end_to_end": {"packets/s": 60000, "Mbit/s": 1966.1}, "lost": 3, "window": 128, "requests_per_post": 16.0,
        "instructions_per_packet": 16667}


def test_raw_round_trip_has_two_packets():
    assert figures.raw_figures(TRIPS)["end_to_end"] == {"round trips/s": 20000}
    assert figures.raw_figures(TRIPS)["instructions_per_packet"] == 25000


def test_each_workload_has_its_ceiling(found):
    assert row(found, "TCP stream")["ceiling"] == {"raw": "stream of 4096", "unit": "Mbit/s", "value": 1966.1}
    assert row(found, "TCP stream")["ratio"] == 0.5
    assert row(found, "UDP 64 bytes")["ceiling"] == {"raw": "stream of 64", "unit": "packets/s", "value": 60000}
    assert row(found, "UDP 64 bytes")["ratio"] == 0.333
    assert row(found, "TCP round trips")["ratio"] == 0.25


def test_driver_alone(found):
    assert row(found, "TCP stream")["driver_instructions_per_packet"] == {"transmit": 500, "receive": 450}
    assert row(found, "UDP 64 bytes")["driver_instructions_per_packet"] == {"transmit": 625, "receive": 562}


def test_batches(found):
    assert row(found, "TCP stream")["requests_per_post"] == 5.0
    assert row(found, "TCP stream")["frames_per_gro_packet"] == 10.0
    assert row(found, "UDP 64 bytes")["requests_per_post"] == 1.0


def test_counts_become_functions():
    counts, known = figures.snapshots(COUNTS), figures.symbols(KALLSYMS)
    assert figures.by_function(counts[3], counts[4], known) == {
        "vmlinux ip_rcv": 900_000, SEND: 500_000, RECEIVE: 450_000, "user": 100_000}


def test_counts_from_before_do_not_count():
    counts = figures.snapshots(COUNTS)
    known = sorted(figures.symbols(KALLSYMS) + figures.symbols(RAW_VERBS))
    assert figures.by_function(counts[1], counts[2], known) == {
        "vmlinux crc32_le": 500, "rdma_rxe rxe_sender": 2500, "raw_verbs pump": 1000, "user": 100}


def test_whose_instructions(found):
    tcp = row(found, "TCP stream")
    assert tcp["instructions_per_packet"] == 1950
    assert tcp["owners"]["network"] == {"instructions": 900, "share": 0.4615}
    assert sum(part["instructions"] for part in tcp["owners"].values()) == 1950
    # Those of the raw verbs are in proportion to what a packet takes in an undisturbed run.
    stream = found["raw"]["stream of 4096"]
    assert stream["instructions_per_packet"] == 16667
    assert stream["owners"]["driver"] == {"instructions": round(16667 * 1000 / 4100), "share": 0.2439}


def test_nothing_sent_is_a_failure():
    measured = copy.deepcopy(MEASURED)
    measured["workloads"]["TCP stream"]["counters"] = [node(), node()]
    with pytest.raises(Failure, match="TCP stream"):
        figures_of(measured)


def test_tables_say_what_counts(found):
    text = "\n".join(figures.tables(found))
    assert "500 of 600 " in text and "625 of 600, over" in text and "562 of 500, over" in text
    for word in ("7.3.4-ipoib-release", "HZ 250", "Westmere", "128 (send)", "256 (receive)", "make bench"):
        assert word in text


def test_tables_are_restructured_text(found, tmp_path):
    settings = {"halt_level": 2, "report_level": 2}
    html = docutils.core.publish_string("\n".join(figures.tables(found)), writer="html",
                                        settings_overrides=settings).decode()
    assert html.count("<table") == 3 and "625 of 600, over" in html


DOCUMENT = "Title\n\n.. bench: begin (by X)\nold\n.. bench: end\n\nmore\n"


def test_the_tables_go_between_the_marks():
    once = figures.written(DOCUMENT, ["new", "", "lines", ""])
    assert once == "Title\n\n.. bench: begin (by X)\n\nnew\n\nlines\n\n.. bench: end\n\nmore\n"
    assert figures.written(once, ["new", "", "lines"]) == once


@pytest.mark.parametrize("text", [
    "no marks\n",
    "\n.. bench: begin\n",
    "\n.. bench: end\n\n.. bench: begin\n",
    DOCUMENT + DOCUMENT,
    DOCUMENT.replace("\n.. bench: end", " .. bench: end"),
])
def test_a_document_without_its_marks_is_left_alone(text):
    with pytest.raises(Failure, match="bench: begin"):
        figures.written(text, ["new"])


def test_the_real_document_has_its_marks():
    text = (TOOLS.parent / "Documentation/performance.rst").read_text()
    assert "new table" in figures.written(text, ["new table"])
