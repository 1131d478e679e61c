"""Storms over many seeds.

    python -m tests.storm --seeds 0:20
    python -m tests.storm --seeds 7 --kinds pause,two-deaths --keep runs/storm

One line a seed. The folder of a seed with findings is kept: diaries, logs, events and tapes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.process.racks import Nursery
from tests.storm.storm import KINDS, Kind, Storm, usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="one, or first:behind the last")
    parser.add_argument("--kinds", default="", help=f"of {', '.join(KINDS)}; else the usual ones")
    parser.add_argument("--keep", type=Path, default=Path("runs/storm"))
    told = parser.parse_args()
    first, _, end = told.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    kinds = {name: KINDS[name] for name in told.kinds.split(",") if name} or usual()
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder))
        try:
            failed = [seed for seed in seeds if not clean(seed, told.keep, kinds, nursery)]
        finally:
            nursery.close()
    print(f"{len(seeds)} seeds, with findings: {failed or 'none'}")
    return 1 if failed else 0


def clean(seed: int, keep: Path, kinds: dict[str, Kind], nursery: Nursery) -> bool:
    """Run one seed and say how it went. A folder without findings is removed."""
    folder, began = keep / f"seed{seed}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    storm = Storm(seed, folder, nursery, kinds)
    found = storm.run()
    faults = ", ".join(map(str, storm.done))
    state = "FOUND" if found else "ok"
    took_s = time.monotonic() - began
    print(f"seed {seed}: {state} {storm.shown}: {faults} ({took_s:.0f} s)", flush=True)
    for sentence in found:
        print(f"    {sentence}", flush=True)
    if found:
        print(f"    kept in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return not found


if __name__ == "__main__":
    sys.exit(main())
