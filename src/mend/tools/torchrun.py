"""Torchrun with the exit status of the rank that failed first; its own is always 1.

What ended a rack decides whether `mend launch` starts it again, and is what it answers itself.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """A rank that a signal ended counts as 128 + that signal, as in a shell."""
    try:
        torchrun()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        code = failure.exitcode
        sys.exit(128 - code if code < 0 else code or 1)


if __name__ == "__main__":
    main()
