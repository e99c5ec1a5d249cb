"""What a config file may hold: a table of fields, one checker and one strict reader.

A file maps batch sizes (decimal text) to objects of kernel parameters. `problems` says everything that is wrong with
one; `load_config` reads one for use and refuses it at the first error.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moegate import canonical
from moegate.configs.positions import line_of
from moegate.errors import UsageError

Value = int | bool | str
Config = Mapping[str, Value]
Engine = Literal["moegate", "sglang", "vllm"]

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The 18 batch sizes that SGLang's and vLLM's tuners sweep."""

_BATCH = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Field:
    """One kernel parameter: its type, range, whether a file needs it, and who understands it.

    `needed` fields absent from an entry fall back to the kernel language's default, which no tuner timed. `also` are
    values outside the range that some engines' kernels take.
    """

    name: str
    kind: Literal["int", "bool", "text"]
    low: int = 1
    high: int = 1
    power_of_two: bool = False
    also: tuple[int, ...] = ()
    choices: tuple[Value, ...] = ()
    needed: bool = False
    engines: frozenset[Engine] = frozenset({"moegate", "sglang", "vllm"})
    vendors: frozenset[str] = frozenset({"nvidia", "amd", "intel", "cpu"})

    def seen_by(self, engine: Engine) -> Field:
        """This field as `engine`'s kernel takes it."""
        low, also = _TAKES.get((engine, self.name), (self.low, self.also))
        return self if (low, also) == (self.low, self.also) else replace(self, low=low, also=also)

    def problem(self, value: object) -> str | None:
        """What is wrong with `value`, or None."""
        return None if self.accepts(value) else f"is {_say(value)}; must be {self.wanted}"

    def accepts(self, value: object) -> bool:
        """Whether a kernel can be launched with `value`."""
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and value in self.choices
        if type(value) is not int:  # a bool is no size
            return False
        if self.choices:
            return value in self.choices
        inside = self.low <= value <= self.high and not (self.power_of_two and value & (value - 1))
        return inside or value in self.also

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.kind == "bool":
            return "true or false"
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        words = f"{'a power of two' if self.power_of_two else 'an integer'} from {self.low} to {self.high}"
        return ", or ".join([words, *map(str, self.also)])


_AMD = frozenset({"amd"})
_NOT_SGLANG = frozenset[Engine]({"moegate", "vllm"})

# `low` and `also` of a field where an engine's kernel differs. vLLM's FP8 kernel swaps its operands for few rows, so
# that M may be as narrow as N may; blocks of one row it does not take.
_TAKES: Mapping[tuple[Engine, str], tuple[int, tuple[int, ...]]] = {("vllm", "BLOCK_SIZE_M"): (8, ())}

TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
"""The sides of a tile: no compiler has a default for them."""

FIELDS: tuple[Field, ...] = (
    # A matrix unit multiplies tiles of at least 16 in each dimension. Blocks of one row are for a kernel of ours;
    # SGLang's pads them.
    Field("BLOCK_SIZE_M", "int", 16, 1024, power_of_two=True, also=(1,), needed=True),
    Field("BLOCK_SIZE_N", "int", 16, 1024, power_of_two=True, needed=True),
    Field("BLOCK_SIZE_K", "int", 16, 1024, power_of_two=True, needed=True),
    Field("GROUP_SIZE_M", "int", 1, 1024, needed=True),
    Field("num_warps", "int", 1, 32, power_of_two=True, needed=True),
    Field("num_stages", "int", 1, 16, needed=True),
    Field("USE_TMA", "bool", engines=frozenset({"moegate", "sglang"})),
    Field("num_ctas", "int", 1, 16, power_of_two=True, vendors=frozenset({"nvidia"})),
    Field("waves_per_eu", "int", 0, 10, vendors=_AMD),
    Field("matrix_instr_nonkdim", "int", choices=(0, 4, 16, 32), vendors=_AMD),
    Field("kpack", "int", choices=(1, 2), vendors=_AMD),
    Field("SPLIT_K", "int", 1, 64, power_of_two=True, engines=frozenset({"vllm"})),
    Field(
        "grf_mode", "text", choices=("default", "128", "256", "auto"), engines=_NOT_SGLANG, vendors=frozenset({"intel"})
    ),
)

# Dense block-FP8 kernels take two more (SM90), and no USE_TMA.
DENSE_FIELDS: tuple[Field, ...] = (
    *(replace(field, also=()) for field in FIELDS if field.name not in {"USE_TMA", "SPLIT_K", "grf_mode"}),
    Field("SPLIT_K", "int", 1, 64, power_of_two=True),
    Field("SWAP_AB", "bool"),
)

# Storing keys and values has one parameter: programs that share a token, no more than a grid may have along that axis.
STORE_FIELDS: tuple[Field, ...] = (Field("num_split", "int", 1, 0xFFFF, needed=True),)


def refused_by(engine: Engine, entry: Config) -> list[str]:
    """The values of an entry that `engine`'s kernel does not take, such as `BLOCK_SIZE_M 1`."""
    known = _known(FIELDS, engine, None).fields
    return [f"{name} {value}" for name, value in entry.items() if name in known and not known[name].accepts(value)]


def is_batch_size(key: str) -> bool:
    """Whether a key is a batch size: a positive integer without sign, space or leading zero."""
    return _BATCH.fullmatch(key) is not None


@dataclass(frozen=True)
class ValueProblem:
    """One thing wrong inside a config file. `path` leads to it: (batch size,) or (batch size, field)."""

    rule: Literal["bad-value", "missing-field", "unknown-field", "unsorted-keys"]
    path: tuple[str, ...]
    message: str
    fix: str


def problems(
    data: object,
    *,
    engine: Engine = "moegate",
    vendor: str | None = None,
    fields: tuple[Field, ...] = FIELDS,
    defaults: bool = True,
) -> Iterator[ValueProblem]:
    """Everything wrong with a config file's parsed JSON, in file order.

    Args:
        data: the parsed document.
        engine: whose loader and kernel will see it; vLLM allows a top-level `triton_version`.
        vendor: the device's vendor where it is known: a parameter of another vendor's compiler is unknown there.
        fields: the parameter table.
        defaults: whether something is run with all the same where the file does not say what.
    """
    if not isinstance(data, dict):
        yield ValueProblem("bad-value", (), f"is {_say(data)}; must be an object of batch sizes", 'write {"1": {...}}')
        return
    known = _known(fields, engine, vendor)
    sizes: list[int] = []
    for key, entry in data.items():
        if key == "triton_version" and engine == "vllm":
            continue
        if not is_batch_size(key):
            yield ValueProblem(
                "bad-value",
                (key,),
                f"key {_say(key)} is no batch size",
                "use a positive integer without sign, space or leading zero",
            )
            continue
        sizes.append(int(key))
        if not isinstance(entry, dict):
            yield ValueProblem(
                "bad-value",
                (key,),
                f"batch size {key} is {_say(entry)}; must be an object",
                _example(known),
            )
            continue
        yield from _entry_problems(key, entry, known, engine, defaults)
    if not sizes:
        yield ValueProblem(
            "bad-value",
            (),
            "holds no batch size" + (", so that the engine silently uses its default config" if defaults else ""),
            "add the tuned batch sizes or delete the file",
        )
    elif sizes != sorted(sizes):
        at = next(b for a, b in itertools.pairwise(sizes) if b < a)
        yield ValueProblem(
            "unsorted-keys",
            (str(at),),
            f"batch size {at} comes after a larger one: on ties the first wins",
            "sort the batch sizes ascending",
        )


@dataclass(frozen=True)
class _Known:
    """The fields as one engine and vendor take them, and which of them every entry needs."""

    fields: Mapping[str, Field]
    needed: tuple[str, ...]
    strange: Mapping[str, str]


@functools.cache
def _known(fields: tuple[Field, ...], engine: Engine, vendor: str | None) -> _Known:
    mine: dict[str, Field] = {}
    strange: dict[str, str] = {}
    for field in fields:
        if engine not in field.engines:
            strange[field.name] = f"{_say(field.name)} is no parameter of {engine}'s kernel"
        elif vendor is not None and vendor not in field.vendors:
            strange[field.name] = f"{field.name} means nothing to the {vendor} compiler"
        else:
            mine[field.name] = field.seen_by(engine)
    return _Known(mine, tuple(name for name, field in mine.items() if field.needed), strange)


def _example(known: _Known) -> str:
    """How an entry begins, for who wrote something else."""
    first = known.fields[known.needed[0]]
    return f'write {{"{first.name}": {first.low}{", ..." if len(known.needed) > 1 else ""}}}'


def _entry_problems(
    key: str, entry: Mapping[str, object], known: _Known, engine: Engine, defaults: bool
) -> Iterator[ValueProblem]:
    for name, value in entry.items():
        field = known.fields.get(name)
        if field is None:
            words = known.strange.get(name, f"{_say(name)} is no parameter of {engine}'s kernel")
            yield ValueProblem("unknown-field", (key, name), words, "remove it, or check its spelling")
        elif not field.accepts(value):
            words = f"{name} at batch size {key} {field.problem(value)}"
            yield ValueProblem("bad-value", (key, name), words, f"use {field.wanted}")
    for name in known.needed:
        if name not in entry:
            then = "nothing can be launched" if name in TILE else "the compiler's default applies, which nobody timed"
            words = f"batch size {key} has no {name}" + (f": {then}" if defaults else "")
            yield ValueProblem("missing-field", (key,), words, f"add {name}")


def launch_problems(
    data: object, *, engine: Engine = "moegate", fields: tuple[Field, ...] = FIELDS
) -> Iterator[ValueProblem]:
    """Of `problems` those that nothing can be launched with: bad values, and entries that lack a side of their tile."""
    for problem in problems(data, engine=engine, fields=fields):
        entry = data.get(problem.path[0]) if isinstance(data, dict) and problem.path else None
        lacks_tile = isinstance(entry, dict) and not all(side in entry for side in TILE)
        if problem.rule == "bad-value" or (problem.rule == "missing-field" and lacks_tile):
            yield problem


def parse_config(
    text: str, *, file: str | Path | None = None, engine: Engine = "moegate"
) -> dict[int, dict[str, Value]]:
    """Parse one config file's text for use, keeping its order.

    Raises:
        UsageError: the file is no JSON, or holds a `bad-value`, with the line. Missing and unknown fields are kept.
    """
    data = canonical.loads_json(text, file=file)
    for problem in problems(data, engine=engine):
        if problem.rule == "bad-value":
            raise UsageError(problem.message, file=file, line=line_of(text, problem.path), fix=problem.fix)
    return {int(key): dict(entry) for key, entry in data.items() if key != "triton_version"}


def load_config(path: Path, *, engine: Engine = "moegate") -> dict[int, dict[str, Value]]:
    """Read one config file for use; see `parse_config`."""
    return parse_config(canonical.read_text(path), file=path, engine=engine)


def nearest(configs: Mapping[int, Config], batch_size: int) -> int:
    """The batch size of `configs` that serves `batch_size`: the nearest, the first in file order on ties."""
    return min(configs, key=lambda size: abs(size - batch_size))


def _say(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
