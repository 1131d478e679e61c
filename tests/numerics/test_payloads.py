"""The formulas of the reference and the codecs find the same bits, whatever a delta looks like."""

from __future__ import annotations

import pytest
import torch

from mend.codec import CODECS
from mend_lab.reference.payloads import sent
from tests.conformance.test_codecs import INPUTS


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("what", [what for what in INPUTS if "1000003" not in what])
def test_a_codec_is_its_formula_in_the_reference(name: str, what: str) -> None:
    x, codec = INPUTS[what], CODECS[name]()
    found = codec.decode(codec.encode(x.clone()), 0, x.numel(), torch.empty(x.numel()))
    wanted = sent(x, name)
    assert torch.equal(found + 0.0, wanted + 0.0), "0 has either sign"
