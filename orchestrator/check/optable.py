"""Ops whose config files no engine looks up: one table row per op, its file names and its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moegate.configs.values import STORE_FIELDS, Field

__all__ = ["OPS", "OpFiles", "op_of"]

# What `tuner.emit` calls such files, for any op.
_ANY_OP = re.compile(r"([a-z][a-z0-9_]*),(?:heads=|.*device_name=)")


@dataclass(frozen=True)
class OpFiles:
    """The files of one op as `tuner.emit` writes them: `shape` names their numbers, `dtypes` what is stored."""

    op: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    fields: tuple[Field, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """What a file name has to be."""
        numbers = "".join(f",{name}=[1-9][0-9]{{0,8}}" for name in self.shape)
        return re.compile(rf"{self.op}{numbers},device_name=(?P<device>[^,]*),dtype=(?P<dtype>[^,]+)\.json")

    @property
    def meant(self) -> re.Pattern[str]:
        """What begins a file name of the op however wrong it is: one of its fields follows somewhere."""
        return re.compile(rf"{self.op}(?=.*(?:{'|'.join(self.shape)}|device_name)=)")

    @property
    def example(self) -> str:
        """A name in words."""
        numbers = "".join(f",{name}=.." for name in self.shape)
        return f"name it {self.op}{numbers},device_name=..,dtype={'|'.join(self.dtypes)}.json"


OPS: Mapping[str, OpFiles] = {
    row.op: row
    for row in (OpFiles("store_kv_cache", ("heads", "dim"), ("float32", "float16", "bfloat16"), STORE_FIELDS),)
}


def op_of(name: str) -> str | None:
    """The op that a file is of by its name, rightly spelled or not; None where it is none of these."""
    for op in OPS.values():
        if op.meant.match(name):
            return op.op
    match = _ANY_OP.match(name)
    return None if match is None else match[1]
