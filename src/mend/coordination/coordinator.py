"""The coordinator: opens rounds, and appends commits and rosters to the log.

Its state is soft: the next reports restore it, so any voter can take over. The first coordinator is
the witness, or rack 0 without one; later it is the winner of the newest ballot. It decides from the
log and from reports, and never handles a tensor.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import ballot_of, number_of
from mend.consensus.log import Log
from mend.consensus.proposer import Proposer
from mend.consensus.records import TEXT_MAX, AcceptorState, Commit, Drop, Lineage, Offer, Policy
from mend.coordination.admission import Admission, differing_buffers, first_record, first_to_begin
from mend.coordination.awake import AwakeClock, Sleep
from mend.coordination.checkpoints import next_checkpoint, waits
from mend.coordination.donors import copies_of, donors_of
from mend.coordination.election import Election
from mend.coordination.ending import Ending, late_members
from mend.coordination.events import CommonEffect, Effect, Event, Finished, Heard, Note, Send
from mend.coordination.first_version import FirstVersion, why_first_version_missing
from mend.coordination.flow import Flow, batch_ns
from mend.coordination.grace import Mean
from mend.coordination.ladder import Ladder
from mend.coordination.member_view import Holders, MemberView, view_of
from mend.coordination.membership import MembershipContext, next_roster, note_liveness
from mend.coordination.messages import WHY_MAX, Hello, Orders, Prepare, Reason, Report, Retire, Vote
from mend.coordination.pulls import moving_racks, taken_of
from mend.coordination.round import Round
from mend.coordination.round_inputs import (
    asked_fragments,
    inputs_of,
    settled_versions,
    surroundings,
)
from mend.coordination.slow import RackPaces
from mend.coordination.unit_grants import next_grant, why_no_units
from mend.coordination.validation import report_misfit
from mend.errors import require
from mend.events.kinds import (
    CheckpointMarked,
    CoordinatorChosen,
    CoordinatorDeposed,
    ElectionLeft,
    JobFounded,
    JobGivenUp,
    JobResumed,
    LineageBegun,
    ProtocolFault,
    QuorumLost,
    RackRetired,
    RosterChanged,
    RoundDecided,
    RoundDropped,
)
from mend.types import WITNESS, Member, Peer, life_of


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """`racks`: number of racks that must send a hello. Orders repeat every heartbeat; `detect_ns`
    of silence means dead. `first`: whether it coordinates from the beginning."""

    racks: int
    heartbeat_ns: int
    detect_ns: int
    first: bool = True


@dataclass
class Coordinator:
    """A pure machine. `me` is the process it runs in: Peer(WITNESS, 0) for the witness, otherwise a
    leader.

    `acceptor`: the vote of this process. It is asked by messages like any other; only its log is
    read directly, for a candidacy.
    """

    me: Peer
    member: Member
    job: str
    options: CoordinatorOptions
    acceptor: Acceptor
    proposer: Proposer = field(default_factory=Proposer)
    views: dict[int, MemberView] = field(default_factory=dict)
    offers: dict[tuple[int, int], Offer] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    rounds: list[Round] = field(default_factory=list)
    round_dues: list[int] = field(default_factory=list)
    paces: RackPaces = field(default_factory=RackPaces)
    ladder: Ladder = field(default_factory=Ladder)
    first_version: FirstVersion = field(default_factory=FirstVersion)
    lost_reported_ns: int = 0
    """When the loss of the job was last reported to the racks."""
    votes: dict[Member, int] = field(default_factory=dict)
    """Serial of the newest vote in this ballot, by voter."""
    returned: tuple[Member, int] | None = None
    """Another incarnation of the witness than the seated one, and when it was heard."""
    seated: bool = False
    batch_due_ns: int | None = None
    """When collected reports are processed at the latest; None: there are none."""
    beat_due_ns: int | None = None
    """When the next orders are due, while it is the coordinator."""
    leads_since_ns: int = 0
    clock: InitVar[AwakeClock | None] = None
    gave_up: str = ""  # description of the job that it has given up

    def __post_init__(self, clock: AwakeClock | None) -> None:
        options = self.options
        self.sleep = Sleep(clock or AwakeClock(options.heartbeat_ns))
        self._new_admission()
        self.ending = Ending(self.me.rack)
        self.election = Election(
            self.me,
            self.member,
            self.acceptor,
            self.proposer,
            options.heartbeat_ns,
            options.detect_ns,
        )
        if options.first:
            self._found(0)

    def _new_admission(self) -> None:
        self.admission = Admission(self.options.racks, self.job, self.options.detect_ns)

    @property
    def log(self) -> Log:
        return self.proposer.log

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects: list[CommonEffect] = []
        self._discount_sleep(now_ns)
        if isinstance(event, Heard):
            if self._is_beat(event, now_ns):
                return []
            self._hear(event, now_ns, effects)
            if not effects and self._collects(event, now_ns):
                return []
        self.batch_due_ns = None
        if self.proposer.leading and self.acceptor.promised > self.proposer.ballot:
            # Its own vote went to another candidate, which needs time to win the other votes.
            self.election.lost(now_ns, at_once=False)
            self._step_down(effects)
        if self.proposer.leading and not self._hears_quorum(now_ns):
            effects.append(Note(QuorumLost(number_of(self.proposer.ballot))))
            self.election.lost(now_ns, at_once=True)
            self._step_down(effects)
        self._update_founding(now_ns, effects)
        if not self.proposer.leading:
            effects += self.election.move(now_ns)
            if self.proposer.try_lead():
                self._take_over(now_ns, effects)
            elif self._is_done(now_ns):
                effects.append(Finished())
        if self.proposer.leading:
            self._move(now_ns, effects)
            self._compare_paces(now_ns, effects)
            self._send_orders(now_ns, effects)
        return [*effects]

    def deadline_ns(self) -> int | None:
        if not self.proposer.leading:
            due_ns = self._founds_ns() if self._homeless() else self.election.due_ns()
            return self.ending.due_ns if due_ns is None else self.sleep.clock.awake_ns(due_ns)
        dues = [due for due in (self.beat_due_ns, self.batch_due_ns) if due is not None]
        return min([*dues, *self.round_dues], default=None)

    def _discount_sleep(self, now_ns: int) -> None:
        if slept_ns := self.sleep.take(now_ns):
            self.leads_since_ns += slept_ns
            self.election.discount(slept_ns)
            for view in self.views.values():
                view.discount(slept_ns)

    # -------------------------------------------------------------- messages

    def _is_beat(self, event: Heard, now_ns: int) -> bool:
        """Whether this is a heartbeat: a live rack repeats its report with nothing but a new step.
        Most messages are heartbeats. What depends on the clock alone is checked when orders are
        due."""
        view, report = self.views.get(event.peer.rack), event.body
        if not isinstance(report, Report) or view is None or not self.proposer.leading:
            return False
        same = (view.member.incarnation, self.member.incarnation) == (event.incarnation, report.to)
        due_ns, live = self.deadline_ns(), view.live(now_ns, self.options.detect_ns)
        if not (same and live) or due_ns is None or now_ns >= due_ns or not view.repeats(report):
            return False
        self.election.speaks(view.member)
        view.heard_ns = now_ns
        view.hears(report, self.proposer.ballot)
        return True

    def _collects(self, event: Heard, now_ns: int) -> bool:
        """Whether to process a report later, together with those of other racks. The view of the
        rack is updated already."""
        report = event.body
        if not (isinstance(report, Report) and self.proposer.open):
            return False
        if report.gone or report.leaving:
            return False
        self.batch_due_ns = self.batch_due_ns or now_ns + batch_ns(len(self.log.committed.seats))
        return now_ns < (self.deadline_ns() or 0)

    def _hear(self, event: Heard, now_ns: int, effects: list[CommonEffect]) -> None:
        member = Member(event.peer.rack, event.incarnation)
        self.election.speaks(member)
        if isinstance(event.body, Report | Prepare):
            self.admission.report_lost_seat(member, self.views, self.acceptor.log, effects)
        match event.body:
            case Hello() as hello:
                effects += self.election.attest(member, hello)
                if self.proposer.leading:
                    self._on_hello(member, hello, now_ns, effects)
                else:
                    self.admission.report_end(member, hello, self.acceptor.log.committed, effects)
            case Report() as report:
                self.election.shows(member, report.versions)
                effects += self.election.attest(member)
                if self.proposer.leading:
                    self._on_report(member, report, now_ns, effects)
            case Vote() as vote:
                self._on_vote(member, vote, now_ns, effects)
            case Orders() as orders:
                self._on_orders(event.peer, orders, now_ns, effects)
            case Retire() as asked:
                self._retire(asked, now_ns, effects)
            case Prepare(lineage=name) as prepare if self.acceptor.log.continues(
                name, prepare.after
            ):
                self.election.see(number_of(prepare.ballot))

    def _on_orders(
        self, peer: Peer, orders: Orders, now_ns: int, effects: list[CommonEffect]
    ) -> None:
        if self._lives(peer, orders):
            self.election.heard_ns = now_ns
            if self.proposer.leading:
                self._step_down(effects)
        elif self.election.heard(orders, now_ns):
            self._step_down(effects)

    def _retire(self, asked: Retire, now_ns: int, effects: list[CommonEffect]) -> None:
        """A person has retired an incarnation of a rack. One that is still heard is not dead."""
        log, committed = self.acceptor.log.appended, self.acceptor.log.committed
        known = log.members | committed.members | {*log.away.values()}
        gone = next((m for m in known if (m.rack, life_of(m)) == (asked.rack, asked.life)), None)
        if gone is None:
            return
        lives = gone.rack in self._live(now_ns) and self.views[gone.rack].member == gone
        if not lives and self.election.retire(gone, now_ns):
            effects.append(Note(RackRetired(gone.rack)))

    def _on_hello(
        self, sender: Member, hello: Hello, now_ns: int, effects: list[CommonEffect]
    ) -> None:
        rack, begun = sender.rack, self.log.committed.begun
        # An undecided end is not reported to any rack, because it may be undone.
        log = self.log.appended if begun and not self.log.appended.over else self.log.committed
        if not self.admission.hear(sender, hello, self.views, log, now_ns, effects) or begun:
            return
        if rack not in self.views or self.views[rack].member != hello.seat.member:
            self.views[rack] = MemberView(hello.seat.member, now_ns, now_ns)
        self.views[rack].heard_ns = now_ns
        while (misfit := self.admission.first_misfit(effects)) is not None:
            del self.views[misfit]

    def _on_report(
        self, member: Member, report: Report, now_ns: int, effects: list[CommonEffect]
    ) -> None:
        view, policy = self.views.get(member.rack), self._policy()
        if view is None or view.member != member or policy is None:
            return
        if report.to != self.member.incarnation:
            return  # meant for another coordinator, or the rack does not follow this one yet
        if report_misfit(report, member, policy):
            return
        view.heard_ns = now_ns
        if view.report is not None and report.serial <= view.report.serial:
            return
        view.hears(report, self.proposer.ballot)
        view.gone = report.gone
        if report.gone and not self.log.committed.begun:
            del self.views[member.rack], self.admission.hellos[member.rack]
            return
        for offer in report.offers:
            if self._is_open(offer):
                self.offers[(member.rack, offer.fragment)] = offer
        self._on_acceptor_state(member, report.acceptor_state, now_ns, effects)

    def _on_vote(
        self, member: Member, vote: Vote, now_ns: int, effects: list[CommonEffect]
    ) -> None:
        if self._returns(member):
            self.returned = (member, now_ns)
            return
        self.election.meet_witness(member, vote)
        if not self._is_of_this_job(vote):
            return
        self.election.shows(member, vote.held)
        view = self.views.get(member.rack)
        higher = vote.acceptor_state.promised > self.proposer.ballot
        # A restarted witness that founds the job asks again in a higher ballot.
        founds = higher and member.rack == WITNESS
        known = self.proposer.standing and (founds or member in self.proposer.asked())
        if self.proposer.leading:
            known = view is not None and view.member == member
        if not known:
            return
        if not higher and vote.serial <= self.votes.get(member, -1):
            return
        self.votes[member] = vote.serial
        if view is not None:
            view.heard_ns = now_ns
            view.flow.hears(
                vote.serial if vote.acceptor_state.promised == self.proposer.ballot else 0
            )
        self.proposer.held[member] = vote.held
        self._on_acceptor_state(member, vote.acceptor_state, now_ns, effects)

    def _is_of_this_job(self, vote: Vote) -> bool:
        """Whether the vote belongs to this job. That includes a witness that has just got a seat
        and has read nothing yet, and a voter that has discarded a first record without knowing that
        it was decided."""
        acceptor_state = vote.acceptor_state
        new = self.proposer.ballot > 0 and acceptor_state.last == 0
        log = self.log if self.proposer.ballot else self.acceptor.log
        return (
            new
            or log.continues(vote.lineage, acceptor_state.decided)
            # An undecided first record of this founder's former life must be outbid.
            or (self._homeless() and acceptor_state.decided == 0)
        )

    def _on_acceptor_state(
        self,
        member: Member,
        acceptor_state: AcceptorState,
        now_ns: int,
        effects: list[CommonEffect],
    ) -> None:
        self.election.see(number_of(acceptor_state.promised))
        if self.proposer.hear(member, acceptor_state):
            return
        if self.proposer.leading and self._homeless() and not self.log.committed.begun:
            self._found(now_ns)  # its former life has also asked for promises
        else:
            self.election.lost(now_ns, at_once=self.proposer.leading)
            self._step_down(effects)

    # -------------------------------------------------------------- the beginning

    def _found(self, now_ns: int) -> None:
        """Ask all racks to begin the job, in a new ballot and with an empty log.

        The ballot serves as a challenge: a rack that reports in it has received this question,
        holds nothing of a running job, and will not help to found another one.
        """
        number = max(self.election.seen, number_of(self.acceptor.promised)) + 1
        self.election.see(number)
        self.proposer.found(ballot_of(number, *self.member))
        self.votes, self.leads_since_ns = {}, now_ns
        for view in self.views.values():
            view.report = view.sent = None
            view.flow = Flow()
        if self.me.rack == WITNESS:
            self.views[WITNESS] = MemberView(self.member, now_ns)
            self.beat_due_ns = self.options.heartbeat_ns

    def _homeless(self) -> bool:
        """Whether it may found a job: it is a founder and has no seat in a job that it knows to be
        decided, except in one whose racks are all dead."""
        committed = self.acceptor.log.committed
        seated = self.member in committed.members or self.member in committed.former
        return self.options.first and not committed.over and (not seated or self._forsaken())

    def retired(self) -> tuple[int, ...]:
        """Racks with a seat, or evicted, that a person has retired."""
        log, retired = self.acceptor.log.appended, self.proposer.retired
        known = {seat.member for seat in log.seats.values()} | {*log.away.values()}
        return tuple(sorted(member.rack for member in known & retired))

    def _forsaken(self) -> bool:
        """Whether this witness is the only member that can still have a seat in its job: every rack
        is attested dead, or sends hellos, which shows that it never knew of its seat."""
        log = self.acceptor.log
        if self.me.rack != WITNESS or not log.committed.begun or log.committed.over:
            return False
        seated = (log.committed.members | log.appended.members) - {self.member}
        return seated <= self.proposer.dead | self.election.unaware

    def _update_founding(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Stop leading a job whose racks are all dead. Stop founding another job when a member of
        the former one is heard again. Start founding when there is no coordinator to follow."""
        asks_anew = self.acceptor.log.committed.begun and not self.log.committed.begun
        if self.proposer.leading and self._forsaken() != asks_anew:
            self.election.lost(now_ns, at_once=False)
            self._step_down(effects)
        if not self.proposer.leading and self._may_found(now_ns):
            if not self._forsaken():
                self.acceptor.start_over()
            self._new_admission()  # the known hellos may be of lives that are over
            self._found(now_ns)

    def _give_up(self, effects: list[CommonEffect]) -> None:
        """Forget the job. All racks have answered: their former incarnations are over and the
        present ones hold nothing of it, so its bytes are gone."""
        log = self.acceptor.log
        dead = tuple([f"rack {member.rack}" for member in sorted(self.proposer.dead)])
        about = JobGivenUp(log.decided, tuple(log.committed.versions), dead, log.lineage[:12])
        effects.append(Note(about))
        self.acceptor.start_over()
        self.election.forget()
        self.gave_up = (
            f"gave up the former job of this name ({log.decided} records): every rack was started "
            "again, so no process holds its weights any more"
        )

    def _lives(self, peer: Peer, orders: Orders) -> bool:
        """Whether these orders show this founder that a job is running, so that it founds none. To
        a witness, orders to its former life show that as well."""
        for_member = orders.to == self.member.incarnation or self.me.rack == WITNESS
        return for_member and peer != self.me and orders.decided > 0 and self._homeless()

    def _returns(self, member: Member) -> bool:
        """Whether this member is the witness, restarted."""
        log = self.log.appended
        seated = log.witness is not None and member.rack == WITNESS != self.me.rack
        return self.proposer.leading and seated and member != log.witness

    def _founds_ns(self) -> int | None:
        heard_ns = self.election.heard_ns
        return None if heard_ns is None else heard_ns + 2 * self.options.detect_ns

    def _may_found(self, now_ns: int) -> bool:
        """Whether the coordinator that it followed fell silent before this member got a seat."""
        due_ns = self._founds_ns()
        return self._homeless() and due_ns is not None and now_ns >= due_ns

    def _answered(self, rack: int, now_ns: int) -> bool:
        """Whether this rack is live and has promised this ballot."""
        report = self.views[rack].report
        promised = report is not None and report.acceptor_state.promised == self.proposer.ballot
        return promised and rack in self._live(now_ns)

    def _policy(self) -> Policy | None:
        """The policy of the log; before the first record, the one that all hellos share."""
        hellos = self.admission.hellos
        return self.log.appended.policy or (hellos[min(hellos)].policy if hellos else None)

    def _is_open(self, offer: Offer) -> bool:
        log = self.log.appended
        known = offer.fragment < len(log.versions)
        if log.units is not None and offer.units > log.units_given(offer.member):
            return False  # of a grant that is undecided here
        return known and log.is_open(offer.member, offer.fragment, offer.seq)

    def _keep_open_offers(self) -> None:
        self.offers = {key: offer for key, offer in self.offers.items() if self._is_open(offer)}

    # -------------------------------------------------------------- coming and going

    def _take_over(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Begin to lead. Only the log is kept; reports restore members, offers and results."""
        log = self.log.appended
        policy = require(log.policy, "no member stands before the first record")
        self.views = {m.rack: MemberView(m, now_ns, now_ns) for m in sorted(log.members)}
        former = self.election.followed_rack()
        if former in self.views and former != self.me.rack:
            self.views[former].heard_ns -= self.options.detect_ns  # its silence began the candidacy
        self.offers, self.round_dues, self.votes = {}, [], {}
        self.leads_since_ns, self.returned = now_ns, None
        self._new_rounds(policy.fragments)
        number = number_of(self.proposer.ballot)
        effects.append(Note(CoordinatorChosen(number, self.log.last)))
        if isinstance(opening := self.log.record(self.log.last), Lineage):
            lost = tuple([member.rack for member in opening.dead])
            effects.append(Note(LineageBegun(lost, tuple(opening.versions))))

    def _new_rounds(self, fragments: int) -> None:
        times = Mean(), Mean()
        self.rounds = [Round(p, *times, self.proposer.ballot) for p in range(fragments)]

    def _hears_quorum(self, now_ns: int) -> bool:
        """Whether the members heard in the last two detection times can decide anything.

        A coordinator that hears no quorum blocks the job: others wait for its orders, and the
        remaining members cannot begin a new lineage.
        """
        limit_ns = 2 * self.options.detect_ns
        if now_ns - self.leads_since_ns < limit_ns or self.log.committed.over:
            return True
        views = self.views.values()
        return self.proposer.may_decide(
            {view.member for view in views if now_ns - view.heard_ns < limit_ns}
        )

    def _step_down(self, effects: list[CommonEffect]) -> None:
        """Stop leading or standing: a higher ballot was promised, or no quorum is heard."""
        number, led = number_of(self.proposer.ballot), self.proposer.leading
        effects.append(Note(CoordinatorDeposed(number) if led else ElectionLeft(number)))
        self.proposer.step_down()
        self.views, self.offers, self.rounds, self.votes = {}, {}, [], {}
        self.round_dues, self.paces, self.ladder = [], RackPaces(), Ladder()
        self.first_version = FirstVersion()

    def _is_done(self, now_ns: int) -> bool:
        """Whether a member that does not lead may stop: the job is over, or its seat is lost."""
        committed, done = self.acceptor.log.committed, False
        if self.me.rack == WITNESS:
            done = committed.over
        elif committed.member(self.me.rack) == self.member:
            self.seated = True
        else:
            done = self.seated or (committed.over and self.member in committed.former)
        return done and self.ending.may_go(committed, now_ns, confirmed=True)

    # -------------------------------------------------------------- deciding

    def _move(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Repeat all decisions until nothing changes: a decision lets rounds commit, and a commit
        may be decided at once."""
        if not self.log.committed.begun:
            self._try_genesis(now_ns, effects)
        before, log, options = -1, self.log, self.options
        while before != (before := log.last + log.decided):
            self._decide(now_ns, effects)
            if self.proposer.open and not log.committed.over:
                live = self._live(now_ns)
                self._advance_rounds(live, now_ns, effects)
                self._try_checkpoint(live, effects)
                self._try_grant(live)
                if self._acts():
                    looked = (self.paces.judged, self._reports(), live)
                    effects += self.ladder.move(self.proposer, *looked, now_ns, options.detect_ns)
                self._try_roster(live, now_ns, effects)
        racks = [view for rack, view in self.views.items() if rack != WITNESS]
        if log.committed.over:
            self._farewell(now_ns, effects)
        elif racks and all(view.gone for view in racks):
            effects.append(Finished())

    def _try_genesis(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Append Genesis once all racks have answered. If one of them dies before it has voted,
        nothing is decided, and its next incarnation is asked with the others in a new ballot. The
        same happens if one falls silent, because it may follow a running job whose candidate needs
        the racks that have voted here."""
        hellos = {r: h for r, h in self.admission.hellos.items() if r in self.views}
        seats, log = {rack: hello.seat for rack, hello in hellos.items()}, self.log.appended
        if log.begun and (seats != log.seats or not self._live(now_ns) >= hellos.keys()):
            self._found(now_ns)
        missing = len(hellos) < self.options.racks
        if self.log.appended.begun or missing or not all(self._answered(r, now_ns) for r in hellos):
            return
        if self.acceptor.log.committed.begun:
            self._give_up(effects)
        first = first_record(hellos, self.member if self.me.rack == WITNESS else None)
        self.proposer.append(first)
        self._new_rounds(first.policy.fragments)
        effects.append(Note(JobFounded(tuple(sorted(hellos)))))
        if (unequal := differing_buffers(hellos)) is not None:
            effects.append(Note(unequal))
        if (resume := first_to_begin(hellos).resume) is not None:
            lost, versions = sorted(set(resume.racks) - hellos.keys()), tuple(resume.versions)
            about = JobResumed(resume.lineage[:12], resume.number, tuple(lost), versions)
            effects.append(Note(about))

    def _decide(self, now_ns: int, effects: list[CommonEffect]) -> None:
        for record in self.proposer.decide():
            if isinstance(record, Commit):
                self.rounds[record.fragment].on_decided(now_ns)
                effects.append(Note(RoundDecided(record.fragment, record.version)))

    def _advance_rounds(
        self, live: frozenset[int], now_ns: int, effects: list[CommonEffect]
    ) -> None:
        busy = {
            record.fragment for record in self.log.undecided() if isinstance(record, Commit | Drop)
        }
        self.round_dues = []
        if self._acts():
            self.ladder.count(self.rounds, self.paces.judged, now_ns)
        log, holders = self.log.committed, self.holders.follow(self.views)
        reports = self._reports()
        around = surroundings(log, reports, self.offers, live)
        asked = asked_fragments(reports, self.offers)
        for round_ in self.rounds:
            if round_.rests(asked):
                continue
            if round_.fragment in busy or not self.proposer.may_append():
                continue
            inputs = inputs_of(round_.fragment, around, log, reports, self.offers, holders)
            commit = round_.advance(inputs, now_ns)
            if commit is None and (due := round_.deadline_ns(inputs)) is not None:
                self.round_dues.append(due)
            effects += [Note(ProtocolFault(fault)) for fault in round_.faults]
            round_.faults.clear()
            if isinstance(commit, Drop):
                racks = tuple([ended.member.rack for ended in commit.dropped])
                effects.append(Note(RoundDropped(commit.fragment, racks, commit.reason)))
            if commit is not None:
                self.proposer.append(commit)
                self._keep_open_offers()

    def _try_checkpoint(self, live: frozenset[int], effects: list[CommonEffect]) -> None:
        """Append the record of a checkpoint that the racks ask for, or have written."""
        record = next_checkpoint(self.log.appended, self.log.lineage, self._reports(), live)
        if record is None or not self.proposer.may_append():
            return
        self.proposer.append(record)
        about = CheckpointMarked(record.number, record.name, tuple(record.racks), record.written)
        effects.append(Note(about))

    def _try_grant(self, live: frozenset[int]) -> None:
        """Append the record that gives units of data to the racks that ask for them."""
        grant = next_grant(self.log.appended, self._reports(), live)
        if grant is not None and self.proposer.may_append():
            self.proposer.append(grant)

    def _acts(self) -> bool:
        """Whether slow racks are mitigated."""
        policy = self.log.appended.policy
        return policy is not None and policy.acts

    def _reports(self) -> dict[int, Report]:
        """The newest report of each rack that has sent one."""
        return {rack: view.report for rack, view in self.views.items() if view.report is not None}

    def _live(self, now_ns: int) -> frozenset[int]:
        views, detect_ns = self.views, self.options.detect_ns
        return frozenset([rack for rack in views if views[rack].live(now_ns, detect_ns)])

    def _compare_paces(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Compare the paces of all racks, once per heartbeat."""
        if now_ns >= self.paces.due_ns:
            self.paces.due_ns = now_ns + self.options.heartbeat_ns
            racks = self._live(now_ns) & self.log.committed.seats.keys()
            reports = self._reports()
            effects += self.paces.look({rack: reports[rack] for rack in racks & reports.keys()})

    # -------------------------------------------------------------- leaving

    def _try_roster(self, live: frozenset[int], now_ns: int, effects: list[CommonEffect]) -> None:
        """Append the next change of the roster, if one is due. `slow`: live racks that are the only
        ones a merge has waited for, and for too long."""
        slow = frozenset().union(*(round_.slow(now_ns) for round_ in self.rounds))
        detect_ns = self.options.detect_ns
        note_liveness(self.views, live, slow, now_ns, detect_ns)
        log, policy = self.log.appended, self.log.appended.policy
        if self.log.last != self.log.decided or policy is None:
            return
        context = MembershipContext(
            log=log,
            views=self.views,
            live=live,
            offers=self.offers.keys(),
            joining=self.admission.joining,
            seat_timeout_ns=0 if policy.lockstep else policy.seat_timeout_ns,
            now_ns=now_ns,
            detect_ns=detect_ns,
            demotes=not policy.lockstep,
            slow=slow,
            ready=self.proposer.ready(),
            returned=self._returned(live, now_ns),
            retired=self.retired(),
        )
        roster = next_roster(context)
        if roster is None:
            self._report_lost_job(context, effects)
            return
        self.proposer.append(roster)
        members = [seat.member for seat in roster.members]
        self.admission.seated(members)
        for member in (*members, *([roster.witness] if roster.witness else [])):
            self.views[member.rack] = view_of(member, self.views.get(member.rack), now_ns)
        self._keep_open_offers()
        racks = tuple([member.rack for member in members])
        votes = sorted(acceptor.rack for acceptor in self.log.appended.voters) if racks else []
        effects.append(Note(RosterChanged(racks, tuple(votes), roster.reason)))

    def _report_lost_job(self, context: MembershipContext, effects: list[CommonEffect]) -> None:
        """Report the loss of the job to the racks, once per heartbeat, so that they begin again."""
        log, reports, now_ns = context.log, context.reports, context.now_ns
        dead, detect_ns = self.proposer.dead, context.detect_ns
        lost = self.first_version.lost(log, reports, context.live, dead, now_ns, detect_ns)
        if lost and now_ns >= self.lost_reported_ns + self.options.heartbeat_ns:
            self.lost_reported_ns = now_ns
            effects += self.election.report_loss()

    def _returned(self, live: frozenset[int], now_ns: int) -> Member | None:
        """Another incarnation of a silent witness, if it is heard."""
        if self.returned is None or WITNESS in live:
            return None
        member, heard_ns = self.returned
        return member if now_ns - heard_ns < self.options.detect_ns else None

    def _farewell(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Repeat the last decision until every member has confirmed it or stopped."""
        states = self.proposer.acceptor_states.items()
        informed = {member for member, state in states if state.decided >= self.log.last}
        late, live = late_members(self.log.committed, self.views), self._live(now_ns)
        confirmed = all(v.gone or v.member in informed - late for v in self.views.values())
        serves = any(member.rack in live for member in late)
        if self.ending.may_go(self.log.committed, now_ns, confirmed, serves):
            effects.append(Finished())

    # -------------------------------------------------------------- orders

    def _send_orders(self, now_ns: int, effects: list[CommonEffect]) -> None:
        log, versions = self.log, self.log.committed.versions
        rounds = self.rounds if versions else []
        lively = self._live(now_ns)
        live = tuple(sorted(lively - {WITNESS}))
        settled = settled_versions([self.views[rack].report for rack in live], len(versions))
        expected = range(0 if log.committed.begun else self.options.racks)
        missing = tuple(rack for rack in expected if rack not in self.views)
        reports = self._reports()
        donors = donors_of(log.committed, reports, lively)
        state = Orders(
            serial=0,
            to=0,
            ballot=self.proposer.ballot,
            lineage="",
            prev=0,
            chain="",
            records=(),
            last=log.last,
            decided=log.decided,
            offers=tuple(self.offers[key] for key in sorted(self.offers)),
            proposals=tuple(g for r in rounds if (g := r.proposal(versions[r.fragment]))),
            settled=settled,
            live=live,
            missing=missing,
            why=self._why(bool(missing), lively),
            slow=self.paces.judged,
            donors=donors,
            copies=copies_of(log.committed, reports, lively, donors),
        )
        heartbeat_ns, detect_ns = self.options.heartbeat_ns, self.options.detect_ns
        views = [view for view in self.views.values() if not view.gone]
        if any(now_ns >= view.sent_ns + heartbeat_ns for view in views):
            # Orders due soon go now, so that all members are visited once.
            heartbeat_ns -= heartbeat_ns // 4
        moving, taken = moving_racks(log.committed, reports), taken_of(reports)
        for view in views:
            # A restarted witness knows no address, so these orders must contain everything.
            # It gets the end at once, because later no member may be left to send it.
            missed = WITNESS not in lively or log.committed.over
            lost = view.member.rack == WITNESS and missed and log.decided > 0
            known = -1 if lost else self.proposer.common(view.member)
            progress = moving, taken.get(view.member.rack, 0)
            due = view.next_orders(state, log, known, now_ns, heartbeat_ns, detect_ns, progress)
            if due is not None:
                effects.append(Send(Peer(view.member.rack, 0), due))
        self.beat_due_ns = min([v.sent_ns + self.options.heartbeat_ns for v in views], default=None)

    def _why(self, starting: bool, live: frozenset[int]) -> tuple[Reason, ...]:
        if starting:
            return self.admission.refusals(self.views)
        reports = self._reports()
        if unbegun := why_first_version_missing(self.log.committed, reports, live):
            return unbegun
        whys = tuple([Reason(r.why, r.fragment, open_for=r.open_for) for r in self.rounds if r.why])
        log = self.log.appended
        reasons = filter(None, (waits(log, reports), why_no_units(log, reports, live)))
        return (*(Reason(reason[:TEXT_MAX]) for reason in reasons), *whys)[:WHY_MAX]
