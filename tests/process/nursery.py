"""A process with torch loaded that forks others on request, so that a rack starts in milliseconds.

What it forks is an ordinary process with its own session, signals, environment and output file.
Talks in lines of JSON. In: {"argv", "env", "log"}; argv is a module and its arguments. Out:
{"pid"} as the answer, {"ended", "code"} whenever one ends. At the end of its input it kills all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import sys
from typing import Any

READ_BYTES = 1 << 16


def main() -> None:
    request = _serve()
    if request is not None:  # in the child, far from the loop: it ends like any other program
        sys.argv = request["argv"]
        runpy.run_module(request["argv"][0], run_name="__main__", alter_sys=True)


def _serve() -> dict[str, Any] | None:
    """Fork until the input ends; returns the request in a child, None in the nursery itself."""
    _load()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads: set *_NUM_THREADS=1"
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: set[int] = set()
    text = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, READ_BYTES)
            _reap(children)
        if 0 not in ready:
            continue
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(request, woken, wake)
                return dict(request)
            children.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _load() -> None:
    """Import what takes seconds; torch's optimizers bring half of it with their first step.

    Nothing of it is rubbish. A child that does not know this looks through all of it for some when
    it ends, and so copies it: a second of work.
    """
    import torch

    import mend.api
    import mend.cli.coordinate
    import mend.runtime.witness  # noqa: F401

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    gc.collect()
    gc.freeze()


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(request: dict[str, Any], *inherited: int) -> None:
    """Leave everything of the nursery behind but its imports."""
    signal.set_wakeup_fd(-1)
    # Python leaves Ctrl-C alone where a shell in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in inherited:
        os.close(descriptor)
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(log)


if __name__ == "__main__":
    main()
