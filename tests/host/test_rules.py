# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The house rules: what they catch and what they leave alone."""

import pytest
import rules

SPDX = "// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause\n"


def broken(path, body, spdx=SPDX):
    return rules.violations(path, spdx + body)


BAD = [
    ("ud.rs", "// SAFETY: x.\nlet a = unsafe { b };\n", "above the line"),
    ("ud.rs", "use crate::bindings::x;\n", "above the line"),
    ("control/sysfs.rs", "// SAFETY: x.\nunsafe impl Send for X {}\n", "above the line"),
    ("ipoib_rs.rs", "use bindings::x;\n", "above the line"),
    ("tests/bench/raw_verbs.rs", "use bindings::x;\n", "above the line"),
    ("tests/bench/end.rs", "mod bindings;\n", "above the line"),
    ("tests/fabric/hca.rs", "use crate::bindings::x;\n", "above the line"),
    ("ib/qp.rs", "use crate::port::Port;\n", "this layer"),
    ("ib/qp.rs", "use crate::{\n    port, //\n};\n", "this layer"),
    ("net/skb.rs", "fn f() { crate::neigh::g() }\n", "this layer"),
    ("ib/mod.rs", "use super::port;\n", "this layer"),
    ("ib/qp.rs", "use super::super::port;\n", "this layer"),
    ("wire.rs", "use kernel::prelude::*;\n", "`core` only"),
    ("ring.rs", "use crate::wire;\n", "`core` only"),
    ("ib/qp.rs", "let a = unsafe { b };\n", "SAFETY"),
    ("ib/qp.rs", "// It is fine.\nlet a = unsafe { b };\n", "SAFETY"),
    ("ib/qp.rs", "// SAFETY: x.\nlet a = b;\nlet c = unsafe { d };\n", "SAFETY"),
    ("ib/qp.rs", "// SAFETY: x.\n\nunsafe impl Send for X {}\n", "SAFETY"),
    ("ib/qp.rs", "f(\n    // SAFETY: x.\n    unsafe { a },\n    unsafe { b },\n);\n", "SAFETY"),
    ("ud.rs", "let a = b.unwrap();\n", "outside a test module"),
    ("ud.rs", 'let a = b.expect("c");\n', "outside a test module"),
    ("ud.rs", 'panic!("x");\n', "outside a test module"),
    ("ud.rs", "todo!()\n", "outside a test module"),
    ("ud.rs", "#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]\n#[kunit_tests(a)]\nmod tests { fn f() { b.unwrap(); } }\nfn g() { c.unwrap(); }\n",
     "outside"),
    ("bindings/helpers.c", "int f(int a)\n{\n\tif (a)\n\t\treturn 1;\n\treturn 0;\n}\n", "C helper"),
    ("bindings/params.c", "void f(void)\n{\n\twhile (1) ;\n}\n", "C helper"),
    ("tests/fabric/bindings/helpers.c", "void f(void)\n{\n\tfor (;;) ;\n}\n", "C helper"),
    ("tests/fabric/subnet.rs", "// SAFETY: x.\nlet a = unsafe { b };\n", "above the line"),
    ("tests/fabric/glue.rs", "let a = unsafe { b };\n", "SAFETY"),
    ("tests/fabric/qp.rs", "let a = b.unwrap();\n", "outside a test module"),
    ("net/rtnl.rs", "#[kernel::macros::kunit_tests(a)]\nmod tests {}\n", "right above"),
    ("net/rtnl.rs", "#[cfg(CONFIG_OTHER)]\n#[kunit_tests(a)]\nmod tests {}\n", "right above"),
    ("net/rtnl.rs", "fn f() -> Option<Self> {\n    taken().then_some(Self(x))\n}\n", "use `if`"),
]


@pytest.mark.parametrize("path, body, message", BAD)
def test_caught(path, body, message):
    found = broken(path, body)
    assert len(found) == 1 and message in found[0], found


GOOD = [
    ("ud.rs", "// unsafe bindings panic!()\nlet a = \"unsafe { } .unwrap()\";\nlet b = r#\"unsafe\"#;\n"),
    ("ud.rs", "/* unsafe /* nested */ unsafe */\nlet a = 'x';\nlet b: &'static str = c;\n"),
    ("ud.rs", "#[expect(dead_code, reason = \"later\")]\nfn f() {}\n"),
    ("ud.rs", "let a = b.unwrap_or(c);\nlet d = e.expect_err;\n"),
    ("ud.rs", "#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]\n#[kunit_tests(a)]\nmod tests {\n    fn f() { b.unwrap(); if x { panic!() } }\n}\n"),
    ("ud.rs", "#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]\n#[kunit_tests(a)]\nmod tests { fn f() { b.unwrap(); } }\n"),
    ("ipoib_rs.rs", "mod bindings;\nmod ib;\n"),
    ("tests/bench/raw_verbs.rs", "#[path = \"../../bindings/mod.rs\"]\nmod bindings;\n"),
    ("ib/qp.rs", "use crate::bindings;\nuse crate::net::Skb;\nuse super::pd::Pd;\n"),
    ("ib/mod.rs", "use crate::sync::Work;\n"),
    ("ib/cm/req.rs", "use super::super::qp;\n"),
    ("wire.rs", "use core::mem::size_of;\n#[cfg(test)]\nmod tests { use kernel::prelude::*; }\n"),
    ("ib/qp.rs", "// SAFETY: x,\n// and y.\nlet a = unsafe { b };\n"),
    ("ib/qp.rs", "// SAFETY: x.\n#[inline]\nunsafe impl Send for X {}\n"),
    ("ib/qp.rs", "// SAFETY: x.\nlet a =\n    unsafe { b };\n"),
    ("ib/qp.rs", "f(\n    // SAFETY: x.\n    unsafe { a },\n    // SAFETY: y.\n    unsafe { b },\n);\n"),
    ("ib/qp.rs", "/* SAFETY: x. */\nlet a = unsafe { b };\n"),
    ("ib/qp.rs", "unsafe fn f() {}\nunsafe extern \"C\" fn g() {}\n"),
    ("ib/selftest.rs", "#[kernel::macros::kunit_tests(a)]\nmod tests {}\n"),
    ("ib/srq.rs", "#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]\n#[kernel::macros::kunit_tests(a)]\nmod tests {}\n"),
    ("net/rtnl.rs", "let a = b.then(|| Self(x));\nlet c = d.then_some(e);\n"),
    ("bindings/helpers.c", "/* if for while */\n#if X\n#endif\nint f(void)\n{\n\treturn g();\n}\n"),
]


@pytest.mark.parametrize("path, body", GOOD)
def test_left_alone(path, body):
    assert broken(path, body) == []


def test_spdx():
    assert rules.violations("a.py", "print()\n")
    assert rules.violations("a.py", "#!/usr/bin/python3\n# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause\n") == []
    assert rules.violations("a.py", "# SPDX-License-Identifier: MIT\n")
    assert rules.violations("LICENSE", "two licences\n") == []
