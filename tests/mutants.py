"""Plants bugs, one at a time, and shows that the tests catch each. `make mutants`, or with names.

    python -m tests.mutants                 all of them, a table at the end
    python -m tests.mutants wrong-weight    just this one

A mutant is a text that occurs exactly once in a file of src/mend, what it becomes, and the part of
`make test` that must then fail. Each runs in a copy of the tree. Exit status 1 when one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIMULATED = "tests/sim"
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests`: what must fail, as arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = (SIMULATED,)


MUTANTS = (
    Mutant(
        "double-count: a merged offer is carried once more",
        "engine/trainer_rounds.py",
        'return fate, track.offer.merged_N if fate == "named" else None\n',
        "return fate, None\n",
    ),
    Mutant(
        "arrival-order: members in another order than ascending racks",
        "coordination/round.py",
        "self.phase, self.members, self.absent = Phase.GATHER, members, _absent(inputs, members)",
        "self.phase, self.members = Phase.GATHER, members[::-1]\n"
        "        self.absent = _absent(inputs, members)",
    ),
    Mutant(
        "alone: a rank applies without its rack's collective",
        "engine/trainer_rounds.py",
        "agreed: list[int] = values if self.options.ranks == 1 else (yield AgreeMin(values))",
        "agreed: list[int] = values",
    ),
    Mutant(
        "snapshot-kept: what is carried is measured from the snapshot, not from anchor - delta",
        "engine/trainer_rounds.py",
        'return fate, track.offer.merged_N if fate == "named" else None\n',
        "offer = track.offer\n"
        "        moved = track.anchor.values - (offer.anchor.values - offer.delta_N)\n"
        '        return fate, moved if fate == "named" else None\n',
    ),
    Mutant(
        "tokens-restarted: counters begin at the apply, not at the capture",
        "engine/trainer_rounds.py",
        "track.tokens_mark, track.steps_mark = offer.tokens_total, offer.steps_total",
        "track.tokens_mark, track.steps_mark = self.tokens, self.step",
    ),
    Mutant(
        "wrong-weight: tokens instead of tokens^2 / steps",
        "consensus/weights.py",
        "Fraction(tokens * tokens * period_steps, steps * max(period_steps, steps))",
        "Fraction(tokens)",
        ("tests/unit/consensus/test_weights.py",),
    ),
    Mutant(
        "before-hold: one result is enough for a commit",
        "coordination/round.py",
        "if hold(by_digests[digests], inputs.voters):",
        "if by_digests[digests]:",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "below-K: one offer is always enough",
        "consensus/quorum.py",
        "return offers >= quorum_min_learners",
        "return offers >= 1",
        (
            "tests/unit/consensus",
            "tests/unit/coordination",
        ),
    ),
    Mutant(
        "freed-early: payloads go before the others hold the result",
        "coordination/rank.py",
        "if settled >= version or",
        "if True or settled >= version or",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "applied-twice: records that come again are read again",
        "coordination/rank.py",
        "orders.records[self.decided - orders.prev :]",
        "orders.records[:]",
    ),
    Mutant(
        "pend-on-drop: a dropped offer is settled like a merged one",
        "engine/trainer_rounds.py",
        '            if fate == "named":\n                self._settle(track, offer)\n',
        "            self._settle(track, offer)\n            if fate:\n                pass\n",
    ),
    Mutant(
        "trusted-donor: a copied state is not compared with the log",
        "engine/concurrent_outer_step.py",
        "elif result.digest != effect.digest:",
        "elif result.digest == '':",
        ("tests/unit/engine/test_concurrent_outer_step.py",),
    ),
    Mutant(
        "second-capture: an open offer does not stop the next one",
        "engine/trainer_rounds.py",
        "        if track.offer is not None:\n            self._post(StillOpen",
        "        if track.offer is not None and track.seq < 0:\n            self._post(StillOpen",
    ),
    Mutant(
        "merged-twice: an offer that ended may be named again",
        "consensus/log.py",
        "seq > self.ended.get((member, fragment), 0)",
        "seq > 0",
    ),
    Mutant(
        "early-genesis: the log begins without all racks",
        "coordination/coordinator.py",
        "missing = len(hellos) < self.options.racks",
        "missing = len(hellos) < 1",
    ),
    Mutant(
        "endless-budget: each apply point has a stall budget of its own",
        "engine/trainer_rounds.py",
        "self._budget_ns = max(0, self._budget_ns - self.stall_ns_last)",
        "self._budget_ns = max(0, self._budget_ns)",
    ),
    Mutant(
        "any-attempt: results of an earlier attempt count for this one",
        "coordination/round.py",
        "if attempt == self.attempt:",
        "if attempt:",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "newest-only: the ranks' common version is applied where it is not there",
        "engine/trainer_rounds.py",
        "if version > track.anchor.version and version >= -minus_oldest:",
        "if version > track.anchor.version:",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "other-sums: a total of another attempt, or another version, is merged with",
        "coordination/sums.py",
        "if self.of == (total.version, total.attempt) and self.phase is Phase.TOLD:",
        "if self.phase is Phase.TOLD:",
        ("tests/unit/coordination/test_sums.py",),
    ),
    Mutant(
        "early-sums: the leader adds before all its ranks have measured",
        "coordination/sums.py",
        "[key for key in found[0] if all(key in partials for partials in found)]:\n",
        "list(found[0]):\n            found = [each for each in found if key in each]\n",
        ("tests/unit/coordination/test_sums.py",),
    ),
    Mutant(
        "endless-sums: a rank waits for a rack-mate that will never measure",
        "coordination/sums.py",
        "if later and key not in theirs:",
        "if later and key in theirs:",
        ("tests/sim/test_seeds.py", "-k", "mate"),
    ),
    Mutant(
        "own-grid: pieces of a tensor are added though they are rounded to different grids",
        "merge/gram.py",
        "if bins == self.bins:",
        "if bins:",
        ("tests/unit/merge/test_gram.py",),
    ),
    Mutant(
        "own-length: a rank takes its part of a tensor for the whole",
        "engine/sums.py",
        "sums = [mine.plus(other) for mine, other in zip(sums, grams, strict=True)]",
        "sums = list(sums)",
        ("tests/conformance/test_merges.py",),
    ),
    Mutant(
        "gathered-root: writes go to shards that FSDP2 is about to overwrite",
        "fragment/shards.py",
        "            if module is not None:\n                module.reshard()\n",
        "            del module\n",
        ("tests/process/test_fsdp2.py", "-k", "evaluation"),
    ),
    Mutant(
        "both-own: replicas of a shard speak for all of it, each",
        "fragment/shards.py",
        "spans.append(owned_span(mine.numel, len(team), team.index(rank)))",
        "spans.append(owned_span(mine.numel, 1, 0))",
        ("tests/unit/fragment/test_shards.py",),
    ),
    Mutant(
        "early-upload: what waits on the GPU is applied though another version is due",
        "engine/cuda_staging.py",
        "if (uploaded.version, uploaded.named) == (version, named):",
        "if uploaded.version <= version:",
        ("tests/unit/engine/test_cuda_staging.py",),
    ),
    Mutant(
        "discard-alone: a rank forgets an offer before the rack's other ranks know",
        "engine/trainer_rounds.py",
        "if discarded_everywhere and track.offer is not None:",
        "if track.offer is not None and track.offer.seq in dead[fragment]:",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "overtaken: orders that were overtaken by newer ones are read",
        "coordination/rank.py",
        "if orders.serial <= self.orders_serial:",
        "if orders.serial < 0:",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "own-result: a result is taken over though the log has other bits",
        "coordination/rank.py",
        "if mine == digest:",
        "if mine:",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "one-rank: what one rank has fetched counts for its rack",
        "coordination/rank_reports.py",
        "common = set(lists[0]).intersection(*lists[1:])",
        "common = set(lists[0]).union(*lists[1:])",
        ("tests/unit/coordination/test_leader.py",),
    ),
    Mutant(
        "both-halves: half of the voters decide, whichever half",
        "consensus/quorum.py",
        "return bool(voters) and min(voters) in counted",
        "return bool(counted)",
        ("tests/unit/consensus/test_quorum.py",),
    ),
    Mutant(
        "behind-roster: a commit is written behind a roster that is not decided",
        "consensus/proposer.py",
        "isinstance(record, Roster | Lineage) for record in undecided",
        "isinstance(record, Lineage) for record in undecided",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "unbelieved: a candidate does not believe decisions of an epoch that is over",
        "consensus/proposer.py",
        "if acceptor_state.decided > self.log.decided == acceptor_state.prev and fits:",
        "if acceptor_state.decided > self.log.decided == acceptor_state.prev and fits and not "
        "acceptor_state.accepted:",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "piece-refused: of a piece of the log the decided records are not taken",
        "consensus/acceptor.py",
        "records = records[: max(0, decided - prev)]",
        "return True",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "early-rounds: rounds open before the first record of the epoch is decided",
        "consensus/proposer.py",
        "return self.leading and 0 < self.opening <= self.log.decided",
        "return self.leading and self.log.decided > 0",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "last-copy: a rack leaves though those who stay could lose a version",
        "coordination/membership.py",
        "if _keeps_bytes(context, each)), None)",
        "if each.members), None)",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "late-opens: an offer of an older version opens a round",
        "coordination/round.py",
        "offer.applied == inputs.version for offer in inputs.offers",
        "True for _ in inputs.offers",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "ageless: offers older than max_age are merged",
        "coordination/round_inputs.py",
        "if version - offer.base <= around.policy.max_age and _is_held(offer, around, holders)",
        "if _is_held(offer, around, holders)",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "broken-promise: an Append below the promise is accepted",
        "consensus/acceptor.py",
        "            return False\n        self.promised = epoch\n        if snapshot is not",
        "            pass\n        self.promised = epoch\n        if snapshot is not",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "old-tail: an old longer end survives the first whole log of an epoch",
        "consensus/acceptor.py",
        "self.log.cut(max(reached, self.log.decided))",
        "pass",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "old-accepts: what was accepted in an older epoch is counted in this one",
        "consensus/proposer.py",
        "for m, b in self.acceptor_states.items() if b.accepted == self.epoch",
        "for m, b in self.acceptor_states.items()",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "one-roster: a take-over asks only the voters of the roster that is decided",
        "consensus/proposer.py",
        " + [log.roster_at(index + 1) for index in changes]",
        "",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "longest-log: a take-over adopts the longest log, of whatever epoch",
        "consensus/proposer.py",
        "(acceptor_state.accepted, acceptor_state.last)",
        "acceptor_state.last",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "early-rounds: rounds open before the epoch's first record is decided",
        "consensus/proposer.py",
        "return self.leading and 0 < self.opening <= self.log.decided",
        "return self.leading",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "restarted-vote: a rack that was started again keeps its vote",
        "consensus/proposer.py",
        "reached = {m: b.last",
        "reached = {next((v for v in log.appended.voters if v.rack == m.rack), m): b.last",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "any-candidate: who hears its coordinator promises to others",
        "coordination/acceptor_host.py",
        "may = not hears or self.founds or peer == self.coordinator",
        "may = True",
        ("tests/unit/coordination/test_acceptor_host.py",),
    ),
    Mutant(
        "former-life: orders to a rack's former life are obeyed",
        "coordination/acceptor_host.py",
        "mine = orders.to == self.member.incarnation",
        "mine = True",
        ("tests/unit/coordination/test_acceptor_host.py",),
    ),
    Mutant(
        "voting-newcomer: a rank_machine votes before it holds what is decided",
        "coordination/membership.py",
        "if _may_vote(context, rack) and _is_close(context, rack):",
        "if _may_vote(context, rack):",
        ("tests/unit/coordination/test_membership.py",),
    ),
    Mutant(
        "lockstep-eviction: silence costs the seat in lockstep too",
        "coordination/coordinator.py",
        "evict_ns=0 if policy.lockstep else policy.evict_ns",
        "evict_ns=policy.evict_ns",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "undone-copy: a copy of an undone version is taken for the new one of its number",
        "coordination/fragment_replica.py",
        "self.undone |= self.copying is not None and self.copying > version",
        "pass",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "own-ear: a rank joins a round that it has heard of, whatever the rack's others have",
        "engine/trainer_rounds.py",
        "least, greatest = agreed[: len(flags)], agreed[len(flags) : 2 * len(flags)]",
        "least, greatest = flags, [-v for v in flags]",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "joined-again: what was declined is captured again at each poll point of its round",
        "coordination/schedule.py",
        "if version > self.versions[p]]",
        "if version >= 0]",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "late-mark: an open offer that counts in a round leaves the rack's own clock as it is",
        "engine/trainer_rounds.py",
        "            if track.offer is not None:\n                self._reach(fragment)\n",
        "            if track.offer is not None:\n                continue\n",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "closed-door: a rack joins a round whose members are fixed",
        "engine/concurrent_outer_step.py",
        "if (p, version) not in gathers}",
        "if gathers is not None}",
        ("tests/unit/engine/test_concurrent_outer_step.py",),
    ),
    Mutant(
        "replayed-by-grid: a replay looks at every step, not at those of its tape",
        "engine/replay_training.py",
        "return due.step <= self.step if due is not None else not self._ends or self._merged()",
        "return self.step >= self.calendar.next_step",
        ("tests/unit/engine/test_replay_training.py",),
    ),
)


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    return (root / "src/mend" / mutant.file).read_text(encoding="utf-8").count(mutant.old)


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests fail with the bug in place, and the first line that says so."""
    assert occurrences(mutant) == 1, f"{mutant.name}: its text is not in {mutant.file} once"
    with tempfile.TemporaryDirectory(prefix="mend-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "pyproject.toml", "CHANGELOG.md"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name)  # compiled files are told by their times
            else:
                shutil.copy(source, copy / name)
        file = copy / "src/mend" / mutant.file
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, lines[0] if lines else done.stdout[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutants whose name begins so")
    wanted = parser.parse_args().names
    chosen = [m for m in MUTANTS if not wanted or any(m.name.startswith(name) for name in wanted)]
    survivors = 0
    needed = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    red, how = caught(Mutant("nothing", "types.py", "MS = 1_000_000", "MS = 1_000_000", needed))
    if red:
        print(f"the tests fail without any bug planted, so they prove nothing\n{how}")
        return 1
    for mutant in chosen:
        started = time.monotonic()
        found, how = caught(mutant)
        survivors += not found
        verdict = "caught" if found else "SURVIVED"
        print(f"{verdict:8} {time.monotonic() - started:5.1f} s  {mutant.name}\n{'':18}{how}")
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs were caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
