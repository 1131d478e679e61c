"""Bugs of the protocol, planted one at a time in the running code; seeds must show each of them.

A bug is some edits of functions (tests/planting.py), made in this process and for as long as
`planted` lasts. `python -m tests.mutation_table` draws seeds until a checker speaks,
test_mutations.py repeats the cheap ones. The bugs of tests/mutants.py are for tests of single
files, those of planted.py for the model checker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests import planting
from tests.planting import Edit


@dataclass(frozen=True, slots=True)
class Bug:
    """`says`: what the code does wrong now."""

    name: str
    says: str
    edits: tuple[Edit, ...]


def _bug(name: str, says: str, *edits: tuple[str, str, str]) -> Bug:
    return Bug(name, says, tuple(Edit(*edit) for edit in edits))


BUGS = (
    _bug(
        "1",
        "a record is decided when it is appended, before a quorum has it",
        ("consensus.proposer:Proposer.decide", "log.decide(index)", "log.decide(log.last)"),
    ),
    _bug(
        "2",
        "accepts of an older ballot count",
        ("consensus.proposer:Proposer.decide",
         "{m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.ballot}",
         "{m: b.last for m, b in self.acceptor_states.items()}"),
    ),
    _bug(
        "3",
        "an acceptor accepts the log of a ballot below its promise",
        ("consensus.acceptor:Acceptor.append",
         "if ballot < self.promised:\n"
         "    return False", ""),
        ("coordination.acceptor_host:Follower.follow", "self.acceptor.promised", "0"),
    ),
    _bug(
        "4",
        "votes count by rack: a restarted rack votes for its former life",
        ("consensus.proposer:Proposer.decide",
         "log.roster_at(index + 1).may_decide({member for member, last in reached.items() if last "
         "> index})",
         "(lambda votes, voters: 2 * len(votes & voters) > len(voters) or (2 * len(votes) == "
         "len(voters) and min(voters) in votes))({member.rack for member, last in reached.items() "
         "if last > index}, {member.rack for member in log.roster_at(index + 1).voters})"),
    ),
    _bug(
        "4b",
        "a restarted rack has the incarnation of its former life",
        ("mend_lab.sim.world:World._build_rack", "self.rng.getrandbits(62)", "1 + rack"),
    ),
    _bug(
        "5",
        "a take-over asks the voters of the decided roster only",
        ("consensus.proposer:Proposer._rosters",
         "[log.roster_at(log.decided + 1)] + [log.roster_at(index + 1) for index in changes]",
         "[log.roster_at(log.decided + 1) for _ in (changes, None)]"),
    ),
    _bug(
        "6",
        "records are appended behind an undecided Roster",
        ("consensus.proposer:Proposer.may_append", "isinstance(record, Roster | Lineage)", "False"),
    ),
    _bug(
        "7",
        "half of the voters decide, whichever half",
        ("consensus.quorum:quorum", "bool(voters) and min(voters) in counted", "bool(counted)"),
    ),
    _bug(
        "7b",
        "half of the voters decide if the lowest that answered is among them",
        ("consensus.proposer:Proposer.decide",
         "log.roster_at(index + 1).may_decide({member for member, last in reached.items() if last "
         "> index})",
         "2 * len(log.roster_at(index + 1).voters & {m for m, last in reached.items() if last > "
         "index}) >= len(log.roster_at(index + 1).voters)"),
    ),
    _bug(
        "8",
        "one result is enough for a commit",
        ("coordination.round:Round._try_commit", "hold(by_digests[digests], inputs.voters)",
         "by_digests[digests]"),
    ),
    _bug(
        "9",
        "a roster changes whoever holds what is decided",
        ("coordination.membership:next_roster", "_keeps_bytes(context, each)", "each.members"),
    ),
    _bug(
        "10",
        "a result is freed when it is reported",
        ("coordination.fragment_replica:FragmentReplica.on_merged", "return []",
         "return [DropAnchor(event.fragment, event.version, event.attempt)]"),
        ("coordination.rank:RankMachine._reach", "mine == digest", "mine == ''"),
        ("coordination.rank:RankMachine._reach", "replica.same_members(newest)", "mine != digest"),
    ),
    _bug(
        "11",
        "attempts of two ballots have the same number",
        ("consensus.ballots:attempt_of", "ballot << _ATTEMPT_BITS | count", "count"),
    ),
    _bug(
        "11b",
        "merged slices of one attempt are pulled for another",
        ("types:slice_key", "_KEY.pack(b'm', position, attempt, rank, fragment, version, 0, b'')",
         "_KEY.pack(b'm', position, 0, rank, fragment, version, 0, b'')"),
        ("coordination.round:Round._start_attempt",
         "self.sharded, self.merged = (may and (not self.unsharded), ())",
         "self.sharded = may and (not self.unsharded)"),
        ("coordination.slices:Slices.begin",
         "of[0] >= proposal.version", "of[0] > proposal.version"),
        # Else the owner has merged its slices anew by then, in all but a rare race.
        ("coordination.slices:Slices._lacks_payloads", "2 * sum(missing) > len(missing)", "False"),
    ),
    _bug(
        "12",
        "an offer that has ended may be named again",
        ("consensus.log:LogState.is_open", "self.ended.get((member, fragment), 0)", "0"),
    ),
    _bug(
        "13",
        "a fragment is captured again while its offer is open",
        ("engine.trainer.trainer_rounds:TrainerRounds._capture", "state.offer is not None",
         "state.offer is not None and state.seq < 0"),
    ),
    _bug(
        "14",
        "the snapshot is kept instead of the delta: what is carried is measured from there",
        ("engine.trainer.trainer_rounds:TrainerRounds._fate",
         "return (fate, offer.merged_N if fate == 'named' else None)",
         "anchor_N = self.fragment_states[fragment].anchor.values\n"
         "moved_N = anchor_N - (offer.anchor.values - offer.delta_N)\n"
         "return (fate, moved_N if fate == 'named' else None)"),
    ),
    _bug(
        "15",
        "a dropped offer's residual is taken over like a merged one's",
        ("engine.trainer.trainer_rounds:TrainerRounds._apply",
         "self.ledger.miss('offer dropped: too old')",
         "self.ledger.miss('offer dropped: too old')\n"
         "state.residual_N = offer.pend_N"),
    ),
    _bug(
        "16",
        "tokens are counted from the apply on, not from the capture",
        ("engine.trainer.trainer_rounds:TrainerRounds._settle",
         "(offer.tokens_total, offer.steps_total)", "(self.tokens, self.step)"),
    ),
    _bug(
        "17",
        "a rank applies without its rack's collective",
        ("engine.trainer.trainer_rounds:TrainerRounds.agree_and_apply",
         "(yield from agree(self.policy.ranks, values))", "values"),
    ),
    _bug(
        "17b",
        "ranks agree on the least of their newest versions, here or not",
        ("engine.trainer.trainer_rounds:TrainerRounds.agree_and_apply",
         "version > state.anchor.version and version >= -minus_oldest",
         "version > state.anchor.version"),
    ),
    _bug(
        "18",
        "an offer that comes too late for a round is forgotten by the coordinator",
        ("coordination.coordinator:Coordinator._advance_rounds", "self.proposer.append(commit)",
         "self.proposer.append(commit)\n"
         "late = {(*key, o.seq) for key, o in self.offers.items() if key[1] == commit.fragment}\n"
         "vars(self)['late'] = vars(self).get('late', set()) | late"),
        ("coordination.coordinator:Coordinator._is_open",
         "return known and log.is_open(offer.member, offer.fragment, offer.seq)",
         "late = (offer.member.rack, offer.fragment, offer.seq) in vars(self).get('late', ())\n"
         "return known and (not late) and log.is_open(offer.member, offer.fragment, offer.seq)"),
    ),
    _bug(
        "18b",
        "a rack takes its offer back when a commit does not name it",
        ("engine.state.published_state:PublishedFragment.fate",
         "next((fate for commit in stretch if (fate := fate_in(commit, mine))), '')",
         "next((fate for commit in stretch if (fate := fate_in(commit, mine))), 'dropped' if "
         "stretch else '')"),
    ),
    _bug(
        "19",
        "a copied state is not compared with the log",
        ("engine.loop.pipeline:Pipeline.copy",
         "result.digest != effect.digest", "result.digest == ''"),
    ),
    _bug(
        "20",
        "payloads go as soon as the own result is there",
        ("coordination.rank:RankMachine._on",
         "effects += self.replicas[p].on_merged(event, now_ns)",
         "effects += self.replicas[p].on_merged(event, now_ns)\n"
         "for o in self.replicas[p].proposal.members if self.replicas[p].tentative else ():\n"
         "    self._free(o.member, p, o.seq, effects)"),
    ),
    _bug(
        "21",
        "decisions of a ballot that is over are not believed by a candidate",
        ("consensus.proposer:Proposer._learn",
         "acceptor_state.decided > self.log.decided == acceptor_state.prev and fits",
         "acceptor_state.decided > self.log.decided == acceptor_state.prev and fits and "
         "(acceptor_state.accepted == self.ballot)"),
    ),
    _bug(
        "21b",
        "of a piece of the log the decided records are not taken",
        ("consensus.acceptor:Acceptor.append", "records = records[:max(0, decided - prev)]",
         "return True"),
    ),
    _bug(
        "22",
        "each apply point has a stall budget of its own",
        ("engine.trainer.trainer_rounds:TrainerRounds._await_results",
         "self.stalls.spend(now_ns - begun_ns)", "self.stalls.spend(0)"),
    ),
    _bug(
        "23",
        "the log begins when a majority of the racks has said hello",
        ("coordination.coordinator:Coordinator._try_genesis", "len(hellos) < self.options.racks",
         "2 * len(hellos) <= self.options.racks"),
    ),
    _bug(
        "24",
        "K votes decide",
        ("consensus.proposer:Proposer.decide",
         "index < log.last and log.roster_at(index + 1).may_decide({member for member, last in "
         "reached.items() if last > index})",
         "index < log.last and log.roster_at(index + 1).voters and "
         "(len(log.roster_at(index + 1).voters & {m "
         "for m, last in reached.items() if last > index}) >= "
         "log.appended.policy.merge_min_racks)"),
    ),
    _bug(
        "24b",
        "K results are enough for a commit",
        ("coordination.round:Round._try_commit", "hold(by_digests[digests], inputs.voters)",
         "len(by_digests[digests]) >= inputs.policy.merge_min_racks"),
    ),
    _bug(
        "25",
        "a coordinator counts its own vote for ever and never steps down; its acceptor promises "
        "it to others all the same",
        ("coordination.coordinator:Coordinator.handle",
         "self.acceptor.promised > self.proposer.ballot", "self.acceptor.promised < 0"),
        ("consensus.proposer:Proposer.decide",
         "reached = {m: b.last for m, b in self.acceptor_states.items() if b.accepted == "
         "self.ballot}",
         "reached = {m: b.last for m, b in self.acceptor_states.items() if b.accepted == "
         "self.ballot}\n"
         "reached |= {m: log.last for m in self.acceptor_states if m.rack == self.ballot >> 16 & "
         "65535}"),
        ("consensus.proposer:Proposer.hear", "acceptor_state.promised > self.ballot",
         "acceptor_state.promised > self.ballot and (not self.leading)"),
        ("coordination.election:Election.heard", "self.proposer.ballot not in (0, orders.ballot)",
         "self.proposer.standing and self.proposer.ballot != orders.ballot"),
        ("coordination.acceptor_host:Follower.asked",
         "not hears or self.founds or peer == self.coordinator", "True"),
    ),
    _bug(
        "26",
        "rounds open before the first record of the ballot is decided",
        ("consensus.proposer:Proposer.open", "0 < self.opening <= self.log.decided",
         "self.log.decided > 0"),
    ),
    _bug(
        "27",
        "an old longer end of a log survives the first append of a ballot",
        ("consensus.acceptor:Acceptor.append", "self.log.cut(max(reached, self.log.decided))", ""),
        ("consensus.log:Log.put", "enumerate(records, start=prev + 1)",
         "enumerate((*records, *[self._records[i] for i in range(prev + len(records) + 1, "
         "self.last + 1)]), start=prev + 1)"),
    ),
    _bug(
        "28",
        "a new lineage begins without the silent, dead or not",
        ("consensus.proposer:Proposer._enough", "left and left <= promised", "left & promised"),
    ),
    _bug(
        "29",
        "a lineage goes on from the newest versions of the log, held or not",
        ("consensus.proposer:Proposer._lineage", "tuple(map(min, best, log.versions))",
         "tuple(log.versions) if best else ()"),
    ),
    _bug(
        "30",
        "offers that only an undone commit named stay open",
        ("coordination.rank:RankMachine._on_lineage", "(self.member, self.parts[p].seq) in named",
         "named is None"),
    ),
    _bug(
        "31",
        "receivers merge whatever has the right checksum",
        ("engine.compute.merge_pass:MergePass._by_torch", "sound(values)", "size"),
    ),
    _bug(
        "31b",
        "what receivers have found bad is nothing to the coordinator",
        ("coordination.round:Round.advance",
         "if inputs.bad:\n"
         "    return self._drop_bad(inputs.bad)",
         "if inputs.bad and (not inputs.offers):\n"
         "    return self._drop_bad(inputs.bad)"),
    ),
    _bug(
        "31c",
        "a rack whose offer was bad is told that it was too old",
        ("coordination.rank:RankMachine._on_drop", "record.reason if record.diverged else ''",
         "record.reason[:0]"),
    ),
    _bug(
        "32",
        "a snapshot does not say which offers have ended",
        ("consensus.log:log_state_of",
         "{(last.member, last.fragment): last.ended for last in snapshot.last}", "{}"),
    ),
    _bug(
        "32b",
        "a snapshot does not say which offers were named",
        ("engine.state.published_state:PublishedFragment.fate", "seq == known.named",
         "seq < known.named"),
    ),
    _bug(
        "23b",
        "a quorum decides Genesis",
        ("consensus.proposer:Proposer.decide",
         "index == 0 and (not log.roster_at(1).members <= {m for m in reached if reached[m] > 0})",
         "index < 0 and (not log.roster_at(1).members <= {m for m in reached if reached[m] > 0})"),
    ),
    _bug(
        "23c",
        "hellos that waited for a former life of the founder begin a job, and a quorum decides it",
        ("consensus.proposer:Proposer.decide",
         "index == 0 and (not log.roster_at(1).members <= {m for m in reached if reached[m] > 0})",
         "index < 0 and (not log.roster_at(1).members <= {m for m in reached if reached[m] > 0})"),
        ("coordination.coordinator:Coordinator._try_genesis",
         "self.log.appended.begun or missing or (not all((self._answered(r, now_ns) for r in "
         "hellos)))", "self.log.appended.begun or missing"),
    ),
    _bug(
        "23d",
        "a founder waits for ever for the vote of a rack that has died",
        ("coordination.coordinator:Coordinator._try_genesis",
         "seats != log.seats or not self._live(now_ns) >= hellos.keys()", "not seats"),
    ),
    _bug(
        "23e",
        "a founder does not outbid the promises to its former life",
        ("coordination.coordinator:Coordinator._on_acceptor_state",
         "self.proposer.leading and self._homeless() and (not self.log.committed.begun)",
         "self.proposer.leading and now_ns < 0"),
    ),
    _bug(
        "23f",
        "a rack that has promised to a founder does not join a job that lives",
        ("coordination.acceptor_host:Follower.follow",
         "not self._joins(Member(peer.rack, incarnation), orders, now_ns)", "now_ns < 0"),
    ),
    _bug(
        "33",
        "a coordinator that hears no quorum stays",
        ("coordination.coordinator:Coordinator.handle", "not self._hears_quorum(now_ns)",
         "now_ns < 0"),
    ),
    _bug(
        "33b",
        "a rack says hello until a record gives it a seat, decided or not",
        ("coordination.leader:Leader.handle", "self._is_seated()", "self.log.appended.begun"),
    ),
    _bug(
        "34",
        "a demoted acceptor is counted",
        ("consensus.log:LogState._count_seats", "self.non_voters",
         "self.non_voters - self.demoted"),
    ),
    _bug(
        "34b",
        "no vote is taken where hold needs the bytes of who is silent",
        ("coordination.membership:_lost",
         "silent and (not hold({m for m in heard if m.rack in racks}, voters))",
         "silent and (not racks) and (not hold({m for m in heard if m.rack in racks}, voters))"),
    ),
    _bug(
        "34e",
        "a witness that was started again gets no seat",
        ("coordination.membership:_witness", "context.returned is not None",
         "context.returned is not None and (not votes)"),
    ),
    _bug(
        "35",
        "where no acceptor is left, one of those without a vote begins a lineage",
        ("consensus.proposer:Proposer._enough", "each.members - self.dead",
         "each.voters - self.dead or each.members & promised"),
    ),
    _bug(
        "35b",
        "where no acceptor is left, nobody stands for a lineage",
        ("coordination.election:Election.may_stand",
         "written.members if written.voters <= self.proposer.dead else written.voters",
         "written.voters"),
    ),
    _bug(
        "36",
        "a witness forgets its job though one of its racks may live",
        ("coordination.coordinator:Coordinator._forsaken",
         "seated <= self.proposer.dead | self.election.unaware",
         "len(seated - self.proposer.dead - self.election.unaware) <= 1"),
        ("coordination.coordinator:Coordinator._update_founding", "not self._forsaken()", "now_ns"),
    ),
    _bug(
        "36b",
        "a witness keeps a job whose racks are all dead",
        ("coordination.coordinator:Coordinator._homeless", "not seated or self._forsaken()",
         "not seated"),
    ),
    _bug(
        "36c",
        "a hello of a life that never had a seat attests the death of the one that has it",
        ("coordination.election:Election.attest", "life_of(former) not in hello.after",
         "sender == former"),
        ("coordination.admission:Admission._may_join", "life_of(former) in hello.after",
         "former != hello.seat.member"),
    ),
    _bug(
        "40",
        "a rack that joins rounds of others captures on its fixed grid as well",
        ("coordination.schedule:Calendar.due",
         "return mark + self.schedule.period(fragment) if mark else self.schedule.first(fragment)",
         "first, period = (self.schedule.first(fragment), self.schedule.period(fragment))\n"
         "return first if mark < first else mark - (mark - first) % period + period"),
    ),
    _bug(
        "40b",
        "nobody joins a round that another rack has opened",
        ("coordination.schedule:Calendar.joins", "version > self.versions[p]",
         "version > self.versions[p] > 1 << 40"),
    ),
    _bug(
        "36d",
        "a person's word that a rack is dead is nothing to who has no quorum",
        ("coordination.election:Election.retire", "follows and (not self.proposer.leading)",
         "not self.proposer.leading"),
    ),
    _bug(
        "36e",
        "a person's word is enough, whoever else is missing",
        ("consensus.proposer:Proposer._enough", "left and left <= promised",
         "left & promised and self.retired"),
    ),
    _bug(
        "41",
        "a slow rack that rounds do not wait for is never waited for again",
        ("coordination.ladder:Ladder.next", "CALM_DETECTS * detect_ns", "1 << 62"),
    ),
    _bug(
        "43",
        "a rack is evicted though nobody but one would vote without it",
        ("coordination.ladder:_needed",
         "len(left) < VOTERS_LEFT_MIN or not log.may_decide(left)", "not left"),
    ),
    _bug(
        "43b",
        "a rack that is evicted leaves before its work is merged",
        ("engine.trainer.trainer_end:TrainerEnd._leave_evicted", "range(2)", "range(0)"),
        ("engine.trainer.trainer_end:TrainerEnd._leave_evicted", "not stands or minus_open",
         "not stands"),
    ),
    _bug(
        "37",
        "which racks are absent is looked at anew while an attempt lasts",
        ("coordination.round:Round.advance", "return self._try_commit(inputs, now_ns)",
         "self.absent = _absent(inputs, self.members)\n"
         "return self._try_commit(inputs, now_ns)"),
    ),
    _bug(
        "37b",
        "a commit says nothing of the racks that its merge counted as absent",
        ("coordination.round:Round._commit", "self.absent", "()"),
    ),
    _bug(
        "37c",
        "the momentum's ramp goes by versions, whatever was missing in them",
        ("engine.compute.numerics:Numerics.merge", "anchor.rounds + part", "version * WHOLE"),
    ),
    _bug(
        "37d",
        "a snapshot does not say how many rounds were merged",
        ("consensus.log:Log.snapshot", "tuple(state.rounds)", "(0,) * len(state.rounds)"),
    ),
    _bug(
        "38",
        "ranks train on versions that a new lineage, which is not decided yet, undoes",
        ("coordination.leader:Leader._may_pass_on",
         "self._is_seated() and (not awaits) and (not begins)", "self._is_seated()"),
    ),
    _bug(
        "39",
        "the end of a job is appended where it cannot be decided, and told before it is",
        ("coordination.membership:next_roster", "_over(context) if context.decidable else None",
         "_over(context)"),
        ("coordination.coordinator:Coordinator._on_hello",
         "begun and (not self.log.appended.over)", "begun"),
    ),
    _bug(
        "42",
        "a candidate that finds that nobody who is left holds the weights tells nobody",
        ("coordination.election:Election._ask", "self.proposer.lost", "not self.proposer.ballot"),
    ),
    _bug(
        "42b",
        "a coordinator whose racks all lack a first version waits for the dead who held it",
        ("coordination.first_version:FirstVersion.lost",
         "bool(unheld(log, reports, left))", "False"),
    ),
    _bug(
        "45",
        "half of a lineage decides, though each of its racks lacks what another one holds",
        ("consensus.proposer:Proposer._lineage", "len(late) == len(seats)", "False"),
        ("consensus.proposer:Proposer._lineage", "set[int]() if unanimous else late",
         "late if len(late) < len(seats) else set()"),
    ),
    _bug(
        "45b",
        "the racks of such a lineage decide alike for ever",
        ("coordination.membership:_copied", "context.log.unanimous", "False"),
    ),
    _bug(
        "44",
        "time in which a process got no processor counts as the silence of others",
        ("coordination.awake:Sleep.take", "return slept_ns", "return 0"),
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
    "39": "`pytest tests/unit/coordination -k 'cannot_decide_it or not_decided'`. Since racks that "
    "fell silent a moment ago are awaited at the end, the seeds that showed it (747, 5551, 7377, "
    "13661) are clean: their racks were dead for less than three detection times.",
    "38": "`pytest tests/sim/test_deaths.py -k not_decided`. Since a rack that trains on a version "
    "which a lineage has undone ends and joins again, it costs a life and no invariant.",
    "41": "`pytest tests/sim/test_ladder.py`. It costs what a merge is worth, no invariant.",
    "45": "`pytest tests/sim/test_deaths.py`. It takes the death of the quorum, another newest "
    "version on each of those that are left, and one more death before they have copied.",
    "45b": "`pytest tests/sim/test_deaths.py`. Any other roster ends it as well.",
    "44": "`pytest tests/sim/test_awake.py`. It costs a take-over or a vote, no invariant.",
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
    "21, Decided of a lower ballot": "there is no such message, orders are always those of the "
    "newest ballot; the nearest are 21 and 21b.",
    "25, the own vote alone": "an acceptor that hears its own coordinator promises nothing, so a "
    "leader's own vote is never given to another; 25 takes that rule away as well.",
    "26, an old commit whose bytes are gone comes back": "a proposal travels in the same orders as "
    "the Ballot record, so that a rack which frees an older result for it has accepted the ballot. "
    "What 26 breaks here is the coordinator itself; `pytest tests/sim/test_explore.py` and "
    "`python -m tests.mutants early-rounds` show the rule alone.",
}
"""What of the list has no exact counterpart in the code -> why, and what was planted instead."""

NAMED = {bug.name: bug for bug in BUGS}

for _file in {edit.file for bug in BUGS for edit in bug.edits}:
    planting.text_of(_file)  # of now: a long run starts processes while somebody writes


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The running code has the bug."""
    with planting.planted(bug.edits):
        yield
