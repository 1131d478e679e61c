"""Shrinks a scenario that breaks an invariant to a smaller one that breaks the same.

The search is greedy: it keeps the first simpler scenario that still breaks, and starts again, until
no simpler one breaks. Simpler means shorter to read: first fewer faults, then less of everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mend.types import MS
from mend_lab.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario
from mend_lab.sim.world import World

RUNS_MAX = 400


def problems_of(scenario: Scenario, *, first: bool = False) -> list[str]:
    """The problems of a run; an exception of the simulated code is one, too. `first`: end the run
    at the first problem."""
    try:
        return World(scenario).run(first=first).problems
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def kind_of(problem: str) -> str:
    """I1, I2, ...; or the name of the exception."""
    return problem.partition(":")[0]


def shrink(
    scenario: Scenario,
    problems: list[str] | None = None,
    *,
    run: Callable[[Scenario], list[str]] = problems_of,
    runs_max: int = RUNS_MAX,
) -> Scenario:
    """`problems`: those of `scenario`, if they are known. Without any it is returned unchanged."""
    wanted = {kind_of(problem) for problem in (run(scenario) if problems is None else problems)}
    runs, smaller = 0, bool(wanted)
    while smaller:
        smaller = False
        for candidate in simpler(scenario):
            if runs >= runs_max:
                return scenario
            runs += 1
            if wanted & {kind_of(problem) for problem in run(candidate)}:
                scenario, smaller = candidate, True
                break
    return scenario


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Every scenario that is one step simpler, the greatest steps first."""
    yield from _fewer_faults(scenario)
    yield from _fewer_racks(scenario)
    yield from _calmer(scenario)
    yield from _shorter_faults(scenario)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    if len(faults) > 2:
        half = len(faults) // 2
        yield scenario.without(faults=faults[:half])
        yield scenario.without(faults=faults[half:])
    for i in range(len(faults)):
        yield scenario.without(faults=faults[:i] + faults[i + 1 :])


def _fewer_racks(scenario: Scenario) -> Iterator[Scenario]:
    """Without the last rack, or the witness, and what names them."""
    last = scenario.racks - 1
    if scenario.racks > 2:
        yield dataclasses.replace(
            scenario,
            racks=last,
            steps=scenario.steps[:-1],
            step_ns=scenario.step_ns[:-1],
            k=min(scenario.k, last),
            non_finite=tuple(each for each in scenario.non_finite if each[0] != last),
            pauses=tuple(each for each in scenario.pauses if each[0] != last),
            faults=_without_target(scenario.faults, last),
        )
    if scenario.witness:
        faults = _without_target(scenario.faults, WITNESS_TARGET)
        yield dataclasses.replace(scenario, witness=False, faults=faults)


def _without_target(faults: tuple[Fault, ...], gone: int) -> tuple[Fault, ...]:
    kept = []
    for fault in faults:
        racks = tuple(rack for rack in fault.racks if rack != gone)
        if gone not in (fault.a, fault.b if fault.kind != "crash" else -1) and (
            racks or not fault.racks
        ):
            kept.append(dataclasses.replace(fault, racks=racks))
    return tuple(kept)


def _calmer(scenario: Scenario) -> Iterator[Scenario]:
    """One setting at its plainest; then fewer steps."""
    plain: dict[str, object] = {
        "ranks": 1, "fragments": 1, "loss": 0.0, "duplicate": 0.0, "jitter_ns": 0, "byte_ns": 0,
        "non_finite": (), "merge": "mean", "payload": "float32", "momentum": 0.0,
        "ramp": 0, "overlap_ramp": 0, "apply_mode": "carry", "numel": 3, "overlapped": True,
        "lockstep": False, "pauses": (), "cut_step": 0, "cut_writes_ns": 0, "first": 0,
        "delay_ns": 5 * MS, "grace_ns": -1, "staleness_max_rounds": 2, "k": 1,
        "step_ns": (50 * MS,) * scenario.racks, "quiet_ns": 0, "gone": False, "moments": (),
        "sharded": False, "carries": False, "rotates": False,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(scenario, name) != value:
            yield dataclasses.replace(scenario, **{name: value})  # type: ignore[arg-type]
    least = min(scenario.steps)
    if len(set(scenario.steps)) > 1:
        yield dataclasses.replace(scenario, steps=(least,) * scenario.racks)
    for fewer in (least // 2, least - 1):
        if fewer >= 2 and len(set(scenario.steps)) == 1:
            yield dataclasses.replace(scenario, steps=(fewer,) * scenario.racks)


def _shorter_faults(scenario: Scenario) -> Iterator[Scenario]:
    """Half as long, at a rounder time, or at a time instead of after a message."""
    for i, fault in enumerate(scenario.faults):
        length_ns = fault.end_ns - fault.begin_ns
        options = []
        if fault.end_ns < FOR_EVER and length_ns > 100 * MS:
            half_ns = length_ns // 2 // MS * MS
            options.append(dataclasses.replace(fault, end_ns=fault.begin_ns + half_ns))
        for grain_ns in (100 * MS, MS):
            begin_ns = fault.begin_ns // grain_ns * grain_ns
            if begin_ns != fault.begin_ns:
                end_ns = FOR_EVER if fault.end_ns >= FOR_EVER else begin_ns + length_ns
                options.append(dataclasses.replace(fault, begin_ns=begin_ns, end_ns=end_ns))
        if fault.nth > 1:
            options.append(dataclasses.replace(fault, nth=fault.nth // 2))
        for option in options:
            faults = (*scenario.faults[:i], option, *scenario.faults[i + 1 :])
            yield scenario.without(faults=faults)
