"""Reads the environment and the TOML file, alone in mend.

A setting comes from the first source that names it:
1. an argument of `MendConfig(...)`
2. the environment variable MEND_<FIELD>; an empty one counts as not set
3. the TOML file that MEND_CONFIG names: its table [mend], or the whole file if it has no such table
4. the default
An unknown name is an error in every source and never ignored, except for the variables that
Kubernetes injects for a Service whose name begins with "mend".
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mend.config.kinds import NONE, Kind
from mend.config.predecessor import OF_SCRIPTS, refuse
from mend.config.topology import RANKS_PER_RACK
from mend.errors import ConfigError
from mend.files import open_regular

PREFIX = "MEND_"
FILE = "MEND_CONFIG"
KEY_FILE = "MEND_KEY_FILE"
INSECURE = "MEND_INSECURE"
LAUNCH_PORTS = "MEND_LAUNCH_PORTS"
OUTCOMES = "MEND_OUTCOMES"
LIGHTNING = "MEND_LIGHTNING"
METRICS_PORT = "MEND_METRICS_PORT"
DIAGNOSTICS_DIR = "MEND_DIAGNOSTICS_DIR"
RESERVED = frozenset({FILE, RANKS_PER_RACK, LAUNCH_PORTS, OUTCOMES, LIGHTNING}) | OF_SCRIPTS
"""Valid names in the environment that are not settings."""

_OF_A_SERVICE = re.compile(
    r"(MEND_(?:[A-Z0-9_]+?_)??)"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
"""The variables that Kubernetes sets in every pod for a Service (see its documentation, Accessing
the Service)."""


@dataclass(frozen=True, slots=True)
class Named:
    """A value from a source. `origin`: a text that names the source."""

    value: object
    origin: str


def from_arguments(kinds: Mapping[str, Kind], given: Mapping[str, object]) -> dict[str, Named]:
    """The arguments. Raises ConfigError for an unknown name."""
    for name, value in given.items():
        if name not in kinds:
            raise _unknown(name, value, f"the argument {name} is", list(kinds))
    return {name: Named(value, f"the argument {name}") for name, value in given.items()}


def from_environment(
    kinds: Mapping[str, Kind], environ: Mapping[str, str] | None = None
) -> dict[str, Named]:
    """The values in the environment, parsed but not checked. Raises ConfigError for a text that
    cannot be parsed, and for an unknown name, because a job with a misspelt MEND_MERGE_MIN would
    otherwise run with the default. `environ` None: that of this process."""
    fields = {PREFIX + name.upper(): name for name in kinds}
    settings: dict[str, Named] = {}
    environ = os.environ if environ is None else environ
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        # A Service named mend-metrics sets MEND_METRICS_PORT to such an address.
        if (variable not in fields or text.startswith("tcp://")) and _is_of_a_service(
            variable, environ
        ):
            continue
        if variable not in fields:
            raise _unknown(variable, text, "is", [*fields, FILE, RANKS_PER_RACK])
        if text.strip():
            name = fields[variable]
            try:
                settings[name] = Named(kinds[name].parse(text.strip()), variable)
            except ValueError:
                raise misfit(name, kinds[name], Named(text, variable)) from None
    return settings


def _is_of_a_service(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes has set a variable: then the host of the same Service is set, too."""
    found = _OF_A_SERVICE.fullmatch(variable)
    return found is not None and f"{found[1]}SERVICE_HOST" in environ


def from_toml(
    kinds: Mapping[str, Kind], environ: Mapping[str, str] | None = None
) -> dict[str, Named]:
    """The values in the TOML file, not checked. Raises ConfigError for an unreadable file and for
    an unknown key."""
    path = (os.environ if environ is None else environ).get(FILE, "")
    if not path:
        return {}
    try:
        table = _table(path)
    except (OSError, ValueError, RecursionError) as error:
        rule = f"cannot be read as TOML ({error})"
        raise ConfigError(FILE, path, rule, f"Correct the file, or unset {FILE}.") from error
    for name, value in table.items():
        if name not in kinds:
            raise _unknown(name, value, f"the key {name} in {path} is", list(kinds))
    return {name: Named(value, f"{name} in {path}") for name, value in table.items()}


def joins_from_lightning() -> bool:
    """Whether a Lightning training joins a job without a callback in its script."""
    both = os.environ.get("MEND_RACK") and os.environ.get("MEND_RACKS")
    return bool(both) and os.environ.get(LIGHTNING) != "0"


def named_key_file() -> Path | None:
    """The key_file that the environment or the TOML file names."""
    text = _named("key_file")
    return Path(text) if text and text.lower() != NONE else None


def socks_proxy_in_force() -> str:
    """The socks_proxy that the environment or the TOML file names; empty: none."""
    return _named("socks_proxy")


def _named(name: str) -> str:
    """This setting, or empty. Other settings are not read, so that tools that look at a job do not
    fail on them."""
    text = os.environ.get(PREFIX + name.upper(), "").strip()
    if not text and (path := os.environ.get(FILE, "")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            text = str(_table(path).get(name, ""))
    return text


def _table(path: str) -> dict[str, Any]:
    with open_regular(path) as file:
        whole = tomllib.load(file)
    inner = whole.get("mend")
    return inner if isinstance(inner, dict) else whole


def misfit(name: str, kind: Kind, named: Named) -> ConfigError:
    """The error for a value outside its rule."""
    return ConfigError(name, named.value, f"needs {kind.rule}", f"Change {named.origin}.")


def _unknown(name: str, value: object, what_is: str, names: list[str]) -> ConfigError:
    """The error for an unknown name. `what_is`: the beginning of the rule. The value is hidden if
    it may be a secret of another library."""
    if (other := refuse(name.lower().removeprefix(PREFIX.lower()), value, what_is)) is not None:
        return ConfigError(name, other.value, other.rule, other.remedy)
    longer = [other for other in names if other.startswith(name)]
    closest = get_close_matches(name, longer or names, n=1, cutoff=0.0)[0]
    rule = f"{what_is} not a setting of mend"
    return ConfigError(name, value, rule, f"The closest name is {closest}.")
