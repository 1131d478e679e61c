"""The map of both houses as data: which room may import which, and what each room may touch.

A room is a folder of src/mend or src/mend_lab, or a module beside them; those of mend_lab have its
name before theirs. No room of mend imports one of mend_lab, which is not in the wheel. test_map.py
holds every line of src to it.
"""

from __future__ import annotations

FUNCTION_LINES_MAX = 60

DOOR = "mend"
"""src/mend/__init__.py: public names only."""

LAB = "mend_lab"

_PLAIN = frozenset({"errors", "types"})
_NAMES = frozenset({"registry"})
_FILES = frozenset({"files"})
_NUMERIC = frozenset({"fragment", "codec", "merge", "outer"})
_DECIDING = frozenset({"consensus", "coordination", "detector", "events"})
_MACHINE = frozenset({"trace", "status", "hardware", "transport"})
_BELOW_ENGINE = _PLAIN | _NUMERIC | _DECIDING | _MACHINE | _FILES
_BELOW_API = _BELOW_ENGINE | {"engine", "config", "determinism"}
_BELOW_TOOLS = _BELOW_API | {"api", "mesh", "following", DOOR}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset({"errors"}),
    "files": frozenset(),
    "registry": frozenset({"errors"}),
    "step_counters": frozenset(),
    "detector": _PLAIN,
    "consensus": _PLAIN,
    "events": _PLAIN | {"detector"},
    "coordination": _PLAIN | {"consensus", "detector", "events"},
    "trace": _PLAIN | _FILES | _DECIDING,
    "status": _PLAIN | _DECIDING,
    "hardware": _PLAIN | _FILES | {"events"},
    "kernels": frozenset(),
    "fragment": _PLAIN,
    "codec": _PLAIN | _NAMES | {"kernels"},
    "merge": _PLAIN | _NAMES,
    "outer": _PLAIN | _NAMES,
    "determinism": _PLAIN | {"kernels", "step_counters"},
    "transport": _PLAIN,
    "engine": _BELOW_ENGINE | {"kernels", "step_counters"},
    "config": _BELOW_ENGINE | _NAMES | {"engine"},
    "mesh": _BELOW_API,
    "api": _BELOW_API | {"mesh", "step_counters"},
    "integrations": _PLAIN | {"api", "config", "following", "status", "transport"},
    "compat": _BELOW_API | {"api", "mesh"},
    "following": _PLAIN | {"config", "engine", "fragment", "status", "transport"},
    "tools": _BELOW_TOOLS,
    DOOR: _BELOW_API | {"api", "mesh", "following"},
    "__main__": frozenset({"tools"}),
    "mend_lab.reference": frozenset(),
    "mend_lab.sim": _BELOW_API,
    "mend_lab.replay": _BELOW_API | {"tools"},
    "mend_lab.commands": _BELOW_TOOLS | {"tools", "mend_lab.sim", "mend_lab.replay"},
    LAB: frozenset(),
    "mend_lab.__main__": frozenset({"mend_lab.commands"}),
}
"""room -> the other rooms that it may import."""

ROOMS_OF_ENGINE = (
    "compute", "state", "io", "hooks", "loop", "joining", "trainer", "features", "checkpoint", "",
)  # fmt: skip
"""The folders of engine, from the bottom up; last the modules beside them, which put a rank
together. A module imports from its own folder and from those before it: so no core room knows a
feature."""

_COMMANDS = frozenset({"tools", "mend_lab.commands"})

_TENSORS = (
    _NUMERIC
    | {"compat", "determinism", "hardware", "kernels", "engine", "mesh", "api", "following"}
    | {"integrations", "tools"}
    | {"mend_lab.commands", "mend_lab.reference", "mend_lab.replay", "mend_lab.sim"}
)

TENSORS_OF_MEND = _NUMERIC | {"api", "engine", "following", "hardware", "kernels", "mesh"}
"""Rooms that compute beside a script, whatever its default type and device are."""

MAKERS = frozenset({"arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros"})
"""Functions of torch that take those, unless they are told."""

MAY_ASSERT = frozenset({"mend_lab.sim", "mend_lab.reference"})
"""Rooms in which a bare assert may be: they check and are not trained with. Elsewhere `ensure` and
`require` of mend.errors state an invariant, as `python -O` removes asserts."""

OWNERS: dict[str, frozenset[str]] = {
    # installed packages; one that is not here belongs to nobody
    "torch": _TENSORS,
    "numpy": _TENSORS,
    "msgspec": _DECIDING
    | {"trace", "status", "engine", "config", "following", "tools"}
    | {"mend_lab.sim", "mend_lab.replay"},
    "xxhash": _NUMERIC
    | {"determinism", "coordination", "trace", "transport", "engine", "following", "tools"},
    "zmq": frozenset({"transport"}),
    "cryptography": frozenset({"transport", "tools"}),
    "numba": frozenset({"kernels"}),
    "llvmlite": frozenset({"kernels"}),
    "triton": frozenset({"kernels", "determinism"}),
    "matplotlib": frozenset({"mend_lab.commands"}),
    "jinja2": frozenset({"tools"}),
    "prometheus_client": frozenset({"status"}),
    "accelerate": frozenset({"integrations"}),
    "lightning": frozenset({"integrations"}),
    "ray": frozenset({"integrations"}),
    "torchtitan": frozenset({"integrations"}),
    "transformers": frozenset({"integrations"}),
    "rich": _COMMANDS,
    "typer": _COMMANDS,
    # the standard library, where it touches the world
    "argparse": frozenset({"tools"}),
    "asyncio": frozenset({"transport", "engine", "tools"}),
    "concurrent": _COMMANDS | {"transport", "engine", "following", "mend_lab.replay"},
    "datetime": frozenset({"status", "engine", "tools"}),
    "logging": frozenset({"status", "hardware", "engine", "determinism"}),
    "multiprocessing": _COMMANDS,
    "os": _COMMANDS
    | {"transport", "trace", "status", "hardware", "engine", "config", "determinism"}
    | {"files", "following", "integrations", "kernels", "mend_lab.replay"},
    "pathlib": _COMMANDS
    | {"trace", "status", "hardware", "engine", "config", "api", "following", "integrations"}
    | {"files", "mend_lab.sim", "mend_lab.replay"},
    "pickle": frozenset(),
    "queue": frozenset({"trace", "engine"}),
    "random": frozenset({"determinism", "mend_lab.sim"}),
    "secrets": frozenset({"engine", "kernels", "tools"}),
    "select": frozenset({"transport", "status", "engine"}),
    "selectors": frozenset({"transport"}),
    "shutil": frozenset({"trace", "engine", "tools"}),
    "signal": _COMMANDS | {"engine"},
    "socket": frozenset({"transport"}),
    "ssl": frozenset({"transport"}),
    "subprocess": frozenset({"tools"}),
    "tempfile": _COMMANDS | {"engine"},
    "threading": _COMMANDS | {"transport", "trace", "status", "engine", "mend_lab.replay"},
    "time": _COMMANDS | {"transport", "trace", "status", "engine", "following"},
    "tomllib": frozenset({"config"}),
    "uuid": frozenset({"engine"}),
}
"""package -> the only rooms that may import it. The rest of the standard library is free to all."""

NAME_OWNERS: dict[str, frozenset[str]] = {
    "open": frozenset({"trace", "hardware", "engine", "config", "tools"}),
    "print": _COMMANDS | {"integrations"},
    "os.environ": _COMMANDS | {"config", "determinism", "integrations", "mend_lab.replay"},
    "os.getenv": frozenset({"config", "tools"}),
    "os.environb": frozenset({"config", "tools"}),
    "os.putenv": frozenset(),
    "time.sleep": frozenset({"tools"}),
    "time.time": frozenset({"status", "engine", "tools"}),
    "time.time_ns": frozenset({"trace", "status", "engine", "tools"}),
    "torch.manual_seed": frozenset({"tools", "determinism"}),
}
"""name -> the only rooms that may use it. `tools` reads the environment to hand it on to ranks,
`integrations` sets that of workers of Ray, `determinism` what cuBLAS and NCCL read at their start.
"""
