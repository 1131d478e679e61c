"""Tape files with bytes changed: they are read, or cut at the end and told, or a TapeError."""

from __future__ import annotations

import random
import tempfile
import zlib
from pathlib import Path

from mend.coordination.machines import ProcessSpec, machines_of
from mend.errors import TapeError
from mend.trace import format as form
from mend.trace.format import Entry, Packer
from mend.trace.reader import part_to_replay, read_tape
from mend.trace.state import decode_state, encode_state
from mend.trace.writer import TapeWriter, header_of
from mend.types import Member, Peer
from mend_lab.sim import World
from mend_lab.sim.process import MemoryTape
from tests.fuzz.harness import Target
from tests.fuzz.jobs import handled
from tests.fuzz.mutate import damaged, mutated

EVENTS = 60
"""On a tape; small, so that an input is read in less than a millisecond."""


class Tape:
    """Damage to whole files, and records that are damaged inside of chunks that are whole."""

    name, inputs = "tape", 50_000

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "tape-rack0-rank0.mend"
        parts = ProcessSpec(Peer(0, 0), Member(0, 7))
        header = header_of("fuzz", parts, config={"racks": 2})
        self._bound = form.record_of(header)
        self._records = [form.record_of_entry(*each) for each in handled()[:EVENTS]]
        writer = TapeWriter(Path(self._folder.name), header, 1 << 20, lambda event: None)
        for each in handled()[:EVENTS]:
            writer.put(*each)
        writer.close()
        self._whole = self._path.read_bytes()
        assert self.take(self._whole) == "accepted", "a tape as it was written is not read"

    def example(self, rng: random.Random) -> bytes:
        draw = rng.random()
        if draw < 0.3:
            return mutated(rng, self._whole, self._whole)
        if draw < 0.5:
            return damaged(rng, self._whole)
        if draw < 0.6:
            return self._whole[: rng.randrange(len(self._whole) + 1)]
        return self._resealed(rng)

    def _resealed(self, rng: random.Random) -> bytes:
        """Every checksum is right, and what is inside is wrong."""
        records = [self._bound, *rng.choices(self._records, k=rng.choice((1, 2, 8)))]
        at = rng.randrange(len(records)) if rng.random() < 0.3 else len(records) - 1
        other = rng.choice(self._records)
        records[at] = rng.choice((damaged(rng, records[at]), mutated(rng, records[at], other)))
        if rng.random() < 0.1:
            records = rng.sample(records, len(records))
        packer, cut = Packer(), rng.choice((1, 1, len(records)))
        chunks = [packer.chunk(part) for part in (records[:cut], records[cut:]) if part]
        end = (
            packer.end()
            if rng.random() < 0.8
            else rng.choice((b"", b"\0" * 100, zlib.compress(b"x")))
        )
        return form.file_begin() + b"".join(chunks) + end

    def take(self, data: bytes) -> str:
        self._path.write_bytes(data)
        try:
            tape = read_tape(self._path)
            found = [each for each in tape.entries() if isinstance(each, Entry)]
            for each in found:
                assert isinstance(each.effects, tuple)
            part_to_replay(tape)
        except TapeError:
            return "damaged"
        if tape.lost:
            return "the tail is cut, and told"
        assert tape.whole or data != self._whole
        return "accepted" if tape.whole else "not closed in order, and told"

    def close(self) -> None:
        self._folder.cleanup()


def _state_at_the_end(tape: MemoryTape) -> bytes:
    machines = machines_of(tape.parts).named()
    for entry in tape.entries():
        assert isinstance(entry, Entry)
        machines[entry.machine].handle(entry.event, entry.now_ns)
    return encode_state(machines)


class MachineState(Target):
    """What a later file of a tape begins with, whose checksums are right."""

    name, inputs = "machine-state", 20_000

    def __init__(self, seed: int) -> None:
        world = World(seed, record=True)
        world.run()
        tapes = [process.tape for process in world.processes() if process.tape is not None]
        self._states = [_state_at_the_end(tape) for tape in tapes]

    def example(self, rng: random.Random) -> bytes:
        state = rng.choice(self._states)
        if rng.random() < 0.2:
            return state[: rng.randrange(len(state) + 1)]
        return rng.choice((damaged(rng, state), mutated(rng, state, rng.choice(self._states))))

    def take(self, data: bytes) -> str:
        try:
            decode_state(data)
        except TapeError:
            return "damaged"
        return "accepted"
