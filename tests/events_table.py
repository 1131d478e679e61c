"""Makes the tables of events in docs from the code: `python -m tests.events_table`.

docs/internals/events.md has every kind, docs/events.md those that are always shown.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mend.events.base import LoggedEvent, Severity
from mend.events.lines import KINDS

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
Kind = type[LoggedEvent]

WORDS_MIN = 4
"""A sentence with fewer words of its own is made of fields, and the docstring says more."""

REMEDY_WORDS_MAX = 12
"""A longer one is in the line of the log, and on internals/events.md."""


def full_table() -> str:
    """One row per kind, in the order of the module."""
    head = ("kind", "level", "fields", "when", "what to do")
    return _table(
        head,
        [
            [_kind(made), _level(made), _fields(made), _when(made), _remedy(made)]
            for made in KINDS.values()
        ],
    )


def shown_tables() -> str:
    """Errors, warnings, and the other kinds that are always shown."""
    parts = []
    for title, severity in (("Errors", Severity.ERROR), ("Warnings", Severity.WARNING)):
        found = [made for made in KINDS.values() if made.severity == severity]
        rows = [[f"`{_tag(made)}`", _message(made), _advice(made)] for made in found]
        parts.append(f"## {title}\n\n{_table(('kind', 'message', 'what to do'), rows)}")
    others = [made for made in KINDS.values() if made.loud and made.severity < Severity.WARNING]
    parts.append(f"## Other shown events\n\n{', '.join(f'`{_tag(made)}`' for made in others)}.\n")
    return "\n".join(parts)


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "events.md": shown_tables,
    DOCS / "internals" / "events.md": full_table,
}
"""Page -> what it has between BEGIN and END."""


def with_tables(path: Path) -> str:
    """The page with the tables of the code."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + PAGES[path]() + END + after


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    assert not any("|" in cell for row in cells for cell in row), "a cell would break the table"
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _tag(made: Kind) -> str:
    return str(made.__struct_config__.tag)


def _kind(made: Kind) -> str:
    return f"**`{_tag(made)}`**" if made.loud else f"`{_tag(made)}`"


def _level(made: Kind) -> str:
    return Severity(made.severity).name.lower()


def _fields(made: Kind) -> str:
    """Those that may be absent in brackets."""
    signature = inspect.signature(made).parameters
    names = zip(made.__struct_fields__, made.__struct_encode_fields__, strict=True)
    optional = {name for name, each in signature.items() if each.default is not each.empty}
    return ", ".join(f"[{shown}]" if own in optional else shown for own, shown in names)


def _when(made: Kind) -> str:
    """The docstring, whose links are those of a page in docs; else the sentence."""
    return " ".join((made.__doc__ or made.says).split()).replace("](", "](../")


def _remedy(made: Kind) -> str:
    if made.remedy == "{remedy}":
        return "as the field `remedy` says"
    return made.remedy


def _message(made: Kind) -> str:
    """The sentence, with fields in italics. If it has hardly more than these, the beginning of the
    docstring."""
    if len(re.sub(r"\{\w+\}", "", made.says).split()) < WORDS_MIN and made.__doc__:
        return re.split(r"[.;] |\.$", " ".join(made.__doc__.split()))[0]
    return re.sub(r"\{(\w+)\}", r"*\1*", made.says)


def _advice(made: Kind) -> str:
    """A link to the place in docs that the remedy names; else the remedy, if it is short."""
    found = re.search(r"docs/([\w/]+)\.md(?:, ([^;:{]+))?", made.remedy)
    if found is None:
        long = len(made.remedy.split()) > REMEDY_WORDS_MAX
        return "" if long or made.remedy == "{remedy}" else made.remedy
    page, heading = found.groups()
    return f"[{page}]({page}.md{_anchor(page, heading) if heading else ''})"


def _anchor(page: str, heading: str) -> str:
    """That of the heading that contains these words."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (title,) = re.findall(rf"^#+ (.*{re.escape(heading)}.*)$", text, re.MULTILINE)
    return "#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(with_tables(each), encoding="utf-8")
