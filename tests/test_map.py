"""Every line of src stays in its room. A violation is a sentence: where, what, which rule."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

from tests.map import (
    DOOR,
    FUNCTION_LINES_MAX,
    LAB,
    MAKERS,
    MAY_ASSERT,
    MAY_IMPORT,
    NAME_OWNERS,
    OWNERS,
    ROOMS_OF_ENGINE,
    TENSORS_OF_MEND,
)

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted(SOURCE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def room_of(path: Path, root: Path) -> str:
    house, first, *_ = path.relative_to(root).parts
    name = first.removesuffix(".py")
    if house == DOOR:
        return DOOR if name == "__init__" else name
    return house if name == "__init__" else f"{house}.{name}"


def violations(path: Path, root: Path = SOURCE) -> list[str]:
    """All of one module, in the order of its lines."""
    room = room_of(path, root)
    here = f"src/{path.relative_to(root)}"
    if room not in MAY_IMPORT:
        return [f"{here}: {room!r} is no room; tests/map.py names them all"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    if tree.body and not ast.get_docstring(tree):
        said = "the module does not begin with a docstring that says what may happen here"
        found.append((1, said))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        found += [(line, each) for each in _of_a_node(room, node)]
    return [f"{here}:{line}: {each}" for line, each in sorted(found)]


def _of_a_node(room: str, node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield from _of_an_import(room, alias.name)
        case ast.ImportFrom():
            yield from _of_a_from_import(room, node)
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            yield from _of_a_name(room, f"{owner}.{attribute}")
        case ast.Call(func=ast.Name(id=name)):
            yield from _of_a_name(room, name)
        case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=maker), keywords=keywords):
            if room in TENSORS_OF_MEND and maker in MAKERS:
                yield from _of_a_maker(maker, {keyword.arg for keyword in keywords})
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _of_a_function(node)
        case ast.Assert() if room not in MAY_ASSERT:
            yield "a bare assert, which python -O removes; use ensure or require of mend.errors"


def _of_a_from_import(room: str, node: ast.ImportFrom) -> Iterator[str]:
    if node.level > 0 or node.module is None:
        yield "relative import; write it in full, so that the room shows"
    elif node.module in (DOOR, LAB):
        for alias in node.names:  # a room, or a public name of the door
            name = alias.name if node.module == DOOR else f"{LAB}.{alias.name}"
            inside = f".{alias.name}" if name in MAY_IMPORT else ""
            yield from _of_an_import(room, f"{node.module}{inside}")
    else:
        yield from _of_an_import(room, node.module)
        for alias in node.names:
            yield from _of_a_name(room, f"{node.module}.{alias.name}")


def _of_an_import(room: str, name: str) -> Iterator[str]:
    top, _, rest = name.partition(".")
    if top in (DOOR, LAB):
        inside = rest.partition(".")[0]
        target = inside or DOOR if top == DOOR else f"{LAB}.{inside}".rstrip(".")
        if target not in (room, *MAY_IMPORT[room]):
            may = ", ".join(sorted(MAY_IMPORT[room])) or "nothing of mend"
            yield f"{room!r} may not import {target!r} (it may: {may})"
    elif top in OWNERS:
        if room not in OWNERS[top]:
            owners = ", ".join(sorted(OWNERS[top])) or "nobody"
            yield f"{room!r} may not import {top!r}, which belongs to {owners}"
    elif top not in sys.stdlib_module_names:
        yield f"{top!r} is a package that no room owns; add it to pyproject.toml and tests/map.py"


def _of_a_name(room: str, name: str) -> Iterator[str]:
    if name in NAME_OWNERS and room not in NAME_OWNERS[name]:
        owners = ", ".join(sorted(NAME_OWNERS[name])) or "nobody"
        yield f"{room!r} may not use {name}, which belongs to {owners}"


def _of_a_maker(maker: str, given: set[str | None]) -> Iterator[str]:
    if missing := sorted({"dtype", "device"} - given):
        yield f"torch.{maker} without {' and '.join(missing)}: it takes the script's default"


def _of_a_function(node: Function) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > FUNCTION_LINES_MAX:
        yield f"{node.name} has {lines} lines; at most {FUNCTION_LINES_MAX}, split it"


def test_every_module_stays_in_its_room() -> None:
    found = [each for path in MODULES for each in violations(path)]
    assert not found, "\n" + "\n".join(found)


def check_bottom_up(needs: Mapping[str, Set[str]]) -> None:
    """There is no circle: until none is left, some of them need only what is there."""
    left = dict(needs)
    while left:
        ready = [name for name, needed in left.items() if not needed & left.keys()]
        assert ready, f"these import each other in a circle: {sorted(left)}"
        for name in ready:
            del left[name]


def test_rooms_can_be_built_bottom_up() -> None:
    check_bottom_up(MAY_IMPORT)


def engine_imports(root: Path) -> dict[str, set[str]]:
    """Of each module of engine the others that it imports, without `mend.engine.`."""
    engine = root / "mend" / "engine"
    paths = {
        ".".join(path.relative_to(engine).with_suffix("").parts): path
        for path in engine.rglob("*.py")
        if path.stem != "__init__"
    }
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        needs = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        modules = {n.module for n in needs}
        modules |= {f"{n.module}.{alias.name}" for n in needs for alias in n.names}
        found[name] = {m.removeprefix("mend.engine.") for m in modules if m} & paths.keys()
    return found


def upward(imports: dict[str, set[str]]) -> list[str]:
    def place(name: str) -> int:
        return ROOMS_OF_ENGINE.index(name.rpartition(".")[0])

    return [
        f"engine.{name} may not import engine.{need}, which is above it"
        for name, needs in sorted(imports.items())
        for need in sorted(needs)
        if place(need) > place(name)
    ]


def test_rooms_of_engine_import_only_those_below() -> None:
    imports = engine_imports(SOURCE)
    assert {name.rpartition(".")[0] for name in imports} == set(ROOMS_OF_ENGINE)
    assert not (found := upward(imports)), "\n" + "\n".join(found)


def test_core_of_engine_that_imports_a_feature_is_found(tmp_path: Path) -> None:
    for name, code in (("trainer/step", "from mend.engine.features import followed"),
                       ("features/followed", "import time")):  # fmt: skip
        path = tmp_path / "mend" / "engine" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(code)
    (sentence,) = upward(engine_imports(tmp_path))
    assert sentence.startswith("engine.trainer.step may not import engine.features.followed")


def test_modules_of_engine_import_each_other_in_no_circle() -> None:
    """Not for types alone either: a class that only names another in a type takes it as a whole."""
    check_bottom_up(engine_imports(SOURCE))


def test_no_room_of_mend_may_import_the_lab() -> None:
    for room, needs in MAY_IMPORT.items():
        assert room.startswith(LAB) or not any(need.startswith(LAB) for need in needs), room


def test_every_owner_is_a_room() -> None:
    named = set().union(*OWNERS.values(), *NAME_OWNERS.values(), *MAY_IMPORT.values())
    assert named <= MAY_IMPORT.keys()


BROKEN = {
    "coordination/round.py": ("import torch", "may not import 'torch', which belongs to"),
    "consensus/log.py": ("from mend.engine import io_loop", "may not import 'engine'"),
    "coordination/wire.py": ("from mend import codec", "may not import 'codec'"),
    "coordination/grace.py": ("def f():\n    import time", "may not import 'time'"),
    "codec/raw.py": ("from mend.merge.average import Average", "may not import 'merge'"),
    "merge/average.py": ("from mend import mend_init", "may not import 'mend'"),
    "engine/io/rack.py": ("import zmq.asyncio", "may not import 'zmq'"),
    "engine/live_rank.py": ("import os\nprint(os.environ['A'])", "may not use os.environ"),
    "engine/clock.py": ("from os import getenv", "may not use os.getenv"),
    "transport/bulk_client.py": ("import time\ntime.sleep(1)", "may not use time.sleep"),
    "fragment/view.py": ("data = open('x')", "may not use open"),
    "types.py": ("from . import errors", "relative import"),
    "api.py": ("import requests", "no room owns"),
    "../mend_lab/reference/bare.py": ("from mend.types import Peer", "(it may: nothing of mend)"),
    "engine/seam.py": ("from mend_lab.replay import script", "may not import 'mend_lab.replay'"),
    "tools/lab.py": ("from mend_lab import sim", "may not import 'mend_lab.sim'"),
    "tools/all.py": ("import mend_lab", "may not import 'mend_lab'"),
    "../mend_lab/sim/judge.py": ("import mend.tools.launch", "may not import 'tools'"),
    "engine/room.py": ('import torch\ntorch.empty(3, device="cpu")', "torch.empty without dtype"),
    "helpers/text.py": ("", "is no room"),
    "outer/tall.py": ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines; at most 60"),
    "merge/gram.py": ("def f(x):\n    assert x > 0", "a bare assert"),
    "../mend_lab/sim/bare.py": (None, "does not begin with a docstring"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_map_sees_what_is_in_the_wrong_room(name: str, tmp_path: Path) -> None:
    code, sentence = BROKEN[name]
    path = Path(os.path.normpath(tmp_path / "mend" / name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" if code is None else f'"""A room."""\n{code}\n'.rstrip() + "\n")
    found = violations(path, tmp_path)
    assert any(sentence in each for each in found), found
    assert found[0].startswith(f"src/{path.relative_to(tmp_path)}:")


def test_the_map_lets_right_imports_pass(tmp_path: Path) -> None:
    path = tmp_path / "mend" / "coordination" / "round.py"
    path.parent.mkdir(parents=True)
    path.write_text('"""A room."""\nimport struct\nimport msgspec\nfrom mend.types import Peer\n')
    assert violations(path, tmp_path) == []
