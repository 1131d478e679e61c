"""Writes the committed versions of a running job into a folder, until the job or the user ends
it."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial

from mend.following.files import VersionFiles
from mend.following.follower import Follower, Version
from mend.tools.report.summary import short
from mend.tools.top.run import sigterm_exits


def follow(follower: Follower, files: VersionFiles, *, once: bool) -> int:
    """Returns the exit status. Raises GaveUp without a job."""
    written = True
    follower.say = partial(print, file=sys.stderr, flush=True)
    with closing(follower), sigterm_exits():
        try:
            for version in follower:
                written = _write(files, version)
                if once:
                    return int(not written)
        except KeyboardInterrupt:
            return int(not written)
        lost = follower.lost
    print("the job has ended" + (f"; its last version, {lost}, did not come in time" * bool(lost)))
    return int(not written)


def _write(files: VersionFiles, version: Version) -> bool:
    """Write a version and say so. Whether it is there."""
    try:
        path = files.write(version)
    except OSError as error:
        about = f"version {version.number} was not written: {error}. Free some space; going on"
        print(about, file=sys.stderr, flush=True)
        return False
    size = sum(tensor.nbytes for tensor in version.tensors.values())
    missed = f"  missed {version.missed} before it" if version.missed else ""
    print(
        f"version {version.number}  step {version.step}  {short(size)}B  received "
        f"{short(version.bytes_received)}B in {version.seconds:.1f} s  {path}{missed}",
        flush=True,
    )
    return True
