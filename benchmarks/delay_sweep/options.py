"""From the arguments of `mend bench delay-sweep` to the settings of a sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from benchmarks.delay_sweep.plan import SEED_IN_ARGUMENT, SET_BY_THE_SWEEP, Sweep
from benchmarks.delay_sweep.run import machine
from mend.errors import ConfigError
from mend.tools.launch import visible_gpus
from mend.transport.delayed import Distribution

BUILT_IN = "benchmarks.delay_sweep.train"

PLACES = ("RACK", "RACKS", "JOB_ID", "SIDEBAND_ADDR", "SIDEBAND_PEERS", "WITNESS_ADDR",
    "ADVERTISE_HOST", "DATA_PORTS", "DIAGNOSTICS_DIR", "REPLAY", "LAUNCH_PORTS")  # fmt: skip
"""Variables MEND_* that say who and where a process is. Each cell has its own."""


USUAL: Mapping[str, Any] = {
    "delays": "0,500,1000,2000",
    "distributions": "constant,bimodal,long_tail",
    "seeds": 3,
    "tau": "auto",
    "period": 96,
    "fragments": 2,
    "warm_up": 8,
    "rounds": 4,
    "step_ms": 50.0,
    "size": "small",
}
"""Defaults: half an hour on a laptop. H leaves room for the tau of 2000 ms with a tail by steps of
50 ms."""

QUICK: Mapping[str, Any] = {
    **USUAL,
    **{"delays": "0,200", "distributions": "constant", "seeds": 2, "tau": "16", "period": 32},
    **{"step_ms": 20.0, "size": "tiny"},
}

BUILT_IN_ONLY = ("rounds", "step_ms", "size")


def settings_of(arguments: Mapping[str, Any], script: Sequence[str] | None) -> Sweep:
    """`arguments`: of the command, by name; None: not given. Raises ConfigError for arguments that
    do not go together."""
    usual = QUICK if arguments["quick"] else USUAL
    given = {name: arguments[name] for name in usual if arguments[name] is not None}
    of = {**usual, **given}
    racks, nproc_per_rack = arguments["racks"], arguments["nproc_per_rack"]
    on_cpu = _on_cpu(arguments["device"], racks * nproc_per_rack)
    return Sweep(
        command=_built_in(of) if script is None else _own(script, given),
        delays_ms=tuple(_delay(text) for text in _list(of["delays"])),
        # Sweep refuses others
        distributions=cast(tuple[Distribution, ...], _list(of["distributions"])),
        seeds=of["seeds"],
        racks=racks,
        nproc_per_rack=nproc_per_rack,
        period_steps=of["period"],
        fragments=of["fragments"],
        overlap_steps=_tau(of["tau"]),
        warm_up_steps=of["warm_up"],
        on_cpu=on_cpu,
        link=arguments["link"],
        env=_inherited(os.environ) | dict(_pair(text) for text in arguments["env"] or ()),
        machine=machine(on_cpu),
    )


def _built_in(of: Mapping[str, Any]) -> tuple[str, ...]:
    """The built-in script with its options."""
    options = {name.replace("_", "-"): of[name] for name in (*BUILT_IN_ONLY, "warm_up")}
    options["seed"] = SEED_IN_ARGUMENT
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    return ("-m", BUILT_IN, *words)


def _own(script: Sequence[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """The user's script."""
    for name in BUILT_IN_ONLY:
        if name in given:
            remedy = "Leave it out, or give the script an argument of its own."
            option = name.replace("_", "-")
            raise ConfigError(option, given[name], "is for the built-in model only", remedy)
    if not script:
        raise ConfigError("script", "", "there is none after --", "Try: -- train.py")
    return tuple(script)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _delay(text: str) -> float:
    try:
        return float(text.removesuffix("ms"))
    except ValueError:
        remedy = "Give milliseconds, as --delays 0,500,2000."
        raise ConfigError("delays", text, "is no number", remedy) from None


def _tau(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ConfigError("tau", text, "must be auto or a number of steps", "Try --tau auto.")
    return int(text)


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings from the shell, on which the figures depend, without those that the sweep sets."""
    ours = {f"MEND_{name}" for name in PLACES} | SET_BY_THE_SWEEP
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("MEND_") and name not in ours
    }


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError("env", text, "is not K=V", "Try --env NAME=value.")
    return key, value


def _on_cpu(device: str, needed: int) -> bool:
    """Return whether to keep the cells off the GPUs. Raises ConfigError for too few GPUs."""
    if device == "cpu":
        return True
    gpus = len(visible_gpus(os.environ))
    if gpus >= needed:
        return False
    if device == "cuda":
        rule = f"{needed} processes need {needed} GPUs, and there are {gpus}"
        raise ConfigError("device", "cuda", rule, "Lower --racks or --nproc-per-rack.")
    return True
