"""Compares the certificates of `mend repro --certify` of two machines."""

from __future__ import annotations

import json
from typing import Any

import typer

from mend.determinism.comparison import OTHER_HASHES
from mend.errors import CertificateError
from mend.tools.repro import DIFFERENT, EQUAL

DIGITS = 16
"""Of a digest, in the table for people."""

NEXT = "mend repro --record on both machines finds the operator"


def print_pair(content: dict[str, Any], other: dict[str, Any], as_json: bool) -> int:
    """Compare the digests of two certificates, cut by cut; returns the exit status."""
    pairs, facts = digests_of_both(content, other), facts_of_both(content, other)
    verdicts = {cut: "equal" if one == two else "different" for cut, (one, two) in pairs.items()}
    is_equal = set(verdicts.values()) == {"equal"}
    if as_json:
        typer.echo(json.dumps({"equal": is_equal, "cuts": verdicts, "facts": facts}))
        return EQUAL if is_equal else DIFFERENT
    typer.echo(f"{'cut':<18}{'verdict':<15}{'first':<18}second")
    for cut, (one, two) in pairs.items():
        typer.echo(f"{cut:<18}{verdicts[cut]:<15}{one[:DIGITS]:<18}{two[:DIGITS]}")
    what = f"{content['steps']} steps: gradients, weights, optimizer"
    typer.echo(f"\n{'equal' if is_equal else 'different'}: {what}")
    if facts:
        typer.echo(f"    {'settings':<11}{'; '.join(facts)}")
    if not is_equal:
        typer.echo(f"    {'next':<11}{NEXT}")
    return EQUAL if is_equal else DIFFERENT


def digests_of_both(content: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Of all steps, of every cut that both have run. Raises CertificateError where they are not
    of one training, or cannot be compared."""
    left, right = _training(content), _training(other)
    for name, value in left.items():
        if value != right[name]:
            raise CertificateError(
                f"the certificates are not of one training: {name} {value} and {right[name]}"
            )
    places = [each["machine"].get("parameters on") for each in (content, other)]
    if places[0] != places[1]:
        raise CertificateError(f"the parameters are on {places[0]} and {places[1]}: {OTHER_HASHES}")
    rows = [_digests(each) for each in (content, other)]
    both = {cut: (one, rows[1][cut]) for cut, one in rows[0].items() if cut in rows[1]}
    if "uncut" not in both:
        raise CertificateError("a certificate has no digest of the uncut run")
    return both


def _digests(content: dict[str, Any]) -> dict[str, str]:
    """cut -> digest of all steps, of those that ran."""
    rows = [each for each in content["cuts"] if each.get("all steps")]
    return {str(each["cut"]): str(each["all steps"]) for each in rows}


def _training(content: dict[str, Any]) -> dict[str, Any]:
    """What two machines that train the same have in common; the script's path is not."""
    command, hashed = content["script"].get("command", []), content["script"].get("sha256")
    script = {"script": hashed, "arguments": command[1:]} if hashed else {"command": command}
    return {"script": None, "arguments": None, "command": None, **script} | {
        name: content[name] for name in ("steps", "seed")
    }


def facts_of_both(content: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between the machines: "GPU: H100 and H200"."""
    left, right = (
        {**each["machine"], **each["versions"], "level": each["level"], "leaves": each["leaves"]}
        for each in (content, other)
    )
    names = [name for name in left if left[name] != right.get(name)]
    return [f"{name}: {left[name]} and {right.get(name)}" for name in names]
