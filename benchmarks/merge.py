"""benchmarks.merge: the share of memcpy's bandwidth that a merge by one core reaches. Prints
one JSON object.

    python -m benchmarks.merge --numel 100000000 --racks 2,4,8 --codec float32 --momentum 0

Goal: 0.6 of memcpy, and at most 4 means for rda. A rank uses a quarter of its cores, at most 4, for
a merge.

Bytes of a merge: payloads read + anchor read + anchor written (values, and the state if there is
any). Bytes of memcpy: read + written by torch's copy_ on the same thread. All variants take turns
in every repeat, so that a disturbance of the machine meets all of them. `with_digest` is what a
rank does before it says Held. `rda` is what a rack of one rank does with merge="rda": measure, make
the factors, merge with digest. It has --tensors tensors of equal size and reads the payloads twice;
its share counts them once, like the others, so that the shares compare as the times do.

`measured` is the median over repeats of the share of memcpy's bandwidth, with digest, one thread,
for the number of racks that has the least. `rda_means`: by racks, the time of `rda` in that of
`with_digest`, one thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks._common import (
    Goal,
    limit,
    noise,
    ratios,
    read_options,
    report,
    spread,
    spreads,
    take_turns,
)
from mend.codec import CODECS
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import Tensors, factors_in
from mend.merge import MERGES
from mend.outer import Nesterov

GOAL_TEXT = ">= 0.6 of memcpy's bandwidth; rda <= 4 means"
GOAL = Goal(GOAL_TEXT, 0.6, "of memcpy", better="higher")
RDA_GOAL_MEANS = 4.0
OPTIONS = {
    "numel": (100_000_000, "fp32 elements per rank"),
    "racks": ([2, 4, 8], "numbers of racks"),
    "codec": (("float32", *sorted(set(CODECS) - {"float32"})), "of the payloads"),
    "lr": (1.0, "1 saves a multiplication"),
    "momentum": (0.0, "of the outer step"),
    "threads": ([2, 4], "also with so many threads sharing a merge, as on 8 and 16 cores"),
    "tensors": (100, "tensors of the rda rows"),
    "repeats": (5, "turns of every variant; one more warms up"),
}


def main() -> None:
    options = read_options("merge", __doc__, OPTIONS)
    torch.set_num_threads(1)
    racks = sorted(options.racks)
    numerics = _numerics(options, 1)
    threaded = [_numerics(options, threads) for threads in options.threads]
    radial = [_numerics(options, threads, "rda") for threads in (1, *options.threads)]
    anchor = numerics.genesis(noise(options.numel, 99))
    payloads = [numerics.codec.encode(noise(options.numel, m)) for m in range(racks[-1])]
    out = numerics.empty(options.numel).zero_()
    runs: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(anchor.data)}
    for count in racks:
        runs |= _variants(numerics, threaded, payloads[:count], anchor, out)
        runs |= _radial(radial, payloads[:count], anchor, out, options.tensors)
    _report(options, numerics, anchor, take_turns(runs, options.repeats))


def _numerics(options: argparse.Namespace, threads: int, merge: str = "mean") -> Numerics:
    outer = Nesterov(options.lr, options.momentum)
    return Numerics(CODECS[options.codec](), MERGES[merge](), outer, threads)


def _weights(racks: int) -> tuple[float, ...]:
    return (0.5 ** (racks - 1), *(0.5**m for m in range(1, racks)))


def _variants(
    numerics: Numerics,
    threaded: list[Numerics],
    payloads: list[torch.Tensor],
    anchor: Anchor,
    out: torch.Tensor,
) -> dict[str, Callable[[], object]]:
    racks = len(payloads)
    weights = _weights(racks)
    variants: dict[str, Callable[[], object]] = {
        f"{racks} racks with_digest": lambda: numerics.merge(payloads, weights, anchor, 1, out)
    }
    for helped in threaded:
        name = f"{racks} racks with_digest {helped.pool.threads} threads"
        variants[name] = lambda n=helped: n.merge(payloads, weights, anchor, 1, out)
    return variants


def _radial(
    radial: list[Numerics],
    payloads: list[torch.Tensor],
    anchor: Anchor,
    out: torch.Tensor,
    count: int,
) -> dict[str, Callable[[], object]]:
    weights, numel = _weights(len(payloads)), anchor.numel
    tensors = Tensors(tuple(numel * i // count for i in range(count + 1)), (False,) * count)

    def both(numerics: Numerics) -> Anchor:
        total = numerics.total([numerics.measure(payloads, weights, tensors)])
        runs = tensors.runs(weights, factors_in(total, weights, tensors))
        return numerics.merge(payloads, weights, anchor, 1, out, runs)

    return {
        f"{len(payloads)} racks rda {numerics.pool.threads} threads": partial(both, numerics)
        for numerics in radial
    }


def _report(
    options: argparse.Namespace, numerics: Numerics, anchor: Anchor, seconds: dict[str, list[float]]
) -> None:
    state_bytes = 4 * anchor.data.numel()
    memcpy = [2 * state_bytes / s / 1e9 for s in seconds.pop("memcpy")]
    variants: dict[str, object] = {}
    shares: dict[str, list[float]] = {}
    for name, taken in seconds.items():
        moved = int(name.split()[0]) * numerics.payload_bytes(options.numel) + 2 * state_bytes
        speed = [moved / s / 1e9 for s in taken]
        shares[name] = ratios(speed, memcpy)
        variants[name] = {"GBps": spread(speed, 2), "of_memcpy": spread(shares[name])}
    single = [shares[name] for name in shares if name.endswith("with_digest")]
    least = min(single, key=statistics.median)
    plain = limit("memcpy, 1 thread", "GB/s", memcpy, 2)
    means = {
        str(racks): ratios(
            seconds[f"{racks} racks rda 1 threads"], seconds[f"{racks} racks with_digest"]
        )
        for racks in sorted(options.racks)
    }
    more = {
        "memcpy_GBps": spread(memcpy, 2), "rda_means": spreads(means, 2), "variants": variants,
    }  # fmt: skip
    met = max(map(statistics.median, means.values())) <= RDA_GOAL_MEANS
    report("merge", GOAL, least, options, plain, more, also=met)


if __name__ == "__main__":
    main()
