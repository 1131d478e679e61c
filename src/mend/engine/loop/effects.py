"""Runs the machines of one process: a queue for their events, a table for their effects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mend.coordination.events import Effect, Event, Machine
from mend.coordination.rank import RankMachine
from mend.errors import InvariantError
from mend.trace.writer import Tape, handled

Handlers = Mapping[type[Effect], Callable[[Any], None]]
"""What a process does for each kind of effect."""


class EventQueue:
    """Gives the machines of one process their events, one after another. Loop thread.

    `machines`: by their names on a tape. Events that a handler adds are handled after those that
    already wait. Raises InvariantError for an effect without a handler.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        now_ns: Callable[[], int],
        handlers: Callable[[Machine], Handlers],
        tape: Tape | None,
    ) -> None:
        """`handlers`: the table for the effects of a machine."""
        self._names = {id(machine): name for name, machine in machines.items()}
        self._handlers = {id(machine): handlers(machine) for machine in machines.values()}
        self._now_ns, self._tape = now_ns, tape
        self._waiting: deque[tuple[Machine, Event]] = deque()
        self._busy = False
        self._dues_ns: dict[int, int | None] = {}
        """id of a machine -> its deadline in ns, cached until an event may have moved it."""

    def give(self, machine: Machine, event: Event) -> None:
        self._waiting.append((machine, event))
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                machine, event = self._waiting.popleft()
                for effect in self._handle(machine, event):
                    self.perform(effect, machine)
        finally:
            self._busy = False

    def perform(self, effect: Effect, machine: Machine) -> None:
        handler = self._handlers[id(machine)].get(type(effect))
        if handler is None:
            raise InvariantError("an effect has no handler in this process", {"effect": effect})
        handler(effect)

    def deadline_ns(self, machine: Machine) -> int | None:
        """The deadline of a machine in ns; None: it has none. Only events move it."""
        if (known := id(machine)) not in self._dues_ns:
            self._dues_ns[known] = machine.deadline_ns()
        return self._dues_ns[known]

    def _handle(self, machine: Machine, event: Event) -> list[Effect]:
        if isinstance(machine, RankMachine):
            self._dues_ns.pop(id(machine), None)
        else:
            self._dues_ns.clear()  # the others share a vote and a clock
        if self._tape is None:
            return machine.handle(event, self._now_ns())
        name = self._names[id(machine)]
        return handled(self._tape, name, machine, event, self._now_ns())
