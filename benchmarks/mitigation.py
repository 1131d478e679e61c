"""benchmarks.mitigation: a rack becomes slow; what is left of the job's throughput? Prints a table.

    python -m benchmarks.mitigation --save

Three racks on loopback, which train by sleeping: a step is 8 micro-batches and takes `--step-ms` in
all. After `--healthy` steps those of rack 2 take `--factor` times as long, for `--seconds`. The
sleep lies before the forward, as that of a slow loader does. Two jobs: in lockstep, and with a
grace window of 30 s. What is done:

    nothing         failslow_action="validate"
    not waited for  "act", and the script does not ask: rounds stop waiting for rack 2 (rung 3)
    local_batch     "act", and the script asks: rack 2 takes fewer micro-batches (rung 2)
    oracle          nothing, but the script of rack 2 takes 8 / factor of them from that step on

Tokens (micro-batches of all racks) and rounds per second, in percent of those before the onset: of
the whole time behind it, in which the rack has to be found, and of the last third. No rack can do
more than its share: `ideal` tokens are (2 + 1 / factor) / 3.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks._common import RackArgs, arguments, racks
from mend import mend_init
from mend.errors import MendError

RACKS, SLOW, WHOLE = 3, 2, 8
WIDTH = 32
FRAGMENTS, PERIOD, OVERLAP = 2, 16, 4
GRACE_MS = 30_000.0
GIVE_UP_S = 5.0
"""In lockstep the first rack that stops ends the others."""

JOBS: dict[str, dict[str, Any]] = {
    "lockstep": {"lockstep": True, "give_up_s": GIVE_UP_S},
    "grace 30 s": {"grace_window_ms": GRACE_MS},
}
ARMS = ("nothing", "not waited for", "local_batch", "oracle")
RESULT = "benchmarks/results/mitigation.md"


@dataclass(frozen=True, slots=True)
class Behind:
    """Where a rack was behind a step. `at_s` is time.monotonic."""

    at_s: float
    taken: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second."""

    tokens: float
    rounds: float


def main() -> None:
    options = _options()
    rows = [row_of(job, arm, _ran(options, job, arm), options) for job, arm in arms()]
    page = "\n".join([*_head(options), *rows]) + "\n"
    print(page)
    if options.save:
        with open(RESULT, "w", encoding="utf-8") as file:
            file.write(page)


def arms() -> list[tuple[str, str]]:
    """In lockstep every round waits for every rack."""
    return [(job, arm) for job in JOBS for arm in ARMS if (job, arm) != ("lockstep", ARMS[1])]


def _options() -> argparse.Namespace:
    parser = arguments("mitigation", __doc__)
    parser.add_argument("--factor", type=float, default=4.0, help="times slower (default 4)")
    parser.add_argument("--healthy", type=int, default=80, help="steps before (default 80)")
    parser.add_argument("--seconds", type=float, default=15.0, help="behind it (default 15)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of training (default 50)")
    return parser.parse_args()


def _head(options: argparse.Namespace) -> list[str]:
    ideal = 100 * (RACKS - 1 + 1 / options.factor) / RACKS
    return [
        "# A rack becomes slow: what is left of the job's throughput",
        "",
        f"`python -m benchmarks.mitigation --factor {options.factor:g} --seconds "
        f"{options.seconds:g}`. Three racks that train by sleeping, one of them "
        f"{options.factor:g} times slower from step {options.healthy} on; percent of the tokens "
        f"and rounds per second before. Of tokens {ideal:.0f} % are what the racks can do. "
        f"H {PERIOD}, P {FRAGMENTS}, tau {OVERLAP}. One run each, on a shared machine.",
        "",
        "| job | what is done | tokens/s | rounds/s | last third: tokens/s | rounds/s |",
        "|---|---|---|---|---|---|",
    ]


def row_of(job: str, arm: str, seen: dict[int, list[Behind]], options: argparse.Namespace) -> str:
    onset_s = seen[SLOW][options.healthy - 1].at_s
    begun_s = max(each[0].at_s for each in seen.values())
    end_s = min(onset_s + options.seconds, *(each[-1].at_s for each in seen.values()))
    before = rates(seen, begun_s, onset_s)
    cells = []
    for since_s in (onset_s, end_s - (end_s - onset_s) / 3):
        found = rates(seen, since_s, end_s)
        cells += [100 * found.tokens / before.tokens, 100 * found.rounds / before.rounds]
    return f"| {job} | {arm} | " + " | ".join(f"{cell:.0f} %" for cell in cells) + " |"


def rates(seen: dict[int, list[Behind]], since_s: float, until_s: float) -> Rates:
    """Of steps that ended in this time; rounds as rack 0 saw them."""
    tokens = sum(
        each.taken for mine in seen.values() for each in mine if since_s < each.at_s <= until_s
    )
    rounds = [each.rounds for each in seen[0] if since_s < each.at_s <= until_s]
    made = rounds[-1] - rounds[0] if rounds else 0
    return Rates(tokens / (until_s - since_s), made / (until_s - since_s))


def _ran(options: argparse.Namespace, job: str, arm: str) -> dict[int, list[Behind]]:
    one = argparse.Namespace(**{**vars(options), "job": job, "arm": arm})
    with racks(_rack, one, RACKS) as pipes:
        return {rack: pipe.recv() for rack, pipe in enumerate(pipes)}


def _rack(args: RackArgs) -> None:
    """The process of a rack: so many steps, then for so many seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(args.rack)
    options, inputs = args.options, torch.randn(8, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    action = "act" if options.arm in ("not waited for", "local_batch") else "validate"
    rounds = {"fragments": FRAGMENTS, "sync_period_steps": PERIOD, "overlap_steps": OVERLAP}
    settings = {**rounds, **JOBS[options.job], "failslow_action": action}
    runtime = mend_init(model, args.config(**settings), optimizer)
    seen, slower, end_s = list[Behind](), 1.0, float("inf")
    try:
        while time.monotonic() < end_s:
            if len(seen) == options.healthy:
                end_s = time.monotonic() + options.seconds
                slower = options.factor if args.rack == SLOW else 1.0
            taken = WHOLE
            if options.arm == "local_batch":
                taken = runtime.local_batch(WHOLE)
            elif options.arm == "oracle" and slower > 1:
                taken = max(1, round(WHOLE / slower))
            time.sleep(options.step_ms * slower * taken / WHOLE / 1e3)
            model(inputs).square().mean().backward()
            runtime.count_tokens(taken)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(Behind(time.monotonic(), taken, runtime.status().rounds_committed))
    except MendError:  # in lockstep another rack has ended
        pass
    args.pipe.send(seen)
    runtime.abort()


if __name__ == "__main__":
    main()
