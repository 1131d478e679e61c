"""Makes the table of docs/configuration.md from the code: `python -m tests.configuration_table`."""

from __future__ import annotations

from pathlib import Path

from mend.config import describe

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table() -> str:
    """One row per setting, in the order of the class."""
    rows = ["| field | default | needs | meaning |", "| --- | --- | --- | --- |"]
    for setting in describe():
        assert "|" not in setting.type + setting.meaning, f"{setting.field} would break the table"
        default = '""' if setting.default == "" else str(setting.default)
        rows.append(f"| `{setting.field}` | `{default}` | {setting.type} | {setting.meaning} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
