"""What `mend doctor` says of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mend import MendConfig
from mend.tools.doctor.examine import of_keys
from mend.tools.keys_command import create

OUTSIDE = {"sideband_addr": "tcp://0.0.0.0:7", "advertise_host": "me"}


@pytest.mark.parametrize(
    ("settings", "severity", "said"),
    [
        ({"rack": 0}, "ok", "loopback interface only"),
        (OUTSIDE, "problem", "is reached from outside, and there is no key"),
        ({**OUTSIDE, "insecure": True}, "note", "open to anyone who reaches it"),
        ({**OUTSIDE, "key_file": "good"}, "ok", "only holders of the key take part"),
        ({**OUTSIDE, "key_file": "good", "encrypt_payloads": False}, "note", "not encrypted"),
        ({**OUTSIDE, "key_file": "open"}, "problem", "may be read by others"),
        ({"key_file": "open"}, "problem", "may be read by others"),
        ({"key_file": "good"}, "ok", "only holders of the key take part"),
    ],
)
def test_a_rack_hears_what_keeps_others_out(
    tmp_path: Path, settings: dict[str, Any], severity: str, said: str
) -> None:
    create(tmp_path / "good", (bytes(32),))
    create(tmp_path / "open", (bytes(32),))
    (tmp_path / "open").chmod(0o644)
    if "key_file" in settings:
        settings = {**settings, "key_file": tmp_path / settings["key_file"]}
    (found,) = of_keys(MendConfig(**settings))
    assert found.severity == severity
    assert said in str(found)


def test_a_rack_whose_address_a_script_says_is_not_judged() -> None:
    assert of_keys(MendConfig()) == []
