"""Whether merging helped: the merged model against the racks' own and against a run without
exchange, the agreement of the racks, the noise of the outer momentum, and the one thing to change
first. Pure; docs/internals/report.md derives the formulas.

Legend: M racks of a round; c mean cosine of two racks' deltas; r cosine of a delta and the outer
momentum of its base; q balance of their signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median_high
from typing import NamedTuple

from mend.config.pair_warnings import GAIN_SHORT_MAX, default_momentum, default_overlap
from mend.engine.compute.agreement import APART
from mend.engine.state.participation import short_of
from mend.events.base import kind_of
from mend.events.kinds import OffersGrow
from mend.tools.report.facts import RankFacts, RunFacts
from mend.tools.report.summary import last_tenth, mean, steps_of

MERGED = "_merged"
"""What is recorded as NAME_merged is of the merged model, and NAME is of the rack."""
FEW_ROUNDS = 10
"""Of a fragment: fewer make a merge too rare to help."""
STALLED = 0.05
SMALLER: Mapping[object, str] = {"float32": "int8", "bfloat16": "int8", "int8": "int4"}
"""The codec to try next, for fewer bytes."""

PERIOD_BEST, PERIOD_SHORT = 32, 16
"""The least loss of those that were measured, and the shortest of them (mend.tools.plan_loss)."""


class Compared(NamedTuple):
    """A recorded value of the racks' own weights and of the merged model, means over the looks of
    the second half; `lower` of `looks` were lower for the merged model. `ended`: the mean of the
    last tenth of the merged model's; `alone`: that of a run without exchange with as many steps."""

    name: str
    own: float
    merged: float
    looks: int
    lower: int
    ended: float
    alone: float | None = None


def learning(
    facts: RunFacts,
    settings: Mapping[str, object],
    stall_share: float,
    alone: RunFacts | None = None,
) -> list[str]:
    """Sentences, the last of which names what to change first. `settings`: of the job, empty where
    no tape says them; `stall_share`: of the worst rack; `alone`: a run without exchange. Empty for
    a run without rounds."""
    if not facts.rounds - facts.moment_rounds:
        return []
    found = list(compared(facts, alone))
    sentences = [part for each in found for part in _in_words(each)]
    if not found:
        sentences.append(
            "Not known: no value of the merged model and of the racks' own was recorded at equal "
            "steps. A loss that falls is not an answer, as a rack alone learns, too. Call "
            "runtime.record(held_out=loss) and, inside runtime.anchor_weights(), "
            "runtime.record(held_out_merged=loss)"
        )
    sentences += [*_delay(facts, settings), *_agreed(facts)]
    worse = any(each.alone is not None and each.ended >= each.alone for each in found)
    return [*sentences, "Change first: " + _first(facts, settings, stall_share, worse=worse)]


def compared(facts: RunFacts, alone: RunFacts | None) -> Iterator[Compared]:
    """Each pair of recorded values NAME and NAME_merged."""
    for name in sorted({name for each in facts.ranks.values() for name in each.curves}):
        pairs = [pair for each in facts.ranks.values() for pair in _looks(each, name)]
        if not pairs:
            continue
        own, merged = map(mean, zip(*pairs, strict=True))
        lower = sum(after < before for before, after in pairs)
        other = last_tenth(alone, name) if alone and steps_of(alone) == steps_of(facts) else None
        tail = last_tenth(facts, name + MERGED)
        ended = merged if tail is None else tail
        yield Compared(name, own, merged, len(pairs), lower, ended, other)


def _looks(rank: RankFacts, name: str) -> list[tuple[float, float]]:
    """(own, merged) of the second half of what a rank has recorded of both at equal tokens."""
    own, merged = rank.curves.get(name), rank.curves.get(name + MERGED)
    if own is None or merged is None or own.width != merged.width:
        return []
    at = dict(zip(own.tokens, own.values, strict=True))
    both = zip(merged.tokens, merged.values, strict=True)
    pairs = [(at[tokens], value) for tokens, value in both if tokens in at]
    return pairs[len(pairs) // 2 :]


def _in_words(found: Compared) -> Iterator[str]:
    verdict = (
        "lower: to average the racks helped"
        if found.merged < found.own
        else "not lower, which proves nothing: it lacks the steps since the last captures, which "
        "the racks' own weights have"
    )
    yield (
        f"{found.name} of the merged model is {found.merged:.4g}, of the racks' own weights "
        f"{found.own:.4g}{_percent(found.merged, found.own)}, lower in {found.lower} of "
        f"{found.looks} looks (second half); {verdict}, where less is better"
    )
    if found.alone is None:
        yield (
            "Whether a rack alone would have done as well cannot be said from this run, as the "
            "racks' own weights contain what was merged before. Put a run with exchange=False and "
            "as many steps into the same folder"
        )
        return
    helped = "helped" if found.ended < found.alone else "did not help"
    yield (
        f"After as many steps {found.name} ended at {found.alone:.4g} without exchange, and at "
        f"{found.ended:.4g} merged{_percent(found.ended, found.alone)}: merging {helped}, in these "
        "two runs"
    )


def _percent(value: float, base: float) -> str:
    return f" ({100 * (value / base - 1):+.1f} %)" if base > 0 else ""


def _delay(facts: RunFacts, settings: Mapping[str, object]) -> Iterator[str]:
    count, steps = facts.delays
    if not steps:
        return
    period = int(_number(settings, "sync_period_steps", 0))
    most = int(_number(settings, "overlap_steps", default_overlap(period)))
    limit = f" (overlap_steps {most})" if most else ""
    yield (
        f"Racks made {steps / count:.1f} steps on average between the capture of an offer and the "
        f"apply of its merge{limit}; the fewer, the lower the loss"
    )


# ------------------------------------------------------------------ agreement and noise


def mean_cosine(facts: RunFacts) -> float | None:
    """c: over the ranks that have compared deltas, weighed by their merges."""
    seen = [each.merges for each in facts.ranks.values() if each.merges.agreement is not None]
    count = sum(max(1, each.merges) for each in seen)
    total = sum(max(1, each.merges) * (each.agreement or 0.0) for each in seen)
    return total / count if count else None


def momentum_cosine(facts: RunFacts) -> float | None:
    """r = sin(pi q / 2), exact for normal elements (Sheppard, 1899); q is the mean of the rounds
    that were compared."""
    count, total = facts.balances
    return math.sin(math.pi / 2 * total / count) if count else None


def momentum_noise(agreement: float, along: float) -> float | None:
    """1 - r^2 / c: the part of the momentum's squared length that is not along what the racks have
    in common. With y_m = g + n_m, and each n_m orthogonal to g, to the others and to b:
    c = |g|^2 / |y|^2 and r = g b / (|y| |b|), so cos(g, b) = r / sqrt(c) (the correction for
    attenuation: Spearman, 1904). All of it where g is not seen or b points against it. None where
    r^2 > c, as each rack's deltas then go on in a direction of its own."""
    if agreement <= 0 or along <= 0:
        return 1.0
    return 1 - along * along / agreement if along * along <= agreement else None


def _agreed(facts: RunFacts) -> Iterator[str]:
    cosine, racks = mean_cosine(facts), _racks(facts)
    if cosine is None or racks < 2:
        yield (
            "Agreement of the racks and noise of the momentum: not known, as "
            + ("most rounds merged one rack alone" if racks < 2 else "no two deltas were compared")
        )
        return
    shared = min(max(cosine, 0.0), 1.0)
    noise = (1 - shared) / racks
    of_step = noise / (shared + noise) if shared + noise else 0.0
    yield (
        f"The deltas of two racks have a mean cosine of {cosine:.2f}, measured on samples. At that "
        f"cosine {of_step:.0%} of the squared length of the mean of {racks} racks is not shared "
        "by them"
    )
    along = momentum_cosine(facts)
    if along is None:
        yield (
            "Noise of the momentum: not known, as no offer was compared with one: there is none "
            "with outer_optimizer_momentum 0, nor in the first rounds"
        )
        return
    finding = (
        f"The deltas have a cosine of {along:.2f} with the outer momentum, by the balance of their "
        f"signs in {facts.balances[0]} rounds"
    )
    part = momentum_noise(cosine, along)
    if part is None:
        yield (
            f"{finding}, more than two racks have in common: each goes on in a direction of its own"
        )
    else:
        yield (
            f"{finding}: {part:.0%} of its squared length is not along what the racks have in "
            "common, so noise of earlier merges or a direction that is over"
        )


def _racks(facts: RunFacts) -> int:
    """The usual number of racks in a round."""
    merged = [racks for (racks, _), count in facts.participation.items() for _ in range(count)]
    return median_high(merged) if merged else len(facts.racks)


# ------------------------------------------------------------------ what to change


def _first(
    facts: RunFacts, settings: Mapping[str, object], stall_share: float, *, worse: bool
) -> str:
    """The first that applies."""
    period = int(_number(settings, "sync_period_steps", 0))
    rules = (
        _momentum_too_long(facts, settings),
        _growing(facts, settings),
        _pulled_apart(facts),
        _not_together(facts, settings, stall_share),
        _period(facts, period),
        _worse(facts, period) if worse else "",
    )
    return next(filter(None, rules), "nothing that these figures show")


def _number(settings: Mapping[str, object], name: str, default: float) -> float:
    given = settings.get(name)
    return float(given) if isinstance(given, int | float) else default


def _momentum_too_long(facts: RunFacts, settings: Mapping[str, object]) -> str:
    """mu makes a movement 1 / (1 - mu) times as long; mend warns of as much at the start."""
    period = int(_number(settings, "sync_period_steps", 0))
    momentum = _number(settings, "outer_optimizer_momentum", 0.0)
    if not period or momentum >= 1:
        return ""
    usual = default_momentum(period, int(_number(settings, "racks", len(facts.racks))))
    if (1 - usual) / (1 - momentum) <= GAIN_SHORT_MAX:
        return ""
    return (
        f"outer_optimizer_momentum, from {momentum:g} to its default, {usual:.2g}: it makes a "
        f"step {1 / (1 - momentum):.0f} times as long, which H {period} does not bear"
    )


def _growing(facts: RunFacts, settings: Mapping[str, object]) -> str:
    if not facts.fault_counts[kind_of(OffersGrow)]:
        return ""
    what = "the learning rate (lower)"
    if (momentum := _number(settings, "outer_optimizer_momentum", 0.0)) > 0:
        what = f"outer_optimizer_momentum (lower than {momentum:g}), or {what}"
    return f"{what}, unless you raised that on the way: the offers grew beyond their peak"


def _pulled_apart(facts: RunFacts) -> str:
    cosine, racks = mean_cosine(facts), _racks(facts)
    if cosine is None or racks < 2 or cosine * (racks - 1) > APART:
        return ""
    return (
        "no setting, but the data: give all racks parts of one mixture. Their deltas point apart "
        f"(cosine {cosine:.2f}; {-1 / (racks - 1):.2f} were racks that undo each other's steps "
        "entirely), so each learns towards a model of its own"
    )


def _not_together(facts: RunFacts, settings: Mapping[str, object], stall_share: float) -> str:
    participation = list(facts.participation.elements())
    if 2 * short_of(participation) > len(participation):
        return "grace_window_ms (longer): most rounds miss a rack that lived"
    if stall_share > STALLED:
        codec = settings.get("codec")
        smaller = f"codec, from {codec} to {SMALLER[codec]}, or " if codec in SMALLER else ""
        return (
            f"{smaller}overlap_steps (longer), because training waits for the exchange; mend plan "
            "compares further settings"
        )
    return ""


def _period(facts: RunFacts, period: int) -> str:
    per_fragment = (facts.rounds - facts.moment_rounds) / max(1, len(facts.fragments))
    if per_fragment < FEW_ROUNDS:
        return f"{_shorter(period)}: a fragment was merged {per_fragment:.0f} times"
    if period > PERIOD_BEST:
        return (
            f"sync_period_steps, from {period} to {PERIOD_BEST}, with codec int8, if the link has "
            "room (mend plan)"
        )
    if 0 < period < PERIOD_SHORT:
        return (
            f"sync_period_steps, from {period} to {PERIOD_BEST}: that sends {period}/{PERIOD_BEST} "
            f"of the bytes, and has the least loss of what was measured (mend plan), which is H "
            f"{PERIOD_SHORT} and more"
        )
    return ""


def _shorter(period: int) -> str:
    if not period:
        return "sync_period_steps, to half of it"
    return f"sync_period_steps, from {period} to {max(1, period // 2)}"


def _worse(facts: RunFacts, period: int) -> str:
    why = "the merged model is not better than a rack alone"
    if facts.outer[1] or facts.balances[0]:
        return f"outer_optimizer_momentum, to 0: {why}"
    return f"{_shorter(period)}: {why}"
