"""codec: one flat fp32 vector <-> bytes. The names a configuration may use."""

from collections.abc import Callable

from mend.codec.base import Codec
from mend.codec.raw import RawBfloat16, RawFloat32

CODECS: dict[str, Callable[[], Codec]] = {"float32": RawFloat32, "bfloat16": RawBfloat16}

__all__ = ["CODECS", "Codec", "RawBfloat16", "RawFloat32"]
