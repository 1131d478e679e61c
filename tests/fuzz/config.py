"""Settings from arguments, environment and TOML: a configuration, or a ConfigError."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from mend.config import MendConfig
from mend.config.declared import Scope
from mend.config.settings import kinds
from mend.config.topology import read_hints
from mend.config.wiring import settings_of, spare_vectors
from mend.errors import ConfigError
from tests.fuzz.mutate import EDGES, mutated

ARGUMENTS, ENVIRONMENT, TOML = b"A", b"E", b"T"

FIELDS = tuple(field.name for field in dataclasses.fields(MendConfig))

PLACE = ("MEND_RANKS_PER_RACK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NODEID",
    "SLURMD_NODENAME", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN", "NCCL_TOPO_FILE")  # fmt: skip
"""What says where a process is; read by `read_hints`."""

_TEXTS = (
    "", " ", "true", "False", "none", "adaptive", "0", "1", "2", "-1", "64", "65", "1024", "1e3",
    "0.5", "1.0", "-0.0", "nan", "inf", "1e999", "0x10", "1_000", "٣", "9" * 400, "9" * 5000,
    "a", "job-1", "carry", "blend", "rda", "mean", "float32", "bfloat16", "constant", "lognormal",
    "tcp://127.0.0.1:5000", "tcp://0.0.0.0:5000", "tcp://[::1]:5000", "tcp://a:0", "tcp://a:65536",
    "tcp://", "udp://a:1", "0=tcp://a:1,1=tcp://b:2", "tcp://a:1,tcp://b:2", "0=,1=", "=", ",,,",
    "1000-2000", "2000-1000", "0-0", "-", "1-", "1-2-3", "*embed*", "a,b,a", "/tmp/x", "~", "..",
    "\udcff", "é漢", "a\tb", "a" * 300, "r[0-1]n[1-2]", "r[0-99999999]", "[[", "a[1-", "s.s.node",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *(text for text in _TEXTS if text.isprintable()),
    None, True, False, 1.5, float("nan"), float("inf"), -1e308, [], {}, b"x",
    ["tcp://a:1", "tcp://b:2"], ["a", 1], [None], [[]], [["="], "="], {"0": "tcp://a:1"}, {"": ""},
    {"0": "tcp://a:1", "1": "tcp://b:1"},
)  # fmt: skip
_DOCUMENT = b"""
racks = 2
fragments = 4
[mend]
rack = 0
sync_period_steps = 64
job_id = "fuzz"
grace_window_ms = 12.5
merge_mean_names = ["*embed*", '*wte*']
sideband_peers = ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]
[mend.extra.deeper]
when = 1979-05-27T07:32:00Z
hex = 0xdead_beef
text = \"\"\"two
lines \\u00e9\"\"\"
"""
_TOML_PIECES = (
    b"[[[[", b"[" * 2000, b"{" * 2000, b"a={" * 1000, b"a=[" * 3000, b"[mend]\n", b"mend=1\n", b"=",
    b"0x" + b"f" * 5000, b"9" * 5000, b"-" * 50, b'"""', b"'''", b"\\U00110000", b"\\ud800",
    b"\xff\xfe", b"\0", b"1979-13-45", b"24:61:61", b"inf", b"nan", b"1e999999", b"a.b.c.d=1\n",
    b"# comment", b"\r", b"rack=99\n", b"racks=3\n", b"overlap_steps=1000\n", b"x" * 20_000,
)  # fmt: skip


class Config:
    """Which source an input is for is its first byte."""

    name, inputs = "config", 50_000

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "mend.toml"

    def example(self, rng: random.Random) -> bytes:
        kind = rng.choice((ARGUMENTS, ENVIRONMENT, TOML))
        if kind == ARGUMENTS:
            return kind + msgspec.msgpack.encode(_arguments(rng))
        if kind == ENVIRONMENT:
            pairs = [f"{name}={text}" for name, text in _environment(rng).items()]
            return kind + "\0".join(pairs).encode(errors="surrogateescape")
        if rng.random() < 0.3:
            return kind + _written(rng).encode()
        text = bytearray(mutated(rng, _DOCUMENT, _DOCUMENT))
        at = rng.randrange(len(text) + 1)
        text[at:at] = rng.choice((*_TOML_PIECES, b""))
        return kind + bytes(text)

    def take(self, data: bytes) -> str:
        kind, rest = data[:1], data[1:]
        given: dict[str, Any] = {}
        variables: dict[str, str] = {}
        if kind == ARGUMENTS:
            given = msgspec.msgpack.decode(rest)
        elif kind == ENVIRONMENT:
            text = rest.decode(errors="surrogateescape")
            variables = dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
        else:
            self._file.write_bytes(rest)
            variables = {"MEND_CONFIG": str(self._file)}
        with _only(variables), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self._made(given)

    @staticmethod
    def _made(given: dict[str, Any]) -> str:
        try:
            read_hints()
            config = MendConfig(**given)
            _used(config)
        except ConfigError as error:
            return _class_of(error)
        return "accepted"

    def close(self) -> None:
        self._folder.cleanup()


def _used(config: MendConfig) -> None:
    """All that is made of a configuration that was accepted."""
    assert dataclasses.replace(config) == config
    assert config.tau >= 0
    assert all(text for scope in Scope for _, text in config.facts(scope) if scope != Scope.RACK)
    assert spare_vectors(config).vectors >= 1
    if config.rack is not None:  # else its place in the list is found by mend_init
        assert sorted(config.peer_addresses) == list(range(config.racks))
    assert config.data_port_range is None or config.data_port_range[0] <= config.data_port_range[1]
    if config.rack is not None:
        settings_of(config, None, None)


def _class_of(error: ConfigError) -> str:
    assert str(error).startswith(f"{error.field}="), error
    assert error.remedy, error
    if "is not a setting" in error.rule:
        return "a name that no setting has"
    if "cannot be read as TOML" in error.rule:
        return "no TOML"
    if error.field not in FIELDS:
        return "a wrong place (Slurm, torchrun)"
    return "a wrong value" if error.rule.startswith("needs ") else "two that do not go together"


@contextmanager
def _only(variables: dict[str, str]) -> Iterator[None]:
    """Of MEND_* and of what says where a process is, just these."""
    with mock.patch.dict(os.environ):
        for name in [*os.environ]:
            if name.startswith("MEND_") or name in PLACE:
                del os.environ[name]
        os.environ.update(variables)
        yield


def _text(rng: random.Random) -> str:
    text = rng.choice((*_TEXTS, str(rng.choice(EDGES)), str(rng.randrange(100))))
    if rng.random() < 0.2:
        other = rng.choice(_TEXTS).encode(errors="surrogateescape")
        raw = mutated(rng, text.encode(errors="surrogateescape") or b"0", other)
        text = raw.decode(errors="surrogateescape")
    return text.replace("\0", "")


def _names(rng: random.Random) -> list[str]:
    names = rng.choices(FIELDS, k=rng.choice((1, 1, 2, 3, 8)))
    if rng.random() < 0.05:
        names.append(rng.choice(("rak", "", "quorum", "x" * 5000, "RACK", "é")))
    return names


def _arguments(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _names(rng):
        fitting = _fitting().get(name)
        values = (
            fitting if fitting and rng.random() < 0.7 else (*_VALUES, *EDGES, rng.randrange(100))
        )
        found[name] = rng.choice(values)
    return found


@functools.cache
def _fitting() -> dict[str, tuple[Any, ...]]:
    """Of the values here, those that each setting takes."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, kind in kinds().items():
        found[name] = tuple(value for value in (*_VALUES, *EDGES) if _fits(kind.accept, value))
    return found


def _fits(accept: Callable[[Any], Any], value: Any) -> bool:
    try:
        accept(value)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _environment(rng: random.Random) -> dict[str, str]:
    found = {f"MEND_{name.upper()}": _text(rng) for name in _names(rng)}
    if rng.random() < 0.5:  # such as it would be written
        found = {f"MEND_{name.upper()}": str(value) for name, value in _arguments(rng).items()}
    if rng.random() < 0.4:
        found |= {rng.choice(PLACE): _text(rng) for _ in range(rng.randrange(1, 4))}
    if rng.random() < 0.05:
        found["MEND_CONFIG"] = rng.choice(("/nowhere", "/", "\udcff", "a" * 5000, "mend.toml"))
    return found


def _written(rng: random.Random) -> str:
    """A file of right names, each with some value that TOML can spell."""
    spelled = ("true", "0", "1", "-1", "1.5", "inf", "nan", '""', '"a"', "[]", '["a", "b"]', "{}",
        '{0="tcp://a:1",1="tcp://b:2"}', "1979-05-27", "07:32:00", "[[]]", '"adaptive"', '"none"',
        "9223372036854775808", "0x" + "f" * 40, '"tcp://a:1,tcp://b:2"', "[1, 2.0]")  # fmt: skip
    lines = [f"{name or 'x'} = {rng.choice(spelled)}" for name in dict.fromkeys(_names(rng))]
    head = rng.choice(("", "[mend]\n", "[other]\n"))
    return head + "\n".join(line for line in lines if _readable(line))


def _readable(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True
