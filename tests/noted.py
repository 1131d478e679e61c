"""Events as (kind, fields): what a line of the events file says, for tests that compare it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
