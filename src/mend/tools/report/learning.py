"""Whether merging helped: the merged model against the racks' own, their agreement, and
the one setting to change first. Pure.

Legend: M racks of a round, c mean cosine of two racks' deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mend.engine.participation import short_of
from mend.tools.report.facts import RunFacts

MERGED = "_merged"
"""What is recorded as NAME_merged is of the merged model, and NAME is of the rack."""
FEW_ROUNDS = 10
"""Of a fragment: fewer make a merge too rare to help."""
STALLED, APART = 0.05, 0.05
PERIOD_BEST = 32
"""The least loss of those that were measured (mend.tools.plan_loss)."""


def learning(facts: RunFacts, settings: Mapping[str, object], stall_share: float) -> list[str]:
    """Sentences, the last of which names what to change first. `settings`: of the job, empty where
    no tape says them; `stall_share`: of the worst rack. Empty for a run without rounds."""
    if not facts.rounds - facts.moment_rounds:
        return []
    compared = _compared(facts)
    sentences = [each for _, each in compared] or [
        "The run has no held-out loss of the merged model and of the racks' own: record them with "
        "runtime.record(held_out=loss) and, inside runtime.anchor_weights(), "
        "runtime.record(held_out_merged=loss)"
    ]
    sentences += _agreed(facts)
    worse = any(merged > own for (own, merged), _ in compared)
    return [*sentences, "Change first: " + _first(facts, settings, stall_share, worse=worse)]


def _compared(facts: RunFacts) -> list[tuple[tuple[float, float], str]]:
    """((own, merged), what it says) of each pair of recorded values."""
    names = sorted({name for each in facts.ranks.values() for name in each.curves})
    found = []
    for name in names:
        own, merged = _tail(facts, name), _tail(facts, name + MERGED)
        if own is None or merged is None:
            continue
        pct = f" ({100 * (merged / own - 1):+.1f} %)" if own > 0 else ""
        verdict = "lower: merging helped" if merged < own else "not lower: merging did not help"
        said = (
            f"{name} of the merged model is {merged:.4g}, the racks' own {own:.4g}{pct}; {verdict}"
        )
        found.append(((own, merged), said + ", where less is better"))
    return found


def _tail(facts: RunFacts, name: str) -> float | None:
    """The mean of the last tenth, over all racks."""
    tails = []
    for each in facts.ranks.values():
        if name in each.curves and (values := each.curves[name].values):
            tail = values[-max(1, len(values) // 10) :]
            tails.append(sum(tail) / len(tail))
    return sum(tails) / len(tails) if tails else None


def mean_cosine(facts: RunFacts) -> float | None:
    """Over the ranks that have compared deltas, weighed by their merges."""
    seen = [each.merges for each in facts.ranks.values() if each.merges.agreement is not None]
    count = sum(max(1, each.merges) for each in seen)
    total = sum(max(1, each.merges) * (each.agreement or 0.0) for each in seen)
    return total / count if count else None


def _agreed(facts: RunFacts) -> list[str]:
    cosine, racks = mean_cosine(facts), _racks(facts)
    if cosine is None or racks < 2:
        return []
    shared = min(max(cosine, 0.0), 1.0)
    noise = (1 - shared) / racks
    of_step = noise / (shared + noise) if shared + noise else 0.0
    return [
        f"The deltas of two racks have a mean cosine of {cosine:.2f}, measured on samples. At that "
        f"cosine {of_step:.0%} of the squared length of the mean of {racks} racks is not shared "
        "by them"
    ]


def _racks(facts: RunFacts) -> int:
    """The usual number of racks in a round."""
    merged = [racks for (racks, _), count in facts.turnout.items() for _ in range(count)]
    return sorted(merged)[len(merged) // 2] if merged else len(facts.racks)


def _first(
    facts: RunFacts, settings: Mapping[str, object], stall_share: float, *, worse: bool
) -> str:
    """The first that applies."""
    given = settings.get("sync_period_steps")
    period = given if isinstance(given, int) else 0
    per_fragment = (facts.rounds - facts.moment_rounds) / max(1, len(facts.fragments))
    turnout = list(facts.turnout.elements())
    cosine = mean_cosine(facts)
    shorter = (
        f"sync_period_steps, from {period} to {max(1, period // 2)}"
        if period
        else ("sync_period_steps, to half of it")
    )
    rules: Sequence[tuple[bool, str]] = (
        (
            2 * short_of(turnout) > len(turnout),
            "grace_window_ms (longer): most rounds miss a rack that lived",
        ),
        (
            stall_share > STALLED,
            "codec (int8, then int4), because training waits for the exchange; mend plan compares "
            "further settings",
        ),
        (per_fragment < FEW_ROUNDS, f"{shorter}: a fragment was merged {per_fragment:.0f} times"),
        (
            period > PERIOD_BEST,
            f"sync_period_steps, from {period} to {PERIOD_BEST}, with codec int8, if the link has "
            "room (mend plan)",
        ),
        (cosine is not None and cosine < APART, f"{shorter}: the deltas of the racks hardly agree"),
        (worse, f"{shorter}: the merged model is not better than the racks' own"),
    )
    return next((text for applies, text in rules if applies), "nothing that these figures show")
