"""torchrun with the exit status of the rank that failed first, and SIGUSR1 passed to the ranks.

torchrun itself always exits with 1, and dies of SIGUSR1. `mend launch` decides by the exit status
whether to start a rack again, and returns it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """A rank that a signal ended counts as 128 + that signal, as in a shell."""
    signal.signal(signal.SIGUSR1, lambda *_: _ask_ranks())
    try:
        torchrun()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        code = failure.exitcode
        sys.exit(128 - code if code < 0 else code or 1)


def _ask_ranks() -> None:
    """Pass SIGUSR1 to the ranks, whose handlers stop training, say. Linux only; else it is
    ignored."""
    with suppress(OSError):  # a thread or a rank has just ended
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                os.kill(int(pid), signal.SIGUSR1)


if __name__ == "__main__":
    main()
