# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Host tests: the tools themselves, without a kernel."""

import importlib.machinery
import importlib.util
import pathlib
import sys

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path[:0] = [str(TOOLS / "lib"), str(TOOLS / "guest")]


def load_tool(name):
    """Imports a tool, whose file name has no .py."""
    loader = importlib.machinery.SourceFileLoader(f"tool_{name}", str(TOOLS / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module
