"""Visits every state of a small job breadth first, until none is left or an invariant breaks."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mend_lab.sim.model_check.parts import Table
from mend_lab.sim.model_check.state import Action, Bounds, Node, State, Term, ballot_name, word
from mend_lab.sim.model_check.world import ModelWorld

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")

REPORT_STATES = 20_000
"""New states between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`frontier`: states that are not expanded yet, of this depth and the next."""

    states: int
    steps: int
    depth: int
    frontier: int


@dataclass(frozen=True, slots=True)
class Found:
    """`complete`: everything within the bounds was visited. `trace`: the shortest way to the
    broken invariant, empty when none is broken."""

    progress: Progress
    complete: bool
    broken: str
    trace: tuple[str, ...]


class Search(Generic[S, A]):
    """Breadth-first search. A state is remembered in its `packed` form, with the step that first
    led to it. `steps`: the possible actions, always in the same order, each with the state after
    it, or the invariant that it breaks."""

    def __init__(self, steps: Callable[[S], Iterable[tuple[A, S | str]]]) -> None:
        self.steps = steps
        self.seen: set[Hashable] = set()
        self.parents = array("L")
        self.choices = array("H")
        """The parent of each state, and the place of the step among those of the parent."""

    def packed(self, state: S) -> Hashable:
        return state

    def sentence(self, state: S, action: A, after: S | str) -> str:
        """A sentence about the step and its effect."""
        return str(action)

    def search(self, start: S, tell: Callable[[Progress], None], limit: int | None) -> Found:
        """Search from `start`. Stops after `limit` states, if there is a limit."""
        gc.disable()  # millions of tuples without a cycle: it would only walk over them
        try:
            return self._search(start, tell, limit)
        finally:
            gc.enable()

    def _search(self, start: S, tell: Callable[[Progress], None], limit: int | None) -> Found:
        self._new(start, 0, 0)
        here, first, depth, steps = [start], 0, 0, 0
        while here:
            behind: list[S] = []
            for offset, state in enumerate(here):
                for choice, (_, after) in enumerate(self.steps(state)):
                    steps += 1
                    if isinstance(after, str):
                        progress = Progress(len(self.seen), steps, depth + 1, 0)
                        trace = tuple(self._trace(start, first + offset, choice))
                        return Found(progress, False, after, trace)
                    if self._new(after, first + offset, choice):
                        behind.append(after)
                        if len(self.seen) % REPORT_STATES == 0:
                            left = len(here) - offset + len(behind)
                            tell(Progress(len(self.seen), steps, depth, left))
                if limit is not None and len(self.seen) >= limit:
                    left = len(here) - offset - 1 + len(behind)
                    return Found(Progress(len(self.seen), steps, depth, left), False, "", ())
            first, here, depth = first + len(here), behind, depth + 1
        return Found(Progress(len(self.seen), steps, depth - 1, 0), True, "", ())

    def _new(self, state: S, parent: int, choice: int) -> bool:
        known = len(self.seen)
        self.seen.add(self.packed(state))
        if len(self.seen) == known:
            return False
        self.parents.append(parent)
        self.choices.append(choice)
        return True

    def _trace(self, start: S, place: int, last: int) -> list[str]:
        """A sentence per step from the start."""
        choices = [last]
        while place:
            choices.append(self.choices[place])
            place = self.parents[place]
        lines, state = [], start
        for number, choice in enumerate(reversed(choices), start=1):
            action, after = list(self.steps(state))[choice]
            line = f"{number:3} {self.sentence(state, action, after)}"
            if isinstance(after, str):
                line += f": {after}"
            else:
                state = after
            lines.append(line)
        return lines


class Explorer(Search[State, Action]):
    """Packs a state into a tuple of small numbers."""

    def __init__(self, bounds: Bounds) -> None:
        self.world = ModelWorld(bounds)
        super().__init__(self.world.steps)
        self.nodes: Table[Node] = Table()
        self.terms: Table[tuple[Term, ...]] = Table()
        self.rest: Table[tuple[object, ...]] = Table()

    def run(
        self,
        tell: Callable[[Progress], None] = lambda _: None,
        limit: int | None = None,
        start: State | None = None,
    ) -> Found:
        """From `start` or the beginning of a job. Stops after `limit` states, if there is one."""
        return self.search(start or self.world.start(), tell, limit)

    def packed(self, state: State) -> Hashable:
        return (
            *map(self.nodes.number, state.nodes),
            self.terms.number(state.terms),
            self.rest.number((state.decided, state.used)),
        )

    def sentence(self, state: State, action: Action, after: State | str) -> str:
        world, who = self.world, self.world.name(action.who)
        if action.what == "stand":
            return f"{who} stands for {ballot_name(action.at)}"
        if action.what == "takeover":
            promised = " and ".join(world.name(node) for node in action.nodes)
            return f"{promised} promise {ballot_name(action.at)} to {who}, which leads"
        if action.what in ("merge", "copy") or (action.what == "crash" and action.at < 0):
            what = {"merge": "has its result", "copy": "copies what is decided", "crash": "dies"}
            return f"{who} {what[action.what]}"
        term = state.terms[action.at]
        ballot, owner = ballot_name(term.ballot), world.name(term.owner)
        others = " and ".join(world.name(node) for node in action.nodes)
        text = {
            "crash": f"{who} promises {ballot} to {owner} and dies",
            "learn": f"{owner}, candidate for {ballot}, learns from {others}",
            "win": f"{others} promise {ballot} to {owner}, which leads",
            "append": f"{who} gets the orders of {ballot} from {owner}",
            "count": f"{owner} counts what was accepted in {ballot}",
            "gather": f"{owner} asks in {ballot} for a merge",
            "commit": f"{owner} appends a commit in {ballot}",
            "roster": f"{owner} appends a roster in {ballot}: {action.change} {others}",
            "propose": f"{owner} appends a roster in {ballot}",
        }[action.what]
        if isinstance(after, str):
            return text
        return text + self._outcome(state, after, action, term)

    def _outcome(self, state: State, after: State, action: Action, term: Term) -> str:
        """What the step changed in the replica or the log that it was about."""
        world, text = self.world, ""
        if action.what == "append":
            vote = world.parts.voters[after.nodes[action.who].acceptor]
            shot = world.parts.logs[vote.log]
            text += f": has {self._records(shot.records)}, {shot.decided} decided"
        elif action.what in ("win", "learn", "count", "commit", "roster", "propose"):
            before = world.parts.proposers[state.nodes[term.owner].proposer]
            now = world.parts.proposers[after.nodes[term.owner].proposer]
            if now.log != before.log:
                shot = world.parts.logs[now.log]
                text += f": has {self._records(shot.records)}, {shot.decided} decided"
        return text

    def _records(self, numbers: tuple[int, ...]) -> str:
        return "[" + " ".join(word(self.world.parts.records[n]) for n in numbers) + "]"
