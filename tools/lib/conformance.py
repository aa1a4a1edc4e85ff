# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What RFC 4391 and RFC 4392 demand, the tests that show it, and the document that says so."""

import ast
import re

import house

FILE = house.TOP / "Documentation/conformance.rst"
STACK = "the network stack"
MANAGER = "the subnet manager"
# (id, level, demand, who else meets it). The level is the RFC's own word; in small letters it is none of RFC 2119.
ROWS = (
    ("R4391-2", "MUST", "IP over unreliable datagrams always works", ""),
    ("R4391-4.a", "MUST", "every MGID has the flag of a transient group", ""),
    ("R4391-4.b", "MUST", "the signature is 0x401B for IPv4, 0x601B for IPv6", ""),
    ("R4391-4.e", "MUST", "255.255.255.255 goes to the broadcast group", ""),
    ("R4391-4.f", "MUST", "all groups of a link have the scope of its broadcast group", ""),
    ("R4391-4.1.a", "MUST", "the broadcast group has the full member's P_Key", ""),
    ("R4391-4.1.b", "SHOULD", "Q_Keys have the top bit set; such a key must work", MANAGER),
    ("R4391-4.1.c", "must", "the group's MTU is no larger than any link's", MANAGER),
    ("R4391-4.1.e", "SHOULD", "the scope is 2 by default", ""),
    ("R4391-5.a", "MUST", "the broadcast group is joined as full member before anything else", ""),
    ("R4391-5.c", "SHOULD", "making the broadcast group is left to the administrator", ""),
    ("R4391-6.a", "MUST", "four bytes of header are in front of each datagram", ""),
    ("R4391-6.b", "MUST", "the reserved bytes are sent as 0 and ignored when received", ""),
    ("R4391-6.c", "MUST", "the types of table 1 are sent", ""),
    ("R4391-6.d", "MUST", "unicast is taken with and without a global route header", ""),
    ("R4391-7.b", "must", "an MTU of 2044 works by default", ""),
    ("R4391-8.a", "MUST", "interface identifiers are made of the GUID, the u bit as it ought to be", STACK),
    ("R4391-8.b", "SHOULD", "the link-local address is made of the GUID", STACK),
    ("R8064-3", "SHOULD", "interface identifiers do not contain the hardware address by default", STACK),
    ("R4391-9.1.1.a", "MUST", "flags in a hardware address are ignored unless they mean something", ""),
    ("R4391-9.1.1.b", "MUST", "unicast goes to the QPN in the hardware address", ""),
    ("R4391-9.1.1.c", "SHOULD", "the GID in it is the subnet prefix and the port's GUID", ""),
    ("R4391-9.1.2.b", "MUST", "all traffic of a link has the Q_Key of the broadcast group", ""),
    ("R4391-9.3", "MUST", "neighbour discovery has two zero bytes in front of the address, length 3", STACK),
    ("R4391-9.4", "SHOULD", "cached addresses are looked up anew: QPNs change", STACK),
    ("R4391-10.a", "must", "a group is joined before anything is sent to it", ""),
    ("R4391-10.c", "must", "what routers pass on, and has no group, goes to the routers", ""),
    ("R4391-10.d", "should", "the LID and attributes of a group are kept", ""),
    ("R4391-10.e", "MUST", "senders subscribe to reports of groups that come and go", ""),
    ("R4391-10.f", "must", "a receiver joins as full member, and makes the group if it is not there", ""),
    ("R4391-10.g", "MUST", "it is made with P_Key, Q_Key, SL, MTU and hop limit of the broadcast group", ""),
    ("R4391-10.h", "SHOULD", "and with its other attributes", ""),
    ("R4391-10.i", "SHOULD", "the group is left when IP leaves it", ""),
    ("R4391-12", "SHOULD", "what fails about groups is logged", ""),
    ("R4391-13.a", "MUST", "setting up a link is privileged", ""),
    ("R4391-13.b", "SHOULD", "controlled Q_Keys work for all traffic", ""),
    ("R4392-4.2.5.a", "must", "who only sends to a group leaves it after a while", ""),
)
# What the RFCs say without a key word. Tests may name it.
FACTS = ("R4391-4.c", "R4391-4.d", "R4391-4.g", "R4391-4.1.d", "R4391-5.b", "R4391-7.a", "R4391-7.c", "R4391-9.1.2.a",
         "R4391-9.2", "R4391-10.b", "R4391-11", "R4392-1.3.1", "R4392-1.3.2.3", "R4392-4.1", "R4392-4.2.5.b", "R4392-5")
# Where a row has no test, or less than a test, why.
NOTES = {
    "R4391-10.e": "not met: Linux has no client for such reports. Groups joined to send only stay as they are while the "
                  "administrator knows the state SendOnlyFullMember, and a request to register again renews all",
    "R4391-8.a": "the kernel sets the bit always: right for every universal GUID",
    "R8064-3": "by ``addr_gen_mode``; the kernel's default is the GUID",
}
HEAD = """\
.. SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

===========================================
Conformance to RFC 4391, RFC 4392, RFC 8064
===========================================

Made by ``tools/conformance``; ``tools/check`` says if it is out of date. Each MUST and SHOULD of datagrams and groups
has a row, with the tests that show it: those that name it. Words in small letters are so in the RFC. What another part
of the system does is said; a test then shows that it works with this driver.

A row counts if one of its tests was seen to fail: ``test_fabric_falsified.py`` runs it with the fault that is named, as
if the driver did what is forbidden.

.. list-table::
   :header-rows: 1
   :widths: 12 8 36 28 16

   * - Id
     - Level
     - Demand
     - Shown by
     - Fails if
"""
FALSIFIED = house.TOP / "tests/integration/test_fabric_falsified.py"
MARK = re.compile(r"\bR(\d{4})-([0-9]+(?:\.[0-9]+)*(?:\.[a-z])?)((?:, -[0-9]+(?:\.[0-9]+)*(?:\.[a-z])?)*)")


def marks(text):
    """The ids that a text names. `R4391-4.a, -4.b` names two."""
    found = []
    for match in MARK.finditer(text):
        number, first, more = match.groups()
        found += [f"R{number}-{part}" for part in [first, *more.replace(", -", " ").split()]]
    return found


def python_tests(text):
    """(name, ids) of the tests in a file of integration tests."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, marks(ast.get_docstring(node) or "")


def kunit_tests(text):
    """(name, ids) of the KUnit tests in a Rust file: what their own comments name, and the one in front."""
    starts = [match.start() for match in re.finditer(r"^(?:[ \t]*///[^\n]*\n)*[ \t]*#\[test\]", text, re.M)]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        part = text[start:end]
        name = re.search(r"\bfn (\w+)", part)
        comments = "\n".join(re.findall(r"//[^\n]*", part))
        if name:
            yield name[1], marks(comments)


def shown():
    """Tests by the row that they show."""
    tests = {}
    for path in sorted((house.TOP / "tests/integration").glob("test_*.py")):
        for name, ids in python_tests(path.read_text()):
            for row in ids:
                tests.setdefault(row, []).append(f"{path.stem}.py: {name}")
    files = house.output_of(["git", "ls-files", "-z", "*.rs"], cwd=house.TOP).split("\0")
    for name in sorted(filter(None, files)):
        for test, ids in kunit_tests((house.TOP / name).read_text()):
            for row in ids:
                tests.setdefault(row, []).append(f"{name}: {test}")
    return {row: list(dict.fromkeys(names)) for row, names in tests.items()}


def falsified():
    """The faults with which tests of a row fail, by the row; and (suite, test, row) of each."""
    found, named = {}, []
    for node in ast.parse(FALSIFIED.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "CASES":
            for suite, test, _, fault, rows in ast.literal_eval(node.value):
                for row in rows:
                    found.setdefault(row, []).append(fault)
                    named.append((suite, test, row))
    return {row: list(dict.fromkeys(faults)) for row, faults in found.items()}, named


def cell(lines):
    return "\n".join(f"{'     - ' if not at else '       '}| {line}" for at, line in enumerate(lines)) + "\n"


def document():
    tests, out = shown(), [HEAD]
    faults, _ = falsified()
    for row, level, demand, other in ROWS:
        by = [f"``{name}``" for name in tests.get(row, [])]
        if row in NOTES:
            by.insert(0, NOTES[row])
        if not by:
            by = ["no test"]
        out.append(f"   * - {row}\n     - {level}\n     - {demand}{f' (by {other})' if other else ''}\n"
                   f"{cell(by)}{cell(faults.get(row, ['nothing was tried']))}")
    missing = [row for row, *_ in ROWS if row not in tests or row not in faults]
    out.append(f"\n{len(ROWS) - len(missing)} of {len(ROWS)} rows count"
               f"{'; these do not: ' + ', '.join(missing) if missing else ''}.\n")
    return "".join(out)


def unknown(tests):
    """Ids of these RFCs that tests name and that there are none of."""
    known = {*FACTS, *(row for row, *_ in ROWS)}
    return sorted(row for row in tests if row.startswith(("R4391", "R4392", "R8064")) and row not in known)


def complaints():
    """What is wrong with the document, and with what tests name."""
    found = [f"no requirement is called {row}, and {', '.join(names)} names it"
             for row, names in shown().items() if row in unknown([row])]
    tests = shown()
    found += [f"{FALSIFIED.name} has {test} fail for {row}, which it does not name" for suite, test, row in falsified()[1]
              if f"test_{suite}.py: {test}" not in tests.get(row, [])]
    if not FILE.exists() or FILE.read_text() != document():
        found.append(f"{FILE.relative_to(house.TOP)} is out of date: run tools/conformance")
    return found
