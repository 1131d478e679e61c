"""train.py as another version of mend would run it; with OTHER_TORCH in the environment, as one
of torch; with OTHER_WIRE, one that speaks another wire format, too."""

from __future__ import annotations

import os

from mend.coordination import wire
from mend.engine import rank_config
from tests.process import train

if __name__ == "__main__":
    changed = "TORCH" if os.environ.get("OTHER_TORCH") else "VERSION"
    setattr(rank_config, changed, "99.0")
    if os.environ.get("OTHER_WIRE"):
        wire.VERSION = 99
        setattr(wire, "_HEAD", wire.MAGIC + bytes([99]))  # noqa: B010
        wire.framed.__defaults__ = (wire._HEAD,)
        wire.body_of.__defaults__ = (wire._HEAD, wire.FRAME_BYTES_MAX)
    train.main()
