"""What two certificates of one training say about two machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mend.errors import CertificateError
from mend.tools.certificate_pair import digests_of_both, print_pair


def content(gpu: str = "H100", digest: str = "a" * 64, **more: Any) -> dict[str, Any]:
    cuts = [
        {"cut": "uncut", "verdict": "uncut", "all steps": digest},
        {"cut": "repeated", "verdict": "equal", "all steps": digest},
        {"cut": "another GPU", "verdict": "not available"},
    ]
    return {
        "cuts": cuts, "leaves": 8, "level": "everywhere", "seed": 7, "steps": 3,
        "machine": {"CPU": "EPYC", "GPU": gpu, "parameters on": ["cuda"]},
        "script": {"command": [f"/home/{gpu}/train.py", "--lr", "1"], "sha256": "f"},
        "versions": {"torch": "2.11"}, **more,
    }  # fmt: skip


def test_digests_of_an_h100_and_an_h200_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_pair(content(), content("H200"), False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cut               verdict        first             second",
        "uncut             equal          aaaaaaaaaaaaaaaa  aaaaaaaaaaaaaaaa",
        "repeated          equal          aaaaaaaaaaaaaaaa  aaaaaaaaaaaaaaaa",
        "",
        "equal: 3 steps: gradients, weights, optimizer",
        "    settings   GPU: H100 and H200",
    ]
    assert print_pair(content(), content("H200", "b" * 64), False) == 1
    said = capsys.readouterr().out
    assert "uncut             different      aaaaaaaaaaaaaaaa  bbbbbbbbbbbbbbbb\n" in said
    assert said.endswith("    next       mend repro --record on both machines finds the operator\n")
    assert print_pair(content(), content(digest="b" * 64), True) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["cuts"] == {"uncut": "different", "repeated": "different"}
    assert (verdict["equal"], verdict["facts"]) == (False, [])


OTHERS = {
    "steps 3 and 4": {"steps": 4},
    "seed 7 and None": {"seed": None},
    "script f and g": {"script": {"command": ["train.py", "--lr", "1"], "sha256": "g"}},
    "--lr": {"script": {"command": ["train.py", "--lr", "2"], "sha256": "f"}},
    "a CPU and a GPU are hashed": {"machine": {"parameters on": ["cpu"]}},
    "no digest of the uncut run": {"cuts": []},
}


@pytest.mark.parametrize("why", OTHERS)
def test_certificates_of_other_trainings_are_refused(why: str) -> None:
    with pytest.raises(CertificateError, match=why):
        digests_of_both(content(), content(**OTHERS[why]))


def test_a_module_is_known_by_its_command() -> None:
    def of(name: str) -> dict[str, Any]:
        return content(script={"command": ["-m", name], "sha256": None})

    assert set(digests_of_both(of("mine"), of("mine"))) == {"uncut", "repeated"}
    with pytest.raises(CertificateError, match="command"):
        digests_of_both(of("mine"), of("yours"))
