"""`mend repro --certify`: runs a script in several cuts of its batch, and states which of them gave
equal bits."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from mend.determinism.comparison import ROW_DIGITS, Run, compare, steps_of_all
from mend.errors import ConfigError, UsageError
from mend.tools.certificate import document_of, private_key, public_key, verified
from mend.tools.certificate_pair import print_pair
from mend.tools.repro import DIFFERENT, EQUAL, HASH_SEEDS, INTERRUPTED, say
from mend.tools.repro_runs import Asked, RunExtent, RunSetting, Stopped, recorded

LIMIT_S = 120.0
LIMIT_TIMES = 20
"""A cut may take so many times as long as the uncut run, and LIMIT_S more: a rank may wait for one
that has failed."""

REASON_CHARS_MAX = 160
DIGITS = 16
"""Of a digest, in the table for people."""


@dataclass(frozen=True)
class Wanted:
    command: tuple[str, ...]
    output: Path
    steps: int = 0
    processes: int = 0
    """Of the uncut run; 0: plain python."""
    ranks: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    option: str = "--microbatches"
    """The option of the script that takes their number."""
    must: bool = False
    """Whether the user has named the cuts: then each has to give equal bits."""
    sign: Path | None = None
    keep: Path | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Cut:
    """One way to run the script."""

    name: str
    setting: RunSetting
    ranks: int = 1
    microbatches: int = 1
    is_repeat: bool = False
    """Whether its calls of the model are those of the uncut run."""


ANOTHER_GPU = "another GPU"


def certify(wanted: Wanted) -> int:
    """Returns the exit status. Raises UsageError where the uncut script fails, ConfigError for a
    key or a file that cannot be used."""
    key = None if wanted.sign is None else private_key(wanted.sign)
    with ExitStack() as stack:
        folder = wanted.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            content = content_of(wanted, folder)
        except Stopped:
            say("stopped")
            return INTERRUPTED
    text = document_of(content, key)
    try:
        wanted.output.write_text(text, encoding="ascii")
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError("--output", str(wanted.output), rule, "Name another file.") from None
    typer.echo(text if wanted.as_json else "\n".join(lines_of(content)), nl=not wanted.as_json)
    say(f"wrote {wanted.output}{'' if key is None else ', signed'}")
    verdicts = [each["verdict"] for each in content["cuts"][1:]]
    verdicts = [each for each in verdicts if each != "not available"]
    if wanted.must or "different" in verdicts:
        return EQUAL if set(verdicts) == {"equal"} else DIFFERENT
    return EQUAL


def verify(path: Path, key: Path | None, other: Path | None, as_json: bool) -> int:
    """Also compares it with `other`, of another machine. Raises CertificateError where a
    certificate does not hold, or the two are not of one training."""
    content = _held(path, key)
    if other is not None:
        return print_pair(content, _held(other, key), as_json)
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        typer.echo("\n".join(lines_of(content)))
    return EQUAL


def _held(path: Path, key: Path | None) -> dict[str, Any]:
    """The content of a certificate that holds."""
    content, signer = verified(path, None if key is None else public_key(key))
    who = "; it is not signed, so anyone may have made it"
    if signer is not None:
        who = f", signed by {signer}"
        who += "" if key else " (a key that the file itself names: pass --key to ask for one)"
    say(f"{path} is as it was written{who}")
    return content


# runs


def cuts_of(wanted: Wanted) -> list[Cut]:
    """Every cut that is made, without the first run, which is not cut."""
    whole, other = HASH_SEEDS
    cuts = [
        Cut("repeated", RunSetting("repeated", wanted.processes, hash_seed=other), is_repeat=True)
    ]
    for count in wanted.microbatches:
        arguments = (wanted.option, str(count))
        setting = RunSetting(f"microbatches-{count}", wanted.processes, arguments, hash_seed=whole)
        cuts.append(Cut(f"{count} microbatches", setting, microbatches=count))
    for count in wanted.ranks:
        setting = RunSetting(f"ranks-{count}", count, hash_seed=whole)
        cuts.append(Cut(f"{count} ranks", setting, ranks=count))
    mine = max(1, wanted.processes)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[mine : 2 * mine])}
    setting = RunSetting("another-GPU", wanted.processes, env=env, hash_seed=whole)
    return [*cuts, Cut(ANOTHER_GPU, setting, is_repeat=True)]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names those that a script is shown, in its order."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(each) for each in range(count)] if named is None else named.split(",")[:count]


def _why_no_other_gpu(wanted: Wanted, base: Run) -> str:
    """Empty: as many GPUs as the uncut run has used are left."""
    devices, gpus = base[0].steps[1]["devices"], len(visible_gpus())
    if devices != ["cuda"]:
        return f"the parameters are on {', '.join(devices)}"
    needed = 2 * max(1, wanted.processes)
    return "" if gpus >= needed else f"needs {needed} GPUs, this machine shows {gpus}"


def content_of(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Run all cuts, and return the content of the certificate."""
    uncut = RunSetting("uncut", wanted.processes, hash_seed=HASH_SEEDS[0])
    cuts = cuts_of(wanted)
    asked = Asked(wanted.command, (uncut, uncut), wanted.steps)
    of = f"of {1 + len(cuts)})"
    began_s = time.monotonic()
    phase = RunExtent(wanted.steps, rows=True, phase=f"(1 {of}")
    base = recorded(asked, uncut, folder, phase, say)
    limit_s = LIMIT_S + LIMIT_TIMES * (time.monotonic() - began_s)
    rows: list[dict[str, Any]] = [_row(Cut("uncut", uncut), base, "uncut", "")]
    missing = _why_no_other_gpu(wanted, base)
    for number, cut in enumerate(cuts, 2):
        if cut.name == ANOTHER_GPU and missing:
            say(f"{ANOTHER_GPU} is not available: {missing}")
            rows.append(_row(cut, None, "not available", missing))
            continue
        made = steps_of_all(base)
        extent = RunExtent(
            wanted.steps, made=made, rows=True, limit_s=limit_s, phase=f"({number} {of}"
        )
        try:
            run = recorded(asked, cut.setting, folder, extent, say)
        except UsageError as error:
            rows.append(_row(cut, None, "failed", _reason(error)))
        else:
            rows.append(_row(cut, run, *judge(base, run, cut.is_repeat)))
    content = {**_facts(wanted, base), "cuts": rows}
    return {**content, "claim": claim_of(content)}


def _row(cut: Cut, run: Run | None, verdict: str, why: str) -> dict[str, Any]:
    row = {"cut": cut.name, "ranks": cut.ranks, "microbatches": cut.microbatches}
    row |= {"PYTHONHASHSEED": cut.setting.hash_seed} if cut.setting.chooses_hash_seed else {}
    row |= {"verdict": verdict, "why": why}
    if run is not None:
        row |= cut.setting.env
        row["GPU"] = run[0].header["facts"]["GPU"]
        steps = [run[0].steps[step] for step in range(1, steps_of_all(run) + 1)]
        every = [[step[part] for part in ("gradients", "weights", "optimizer")] for step in steps]
        row |= {"weights": steps[-1]["weights"], "optimizer": steps[-1]["optimizer"]}
        row["all steps"] = hashlib.sha256(repr(every).encode()).hexdigest()
    return row


def _reason(error: UsageError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if len(lines) > 1 else lines[0]
    return reason[:REASON_CHARS_MAX]


# verdicts


def judge(base: Run, run: Run, is_repeat: bool) -> tuple[str, str]:
    """The verdict on a cut (equal, different, not cut), and why. A run whose calls are those of the
    uncut one is equal for another reason than that the cut keeps bits."""
    if not is_repeat and (why := _why_not_cut(base, run)):
        return "not cut", why
    for step in range(1, steps_of_all(run) + 1):
        if len({each.steps[step]["weights"] for each in run}) > 1:
            return "different", f"step {step}: the ranks do not have equal weights"
    finding = compare(base, run)
    if finding is None:
        return "equal", ""
    if finding.part == "length":
        return "different", finding.cause
    named = f" ({finding.name})" if finding.name else ""
    return "different", f"step {finding.step}, {finding.part}{named}"


def _why_not_cut(base: Run, run: Run) -> str:
    """Empty: in every step all ranks together were given the rows of the uncut batch, otherwise
    spread over calls."""
    for step in range(1, min(steps_of_all(base), steps_of_all(run)) + 1):
        whole, parts = _calls(base, step), _calls(run, step)
        if not any(whole):
            return "the rows of the batch were not seen: no module with parameters had a tensor"
        rows = [_rows(each) for each in (whole, parts)]
        by_rank = [_rows([each]) for each in parts]
        if len(parts) > 1 and all(each == rows[0] for each in by_rank):
            return f"step {step}: every rank was given the whole batch"
        if rows[0] != rows[1]:
            return f"step {step}: the ranks and calls together were given other rows"
        if sorted(_sizes(whole)) == sorted(_sizes(parts)):
            return f"step {step}: the model was called with as many rows as uncut"
    return ""


Calls = list[list[Any]]
"""Of one rank: [number of rows, their hashes] for each call of the model."""


def _calls(run: Run, step: int) -> list[Calls]:
    return [each.steps[step].get("calls", []) for each in run]


def _sizes(calls: Sequence[Calls]) -> list[int]:
    return [count for each in calls for count, _ in each]


def _rows(calls: Sequence[Calls]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in calls:
        for _, rows in each:
            found.update(rows[at : at + ROW_DIGITS] for at in range(0, len(rows), ROW_DIGITS))
    return found


# what is stated


def _facts(wanted: Wanted, base: Run) -> dict[str, Any]:
    from mend import __version__

    facts, steps = base[0].header["facts"], base[0].steps
    settings = {(each["level"], each.get("seed"), each.get("leaf_rows")) for each in steps.values()}
    level, seed, leaf_rows = settings.pop() if len(settings) == 1 else ("mixed", None, None)
    sizes = {sum(_sizes(_calls(base, step))) for step in steps}
    rows = sizes.pop() if len(sizes) == 1 else None
    leaves = rows // leaf_rows if level == "shape" and rows and leaf_rows else None
    return {
        "script": {"command": list(wanted.command), "sha256": _script_hash(wanted.command)},
        "steps": steps_of_all(base),
        "level": level,
        "seed": seed,
        "leaves": leaves,
        "machine": {
            "CPU": cpu_name(),
            "instructions": facts["CPU"],
            "GPU": facts["GPU"],
            "threads": facts["threads"],
            "parameters on": steps[1]["devices"],
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "mend": __version__,
            "torch": facts["torch"],
            "Python": platform.python_version(),
        },
    }


def _script_hash(command: Sequence[str]) -> str | None:
    path = Path(command[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def cpu_name() -> str:
    """As Linux calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, "") or platform.processor() or platform.machine()


def claim_of(content: dict[str, Any]) -> str:
    """The sentence for a paper."""
    machine, versions, cuts = content["machine"], content["versions"], content["cuts"]
    gpu = f", {machine['GPU']}" if machine["parameters on"] != ["cpu"] else ""
    level = "without a level of mend.determinism"
    if content["level"] != "none":
        leaves = f", {content['leaves']} leaves" if content["leaves"] else ""
        level = f"at level {content['level']} (seed {content['seed']}{leaves})"
    equal = [each["cut"] for each in cuts if each["verdict"] == "equal"]
    others = [each["cut"] for each in cuts[1:] if each["verdict"] not in ("equal", "not available")]
    where = (
        f"On one machine ({machine['CPU']}{gpu}; torch {versions['torch']}, mend "
        f"{versions['mend']}, Python {versions['Python']}), "
    )
    what = f"{content['steps']} steps of {' '.join(content['script']['command'])} {level}"
    if "repeated" not in equal:
        return f"{where}two runs of {what} did not give equal bits."
    ways = ["in two runs"]
    ways += [
        f"{'in' if 'microbatches' in each else 'on'} {each}" for each in equal if each != "repeated"
    ]
    joined = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} and {ways[-1]}"
    claim = (
        f"{where}{what} gave gradients, weights and optimizer state that are equal bit for bit "
        f"after every step, {joined}."
    )
    return claim + (f" Not certified: {', '.join(others)}." if others else "")


def lines_of(content: dict[str, Any]) -> list[str]:
    """The certificate for people: the table, and the sentence."""
    lines = [f"{'cut':<18}{'verdict':<15}{'weights':<18}optimizer"]
    for each in content["cuts"]:
        digests = [str(each.get(part, "-"))[:DIGITS] for part in ("weights", "optimizer")]
        lines.append(f"{each['cut']:<18}{each['verdict']:<15}{digests[0]:<18}{digests[1]}")
        lines += [f"    {each['why']}"] * bool(each["why"])
    return [*lines, "", content["claim"]]
