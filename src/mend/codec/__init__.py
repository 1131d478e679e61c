"""codec: encodes a flat fp32 vector to bytes and decodes it, by one of the registered codecs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import cast, get_args

from mend.codec.base import Codec, Feedback, FragmentCodec, LayoutCodec, Stateless, Varying
from mend.codec.blocks import BlockCodec
from mend.codec.closing import CLOSING, fragment_codec
from mend.codec.cost import cost_of
from mend.codec.e3m0 import E3M0
from mend.codec.linear import Int4, Int8
from mend.codec.powersgd import RANK_MAX, PowerSGD
from mend.codec.raw import RawBfloat16, RawFloat32
from mend.codec.sparse import Sparse
from mend.codec.topk import TopK
from mend.errors import ConfigError
from mend.registry import Registry

CODECS: Registry[Callable[[], Codec]] = Registry(
    "codec",
    {codec.name: codec for codec in (RawFloat32, RawBfloat16, Int8, Int4, E3M0, TopK, Sparse)},
)

LAYOUT_CODECS: Registry[Callable[[], LayoutCodec]] = Registry(
    "codec", {f"powersgd-{rank}": partial(PowerSGD, rank) for rank in range(1, RANK_MAX + 1)}
)
"""Codecs that need to know the tensors, or have a state."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)


def is_codec(name: str) -> bool:
    """Whether a codec of this name is registered here."""
    return name in CODECS or name in LAYOUT_CODECS


def codec_named(name: str) -> Codec | LayoutCodec:
    """A new codec. Raises ConfigError for a name that is not registered."""
    return LAYOUT_CODECS[name]() if name in LAYOUT_CODECS else CODECS[name]()


def cut_numel(codec: Codec | LayoutCodec) -> int:
    """Payloads of this codec may be cut at multiples of this number of elements into slices that
    decode independently; 0: they may not be cut."""
    if isinstance(codec, LayoutCodec | Varying) or codec.feedback == "weights":
        return 0
    return 1 if isinstance(codec, RawFloat32) else codec.block


def register(name: str, make: Callable[[], Codec] | Callable[[], LayoutCodec]) -> None:
    """Register a codec for the setting `codec`, in this process. Every rack must do so, under the
    same name, before its MendConfig is built. Raises ConfigError if the name is malformed, taken
    or not the codec's own, if `make` needs arguments, or if the codec's feedback is not one."""
    if not _NAME.fullmatch(name):
        rule = "must be a lower-case letter and up to 31 letters, digits, - and _"
        raise ConfigError("codec", name, rule, "Choose another name.")
    made = LAYOUT_CODECS.tried(name, make) if name in LAYOUT_CODECS else CODECS.tried(name, make)
    feedback = getattr(made, "feedback", None)
    if feedback not in get_args(Feedback):
        rule = f"makes a codec whose feedback is {feedback!r}, none of {get_args(Feedback)}"
        raise ConfigError("codec", name, rule, "Say where what it leaves out is kept.")
    if isinstance(made, LayoutCodec):
        LAYOUT_CODECS[name] = cast(Callable[[], LayoutCodec], make)
    else:
        CODECS[name] = cast(Callable[[], Codec], make)


__all__ = [
    "CLOSING",
    "CODECS",
    "E3M0",
    "LAYOUT_CODECS",
    "RANK_MAX",
    "BlockCodec",
    "Codec",
    "Feedback",
    "FragmentCodec",
    "Int4",
    "Int8",
    "LayoutCodec",
    "PowerSGD",
    "RawBfloat16",
    "RawFloat32",
    "Sparse",
    "Stateless",
    "TopK",
    "Varying",
    "codec_named",
    "cost_of",
    "cut_numel",
    "fragment_codec",
    "is_codec",
    "register",
]
