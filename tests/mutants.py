"""Plants bugs, one at a time, and shows that the tests catch each. `make mutants`, or with names.

    python -m tests.mutants                 all of the list below
    python -m tests.mutants wrong-weight    just this one
    python -m tests.mutants --since         small edits of the functions that this change touches

A mutant is an edit of a function (tests/planting.py) and the part of `make test` that must then
fail. Each runs in a copy of the tree. Exit status 1 when one survives.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.change_mutants import PARALLEL, copy_tree, edits_in, edits_since, hunt
from tests.planting import Edit, edited, own_environment

ROOT = Path(__file__).parent.parent
SIMULATED = "tests/sim"
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests`: what must fail, as arguments of pytest."""

    name: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...] = (SIMULATED,)

    @property
    def edit(self) -> Edit:
        return Edit(self.function, self.old, self.new)


MUTANTS = (
    Mutant(
        "fsync-left-out: a rank's file counts before it is on disk",
        "engine.checkpoint.checkpoint_files:write_rank",
        "os.fsync(file.fileno())",
        "pass",
        ("tests/unit/engine/test_checkpoint_files.py",),
    ),
    Mutant(
        "deadline-stays: a reader that takes lines is left at the end all the same",
        "status.log_lines:LogLines._handle",
        "self._give_up_s = time.monotonic() + STUCK_S",
        "pass",
        ("tests/unit/status/test_log_lines.py",),
    ),
    Mutant(
        "never-forgets: the spread of a run grows for ever",
        "detector.change_point:ChangePoints.observe",
        "beta *= longest / (longest + 1)",
        "pass",
        ("tests/unit/detector/test_change_point.py",),
    ),
    Mutant(
        "last-rank: a launch names the last rank that is not merged",
        "tools.launch:Launch._find_unmerged",
        "reversed(ended_as)",
        "ended_as",
        ("tests/unit/tools/test_launch.py",),
    ),
    Mutant(
        "no-rest: a flood of connections is admitted at once",
        "transport.bulk_server:PayloadServer._rest",
        "self._next_ns > now_ns",
        "self._next_ns < 0",
        (
            "tests/unit/transport/test_bulk_client.py::"
            "test_flood_of_connections_is_admitted_at_a_limited_rate",
        ),
    ),
    Mutant(
        "tie-by-arrival: of two slow links the first measured is named",
        "detector.cause:cause_of",
        "max(sorted(lanes), key=lambda rack: lanes[rack], default=-1)",
        "max(lanes, key=lambda rack: lanes[rack], default=-1)",
        ("tests/unit/detector/test_cause.py",),
    ),
    Mutant(
        "asleep: time without a processor is the silence of others",
        "coordination.awake:Sleep.take",
        "return slept_ns",
        "return 0",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "double-count: a merged offer is carried once more",
        "engine.trainer.trainer_rounds:TrainerRounds._fate",
        "offer.merged_N if fate == 'named' else None",
        "None",
    ),
    Mutant(
        "arrival-order: members in another order than ascending racks",
        "coordination.round:Round._start_attempt",
        "self.phase, self.members, self.absent = "
        "(Phase.PROPOSED, members, _absent(inputs, members))",
        "self.phase, self.members = (Phase.PROPOSED, members[::-1])\n"
        "self.absent = _absent(inputs, members)",
    ),
    Mutant(
        "added-up: work of racks that leave counts as whole rounds",
        "coordination.round:Round._start_attempt",
        "_absent(inputs, members)",
        "tuple(a for a in _absent(inputs, members) if not a.closing)",
        ("tests/sim/test_hurried.py",),
    ),
    Mutant(
        "statistics-left-out: the end of a run averages the weights alone",
        "engine.trainer.trainer_end:TrainerEnd._capture_tails",
        "self.of_model",
        "enumerate(self.weights)",
        ("tests/process/test_statistics.py",),
    ),
    Mutant(
        "merged-behind: a rack that slept through the end says that all is merged",
        "engine.trainer.trainer_end:TrainerEnd._end",
        "self.published.job.over and not self._reached()",
        "False",
        ("tests/sim/test_ending.py",),
    ),
    Mutant(
        "tail-dropped: a last offer that was too old is not made again",
        "engine.trainer.trainer_end:TrainerEnd._may_try_again",
        "bool(minus_left and may)",
        "False",
        ("tests/sim/test_ending.py",),
    ),
    Mutant(
        "alone: a rank applies without its rack's collective",
        "engine.trainer.trainer_rounds:TrainerRounds.agree_and_apply",
        "(yield from agree(self.policy.ranks, values))",
        "values",
    ),
    Mutant(
        "snapshot-kept: what is carried is measured from the snapshot, not from anchor - delta",
        "engine.trainer.trainer_rounds:TrainerRounds._fate",
        "return (fate, offer.merged_N if fate == 'named' else None)",
        "state = self.fragment_states[fragment]\n"
        "moved = state.anchor.values - (offer.anchor.values - offer.delta_N)\n"
        "return (fate, moved if fate == 'named' else None)",
    ),
    Mutant(
        "tokens-restarted: counters begin at the apply, not at the capture",
        "engine.trainer.trainer_rounds:TrainerRounds._settle",
        "(offer.tokens_total, offer.steps_total)",
        "(self.tokens, self.step)",
    ),
    Mutant(
        "wrong-weight: tokens instead of tokens / steps",
        "consensus.weights:_batches",
        "Fraction(*each)",
        "Fraction(each[0])",
        ("tests/unit/consensus/test_weights.py",),
    ),
    Mutant(
        "no-stretch: racks of unequal steps make too short a step",
        "engine.compute.numerics:Numerics.rates",
        "rates._replace(stretch=stretch)",
        "rates",
        ("tests/sim/test_oracle.py",),
    ),
    Mutant(
        "signs-of-one-rank: whether momentum waits depends on how a rack is cut",
        "coordination.rank_reports:_outcome",
        "sum(part.against for part in parts)",
        "head.against",
        ("tests/unit/coordination/test_rank_reports.py",),
    ),
    Mutant(
        "momentum-never-waits: a step is made with momentum against which the offers point",
        "engine.compute.numerics:Numerics.rates",
        "rates._replace(momentum=0.0)",
        "rates",
        ("tests/unit/engine/test_numerics.py",),
    ),
    Mutant(
        "before-hold: one result is enough for a commit",
        "coordination.round:Round._try_commit",
        "hold(by_digests[digests], inputs.voters)",
        "by_digests[digests]",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "below-K: one offer is always enough",
        "consensus.quorum:worthwhile",
        "merge_min_racks",
        "1",
        (
            "tests/unit/consensus",
            "tests/unit/coordination",
        ),
    ),
    Mutant(
        "freed-early: payloads go before the others hold the result",
        "coordination.rank:RankMachine._tidy",
        "settled >= version or stale",
        "True or settled >= version or stale",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "untouched: what became of a pull or a merge gives a fragment nothing to do",
        "coordination.rank:RankMachine._touch",
        "self.touched.add(p)",
        "pass",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "stale-orders: ranks are not told that their rack has lost its seat",
        "coordination.leader:Leader._orders_now",
        "self.left()",
        "False",
        ("tests/unit/coordination/test_leader.py", "tests/sim/test_quiet.py"),
    ),
    Mutant(
        "applied-twice: records that come again are read again",
        "coordination.rank:RankMachine._read",
        "orders.records[self.decided - orders.prev:]",
        "orders.records[:]",
    ),
    Mutant(
        "pend-on-drop: a dropped offer is settled like a merged one",
        "engine.trainer.trainer_rounds:TrainerRounds._apply",
        "if fate == 'named':\n"
        "    self._settle(state, offer)\n"
        "else:\n"
        "    self.ledger.miss('offer dropped: too old')",
        "self._settle(state, offer)\n"
        "if fate:\n"
        "    pass\n"
        "else:\n"
        "    self.ledger.miss('offer dropped: too old')",
    ),
    Mutant(
        "trusted-donor: a copied state is not compared with the log",
        "engine.loop.pipeline:Pipeline.copy",
        "result.digest != effect.digest",
        "result.digest == ''",
        ("tests/unit/engine/test_concurrent_outer_step.py",),
    ),
    Mutant(
        "second-capture: an open offer does not stop the next one",
        "engine.trainer.trainer_rounds:TrainerRounds._capture",
        "state.offer is not None",
        "state.offer is not None and state.seq < 0",
    ),
    Mutant(
        "merged-twice: an offer that ended may be named again",
        "consensus.log:LogState.is_open",
        "self.ended.get((member, fragment), 0)",
        "0",
    ),
    Mutant(
        "early-genesis: the log begins without all racks",
        "coordination.coordinator:Coordinator._try_genesis",
        "self.options.racks",
        "1",
    ),
    Mutant(
        "endless-budget: each apply point has a stall budget of its own",
        "engine.trainer.trainer_rounds:TrainerRounds._await_results",
        "self.stalls.spend(now_ns - begun_ns)",
        "self.stalls.spend(0)",
    ),
    Mutant(
        "any-attempt: results of an earlier attempt count for this one",
        "coordination.round:Round._try_commit",
        "attempt == self.attempt",
        "attempt",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "newest-only: the ranks' common version is applied where it is not there",
        "engine.trainer.trainer_rounds:TrainerRounds.agree_and_apply",
        "version > state.anchor.version and version >= -minus_oldest",
        "version > state.anchor.version",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "other-sums: a total of another attempt, or another version, is merged with",
        "coordination.sums:Sums.take_total",
        "self.of == (total.version, total.attempt) and self.phase is SumPhase.REPORTED",
        "self.phase is SumPhase.REPORTED",
        ("tests/unit/coordination/test_sums.py",),
    ),
    Mutant(
        "early-sums: the leader adds before all its ranks have measured",
        "coordination.sums:Totals.collect",
        "for key in [key for key in found[0] if all((key in partials for partials in "
        "found))]:\n"
        "    fragment, *of = key\n"
        "    if (of[0], of[1]) > max(self._busy.get(fragment, (0, 0)), self._of(fragment)):\n"
        "        self._busy[fragment] = (of[0], of[1])\n"
        "        effects.append(Sum(*key, tuple((partials[key] for partials in found))))",
        "for key in list(found[0]):\n"
        "    found = [each for each in found if key in each]\n"
        "    fragment, *of = key\n"
        "    if (of[0], of[1]) > max(self._busy.get(fragment, (0, 0)), self._of(fragment)):\n"
        "        self._busy[fragment] = (of[0], of[1])\n"
        "        effects.append(Sum(*key, tuple((partials[key] for partials in found))))",
        ("tests/unit/coordination/test_sums.py",),
    ),
    Mutant(
        "endless-sums: a rank waits for a rack-mate that will never measure",
        "coordination.sums:Totals._is_never",
        "key not in theirs",
        "key in theirs",
        ("tests/sim/test_seeds.py", "-k", "mate"),
    ),
    Mutant(
        "own-grid: pieces of a tensor are added though they are rounded to different grids",
        "merge.gram:Gram._on",
        "bins == self.bins",
        "bins",
        ("tests/unit/merge/test_gram.py",),
    ),
    Mutant(
        "own-length: a rank takes its part of a tensor for the whole",
        "engine.compute.sums:total_of",
        "[total.plus(gram) for total, gram in zip(sums, grams, strict=True)]",
        "list(sums)",
        ("tests/conformance/test_merges.py",),
    ),
    Mutant(
        "gathered-root: writes go to shards that FSDP2 is about to overwrite",
        "fragment.in_place:InPlace.check",
        "if module is not None:\n    module.reshard()",
        "del module",
        ("tests/process/test_fsdp2.py", "-k", "evaluation"),
    ),
    Mutant(
        "both-own: replicas of a shard speak for all of it, each",
        "fragment.shards:holding",
        "owned_span(mine.numel, len(team), team.index(rank))",
        "owned_span(mine.numel, 1, 0)",
        ("tests/unit/fragment/test_shards.py",),
    ),
    Mutant(
        "one-name: layers of two stages that have one name pass for replicas",
        "fragment.stages:Together._refuse_two_of_one_name",
        "if not together[1:] or all(held.team == together for held in holders.values()):\n"
        "    return",
        "return",
        ("tests/unit/fragment/test_stages.py",),
    ),
    Mutant(
        "half-rows: a part reads the first rows of its rank instead of its own",
        "fragment.parts:JobParts.rows",
        "slice(first, first + box.shape[0])",
        "slice(0, box.shape[0])",
        ("tests/unit/fragment/test_parts.py",),
    ),
    Mutant(
        "lone-part: a part that fails leaves the others waiting",
        "engine.part_group:Meeting.end",
        "self._why = self._why or why",
        "pass",
        ("tests/unit/engine/test_part_group.py",),
    ),
    Mutant(
        "began-alike: stages that were made alike are merged as replicas",
        "engine.hooks.model_checks:Copies.refuse",
        "if not names or module is None:\n    return",
        "return",
        ("tests/unit/engine/test_rack_model.py",),
    ),
    Mutant(
        "early-upload: what waits on the GPU is applied though another version is due",
        "engine.trainer.cuda_staging:CudaStaging._taken",
        "uploaded.move != move",
        "uploaded.move.version > move.version",
        ("tests/unit/engine/test_cuda_staging.py",),
    ),
    Mutant(
        "discard-alone: a rank forgets an offer before the rack's other ranks know",
        "engine.trainer.trainer_rounds:TrainerRounds.agree_and_apply",
        "discarded_everywhere and state.offer is not None",
        "state.offer is not None and state.offer.seq in dead[fragment]",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "overtaken: orders that were overtaken by newer ones are read",
        "coordination.rank:RankMachine._on_orders",
        "orders.serial <= self.orders_serial",
        "orders.serial < 0",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "own-result: a result is taken over though the log has other bits",
        "coordination.rank:RankMachine._reach",
        "mine == digest",
        "mine",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "one-rank: what one rank has fetched counts for its rack",
        "coordination.rank_reports:_in_all",
        "set(lists[0]).intersection",
        "set(lists[0]).union",
        ("tests/unit/coordination/test_leader.py",),
    ),
    Mutant(
        "both-halves: half of the voters decide, whichever half",
        "consensus.quorum:quorum",
        "bool(voters) and min(voters) in counted",
        "bool(counted)",
        ("tests/unit/consensus/test_quorum.py",),
    ),
    Mutant(
        "behind-roster: a commit is written behind a roster that is not decided",
        "consensus.proposer:Proposer.may_append",
        "Roster | Lineage",
        "Lineage",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "unbelieved: a candidate does not believe decisions of a ballot that is over",
        "consensus.proposer:Proposer._learn",
        "acceptor_state.decided > self.log.decided == acceptor_state.prev and fits",
        "acceptor_state.decided > self.log.decided == acceptor_state.prev and fits and (not "
        "acceptor_state.accepted)",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "piece-refused: of a piece of the log the decided records are not taken",
        "consensus.acceptor:Acceptor.append",
        "records = records[:max(0, decided - prev)]",
        "return True",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "early-rounds: rounds open before the first record of the ballot is decided",
        "consensus.proposer:Proposer.open",
        "0 < self.opening <= self.log.decided",
        "self.log.decided > 0",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "last-copy: a rack leaves though those who stay could lose a version",
        "coordination.membership:next_roster",
        "_keeps_bytes(context, each)",
        "each.members",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "late-opens: an offer of an older version opens a round",
        "coordination.round:Round._opens",
        "(offer.applied == inputs.version for offer in inputs.offers)",
        "(True for _ in inputs.offers)",
        ("tests/unit/coordination/test_round.py",),
    ),
    Mutant(
        "ageless: offers older than staleness_max_rounds are merged",
        "coordination.round_inputs:inputs_of",
        "version - offer.base <= around.policy.staleness_max_rounds "
        "and _is_held(offer, around, holders)",
        "_is_held(offer, around, holders)",
        ("tests/unit/coordination/test_coordinator.py",),
    ),
    Mutant(
        "broken-promise: an Append below the promise is accepted",
        "consensus.acceptor:Acceptor.append",
        "if ballot < self.promised:\n    return False",
        "if ballot < self.promised:\n    pass",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "old-tail: an old longer end survives the first whole log of a ballot",
        "consensus.acceptor:Acceptor.append",
        "self.log.cut(max(reached, self.log.decided))",
        "pass",
        ("tests/unit/consensus/test_acceptor.py",),
    ),
    Mutant(
        "old-accepts: what was accepted in an older ballot is counted in this one",
        "consensus.proposer:Proposer.decide",
        "{m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.ballot}",
        "{m: b.last for m, b in self.acceptor_states.items()}",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "one-roster: a take-over asks only the voters of the roster that is decided",
        "consensus.proposer:Proposer._rosters",
        "[log.roster_at(log.decided + 1)] + [log.roster_at(index + 1) for index in changes]",
        "[log.roster_at(log.decided + 1)]",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "longest-log: a take-over adopts the longest log, of whatever ballot",
        "consensus.proposer:Proposer.try_lead",
        "(promise.accepted, promise.last)",
        "promise.last",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "early-rounds: rounds open before the ballot's first record is decided",
        "consensus.proposer:Proposer.open",
        "self.leading and 0 < self.opening <= self.log.decided",
        "self.leading",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "restarted-vote: a rack that was started again keeps its vote",
        "consensus.proposer:Proposer.decide",
        "{m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.ballot}",
        "{next((v for v in log.appended.voters if v.rack == m.rack), m): b.last for m, b in "
        "self.acceptor_states.items() if b.accepted == self.ballot}",
        ("tests/unit/consensus/test_proposer.py",),
    ),
    Mutant(
        "any-candidate: who hears its coordinator promises to others",
        "coordination.acceptor_host:Follower.asked",
        "not hears or self.founds or peer == self.coordinator",
        "True",
        ("tests/unit/coordination/test_acceptor_host.py",),
    ),
    Mutant(
        "former-life: orders to a rack's former life are obeyed",
        "coordination.acceptor_host:Follower.addressed",
        "orders.to == self.member.incarnation",
        "True",
        ("tests/unit/coordination/test_acceptor_host.py",),
    ),
    Mutant(
        "voting-newcomer: a rank_machine votes before it holds what is decided",
        "coordination.membership:_votes",
        "_may_vote(context, rack) and _is_close(context, rack)",
        "_may_vote(context, rack)",
        ("tests/unit/coordination/test_membership.py",),
    ),
    Mutant(
        "lockstep-eviction: silence costs the seat in lockstep too",
        "coordination.coordinator:Coordinator._try_roster",
        "0 if policy.lockstep else policy.seat_timeout_ns",
        "policy.seat_timeout_ns",
        ("tests/unit/coordination/test_takeover.py",),
    ),
    Mutant(
        "undone-copy: a copy of an undone version is taken for the new one of its number",
        "coordination.fragment_replica:FragmentReplica.begin_anew",
        "self.undone |= self.copying is not None and self.copying > version",
        "pass",
        ("tests/unit/coordination/test_rank.py",),
    ),
    Mutant(
        "own-ear: a rank joins a round that it has heard of, whatever the rack's others have",
        "engine.trainer.trainer_rounds:TrainerRounds._apply_point",
        "(agreed[:len(flags)], agreed[len(flags):2 * len(flags)])",
        "(flags, [-v for v in flags])",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "joined-again: what was declined is captured again at each poll point of its round",
        "coordination.schedule:Calendar.joins",
        "version > self.versions[p]",
        "version >= 0",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "late-mark: an open offer that counts in a round leaves the rack's own clock as it is",
        "engine.trainer.trainer_rounds:TrainerRounds._join",
        "if state.offer is not None:\n"
        "    self._reach(fragment)\n"
        "elif not joined and self._countable(False)[1] > state.steps_mark:\n"
        "    self.parts.before_capture()\n"
        "    if self.clock.measured_step < self.step:\n"
        "        self._measure()\n"
        "    self._reach(fragment)\n"
        "    joined = (fragment,)",
        "if state.offer is not None:\n"
        "    continue\n"
        "elif not joined and self._countable(False)[1] > state.steps_mark:\n"
        "    self.parts.before_capture()\n"
        "    if self.clock.measured_step < self.step:\n"
        "        self._measure()\n"
        "    self._reach(fragment)\n"
        "    joined = (fragment,)",
        ("tests/unit/engine/test_trainer_rounds.py",),
    ),
    Mutant(
        "closed-door: a rack joins a round whose members are fixed",
        "engine.loop.concurrent_outer_step:_opened_in",
        "(p, version) not in proposals",
        "proposals is not None",
        ("tests/unit/engine/test_concurrent_outer_step.py",),
    ),
    Mutant(
        "replayed-by-grid: a replay looks at every step, not at those of its tape",
        "mend_lab.replay.training:ReplayTrainer.stepped",
        "due.step <= self.step if due is not None else not self._ends or self._merged()",
        "self.step >= self.calendar.next_step",
        ("tests/unit/lab/test_replay_training.py",),
    ),
)


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests fail with the bug in place, and the first line that says so."""
    changed = ast.unparse(edited([mutant.edit]))
    with tempfile.TemporaryDirectory(prefix="mend-mutant-") as folder:
        copy = Path(folder)
        copy_tree(copy)  # with compiled files, which are told by their times
        (copy / "src/mend" / mutant.edit.file).write_text(changed, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = own_environment(PYTHONPATH=str(copy / "src"))
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, lines[0] if lines else done.stdout[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutants whose name begins so")
    parser.add_argument(
        "--since", nargs="?", const="", metavar="REV",
        help="small edits of the functions that differ from REV; without REV from the main branch",
    )  # fmt: skip
    parser.add_argument(
        "--of", nargs="+", metavar="MODULE", help="small edits of modules, as transport.socks"
    )
    parser.add_argument("--most", type=int, default=30, help="edits, for --of of each module")
    parser.add_argument("--minutes", type=float, default=10, help="then no further edit is tried")
    asked = parser.parse_args()
    if asked.of or asked.since is not None:
        of_module = asked.of is not None
        edits = (
            edits_in(asked.of, asked.most) if of_module else edits_since(asked.since, asked.most)
        )
        print(f"{len(edits)} mutants, at most {asked.minutes:g} minutes", flush=True)
        return hunt(edits, asked.minutes, PARALLEL)
    wanted = asked.names
    chosen = [m for m in MUTANTS if not wanted or any(m.name.startswith(name) for name in wanted)]
    survivors = 0
    needed = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    nothing = Mutant(
        "nothing", "consensus.quorum:quorum", "votes & voters", "votes & voters", needed
    )
    red, how = caught(nothing)
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
