"""Events as (kind, fields): what a line of the events file says, for tests that compare it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from mend.events.base import LoggedEvent
from mend.events.lines import KINDS


def pair(event: LoggedEvent) -> tuple[str, dict[str, Any]]:
    fields = flat(event)
    return fields.pop("kind"), fields


def pairs(events: Iterable[LoggedEvent]) -> list[tuple[str, dict[str, Any]]]:
    return [pair(event) for event in events]


def flat(event: LoggedEvent) -> dict[str, Any]:
    """The fields with the kind."""
    fields: dict[str, Any] = json.loads(msgspec.json.encode(event))
    return fields


def kinds_made_in(path: Path) -> set[str]:
    """The kinds of which a module makes events: by a call of the class, or by a name that stands
    for one of two classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    chosen = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        for name in (node.body, node.orelse)
        if isinstance(name, ast.Name)
    }
    return {kind for kind, made in KINDS.items() if made.__name__ in called | chosen}


def filled(event: dict[str, Any]) -> dict[str, Any]:
    """`event`, as a line of a file has it, with zeros in the fields that it must have and lacks."""
    made = KINDS.get(str(event.get("kind")))
    if made is None:
        return event
    needed = [field for field in msgspec.structs.fields(made) if field.required]
    return {field.encode_name: zero(field.type) for field in needed} | event


def zero(kind: Any) -> Any:
    """The least value of a field's type."""
    if get_origin(kind) is Annotated:
        return zero(kind.__origin__)
    if kind in (int, float, bool, str):
        return kind()
    if get_origin(kind) in (tuple, dict):
        return get_origin(kind)()
    first = get_args(kind)[0]
    return first if isinstance(first, str) else zero(first)
