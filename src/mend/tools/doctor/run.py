"""`mend doctor`: examines this machine, measures the network on demand, prints findings. Changes
nothing."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from mend.config.placing import place
from mend.config.settings import MendConfig
from mend.config.topology import Hints, read_hints
from mend.errors import AddressInUse, ConfigError, MendError
from mend.tools import plan
from mend.tools.doctor.estimate import memory_of, merge_ns_per_element, of_memory, params_of
from mend.tools.doctor.examine import CANNOT_LISTEN, Report, examine
from mend.tools.doctor.findings import of_meeting
from mend.tools.doctor.jobs import STOP_IT, look_around, of_taken
from mend.tools.doctor.local import System
from mend.tools.doctor.meeting import attend, is_alone, meet
from mend.tools.doctor.planning import planned
from mend.tools.doctor.show import show
from mend.tools.doctor.terms import Finding, Meeting, problem, remark
from mend.transport.whereabouts import Whereabouts

WAIT_S = 30.0
MEGABYTES = 16.0
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The arguments of the command. None: not given."""

    topology: Path | None = None
    as_json: bool = False
    meet: bool = False
    wait_s: float | None = None
    megabytes: float | None = None
    params: str = ""
    step_ms: float | None = None

    def __post_init__(self) -> None:
        needs_meet = {"--for": self.wait_s, "--megabytes": self.megabytes}
        for name, value in needs_meet.items():
            if value is not None and not self.meet:
                rule = "has no effect without a meeting"
                raise ConfigError(name, value, rule, "Add --meet, or leave it out.")
        if self.step_ms is not None and not self.params:
            rule = "needs the size of the model, too"
            raise ConfigError("--step-ms", self.step_ms, rule, "Add --params 1.5B.")


def doctor(asked: Asked) -> int:
    """Print it; the exit status is 1 where there is a problem. Raises ConfigError."""
    if asked.meet and int(os.environ.get("RANK", "0") or 0):
        return attend(_settings()[0], *_of_meeting(asked))
    params = params_of(asked.params) if asked.params else None
    report, findings = examine(asked.topology)
    try:
        meeting = _try_to_meet(asked, report, findings)
    except KeyboardInterrupt:
        print("mend doctor: stopped; nothing was changed anywhere", file=sys.stderr)
        return INTERRUPTED
    if meeting is not None:
        report["meeting"] = asdict(meeting)
        findings += of_meeting(meeting)
    if report["readable"] and params is not None:
        findings += _estimates(asked, report, params, meeting)
    report["findings"] = [asdict(each) for each in findings]
    report["problems"] = [str(each) for each in findings if each.severity == "problem"]
    if asked.as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report, findings, Console(emoji=False))  # a bus id such as 0000:ab:00.0 has one
    return 1 if report["problems"] else 0


def _settings() -> tuple[MendConfig, Hints]:
    """Read the settings again without warnings: `examine` has reported their faults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MendConfig(), read_hints()


def _of_meeting(asked: Asked) -> tuple[float, float]:
    """(seconds to wait, megabytes to pull)."""
    wait_s = WAIT_S if asked.wait_s is None else asked.wait_s
    return wait_s, MEGABYTES if asked.megabytes is None else asked.megabytes


def _try_to_meet(asked: Asked, report: Report, findings: list[Finding]) -> Meeting | None:
    """None: not wanted, or not possible; then `findings` has the reason."""
    if not asked.meet:
        return None
    if not report["readable"]:
        findings.append(_cannot_meet("the settings cannot be read", "Correct them first."))
        return None
    config, _ = _settings()
    try:
        config = place(config, Whereabouts())
    except ConfigError as error:
        findings.append(_cannot_meet(error.rule, error.remedy))
        return None
    if config.rack is None:
        findings.append(_cannot_meet("nothing says which rack this is", "Set MEND_RACK."))
        return None
    if is_alone(config):
        found = "This rack trains alone (racks=1 or exchange=false): there is nobody to meet."
        findings.append(remark("meeting", found, "Set MEND_RACKS."))
        return None
    running = look_around(config)
    findings += running
    if any(each.change == STOP_IT for each in running):
        if any(each.topic == f"rack {config.rack}" for each in running):
            _forget_port(findings)
        return None  # not a word to a job that trains
    try:
        return meet(config, *_of_meeting(asked))
    except AddressInUse as error:
        _forget_port(findings)
        findings.append(of_taken(error))
    except MendError as error:
        findings.append(problem("this rack", str(error)))
    return None


def _forget_port(findings: list[Finding]) -> None:
    """Remove the finding that this rack's port is taken, where another one names who has it."""
    findings[:] = [each for each in findings if CANNOT_LISTEN not in each.found]


def _cannot_meet(why: str, change: str) -> Finding:
    return problem("meeting", f"This rack cannot meet the others: {why}.", change)


def _estimates(asked: Asked, report: Report, params: int, meeting: Meeting | None) -> list[Finding]:
    """Memory, and the exchange where the network was measured."""
    config, hints = _settings()
    ranks = hints.world or hints.ranks_per_rack or 1
    here = hints.local_world if hints.world else ranks
    memory = memory_of(config, params, ranks)
    report["memory"] = {**asdict(memory), "params": params, "ranks_here": here}
    findings = [of_memory(memory, System().room(), here)]
    mbit = meeting.inbound_mbit if meeting is not None else None
    trip_ms = meeting.slowest_trip_ms if meeting is not None else None
    if mbit is None or trip_ms is None:
        if asked.step_ms is not None:
            why = "Whether tau hides an exchange is not known: bandwidth was not measured to all."
            findings.append(remark("overlap", why, "Run it with --meet on all racks."))
        return findings
    question = plan.Asked(
        params,
        asked.step_ms or 1.0,
        plan.measured_link(mbit, trip_ms),
        config.racks,
        ranks,
        merge_ns_per_element(config.merge, config.racks),
        config.simulated_merge_delay_ms,
        "cuda" if report["devices"] else "cpu",
    )
    report["plan"], advice = planned(config, question, has_step=asked.step_ms is not None)
    return findings + advice
