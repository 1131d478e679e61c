"""Runs a module in a terminal that becomes its own: `tests.process.terminal TTY MODULE ARGS...`.

Who leads a session, and has no terminal, gets the first that it opens for reading and writing as
the one that controls it: then a Ctrl-C typed there is one.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    _, tty, *argv = sys.argv
    terminal = os.open(tty, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
