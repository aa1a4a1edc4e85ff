# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What every tool here shares: where things live, how it speaks, how it runs a long step."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
LLVM = "-22"


# The programs of the steps that run now, in whatever threads; None once no more may start.
_running = set()
_lock = threading.Lock()


class Failure(Exception):
    """An error for the person at the prompt: what is wrong, where, what to do."""


def say(text):
    print(text, flush=True)


def elapsed(seconds):
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def cache():
    """The cache shared by every checkout of one user."""
    base = os.environ.get("IPOIB_RS_CACHE")
    if base:
        return pathlib.Path(base).resolve()
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home).resolve() / "ipoib_rs"


def build_env():
    """The environment of every kernel and module build.

    Debian's rustc must come before a rustup one: it alone has the sources of `core`.
    """
    env = dict(os.environ)
    env["PATH"] = f"{cache()}/bindgen/bin:/usr/bin:/usr/sbin:{env.get('PATH', '')}"
    env.setdefault("LIBCLANG_PATH", f"/usr/lib/llvm{LLVM}/lib")
    env["LC_ALL"] = "C"
    # A make above us must not lend its job server to a build with its own -j.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RUSTUP_TOOLCHAIN"):
        env.pop(name, None)
    return env


def output_of(argv, **kwargs):
    return subprocess.run(argv, check=True, text=True, stdout=subprocess.PIPE, **kwargs).stdout


def need_space(path, gib, what):
    path.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path).free / 2**30
    if free < gib:
        raise Failure(
            f"{what} needs {gib} GiB in {path}, {free:.1f} GiB are free.\n"
            "Free some space, or set IPOIB_RS_CACHE to a folder on a larger disk."
        )


@contextlib.contextmanager
def locked(name):
    """One process at a time for the named thing in the cache."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / f".{name}.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is working on {name} …")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def tail(path, count=30):
    try:
        lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join("    " + line for line in lines[-count:])


def launch(argv, **kwargs):
    """Starts a program of a step."""
    global _running
    with _lock:
        if _running is None:
            raise Failure("we were told to stop")
        process = subprocess.Popen([str(word) for word in argv], **kwargs)
        _running.add(process)
    return process


def reap(process):
    """Waits for the end of a program of a step. Whoever is told to stop meanwhile ends it: make then ends its own."""
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    with _lock:
        if _running is not None:
            _running.discard(process)
    return status


def end_steps():
    """Ends the steps of all threads, and lets no other begin."""
    global _running
    with _lock:
        running, _running = _running or (), None
    for process in running:
        process.terminate()


def step(title, argv, log, env=None, cwd=None, every=15, weigh=None, check=True):
    """Runs a long command: output to `log`, a line of progress every few seconds.

    `weigh(line)` turns a line of output into the short text shown as progress. With `check` off
    a failure is the caller's business: the exit status is returned and nothing is said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    latest = {"lines": 0, "text": ""}
    done = threading.Event()

    def progress():
        while not done.wait(every):
            say(
                f"  [{elapsed(time.monotonic() - start)}] {title}: "
                f"{latest['lines']} steps, {latest['text']}"
            )

    say(f"{title} …")
    reporter = threading.Thread(target=progress, daemon=True)
    reporter.start()
    try:
        with open(log, "w") as out:
            process = launch(
                argv,
                env=env,
                cwd=cwd,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                for line in process.stdout:
                    out.write(line)
                    out.flush()
                    latest["lines"] += 1
                    latest["text"] = (weigh or str.strip)(line)[:70]
            except BaseException:
                process.terminate()
                raise
            finally:
                status = reap(process)
    finally:
        done.set()
        reporter.join()
    took = elapsed(time.monotonic() - start)
    if not check:
        return status
    if status:
        raise Failure(f"{title}: failed after {took} (exit {status}). Last lines of {log}:\n{tail(log)}")
    say(f"{title}: done in {took}")
    return status


def main(run):
    """Runs a tool's main function and turns its failures into a message and an exit code."""
    try:
        sys.exit(run())
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)
    except subprocess.CalledProcessError as failure:
        print(f"error: `{' '.join(map(str, failure.cmd))}` failed with exit {failure.returncode}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def config_of(path):
    """The set symbols of a .config or a fragment, `n` for a line that turns one off."""
    found = {}
    for line in pathlib.Path(path).read_text().splitlines():
        if match := re.match(r"(CONFIG_\w+)=(.*)$", line):
            found[match[1]] = match[2]
    return found
