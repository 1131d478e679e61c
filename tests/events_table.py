"""Makes the table of docs/internals/events.md from the code: `python -m tests.events_table`."""

from __future__ import annotations

import inspect
from pathlib import Path

from mend.events.base import LoggedEvent, Severity
from mend.events.lines import KINDS

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "events.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table() -> str:
    """One row per kind, in the order of the module."""
    rows = ["| kind | level | fields | when | what to do |", "| --- | --- | --- | --- | --- |"]
    for kind, made in KINDS.items():
        cells = [_kind(kind, made), _level(made), _fields(made), _when(made), _remedy(made)]
        assert not any("|" in cell for cell in cells), f"{kind} would break the table"
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def _kind(kind: str, made: type[LoggedEvent]) -> str:
    return f"**`{kind}`**" if made.loud else f"`{kind}`"


def _level(made: type[LoggedEvent]) -> str:
    return Severity(made.severity).name.lower()


def _fields(made: type[LoggedEvent]) -> str:
    """Those that may be absent in brackets."""
    signature = inspect.signature(made).parameters
    names = zip(made.__struct_fields__, made.__struct_encode_fields__, strict=True)
    optional = {name for name, each in signature.items() if each.default is not each.empty}
    return ", ".join(f"[{shown}]" if own in optional else shown for own, shown in names)


def _when(made: type[LoggedEvent]) -> str:
    """The docstring, whose links are those of a page in docs; else the sentence."""
    return " ".join((made.__doc__ or made.says).split()).replace("](", "](../")


def _remedy(made: type[LoggedEvent]) -> str:
    if made.remedy == "{remedy}":
        return "as the field `remedy` says"
    return made.remedy


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
