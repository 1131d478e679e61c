"""Storms: faults drawn from a seed, done to small jobs of real processes, and judged by what their
training scripts have logged. `make storm` runs this.

    make storm                                          # 10 minutes, as before a release
    make storm ARGS="--minutes 100 --seeds $(date +%s):"   # nightly: new seeds
    make storm ARGS="--seeds 7"                         # one seed again
    make storm ARGS="--seeds 0:20 --kinds restart,two-deaths --table storm.md"

A seed draws the job (2 to 4 racks, perhaps a witness, one or two ranks per rack, DDP or FSDP2, a
key, links that can be cut), up to three faults, whom and when they hit, and whether a rack dies in
mend_init or in the shutdown. It does not repeat the timing: racks are processes, and the machine
has other work.

One line a seed. The folder of a seed with findings is kept: diaries, logs, events and tapes; the
command that runs it again is printed. Links need root on Linux with /dev/net/tun; without them
their seeds run on the loopback interface, and their faults are left out. Exit status 1: a finding.

kinds of faults:
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.process.racks import Nursery
from tests.storm import network
from tests.storm.kinds import KINDS, LINK_KINDS
from tests.storm.storm import Storm
from tests.storm.table import Tally

MINUTES = 10.0


def main() -> int:
    options = _options()
    why = network.missing()
    kinds = {name: KINDS[name] for name in options.kinds or KINDS}
    if why:
        kinds = {name: kind for name, kind in kinds.items() if name not in LINK_KINDS}
        print(f"no links here ({why}): {', '.join(LINK_KINDS)} are left out", flush=True)
    failed, tally, end_s = list[int](), Tally(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder))
        try:
            for seed in options.seeds:
                if time.monotonic() > end_s:
                    break
                storm = Storm(seed, _fresh(options.keep, seed), nursery, kinds, links=not why)
                if not clean(seed, storm, tally, options):
                    failed.append(seed)
        finally:
            nursery.close()
    print(f"{tally.seeds} seeds, with findings: {failed or 'none'}")
    if options.table:
        command = f"python -m tests.storm {shlex.join(sys.argv[1:])}"
        options.table.write_text(tally.page(command), encoding="utf-8")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    names = ", ".join(KINDS)
    parser = argparse.ArgumentParser(
        prog="make storm", description=f"{__doc__}  {names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0:"), help="7, 0:20 or 0: (all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no seed behind them")
    parser.add_argument("--kinds", type=_kinds, default=[], help="with commas; else all")
    parser.add_argument("--keep", type=Path, default=Path("runs/storm"), help="folder of findings")
    parser.add_argument("--table", type=Path, help="write what was measured there")
    return parser.parse_args()


def _seeds(text: str) -> Iterable[int]:
    first, colon, end = text.partition(":")
    if not colon:
        return [int(first)]
    return range(int(first), int(end)) if end else itertools.count(int(first))


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KINDS)}")
    return names


def _fresh(keep: Path, seed: int) -> Path:
    folder = keep / f"seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def clean(seed: int, storm: Storm, tally: Tally, options: argparse.Namespace) -> bool:
    """Run one seed and say how it went. A folder without findings is removed."""
    began = time.monotonic()
    found = storm.run()
    tally.take(storm, found)
    faults = ", ".join(map(str, storm.done)) or "no fault"
    state = "FOUND" if found else "ok"
    took_s = time.monotonic() - began
    print(f"seed {seed}: {state} {storm.shown}: {faults} ({took_s:.0f} s)", flush=True)
    for sentence in found:
        print(f"    {sentence}", flush=True)
    if found:
        kinds = f" --kinds {','.join(options.kinds)}" if options.kinds else ""
        print(f"    kept in {storm.folder}; again: make storm ARGS='--seeds {seed}{kinds}'")
    else:
        shutil.rmtree(storm.folder)
    return not found


if __name__ == "__main__":
    sys.exit(main())
