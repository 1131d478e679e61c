"""Makes the table of docs/configuration.md from the code: `python -m tests.configuration_table`."""

from __future__ import annotations

from pathlib import Path

from mend.config import describe
from mend.config.declared import Group
from mend.consensus.records import filled_fields

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table() -> str:
    """One table per group, with one row per setting in the order of the class."""
    in_log = {filled.setting for filled in filled_fields().values()}
    rows = []
    for group in Group:
        rows += ["", f"### {group.value}", ""]
        rows += ["| field | default | needs | scope | meaning |", "| --- | --- | --- | --- | --- |"]
        for row in (row for row in describe() if row.declared.group is group):
            needs, meaning = row.declared.kind.rule, row.declared.meaning
            assert "|" not in needs + meaning, f"{row.field} would break the table"
            default = '""' if row.default == "" else str(row.default)
            scope = row.declared.scope.value + ", log" * (row.field in in_log)
            rows.append(f"| `{row.field}` | `{default}` | {needs} | {scope} | {meaning} |")
    return "\n".join([*rows[1:], ""])


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
