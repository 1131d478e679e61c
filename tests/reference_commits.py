"""Commits for the reference, from the fields of `commit` events."""

from __future__ import annotations

from typing import Any

from mend_lab.reference import Commit, Named


def commit_of(fields: dict[str, Any]) -> Commit:
    return Commit(
        fields["fragment"],
        fields["version"],
        [Named(m["rack"], m["seq"], m["base"], m["tokens"], m["steps"]) for m in fields["members"]],
        [(ended["rack"], ended["seq"]) for ended in fields["dropped"]],
        [(away["tokens"], away["steps"]) for away in fields["absent"]],
        not all(away["closing"] for away in fields["absent"]),
    )
