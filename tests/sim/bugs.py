"""Bugs of the protocol, planted one at a time in the running code; seeds must show each of them.

A bug is a change of the source: texts that occur exactly once in a file of src/mend, and what they
become. `planted` gives the functions of that file the code of the changed text, in this process and
for as long as it lasts; whoever imported them has the bug too. `python -m tests.mutation_table`
draws seeds until a checker speaks, test_mutations.py repeats the cheap ones. The bugs of
tests/mutants.py are for tests of single files, those of planted.py for the model checker.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import mend

SOURCE = Path(mend.__file__).parent


@dataclass(frozen=True, slots=True)
class Edit:
    """`old` is in `file` exactly once; `new` takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Bug:
    """`says`: what the code does wrong now."""

    name: str
    says: str
    edits: tuple[Edit, ...]


def _bug(name: str, says: str, *edits: tuple[str, str, str]) -> Bug:
    return Bug(name, says, tuple(Edit(*edit) for edit in edits))


RANK_MACHINE, ROUND, COORDINATOR = (
    "coordination/rank.py",
    "coordination/round.py",
    "coordination/coordinator.py",
)
PROPOSER, VOTER, FOLLOWER = (
    "consensus/proposer.py",
    "consensus/acceptor.py",
    "coordination/acceptor_host.py",
)
ROUNDS, SHELF = "engine/trainer_rounds.py", "coordination/fragment_replica.py"
SCHEDULE = "coordination/schedule.py"
LOG, ELECTION = "consensus/log.py", "coordination/election.py"
ROSTERS, LADDER = "coordination/membership.py", "coordination/ladder.py"
ACCEPTED = (
    "reached = {m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.epoch}"
)
IN_DECIDE = "{member for member, last in reached.items() if last > index}, log.voters_at(index + 1)"
OWN_STEP_DOWN = "if self.proposer.leading and self.acceptor.promised > self.proposer.epoch:"
LEFT = "left and left <= promised for left in lefts"

BUGS = (
    _bug(
        "1",
        "a record is decided when it is appended, before a quorum has it",
        (PROPOSER, "return log.decide(index) if", "return log.decide(log.last) if"),
    ),
    _bug(
        "2",
        "accepts of an older epoch count",
        (PROPOSER, ACCEPTED, "reached = {m: b.last for m, b in self.acceptor_states.items()}"),
    ),
    _bug(
        "3",
        "a acceptor accepts the log of an epoch below its promise",
        (VOTER, "        if epoch < self.promised:\n            return False\n"
         "        self.promised = epoch\n        if snapshot",
         "        self.promised = epoch\n        if snapshot"),
        (FOLLOWER, "if orders.epoch < self.acceptor.promised:", "if orders.epoch < 0:"),
    ),
    _bug(
        "4",
        "votes count by rack: a restarted rack votes for its former life",
        (PROPOSER, IN_DECIDE,
         "{member.rack for member, last in reached.items() if last > index}, "
         "{member.rack for member in log.voters_at(index + 1)}"),
    ),
    _bug(
        "4b",
        "a restarted rack has the incarnation of its former life",
        ("sim/world.py", "member = Member(rack, self.rng.getrandbits(62))",
         "member = Member(rack, 1 + rack)"),
    ),
    _bug(
        "5",
        "a take-over asks the voters of the decided roster only",
        (PROPOSER, "return [log.roster_at(log.decided + 1)] + [log.roster_at(index + 1) for index "
         "in changes]", "return [log.roster_at(log.decided + 1) for _ in (changes, None)]"),
    ),
    _bug(
        "6",
        "records are appended behind an undecided Roster",
        (PROPOSER, "isinstance(record, Roster | Lineage) for record in undecided",
         "False for record in undecided"),
    ),
    _bug(
        "7",
        "half of the voters decide, whichever half",
        ("consensus/quorum.py", "return bool(voters) and min(voters) in counted",
         "return bool(counted)"),
    ),
    _bug(
        "7b",
        "half of the voters decide if the lowest that answered is among them",
        (PROPOSER, "quorum(\n            " + IN_DECIDE + "\n        )",
         "2 * len(log.voters_at(index + 1) & {m for m, last in reached.items() if last > index}) "
         ">= len(log.voters_at(index + 1))"),
    ),
    _bug(
        "8",
        "one result is enough for a commit",
        (ROUND, "if hold(by_digests[digests], inputs.voters):", "if by_digests[digests]:"),
    ),
    _bug(
        "9",
        "a roster changes whoever holds what is decided",
        (ROSTERS, "if _keeps_bytes(context, each)), None)", "if each.members), None)"),
    ),
    _bug(
        "10",
        "a result is freed when it is reported",
        (SHELF, "        self.tentative = (event.version, event.attempt, event.digest)\n"
         "        return []",
         "        self.tentative = (event.version, event.attempt, event.digest)\n"
         "        return [DropAnchor(event.fragment, event.version, event.attempt)]"),
        (RANK_MACHINE, "            if mine == digest:\n                replica.held.add(newest)",
         "            if mine == '':\n                replica.held.add(newest)"),
        (RANK_MACHINE, "if replica.same_members(newest):", "if mine != digest:"),
    ),
    _bug(
        "11",
        "attempts of two epochs have the same number",
        ("consensus/epochs.py", "return epoch << _ATTEMPT_BITS | count", "return count"),
    ),
    _bug(
        "11b",
        "merged slices of one attempt are pulled for another",
        ("types.py", 'b"m", position, attempt, rank', 'b"m", position, 0, rank'),
        (ROUND, "self.sharded, self.merged = may and not self.unsharded, ()",
         "self.sharded = may and not self.unsharded"),
        ("coordination/slices.py", "if of[0] >= gather.version", "if of[0] > gather.version"),
    ),
    _bug(
        "12",
        "an offer that has ended may be named again",
        (LOG, "seq > self.ended.get((member, fragment), 0)", "seq > 0"),
    ),
    _bug(
        "13",
        "a fragment is captured again while its offer is open",
        (ROUNDS, "        if track.offer is not None:\n            self._post(StillOpen",
         "        if track.offer is not None and track.seq < 0:\n            self._post(StillOpen"),
    ),
    _bug(
        "14",
        "the snapshot is kept instead of the delta: what is carried is measured from there",
        (ROUNDS, 'return fate, track.offer.merged_N if fate == "named" else None\n',
         "moved_N = track.anchor.values - (track.offer.anchor.values - track.offer.delta_N)\n"
         '        return fate, moved_N if fate == "named" else None\n'),
    ),
    _bug(
        "15",
        "a dropped offer's residual is taken over like a merged one's",
        (ROUNDS, '                self.ledger.miss("offer dropped: too old")\n',
         '                self.ledger.miss("offer dropped: too old")\n'
         "                track.residual_N = offer.pend_N\n"),
    ),
    _bug(
        "16",
        "tokens are counted from the apply on, not from the capture",
        (ROUNDS, "track.tokens_mark, track.steps_mark = offer.tokens_total, offer.steps_total",
         "track.tokens_mark, track.steps_mark = self.tokens, self.step"),
    ),
    _bug(
        "17",
        "a rank applies without its rack's collective",
        (ROUNDS, "agreed: list[int] = values if self.options.ranks == 1 else (yield "
         "AgreeMin(values))", "agreed: list[int] = values"),
    ),
    _bug(
        "17b",
        "ranks agree on the least of their newest versions, here or not",
        (ROUNDS, "if version > track.anchor.version and version >= -minus_oldest:",
         "if version > track.anchor.version:"),
    ),
    _bug(
        "18",
        "an offer that comes too late for a round is forgotten by the coordinator",
        (COORDINATOR, "                self.proposer.append(commit)\n"
         "                self.offers = {key: o for key, o in self.offers.items() if "
         "self._is_open(o)}",
         "                self.proposer.append(commit)\n"
         "                late = {(*key, o.seq) for key, o in self.offers.items() if key[1] == "
         "commit.fragment}\n"
         "                vars(self)['late'] = vars(self).get('late', set()) | late\n"
         "                self.offers = {key: o for key, o in self.offers.items() if "
         "self._is_open(o)}"),
        (COORDINATOR, "return known and log.is_open(offer.member, offer.fragment, offer.seq)",
         "late = (offer.member.rack, offer.fragment, offer.seq) in vars(self).get('late', ())\n"
         "        return known and not late and "
         "log.is_open(offer.member, offer.fragment, offer.seq)"),
    ),
    _bug(
        "18b",
        "a rack takes its offer back when a commit does not name it",
        ("engine/published_state.py", 'if (fate := fate_in(commit, mine))), "")',
         'if (fate := fate_in(commit, mine))), "dropped" if stretch else "")'),
    ),
    _bug(
        "19",
        "a copied state is not compared with the log",
        ("engine/concurrent_outer_step.py",
         "elif result.digest != effect.digest:", "elif result.digest == '':"),
    ),
    _bug(
        "20",
        "payloads go as soon as the own result is there",
        (RANK_MACHINE, "                effects += self.replicas[p].merged(event, now_ns)\n",
         "                effects += self.replicas[p].merged(event, now_ns)\n"
         "                for o in self.replicas[p].gather.members if self.replicas[p].tentative "
         "else ():\n"
         "                    self._free(o.member, p, o.seq, effects)\n"),
    ),
    _bug(
        "21",
        "decisions of an epoch that is over are not believed by a candidate",
        (PROPOSER, "if acceptor_state.decided > self.log.decided == acceptor_state.prev and fits:",
         "if acceptor_state.decided > self.log.decided == acceptor_state.prev and fits "
         "and acceptor_state.accepted == self.epoch:"),
    ),
    _bug(
        "21b",
        "of a piece of the log the decided records are not taken",
        (VOTER, "records = records[: max(0, decided - prev)]", "return True"),
    ),
    _bug(
        "22",
        "each apply point has a stall budget of its own",
        (ROUNDS, "self._budget_ns = max(0, self._budget_ns - self.stall_ns_last)",
         "self._budget_ns = max(0, self._budget_ns)"),
    ),
    _bug(
        "23",
        "the log begins when a majority of the racks has said hello",
        (COORDINATOR, "missing = len(hellos) < self.options.racks",
         "missing = 2 * len(hellos) <= self.options.racks"),
    ),
    _bug(
        "24",
        "K votes decide",
        (PROPOSER, "quorum(\n            " + IN_DECIDE + "\n        )",
         "log.voters_at(index + 1) and len(log.voters_at(index + 1) & {m for m, last in "
         "reached.items() if last > index}) >= log.appended.policy.quorum_min_learners"),
    ),
    _bug(
        "24b",
        "K results are enough for a commit",
        (ROUND, "if hold(by_digests[digests], inputs.voters):",
         "if len(by_digests[digests]) >= inputs.policy.quorum_min_learners:"),
    ),
    _bug(
        "25",
        "a coordinator counts its own vote for ever and never steps down; its acceptor promises "
        "it to others all the same",
        (COORDINATOR, OWN_STEP_DOWN, "if self.proposer.leading and self.acceptor.promised < 0:"),
        (PROPOSER, ACCEPTED,
         ACCEPTED + "\n        reached |= {m: log.last for m in self.acceptor_states if m.rack == "
         "self.epoch >> 16 & 0xFFFF}"),
        (PROPOSER, "if acceptor_state.promised > self.epoch:",
         "if acceptor_state.promised > self.epoch and not self.leading:"),
        (ELECTION, "return self.proposer.epoch not in (0, orders.epoch)",
         "return self.proposer.standing and self.proposer.epoch != orders.epoch"),
        (FOLLOWER, "may = not hears or self.founds or peer == self.coordinator", "may = True"),
    ),
    _bug(
        "26",
        "rounds open before the first record of the epoch is decided",
        (PROPOSER, "return self.leading and 0 < self.opening <= self.log.decided",
         "return self.leading and self.log.decided > 0"),
    ),
    _bug(
        "27",
        "an old longer end of a log survives the first append of an epoch",
        (VOTER, "            self.log.cut(max(reached, self.log.decided))\n", ""),
        (LOG, "        for index, record in enumerate(records, start=prev + 1):\n",
         "        records = tuple(records)\n"
         "        old = range(prev + len(records) + 1, self.last + 1)\n"
         "        tail = [self._records[i] for i in old]\n"
         "        for index, record in enumerate((*records, *tail), start=prev + 1):\n"),
    ),
    _bug(
        "28",
        "a new lineage begins without the silent, dead or not",
        (PROPOSER, LEFT, "left & promised for left in lefts"),
    ),
    _bug(
        "29",
        "a lineage goes on from the newest versions of the log, held or not",
        (PROPOSER, "versions = tuple(map(min, best, log.versions))",
         "versions = tuple(log.versions) if best else ()"),
    ),
    _bug(
        "30",
        "offers that only an undone commit named stay open",
        (RANK_MACHINE, "if p in self.parts and (self.member, self.parts[p].seq) in named:",
         "if p in self.parts and named is None:"),
    ),
    _bug(
        "31",
        "receivers merge whatever has the right checksum",
        ("engine/numerics.py", "if not _sound(values):", "if not len(runs):"),
    ),
    _bug(
        "31b",
        "what receivers have found bad is nothing to the coordinator",
        (ROUND, "if inputs.bad:", "if inputs.bad and not inputs.offers:"),
    ),
    _bug(
        "31c",
        "a rack whose offer was bad is told that it was too old",
        (RANK_MACHINE, 'bad = record.reason if record.diverged else ""', 'bad = record.reason[:0]'),
    ),
    _bug(
        "32",
        "a snapshot does not say which offers have ended",
        (LOG, "ended={(last.member, last.fragment): last.ended for last in snapshot.last},",
         "ended={},"),
    ),
    _bug(
        "32b",
        "a snapshot does not say which offers were named",
        ("engine/published_state.py", 'return "named" if seq == known.named else "dropped"',
         'return "named" if seq < known.named else "dropped"'),
    ),
    _bug(
        "23b",
        "a quorum decides Genesis",
        (PROPOSER, "if index == 0 and not log.roster_at(1).members <= ",
         "if index < 0 and not log.roster_at(1).members <= "),
    ),
    _bug(
        "23c",
        "hellos that waited for a former life of the founder begin a job, and a quorum decides it",
        (PROPOSER, "if index == 0 and not log.roster_at(1).members <= ",
         "if index < 0 and not log.roster_at(1).members <= "),
        (COORDINATOR,
         "missing or not all(self._answered(r, now_ns) for r in hellos):", "missing:"),
    ),
    _bug(
        "23d",
        "a founder waits for ever for the vote of a rack that has died",
        (COORDINATOR,
         "if log.begun and (seats != log.seats or not self._live(now_ns) >= hellos.keys()):",
         "if log.begun and not seats:"),
    ),
    _bug(
        "23e",
        "a founder does not outbid the promises to its former life",
        (COORDINATOR,
         "if self.proposer.leading and self._homeless() and not self.log.committed.begun:",
         "if self.proposer.leading and now_ns < 0:"),
    ),
    _bug(
        "23f",
        "a rack that has promised to a founder does not join a job that lives",
        (FOLLOWER, "if not self._joins(Member(peer.rack, incarnation), orders, now_ns):",
         "if now_ns < 0:"),
    ),
    _bug(
        "33",
        "a coordinator that hears no quorum stays",
        (COORDINATOR, "if self.proposer.leading and not self._hears_quorum(now_ns):",
         "if self.proposer.leading and now_ns < 0:"),
    ),
    _bug(
        "33b",
        "a rack says hello until a record gives it a seat, decided or not",
        ("coordination/leader.py", "        if not self._is_seated():\n            self._say_hello",
         "        if not self.log.appended.begun:\n            self._say_hello"),
    ),
    _bug(
        "34",
        "a demoted acceptor is counted",
        (LOG, "voters_of(self.seats.values(), self.non_voters, self.witness)",
         "voters_of(self.seats.values(), self.non_voters - self.demoted, self.witness)"),
    ),
    _bug(
        "34b",
        "no vote is taken where hold needs the bytes of who is silent",
        (ROSTERS, "    if silent and not hold(", "    if silent and not racks and not hold("),
    ),
    _bug(
        "34e",
        "a witness that was started again gets no seat",
        (ROSTERS,
         "if context.returned is not None:", "if context.returned is not None and not votes:"),
    ),
    _bug(
        "35",
        "where no acceptor is left, one of those without a vote begins a lineage",
        (PROPOSER,
         "lefts = [each.members - self.dead for each in rosters]",
         "lefts = [each.voters - self.dead or each.members & promised for each in rosters]"),
    ),
    _bug(
        "35b",
        "where no acceptor is left, nobody stands for a lineage",
        (ELECTION, "written.members if written.voters <= self.proposer.dead else written.voters",
         "written.voters"),
    ),
    _bug(
        "36",
        "a witness forgets its job though one of its racks may live",
        (COORDINATOR, "return seated <= self.proposer.dead | self.election.unaware",
         "return len(seated - self.proposer.dead - self.election.unaware) <= 1"),
        (COORDINATOR, "if not self._forsaken():\n                self.acceptor.start_over()",
         "if now_ns:\n                self.acceptor.start_over()"),
    ),
    _bug(
        "36b",
        "a witness keeps a job whose racks are all dead",
        (COORDINATOR, "not told.over and (not seated or self._forsaken())",
         "not told.over and not seated"),
    ),
    _bug(
        "36c",
        "a hello of a life that never had a seat attests the death of the one that has it",
        (ELECTION, "if hello and life_of(former) not in hello.after:",
         "if hello and sender == former:"),
        ("coordination/admission.py", "return former is None or life_of(former) in hello.after",
         "return former is None or former != hello.seat.member"),
    ),
    _bug(
        "40",
        "a rack that joins rounds of others captures on its fixed grid as well",
        (SCHEDULE, "return mark + self.schedule.period(fragment) if mark else "
         "self.schedule.first(fragment)",
         "first, period = self.schedule.first(fragment), self.schedule.period(fragment)\n"
         "        return first if mark < first else mark - (mark - first) % period + period"),
    ),
    _bug(
        "40b",
        "nobody joins a round that another rack has opened",
        (SCHEDULE, "if version > self.versions[p]]", "if version > self.versions[p] > 1 << 40]"),
    ),
    _bug(
        "36d",
        "a person's word that a rack is dead is nothing to who has no quorum",
        (ELECTION, "if gone not in racks or (follows and not self.proposer.leading):",
         "if gone not in racks or not self.proposer.leading:"),
    ),
    _bug(
        "36e",
        "a person's word is enough, whoever else is missing",
        (PROPOSER, LEFT, "left & promised and self.retired for left in lefts"),
    ),
    _bug(
        "41",
        "a slow rack that rounds do not wait for is never waited for again",
        (LADDER, "CALM_DETECTS * detect_ns", "1 << 62"),
    ),
    _bug(
        "37",
        "which racks are absent is looked at anew while an attempt lasts",
        (ROUND, "            return self._try_commit(inputs, now_ns)",
         "            self.absent = _absent(inputs, self.members)\n"
         "            return self._try_commit(inputs, now_ns)"),
    ),
    _bug(
        "37b",
        "a commit says nothing of the racks that its merge counted as absent",
        (ROUND, "            absent=self.absent,\n", ""),
    ),
    _bug(
        "37c",
        "the momentum's ramp goes by versions, whatever was missing in them",
        ("engine/numerics.py", "anchor.rounds + part, len", "version * WHOLE, len"),
    ),
    _bug(
        "37d",
        "a snapshot does not say how many rounds were merged",
        (LOG, "rounds=tuple(told.rounds),", "rounds=(0,) * len(told.rounds),"),
    ),
    _bug(
        "38",
        "ranks train on versions that a new lineage, which is not decided yet, undoes",
        ("coordination/leader.py",
         "return self._is_seated() and not awaits and not begins", "return self._is_seated()"),
    ),
    _bug(
        "39",
        "the end of a job is appended where it cannot be decided, and told before it is",
        (ROSTERS, "_over(context) if context.decidable else None", "_over(context)"),
        (COORDINATOR, "if begun and not self.log.appended.over else", "if begun else"),
    ),
    _bug(
        "42",
        "a candidate that finds that nobody who is left holds the weights tells nobody",
        (ELECTION, "if self.proposer.lost else ()", "if not self.proposer.epoch else ()"),
    ),
)  # fmt: skip
"""Named as in the list of bugs that the protocol must survive; letters are other forms of one."""

ELSEWHERE = {
    "21": "`python -m tests.mutants unbelieved`. Seeds hardly can: whoever does not believe it "
    "cannot win and waits, and the voter that knows the decision stands next; it costs time only.",
    "34e": "`pytest tests/unit/coordination/test_takeover.py -k started_again`. It costs no vote "
    "any more: the next candidate asks the witness, too, whose promise attests its former life.",
    "11b": "`pytest tests/sim/test_sharded.py`. Digests find it, and the next attempt is a mesh; a "
    "seed has to have an owner die between its own merge and those of the others.",
    "41": "`pytest tests/sim/test_ladder.py`. It costs what a merge is worth, no invariant.",
    "40": "`pytest tests/sim/test_together.py`. It costs bytes and breaks nothing: no invariant.",
    "40b": "`pytest tests/sim/test_together.py`. It costs what a merge is worth, no invariant.",
    "34b": "`pytest tests/sim/test_deaths.py`. The vote is taken some seconds later all the "
    "same, as of anybody who is silent for long; it costs time only.",
    "21b": "`python -m tests.mutants piece-refused`. Pieces are for voters more than 256 records "
    "behind; simulated jobs decide some hundred records in all.",
}
"""Bugs that no seed shows -> what does, and why seeds do not."""

NOT_HERE = {
    "4, votes of a former life, by name": "messages of another incarnation are not read; what is "
    "left of it are 4 (counting by rack) and 4b (an incarnation that is not new).",
    "7, lowest live voter": "`quorum` is not told who is live; of those that answered the lowest "
    "is always among them, which is 7b.",
    "20, freed on append": "ranks see decided records only; the nearest is 20, freed when the own "
    "result is there.",
    "21, Decided of a lower epoch": "there is no such message, orders are always those of the "
    "newest epoch; the nearest are 21 and 21b.",
    "25, the own vote alone": "a acceptor that hears its own coordinator promises nothing, so a "
    "leader's own vote is never given to another; 25 takes that rule away as well.",
    "26, an old commit whose bytes are gone comes back": "a gather travels in the same orders as "
    "the Epoch record, so that a rack which frees an older result for it has accepted the epoch. "
    "What 26 breaks here is the coordinator itself; `pytest tests/sim/test_explore.py` and "
    "`python -m tests.mutants early-rounds` show the rule alone.",
}
"""What of the list has no exact counterpart in the code -> why, and what was planted instead."""

TEXTS = {
    file: (SOURCE / file).read_text(encoding="utf-8")
    for file in {edit.file for bug in BUGS for edit in bug.edits}
}
"""Of now, so that a long run does not mix what runs with what is being written meanwhile."""


def occurrences(edit: Edit) -> int:
    return TEXTS[edit.file].count(edit.old)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The running code has the bug."""
    texts: dict[str, str] = {}
    for edit in bug.edits:
        text = texts.get(edit.file, TEXTS[edit.file])
        assert text.count(edit.old) == 1, f"bug {bug.name}: its text is not in {edit.file} once"
        texts[edit.file] = text.replace(edit.old, edit.new)
    before: list[tuple[FunctionType, CodeType]] = []
    for file, text in texts.items():
        before += _changed(file, text)
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _changed(file: str, text: str) -> list[tuple[FunctionType, CodeType]]:
    """All functions of a module get their code of this text; returns what they had."""
    module = importlib.import_module("mend." + file.removesuffix(".py").replace("/", "."))
    codes = {code.co_qualname: code for code in _codes(compile(text, file, "exec"))}
    before = []
    for function in _functions(module):
        code = codes.get(function.__qualname__)
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            before.append((function, function.__code__))
            function.__code__ = code
    return before


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Of a module and its classes, as they were defined there."""
    for found in vars(module).values():
        if getattr(found, "__module__", None) != module.__name__:
            continue
        for each in vars(found).values() if inspect.isclass(found) else (found,):
            function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
            if isinstance(function, FunctionType):
                yield function
