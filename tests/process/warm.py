"""`python`, but warm: has a nursery fork what it is asked to run, and stands for that process.

`python -IS warm.py PYTHON SOCKET NAME argv...`: NAME is what the fork takes for its interpreter, so
that what it starts in turn is warm too. Its output is ours, signals are passed on, we end as it
ends, and it ends with us. What would not load torch anyway is run by PYTHON itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from types import FrameType

COLD = "pdeathsig.py"
"""Binds itself to the process that starts it, so it must be its child."""

SPAWNED = ("from multiprocessing.", "import sys;exec(eval(sys.stdin.readline()))")
"""How the code begins that multiprocessing has a child of its own run, and xdist a worker."""
NO_MATTER = ("-u", "-B")
"""Options that nothing here depends on."""

LIGHT = "from multiprocessing.resource_tracker"

PASSED_ON = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGABRT,
)  # fmt: skip


def main() -> None:
    python, address, name, *argv = sys.argv[1:]
    words = list(itertools.dropwhile(NO_MATTER.__contains__, argv))
    if not _loads_torch(words):
        os.execv(python, [python, *argv])
    child, early = 0, list[int]()

    def pass_on(number: int, _: FrameType | None) -> None:
        if not child:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    for number in set(PASSED_ON) - set(ignored):
        signal.signal(number, pass_on)
    numbers = _open_descriptors()
    request = {
        "argv": words, "env": dict(os.environ), "folder": os.getcwd(), "executable": name,
        "ignored": ignored, "numbers": numbers, "network": f"/proc/{os.getpid()}/ns/net",
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(address)
        socket.send_fds(nursery, [b"\0"], numbers)
        nursery.sendall(json.dumps(request).encode() + b"\n")
        with nursery.makefile("rb") as said:
            child = int(said.readline())
            for number in early:
                pass_on(number, None)
            code = int(said.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _loads_torch(words: list[str]) -> bool:
    match words:
        case ["-m", *_]:
            return True
        case ["-c", code, *_]:
            return code.startswith(SPAWNED) and not code.startswith(LIGHT)
        case [script, *_]:
            return script.endswith(".py") and not script.endswith(COLD)
    return False


def _open_descriptors() -> list[int]:
    """All that whoever starts this has passed on; of what is open here alone, none."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of the listing itself
            if number < 3 or os.get_inheritable(number):
                found.append(number)
    return sorted(found)


if __name__ == "__main__":
    main()
