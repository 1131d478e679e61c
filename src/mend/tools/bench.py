"""`mend bench`: runs benchmarks/ of the source tree. An installed package says where that is."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from mend.errors import ConfigError

COMMANDS = Path("benchmarks") / "_commands.py"


class PassedOn(TyperCommand):
    """Takes all that follows as it is, --help and -- too: benchmarks/ has options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = args
        return super().parse_args(ctx, [])


def bench_command(context: typer.Context) -> None:
    """Run benchmarks of mend on this machine: the cost of a slow link and of each part."""
    root = str(source_tree())
    sys.path.insert(0, root)
    paths = (root, os.environ.get("PYTHONPATH", ""))  # of the processes that it starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    bench_app = importlib.import_module("benchmarks._commands").bench_app
    bench_app(context.obj, prog_name="mend bench")


def source_tree() -> Path:
    """The checkout that mend runs from, else the one that this shell is in. Raises ConfigError."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / COMMANDS).exists():
            return root
    rule = "the benchmarks are in the source tree, not in an installed package"
    remedy = "Clone the repository, and run mend bench in it."
    raise ConfigError("bench", str(Path.cwd()), rule, remedy)
