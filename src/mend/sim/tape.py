"""The tape of a simulated process, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mend.coordination.events import Effect, Event
from mend.coordination.machines import Parts
from mend.trace.format import Entry, Gap, read_record, record_of_entry


class MemoryTape:
    """What a process records, as bytes: what is read from it was written and parsed."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.records: list[bytes] = []

    def put(
        self,
        machine: str,
        now_ns: int,
        event: Event,
        effects: Sequence[Effect],
        error: str = "",
    ) -> None:
        self.records.append(record_of_entry(machine, now_ns, event, effects, error))

    def entries(self) -> Iterator[Entry | Gap]:
        for number, record in enumerate(self.records, start=1):
            entry = read_record(record, number)
            assert isinstance(entry, Entry | Gap)
            yield entry
