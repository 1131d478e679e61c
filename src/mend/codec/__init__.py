"""codec: one flat fp32 vector <-> bytes. The names a configuration may use."""

from __future__ import annotations

import re
from collections.abc import Callable

from mend.codec.base import Codec
from mend.codec.blocks import BlockCodec
from mend.codec.e3m0 import E3M0
from mend.codec.linear import Int4, Int8
from mend.codec.raw import RawBfloat16, RawFloat32
from mend.codec.topk import TopK
from mend.errors import ConfigError

CODECS: dict[str, Callable[[], Codec]] = {
    codec.name: codec for codec in (RawFloat32, RawBfloat16, Int8, Int4, E3M0, TopK)
}

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)


def register(name: str, make: Callable[[], Codec]) -> None:
    """Let `outer_step_compression_mode` name a codec of yours, in this process. Every rack must do
    so, under the same name, before its MendConfig is built. Raises ConfigError for a name that
    cannot be, or that is taken."""
    if not _NAME.fullmatch(name):
        rule = "must be a lower-case letter and up to 31 letters, digits, - and _"
        raise ConfigError("codec", name, rule, "Choose another name.")
    if CODECS.get(name, make) is not make:
        raise ConfigError("codec", name, "is registered already", "Choose another name.")
    if (found := make().name) != name:
        rule = f"makes a codec whose name is {found!r}"
        raise ConfigError("codec", name, rule, "Register it under the name that it has.")
    CODECS[name] = make


__all__ = [
    "CODECS",
    "E3M0",
    "BlockCodec",
    "Codec",
    "Int4",
    "Int8",
    "RawBfloat16",
    "RawFloat32",
    "TopK",
    "register",
]
