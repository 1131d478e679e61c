"""The map of mend as data: which room may import which, and who owns what of the outside world.

A room is a folder of src/mend, or a module beside them. test_map.py holds every line of src to it.
"""

from __future__ import annotations

MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 60

DOOR = "mend"
"""src/mend/__init__.py: public names only."""

_PLAIN = frozenset({"errors", "terms"})
_NUMERIC = frozenset({"fragment", "codec", "merge", "outer"})
_DECIDING = frozenset({"protocol", "detector"})
_BELOW_RUNTIME = _PLAIN | _NUMERIC | _DECIDING | {"transport"}
_BELOW_API = _BELOW_RUNTIME | {"runtime", "config", "determinism"}
_BELOW_CLI = _BELOW_API | {"api", "mesh", "sim", "reference", "kernels", DOOR}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "terms": frozenset({"errors"}),
    "protocol": _PLAIN | {"detector"},
    "detector": _PLAIN,
    "kernels": frozenset({"errors"}),
    "fragment": _PLAIN | {"kernels"},
    "codec": _PLAIN | {"kernels"},
    "merge": _PLAIN | {"kernels"},
    "outer": _PLAIN | {"kernels"},
    "determinism": _PLAIN,
    "transport": _PLAIN,
    "runtime": _BELOW_RUNTIME,
    "config": _BELOW_RUNTIME | {"runtime"},
    "reference": frozenset(),
    "sim": _BELOW_API | {"reference"},
    "mesh": _BELOW_API,
    "api": _BELOW_API | {"mesh"},
    "cli": _BELOW_CLI,
    DOOR: _BELOW_API | {"api", "mesh"},
    "__main__": frozenset({"cli"}),
}
"""room -> the other rooms of mend that it may import."""

_TENSORS = _NUMERIC | {
    "determinism",
    "kernels",
    "runtime",
    "reference",
    "sim",
    "mesh",
    "api",
    "cli",
}

OWNERS: dict[str, frozenset[str]] = {
    # installed packages; one that is not here belongs to nobody
    "torch": _TENSORS,
    "numpy": _TENSORS,
    "msgspec": _DECIDING | {"runtime", "config", "sim", "cli"},
    "xxhash": _NUMERIC | {"determinism", "protocol", "transport", "runtime", "sim", "cli"},
    "zmq": frozenset({"transport"}),
    "triton": frozenset({"kernels"}),
    "matplotlib": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
    "typer": frozenset({"cli"}),
    # the standard library, where it touches the world
    "argparse": frozenset({"cli"}),
    "asyncio": frozenset({"transport", "runtime", "sim"}),
    "concurrent": frozenset({"transport", "runtime", "cli"}),
    "datetime": frozenset({"runtime", "cli"}),
    "logging": frozenset({"runtime"}),
    "multiprocessing": frozenset({"cli"}),
    "os": frozenset({"transport", "runtime", "config", "cli", "determinism"}),
    "pathlib": frozenset({"runtime", "config", "sim", "api", "cli"}),
    "pickle": frozenset(),
    "queue": frozenset({"runtime"}),
    "random": frozenset({"sim", "determinism"}),
    "secrets": frozenset({"runtime", "cli"}),
    "select": frozenset({"transport", "runtime"}),
    "selectors": frozenset({"transport"}),
    "shutil": frozenset({"runtime", "cli"}),
    "signal": frozenset({"runtime", "cli"}),
    "socket": frozenset({"transport"}),
    "ssl": frozenset({"transport"}),
    "subprocess": frozenset({"cli"}),
    "tempfile": frozenset({"runtime", "cli"}),
    "threading": frozenset({"transport", "runtime", "cli"}),
    "time": frozenset({"transport", "runtime", "cli"}),
    "tomllib": frozenset({"config"}),
    "uuid": frozenset({"runtime"}),
}
"""package -> the only rooms that may import it. The rest of the standard library is free to all."""

NAME_OWNERS: dict[str, frozenset[str]] = {
    "open": frozenset({"runtime", "config", "cli"}),
    "print": frozenset({"cli"}),
    "os.environ": frozenset({"config", "cli", "determinism"}),
    "os.getenv": frozenset({"config", "cli"}),
    "os.environb": frozenset({"config", "cli"}),
    "os.putenv": frozenset(),
    "time.sleep": frozenset({"cli"}),
    "time.time": frozenset({"runtime", "cli"}),
    "time.time_ns": frozenset({"runtime", "cli"}),
    "torch.manual_seed": frozenset({"cli", "determinism"}),
}
"""name -> the only rooms that may use it. `cli` reads the environment to hand it on to ranks,
`determinism` sets what cuBLAS and NCCL read at their start."""
