"""benchmarks.tape: the cost of a tape. Prints one JSON object.

    python -m benchmarks.tape --events 20000

The machines of a simulated job (two racks, a witness, no fault) are fed what they were fed, in one
process, as its loop would: without a tape, and with one that a thread writes to disk, --repeats
times each, in turn. The training thread has no part in this, so its cost is nil.

`measured` is what the tape adds to an event on the loop, in microseconds: an append to a queue, and
the waits for the interpreter's lock while the writer encodes. `put_us` is the append
alone, `handle_us` a machine's own time per event, `writer_us` the writer's time per event, off the
loop. `bytes_per_event` and `bytes_per_round` are on disk, of all processes of the job.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import Goal, limit, read_options, report
from mend.coordination.events import Effect, Event, Tick
from mend.coordination.machines import ProcessSpec, machines_of
from mend.trace import format as form
from mend.trace.format import Entry
from mend.trace.writer import TapeWriter, handled, header_of
from mend.types import MB, Member, Peer
from mend_lab.sim import World
from mend_lab.sim.scenario import Scenario

GOAL = Goal("< 20 us per event", 20.0, "us", digits=2)
US = 1000
BURST, PAUSE_S = 200, 0.02
"""Some thousand events a second: a hundred times what a rank has."""
OPTIONS = {"events": (20_000, "at least"), "repeats": (5, "of the job with and without a tape")}


@dataclass(frozen=True)
class Fed:
    """The events that one process handled: machine, event, time."""

    parts: ProcessSpec
    entries: list[Entry]


def main() -> None:
    options = read_options("tape", __doc__, OPTIONS)
    fed, rounds = _job(options.events)
    without: list[float] = []
    with_tape: list[float] = []
    puts: list[float] = []
    encodes: list[float] = []
    size = 0
    for _ in range(options.repeats):
        without.append(_feed(fed, None)[0])
        with tempfile.TemporaryDirectory() as folder:
            ns, put_ns, encode_ns = _feed(fed, Path(folder))
            with_tape.append(ns)
            puts.append(put_ns)
            encodes.append(encode_ns)
            size = sum(path.stat().st_size for path in Path(folder).glob("*.mend"))
    events = sum(len(one.entries) for one in fed)
    added = [(b - a) / US for a, b in zip(without, with_tape, strict=True)]
    more = {
        "events": events,
        "rounds": rounds,
        "handle_us": round(statistics.median(without) / US, 2),
        "put_us": round(statistics.median(puts) / US, 3),
        "writer_us": round(statistics.median(encodes) / US, 2),
        "bytes_per_event": round(size / events, 1),
        "bytes_per_round": round(size / max(1, rounds)),
    }
    plain = limit("a machine's own time per event", "us", [ns / US for ns in without], 2)
    report("tape", GOAL, added, options, plain, more)


def _job(events: int) -> tuple[list[Fed], int]:
    """A quiet simulated job that is long enough."""
    steps = 64
    while True:
        world = World(Scenario(steps=(steps, steps)), record=True)
        world.run()
        tapes = [process.tape for process in world.processes() if process.tape is not None]
        if sum(len(tape.records) for tape in tapes) >= events:
            break
        steps *= 2
    fed = [
        Fed(tape.parts, [entry for entry in tape.entries() if isinstance(entry, Entry)])
        for tape in tapes
    ]
    return fed, len(world.checkers.commits)


def _feed(fed: list[Fed], folder: Path | None) -> tuple[float, float, float]:
    """Nanoseconds per event: on the loop in all, for the append alone, for the writer's encoding.

    Paced like a loop that waits for frames now and then, so that the writer keeps up.
    """
    loop_ns = events = 0
    for one in fed:
        machines = machines_of(one.parts).named()
        tape = None
        if folder is not None:
            tape = TapeWriter(folder, header_of("job", one.parts), 1000 * MB, _say)
        for entry in one.entries:
            machine = machines[entry.machine]
            begun_ns = time.perf_counter_ns()
            if tape is None:
                machine.handle(entry.event, entry.now_ns)
            else:
                handled(tape, entry.machine, machine, entry.event, entry.now_ns)
            loop_ns += time.perf_counter_ns() - begun_ns
            events += 1
            if events % BURST == 0:
                time.sleep(PAUSE_S)
        if tape is not None:
            tape.close()
            assert tape.lost == 0, "the writer did not keep up"
    put_ns, encode_ns = (_put_ns(folder), _encode_ns(fed)) if folder else (0.0, 0.0)
    return loop_ns / events, put_ns, encode_ns


def _put_ns(folder: Path) -> float:
    parts = ProcessSpec(Peer(0, 0), Member(0, 0))
    tape = TapeWriter(folder / "put", header_of("job", parts), MB, _say)
    event: Event = Tick()
    effects: list[Effect] = []
    begun_ns = time.perf_counter_ns()
    for number in range(1000):
        tape.put("rank", number, event, effects)
    put_ns = (time.perf_counter_ns() - begun_ns) / 1000
    tape.close()
    return put_ns


def _encode_ns(fed: list[Fed]) -> float:
    entries = [entry for one in fed for entry in one.entries]
    records = [(e.machine, e.now_ns, e.event, e.effects) for e in entries]
    packer, begun_ns = form.Packer(), time.perf_counter_ns()
    for start in range(0, len(records), 16):  # about what comes in 0.25 s
        packer.chunk([form.record_of_entry(*one) for one in records[start : start + 16]])
    return (time.perf_counter_ns() - begun_ns) / len(records)


def _say(kind: str, fields: dict[str, object]) -> None:
    print(kind, fields)


if __name__ == "__main__":
    main()
