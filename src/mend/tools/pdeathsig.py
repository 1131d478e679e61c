"""`python pdeathsig.py PARENT COMMAND...` becomes COMMAND, and gets SIGTERM when PARENT dies.

Run as a file, so that nothing else is imported before the tie holds. A hook between fork and exec
(preexec_fn) would do the same, but may deadlock in a process that has threads. Linux only; else
it is just exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(f"mend launch: the launcher {parent} is gone, not starting {command[0]}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
