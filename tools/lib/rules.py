# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The house rules that a script can check. Each rule yields (line number, message)."""

import re

# Folders below the line: the only ones that may say `unsafe` or name the bindings.
BELOW = ("ib", "net", "sync", "bindings")
# Crate roots, which alone declare the bindings' module.
ROOTS = ("ipoib_rs.rs", "tests/bench/raw_verbs.rs")
# Files elsewhere that may hold unsafe code: the provider glue of the test fabric, and the generated
# code that only this glue names.
UNSAFE_ELSEWHERE = ("tests/fabric/glue.rs", "tests/fabric/bindings/mod.rs")
# Files that use `core` only.
PURE = ("wire.rs", "ring.rs")
# What the layers below may take from this crate: each other, and what is no part of IPoIB.
LAYERS = ("ib", "net", "sync", "bindings", "ring")

PANICS = re.compile(r"\.unwrap\s*\(\s*\)|\.expect\s*\(|\b(panic|todo|unimplemented|dbg)!")
TOKEN = re.compile(
    r"""
    (?P<line>//[^\n]*)
  | (?P<block>/\*)
  | (?P<raw>\b[bc]?r(?P<hashes>\#*)"(?:.|\n)*?"(?P=hashes))
  | (?P<string>[bc]?"(?:\\(?:.|\n)|[^"\\])*")
  | (?P<char>b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F_]+\}|.)|[^'\\\n])')
    """,
    re.VERBOSE,
)


def blank(text):
    """Spaces in place of everything but the line ends."""
    return re.sub(r"[^\n]", " ", text)


def code_of(text):
    """Source code with comments and literals blanked out, the layout unchanged."""
    out, at = [], 0
    while match := TOKEN.search(text, at):
        out.append(text[at : match.start()])
        end = match.end()
        if match["block"]:
            depth = 1
            for mark in re.finditer(r"/\*|\*/", text[end:]):
                depth += 1 if mark[0] == "/*" else -1
                if depth == 0:
                    end += mark.end()
                    break
            else:
                end = len(text)
        out.append(blank(text[match.start() : end]))
        at = end
    out.append(text[at:])
    return "".join(out)


def without_tests(code):
    """Code (as from `code_of`) with test modules blanked out."""
    found = re.compile(r"#\[(?:kunit_tests\b|cfg\([^\]]*(?:\btest\b|KUNIT))[^\]]*\](?:\s*#\[[^\]]*\])*"
                       r"\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+\w+\s*\{")
    at = 0
    while match := found.search(code, at):
        depth, end = 1, match.end()
        while depth and end < len(code):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        code = code[: match.start()] + blank(code[match.start() : end]) + code[end:]
        at = end
    return code


def hits(pattern, code):
    for match in re.finditer(pattern, code):
        yield code.count("\n", 0, match.start()) + 1, match


def line_rule(path, text):
    """No `unsafe` and no `bindings` above the line. A crate root alone declares the module."""
    if path.split("/")[0] in BELOW or path in UNSAFE_ELSEWHERE:
        return
    code = re.sub(r"^mod bindings;$", "", code_of(text), flags=re.M) if path in ROOTS else code_of(text)
    for line, match in hits(r"\b(unsafe|bindings)\b", code):
        yield line, f"`{match[1]}` above the line: only {', '.join(BELOW)} may use it"


def layer_rule(path, text):
    """ib/, net/ and sync/ know nothing of IPoIB."""
    if path.split("/")[0] not in ("ib", "net", "sync"):
        return
    code = code_of(text)
    depth = len(path.split("/")) - (1 if path.endswith("/mod.rs") else 0)
    up = r"\bsuper::" * depth + r"(\w+)"
    for line, match in [*hits(r"\bcrate::\{?\s*(\w+)", code), *hits(up, code)]:
        if match[1] not in LAYERS and match[1] != "super":
            yield line, f"`{match[0]}`: this layer takes only {', '.join(LAYERS)} from the crate"


def pure_rule(path, text):
    """Formats and arithmetic use `core` only."""
    if path not in PURE:
        return
    for line, match in hits(r"\b(kernel|crate|std|alloc)::", without_tests(code_of(text))):
        yield line, f"`{match[0]}` in a file that uses `core` only"


def safety_rule(path, text):
    """Every unsafe block and impl has its reason right above."""
    lines = text.splitlines()
    code = code_of(text).splitlines()
    for number, _ in hits(r"\bunsafe\s*\{|\bunsafe\s+impl\b", "\n".join(code)):
        if not has_reason(lines, code, number - 1):
            yield number, "unsafe without a `// SAFETY:` comment right above"


def has_reason(lines, code, at):
    """Looks up from a line, past the start of its statement and attributes, for the comment."""
    at -= 1
    while at >= 0:
        raw, bare = lines[at].strip(), code[at].strip()
        if raw.startswith("//") or (raw and not bare):
            break
        if not bare or (bare[-1] in ";{}," and not bare.startswith("#[")):
            return False
        at -= 1
    while at >= 0 and lines[at].strip() and not code[at].strip():
        if "SAFETY:" in lines[at]:
            return True
        at -= 1
    return False


def panic_rule(path, text):
    """Nothing in the driver panics on purpose."""
    for line, match in hits(PANICS, without_tests(code_of(text))):
        yield line, f"`{match[0].strip()}` outside a test module"


def suite_rule(path, text):
    """KUnit suites are in the test builds only: `insmod` would run them."""
    if "/selftest" in path:
        return
    for line, match in hits(r"(#\[cfg\([^\]]*KUNIT[^\]]*\]\s*)?#\[[\w:\s]*\bkunit_tests\b", code_of(text)):
        if not match[1]:
            yield line, "a KUnit suite without `#[cfg(…KUNIT_TEST)]` right above"


def guard_rule(path, text):
    """An object that stands for something taken is made only once that is taken."""
    if path.split("/")[0] not in ("ib", "net", "sync"):
        return
    for line, _ in hits(r"\.then_some\(\s*Self\b", code_of(text)):
        yield line, "`then_some(Self…)` makes, and drops, the object even if the condition does not hold: use `if`"


def helper_rule(path, text):
    """C helpers are inline functions and macros of the kernel made callable, without logic."""
    if not re.fullmatch(r"(tests/fabric/)?bindings/[^/]+\.c", path):
        return
    code = re.sub(r"^\s*#.*(?:\\\n.*)*$", lambda found: blank(found[0]), code_of(text), flags=re.M)
    for line, match in hits(r"\b(if|for|while|switch|goto)\b", code):
        yield line, f"`{match[1]}` in a C helper: logic belongs into Rust"


def spdx_rule(path, text):
    lines = text.splitlines()
    if lines and lines[0].startswith("#!"):
        del lines[0]
    if not lines or "SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause" not in lines[0]:
        yield 1, "the first line must be: SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause"


RUST_RULES = (line_rule, layer_rule, pure_rule, safety_rule, panic_rule, suite_rule, guard_rule)
# Files that carry no licence line of their own.
NO_SPDX = re.compile(r"^(LICENSE.*|.*\.(json|bin|pcap|txt))$")


def violations(path, text):
    """All violations in a file as readable lines."""
    rules = []
    if path.endswith(".rs"):
        rules += RUST_RULES
    if path.endswith(".c"):
        rules.append(helper_rule)
    if not NO_SPDX.match(path) or path.endswith("requirements.txt"):
        rules.append(spdx_rule)
    return [f"{path}:{line}: {message}" for rule in rules for line, message in sorted(rule(path, text))]
