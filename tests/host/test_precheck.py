# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Every reason why a module cannot be built has its own message."""

import pytest
from conftest import load_tool

precheck = load_tool("precheck")
Failure = precheck.Failure

RUSTC = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)"


def program(folder, name, says):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path):
    """A search path with the right tools."""
    tools = tmp_path / "bin"
    program(tools, "rustc", RUSTC)
    program(tools, "bindgen", "bindgen 0.72.1")
    program(tools, "clang-22", "Debian clang version 22.1.8")
    return str(tools)


@pytest.fixture
def kdir(tmp_path):
    """A build folder that looks right; the options are set by `configure`."""
    folder = tmp_path / "kernel"
    (folder / "include/config").mkdir(parents=True)
    (folder / "Makefile").touch()
    (folder / "rust").mkdir()
    for name in precheck.METADATA:
        (folder / "rust" / name).touch()
    configure(folder)
    return folder


def configure(kdir, **changes):
    options = {
        "CONFIG_RUST": "y",
        "CONFIG_INFINIBAND": "m",
        "CONFIG_CC_IS_CLANG": "y",
        "CONFIG_CC_VERSION_TEXT": '"Debian clang version 22.1.8 (1~deb12u1)"',
        "CONFIG_RUSTC_VERSION_TEXT": RUSTC,
        **changes,
    }
    lines = [f"{name}={value}\n" for name, value in options.items() if value is not None]
    (kdir / "include/config/auto.conf").write_text("".join(lines))


def refusal(kdir, path):
    with pytest.raises(Failure) as caught:
        precheck.check(kdir, path)
    return str(caught.value)


def test_good_kernel(kdir, path):
    assert precheck.check(kdir, path) == {
        "RUSTC": f"{path}/rustc", "BINDGEN": f"{path}/bindgen", "LLVM": "-22",
    }


def test_built_by_gcc(kdir, path):
    configure(kdir, CONFIG_CC_IS_CLANG=None)
    assert "LLVM" not in precheck.check(kdir, path)


def test_quoted_strings(kdir, path):
    configure(kdir, CONFIG_RUSTC_VERSION_TEXT=f'"{RUSTC}"')
    assert precheck.check(kdir, path)["RUSTC"] == f"{path}/rustc"


def test_no_kdir(tmp_path, path):
    assert "there is no kernel build folder" in refusal(tmp_path / "nothing", path)


def test_not_configured(kdir, path):
    (kdir / "include/config/auto.conf").unlink()
    assert "configured and built kernel" in refusal(kdir, path)


@pytest.mark.parametrize("value", [None, "n"])
def test_rust_off(kdir, path, value):
    configure(kdir, CONFIG_RUST=value)
    assert "CONFIG_RUST is off" in refusal(kdir, path)


def test_infiniband_off(kdir, path):
    configure(kdir, CONFIG_INFINIBAND=None)
    assert "CONFIG_INFINIBAND is off" in refusal(kdir, path)


@pytest.mark.parametrize("name", precheck.METADATA)
def test_metadata_missing(kdir, path, name):
    (kdir / "rust" / name).unlink()
    message = refusal(kdir, path)
    assert "Rust metadata" in message and name in message


def test_other_rustc(kdir, path):
    configure(kdir, CONFIG_RUSTC_VERSION_TEXT="rustc 1.85.0 (4d91de4e4 2025-02-17)")
    message = refusal(kdir, path)
    assert "another Rust compiler" in message
    assert "1.85.0" in message and "1.96.0" in message


def test_right_rustc_further_down_the_path(kdir, path, tmp_path):
    program(tmp_path / "rustup", "rustc", "rustc 1.99.0 (nightly)")
    found = precheck.check(kdir, f"{tmp_path}/rustup:{path}")
    assert found["RUSTC"] == f"{path}/rustc"


def test_bindgen_missing(kdir, path, tmp_path):
    (tmp_path / "bin/bindgen").unlink()
    assert "bindgen is missing" in refusal(kdir, path)


@pytest.mark.parametrize("version", ["bindgen 0.71.0", "bindgen 0.66.1", "bindgen"])
def test_bindgen_too_old(kdir, path, tmp_path, version):
    program(tmp_path / "bin", "bindgen", version)
    assert "too old" in refusal(kdir, path)


def test_bindgen_old_enough(kdir, path, tmp_path):
    program(tmp_path / "bin", "bindgen", "bindgen 0.71.1")
    precheck.check(kdir, path)


def test_clang_missing(kdir, path, tmp_path):
    configure(kdir, CONFIG_CC_VERSION_TEXT="Debian clang version 77.1.0")
    message = refusal(kdir, path)
    assert "which is not here" in message and "clang-77" in message
