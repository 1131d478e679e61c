"""The map of mend as data: which room may import which, and who owns what of the outside world.

A room is a folder of src/mend, or a module beside them. test_map.py holds every line of src to it.
"""

from __future__ import annotations

FUNCTION_LINES_MAX = 60

DOOR = "mend"
"""src/mend/__init__.py: public names only."""

_PLAIN = frozenset({"errors", "types"})
_NUMERIC = frozenset({"fragment", "codec", "merge", "outer"})
_DECIDING = frozenset({"consensus", "coordination", "detector"})
_MACHINE = frozenset({"trace", "status", "hardware", "transport"})
_BELOW_ENGINE = _PLAIN | _NUMERIC | _DECIDING | _MACHINE
_BELOW_API = _BELOW_ENGINE | {"engine", "config", "determinism"}
_BELOW_TOOLS = _BELOW_API | {"api", "mesh", "sim", DOOR}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset({"errors"}),
    "detector": _PLAIN,
    "consensus": _PLAIN,
    "coordination": _PLAIN | {"consensus", "detector"},
    "trace": _PLAIN | _DECIDING,
    "status": _PLAIN | _DECIDING,
    "hardware": _PLAIN,
    "kernels": frozenset(),
    "fragment": _PLAIN,
    "codec": _PLAIN | {"kernels"},
    "merge": _PLAIN,
    "outer": _PLAIN,
    "determinism": _PLAIN,
    "transport": _PLAIN,
    "engine": _BELOW_ENGINE | {"kernels"},
    "config": _BELOW_ENGINE | {"engine"},
    "reference": frozenset(),
    "sim": _BELOW_API,
    "mesh": _BELOW_API,
    "api": _BELOW_API | {"mesh"},
    "compat": _BELOW_API | {"api"},
    "tools": _BELOW_TOOLS,
    DOOR: _BELOW_API | {"api", "mesh"},
    "__main__": frozenset({"tools"}),
}
"""room -> the other rooms of mend that it may import."""

_TENSORS = _NUMERIC | {
    "compat",
    "determinism",
    "hardware",
    "kernels",
    "engine",
    "reference",
    "sim",
    "mesh",
    "api",
    "tools",
}

TENSORS_OF_MEND = _NUMERIC | {"api", "engine", "hardware", "kernels", "mesh"}
"""Rooms that compute beside a script, whatever its default type and device are."""

MAKERS = frozenset({"arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros"})
"""Functions of torch that take those, unless they are told."""

OWNERS: dict[str, frozenset[str]] = {
    # installed packages; one that is not here belongs to nobody
    "torch": _TENSORS,
    "numpy": _TENSORS,
    "msgspec": _DECIDING | {"trace", "status", "engine", "config", "sim", "tools"},
    "xxhash": _NUMERIC
    | {"determinism", "coordination", "trace", "transport", "engine", "sim", "tools"},
    "zmq": frozenset({"transport"}),
    "cryptography": frozenset({"transport"}),
    "numba": frozenset({"kernels"}),
    "triton": frozenset({"kernels", "determinism"}),
    "matplotlib": frozenset({"tools"}),
    "jinja2": frozenset({"tools"}),
    "rich": frozenset({"tools"}),
    "typer": frozenset({"tools"}),
    # the standard library, where it touches the world
    "argparse": frozenset({"tools"}),
    "asyncio": frozenset({"transport", "engine", "sim", "tools"}),
    "concurrent": frozenset({"transport", "engine", "tools"}),
    "datetime": frozenset({"status", "engine", "tools"}),
    "logging": frozenset({"status", "hardware", "engine"}),
    "multiprocessing": frozenset({"tools"}),
    "os": frozenset(
        {"transport", "trace", "status", "hardware", "engine", "config", "tools", "determinism"}
    ),
    "pathlib": frozenset(
        {"trace", "status", "hardware", "engine", "config", "sim", "api", "tools"}
    ),
    "pickle": frozenset(),
    "queue": frozenset({"trace", "engine"}),
    "random": frozenset({"sim", "determinism"}),
    "secrets": frozenset({"engine", "tools"}),
    "select": frozenset({"transport", "status", "engine"}),
    "selectors": frozenset({"transport"}),
    "shutil": frozenset({"trace", "engine", "tools"}),
    "signal": frozenset({"engine", "tools"}),
    "socket": frozenset({"transport"}),
    "ssl": frozenset({"transport"}),
    "subprocess": frozenset({"tools"}),
    "tempfile": frozenset({"engine", "tools"}),
    "threading": frozenset({"transport", "trace", "status", "engine", "tools"}),
    "time": frozenset({"transport", "trace", "status", "engine", "tools"}),
    "tomllib": frozenset({"config"}),
    "uuid": frozenset({"engine"}),
}
"""package -> the only rooms that may import it. The rest of the standard library is free to all."""

NAME_OWNERS: dict[str, frozenset[str]] = {
    "open": frozenset({"trace", "hardware", "engine", "config", "tools"}),
    "print": frozenset({"tools"}),
    "os.environ": frozenset({"config", "tools", "determinism"}),
    "os.getenv": frozenset({"config", "tools"}),
    "os.environb": frozenset({"config", "tools"}),
    "os.putenv": frozenset(),
    "time.sleep": frozenset({"tools"}),
    "time.time": frozenset({"status", "engine", "tools"}),
    "time.time_ns": frozenset({"trace", "status", "engine", "tools"}),
    "torch.manual_seed": frozenset({"tools", "determinism"}),
}
"""name -> the only rooms that may use it. `tools` reads the environment to hand it on to ranks,
`determinism` sets what cuBLAS and NCCL read at their start."""
