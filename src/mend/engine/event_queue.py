"""Gives the machines of one process their events, one after another. Loop thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mend.coordination.events import Effect, Event, Machine
from mend.trace.writer import Tape, handled


class EventQueue:
    """`name`: what a tape calls a machine. `perform` does what a machine wants done; it may give
    further events, which are handled behind those that wait."""

    def __init__(
        self,
        name: Callable[[Machine], str],
        now_ns: Callable[[], int],
        perform: Callable[[Effect, Machine], None],
        tape: Tape | None,
    ) -> None:
        self._name, self._now_ns, self._perform, self._tape = name, now_ns, perform, tape
        self._waiting: deque[tuple[Machine, Event]] = deque()
        self._busy = False

    def give(self, machine: Machine, event: Event) -> None:
        self._waiting.append((machine, event))
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                machine, event = self._waiting.popleft()
                for effect in self._handle(machine, event):
                    self._perform(effect, machine)
        finally:
            self._busy = False

    def _handle(self, machine: Machine, event: Event) -> list[Effect]:
        if self._tape is None:
            return machine.handle(event, self._now_ns())
        return handled(self._tape, self._name(machine), machine, event, self._now_ns())
