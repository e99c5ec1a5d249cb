"""Quantisation blocks of config.json, read into what a config file's name and a kernel's scheme need.

What is not known to be read right is an error: a name made of a guess would be tuned, looked up and never found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegate.errors import UsageError
from moegate.families.modules import ALL_KINDS, LeftOut, Named, Unclear, experts_named


@dataclass(frozen=True)
class Quant:
    """How the experts' weights are stored.

    Args:
        method: `quant_method` of the file, or `none`.
        dtype: the dtype field of config files (`fp8_w8a8`, ...), None for bf16, fp16 and float32 weights.
        block_shape: (n, k) of block scales; (0, g) means groups of g along k, which names leave out.
        per_channel: scales per output channel and per token.
    """

    method: str = "none"
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False


NONE = Quant()


@dataclass(frozen=True)
class _Block:
    """One object of the file: its fields, and errors that name them in full."""

    values: Mapping[str, Any]
    where: str
    file: str | None

    def get(self, *names: str) -> Any:
        """The first of `names` that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def inner(self, name: str, value: Any) -> _Block:
        """The object `value` that stands under `name`."""
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r:.60}; must be an object")
        return _Block(value, f"{self.where}.{name}", self.file)

    def error(self, name: str, said: str, fix: str | None = None) -> UsageError:
        """That the field `name` is wrong."""
        return UsageError(said, file=self.file, field=f"{self.where}.{name}" if name else self.where, fix=fix)

    def one_of(self, name: str, value: Any, known: Mapping[str, Any]) -> Any:
        """What `known` has for `value`, which is text, in any case."""
        fix = f"one of {', '.join(known)}"
        if value is None:
            raise self.error(name, "is missing", fix)
        key = value.lower() if isinstance(value, str) else None
        found = next((known[word] for word in known if word.lower() == key), None)
        if found is None:
            raise self.error(name, f"{value!r:.60} is not understood", fix)
        return found

    def positive(self, name: str, value: Any) -> int:
        """A positive integer."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 20:
            raise self.error(name, f"is {value!r:.60}; must be a positive integer")
        return value

    def pair(self, name: str) -> tuple[int, int] | None:
        """Two positive integers, as a list or as text such as `128x128`; None where there are none."""
        value = self.get(name)
        if value is None:
            return None
        parts = value.lower().split("x") if isinstance(value, str) else value
        if isinstance(value, str) and len(parts) == 2 and all(part.isdecimal() and len(part) < 8 for part in parts):
            parts = [int(part) for part in parts]
        elif not isinstance(value, list | tuple) or len(parts) != 2:
            raise self.error(name, f"is {value!r:.60}; must be two integers", "[128, 128]")
        return self.positive(name, parts[0]), self.positive(name, parts[1])


def read_quant(
    config: Mapping[str, Any], file: str | None, *, moe_layers: tuple[int, ...], experts: int
) -> tuple[Quant, tuple[str, ...]]:
    """The quantisation of the experts, from `quantization_config` (or `compression_config`), and notes on it.

    Raises:
        UsageError: the block is there but its method, its numbers or what they are for are not understood.
    """
    field = next((name for name in ("quantization_config", "compression_config") if config.get(name) is not None), None)
    if field is None:
        return NONE, ()
    if not isinstance(config[field], dict):
        raise UsageError("must be an object", file=file, field=field)
    block = _Block(config[field], field, file)
    method = block.get("quant_method")
    if method is None and "config_groups" in block.values and block.get("quant_algo") is None:
        method = "compressed-tensors"
    if method is None and _algorithm(block)[1] is not None:
        method = "modelopt"
    if not isinstance(method, str):
        raise block.error("", "has no quant_method", f"one of {', '.join(sorted(_READERS))}")
    name = method.lower().replace("_", "-").removeprefix("intel/")
    if name not in _READERS:
        raise block.error("quant_method", f"{method!r:.60} is not understood", f"one of {', '.join(sorted(_READERS))}")
    quant = _READERS[name](method, block)
    left = _left_out(block, exact=name == "compressed-tensors", left=LeftOut(moe_layers, experts))
    if left == moe_layers:
        return Quant(method), (f"{field} leaves the experts out: their weights are not quantised",)
    if left:
        listed = ", ".join(map(str, left))
        return quant, (f"{field} leaves the experts of layer {listed:.80} out: those of the other layers count",)
    return quant, ()


_LISTS = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert", "ignored_layers")
"""Fields with names of modules that stay as they are."""

_OVERRIDES = ("dynamic", "extra_config", "layer_quant_config")
"""Fields with a quantisation of its own for each name, as GPTQ, AutoRound and Quark write them."""


def _left_out(block: _Block, *, exact: bool, left: LeftOut) -> tuple[int, ...]:
    """The MoE layers whose experts the block leaves as they are."""
    inner = block.get("quantization")
    blocks = [block] + ([_Block(inner, f"{block.where}.quantization", block.file)] if isinstance(inner, dict) else [])
    seen = ""
    for where in blocks:
        for field in _LISTS:
            names = where.get(field)
            if names is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise where.error(field, f"is {names!r:.60}; must be a list of names")
            for name in names:
                seen = field
                try:
                    named = experts_named(name, exact=exact)
                    left.add(() if named is None else (named,))
                except Unclear:
                    raise _unclear(where, field, name) from None
        for field in _OVERRIDES:
            names = where.get(field)
            for name in names if isinstance(names, dict) else ():
                _refuse_override(where, field, name, left.layers)
    try:
        return left.left_layers()
    except Unclear:
        raise block.error(seen, "leaves out some experts or projections of a layer and not the others",
                          "name all experts of a layer, or none") from None  # fmt: skip


def _unclear(block: _Block, field: str, name: str) -> UsageError:
    fix = "names that stand for all experts, such as re:.*mlp.experts.*, or for none"
    return block.error(field, f"{name!r:.80} may stand for some of the experts", fix)


def _refuse_override(block: _Block, field: str, name: str, layers: tuple[int, ...]) -> None:
    try:
        named = experts_named(name.removeprefix("-:").removeprefix("+:"))
    except Unclear:
        named = Named()
    if named is not None and (named.layer is None or named.layer in layers):
        raise block.error(field, f"{name!r:.80} has a quantisation of its own for experts, which is not understood",
                          "one quantisation for all experts, in the fields of the block itself")  # fmt: skip


def _fp8(method: str, block: _Block) -> Quant:
    return Quant(method, "fp8_w8a8", block.pair("weight_block_size"))


def _mxfp8(method: str, block: _Block) -> Quant:
    return Quant(method, "fp8_w8a8", block.pair("weight_block_size") or (1, 32))


def _channel_fp8(method: str, block: _Block) -> Quant:
    return Quant(method, "fp8_w8a8", per_channel=True)


def _channel_int8(method: str, block: _Block) -> Quant:
    return Quant(method, "int8_w8a8", per_channel=True)


def _mxfp4(method: str, block: _Block) -> Quant:
    return Quant(method, "mxfp4_w4a16", (1, 32))


def _grouped_int(method: str, block: _Block) -> Quant:
    bits = block.get("bits", "w_bit")
    if bits is None or isinstance(bits, bool | float) or bits not in (4, 8):
        raise block.error("bits", f"is {bits!r:.20}", "4 or 8")
    return Quant(method, _WEIGHT_ONLY[bits], _group(block, block.get("group_size", "q_group_size")))


_WEIGHT_ONLY = {4: "int4_w4a16", 8: "int8_w8a16"}


def _group(block: _Block, size: Any) -> tuple[int, int] | None:
    """Groups of `size` along k; -1 means the whole of it."""
    return None if size == -1 else (0, block.positive("group_size", size))


_ALGORITHMS = {
    "FP8": Quant(dtype="fp8_w8a8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Quant(dtype="fp8_w8a8", per_channel=True),
    "FP8_PB_WO": Quant(dtype="fp8_w8a8", block_shape=(128, 128)),
    "MXFP8": Quant(dtype="fp8_w8a8", block_shape=(1, 32)),
    "NVFP4": Quant(dtype="nvfp4_w4a16", block_shape=(1, 16)),
    "W4A16_NVFP4": Quant(dtype="nvfp4_w4a16", block_shape=(1, 16)),
}
"""ModelOpt's algorithms that store all experts alike."""

_IMPLIED = {"modelopt-fp8": "FP8", "modelopt-fp4": "NVFP4", "nvfp4": "NVFP4", "fp8-pb-wo": "FP8_PB_WO"}
"""Methods that name the algorithm themselves."""


def _algorithm(block: _Block) -> tuple[_Block, Any]:
    """ModelOpt's algorithm and the object it stands in: the block, or `quantization` in it."""
    if block.get("quant_algo") is None and isinstance(block.get("quantization"), dict):
        block = block.inner("quantization", block.get("quantization"))
    return block, block.get("quant_algo")


def _modelopt(method: str, block: _Block) -> Quant:
    place, algorithm = _algorithm(block)
    implied = _IMPLIED.get(method.lower().replace("_", "-"))
    quant: Quant = place.one_of("quant_algo", implied if algorithm is None else algorithm, _ALGORITHMS)
    if implied is not None and quant.dtype != _ALGORITHMS[implied].dtype:
        raise place.error("quant_algo", f"is {algorithm!r:.60} under quant_method {method}", implied)
    size = place.get("group_size")
    if size is not None and quant.block_shape is not None and size != quant.block_shape[1]:
        raise place.error("group_size", f"is {size!r:.20} under {algorithm or implied}", f"{quant.block_shape[1]}")
    return replace(quant, method=method)


def _compressed(method: str, block: _Block) -> Quant:
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise block.error("config_groups", "must be an object with at least one group")
    where = block.inner("config_groups", groups)
    found = {name: _scheme(method, where.inner(name, groups[name])) for name in _groups_of_experts(where)}
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise block.error("config_groups", f"{first} and {name} differ, and the experts may be of either",
                              "targets that name the experts in one of them, such as re:.*mlp.experts.*")  # fmt: skip
    return found[first]


def _groups_of_experts(groups: _Block) -> tuple[str, ...]:
    """The groups that the experts' weights may belong to."""
    ranks: dict[str, str] = {}
    for name, group in groups.values.items():
        targets = group.get("targets") if isinstance(group, dict) else None
        if targets is None:
            targets = ["Linear"]
        if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
            raise groups.error(f"{name}.targets", f"is {targets!r:.60}; must be a list of names")
        ranks[name] = _rank(targets)
    named = tuple(name for name in ranks if ranks[name] == "experts")
    if named and "maybe" not in ranks.values():
        return named  # a name goes before a class
    possible = tuple(name for name in ranks if ranks[name] != "elsewhere")
    if not possible:
        raise groups.error("", "has no group for the experts", "targets with Linear, or with the experts' names")
    return possible


def _rank(targets: list[str]) -> str:
    """Whether targets mean all `experts`, `maybe` some, a `class` of modules, or something `elsewhere`."""
    rank, kinds = "elsewhere", set[str]()
    for target in targets:
        if target[:1].isupper():
            rank = rank if rank == "maybe" else "class"
            continue
        try:
            named = experts_named(target, exact=True)
        except Unclear:
            named = Named(expert=0)
        if named is not None:
            rank = "maybe"
            kinds |= named.kinds if named.layer is None and named.expert is None else set()
    return "experts" if kinds >= ALL_KINDS else rank


def _scheme(method: str, group: _Block) -> Quant:
    """The scheme of one group of compressed-tensors."""
    if group.get("weights") is None:
        raise group.error("weights", "is missing")
    weights = group.inner("weights", group.get("weights"))
    size, activations = weights.get("group_size"), group.get("input_activations")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    inputs = None if activations is None else group.inner("input_activations", activations)
    stored = weights.get("type"), weights.get("num_bits")
    taken = None if inputs is None else (inputs.get("type") or stored[0], inputs.get("num_bits"))
    if stored == ("float", 8) and taken in (None, stored):
        shape = weights.pair("block_structure") if strategy == "block" else None
        if strategy not in ("tensor", "channel", "block"):
            raise weights.error("strategy", f"{strategy!r:.40} is not understood", "tensor, channel or block")
        if strategy == "block" and shape is None:
            raise weights.error("block_structure", "is missing under strategy block", "[128, 128]")
        return Quant(method, "fp8_w8a8", shape, strategy == "channel")
    if stored == ("float", 4) and taken in (None, stored):
        if (scheme := next((scheme for form, scheme in _FP4 if form == (strategy, size)), None)) is None:
            raise weights.error("group_size", f"is {size!r:.20} under strategy {strategy!r:.40}",
                                "16 under tensor_group (NVFP4), 32 under group (MXFP4)")  # fmt: skip
        return Quant(method, *scheme)
    if stored == ("int", 8) and taken == stored:
        if strategy not in ("tensor", "channel"):
            raise weights.error("strategy", f"{strategy!r:.40} is not understood", "tensor or channel")
        return Quant(method, "int8_w8a8", per_channel=strategy == "channel")
    if stored in (("int", 4), ("int", 8)) and taken is None:
        if strategy not in ("tensor", "channel", "group"):
            raise weights.error("strategy", f"{strategy!r:.40} is not understood", "channel or group")
        return Quant(method, _WEIGHT_ONLY[stored[1]], _group(weights, size) if strategy == "group" else None)
    said = f"{stored[1]!r:.20}-bit {stored[0]!r:.20} weights"
    said += "" if taken is None else f" with {taken[1]!r:.20}-bit {taken[0]!r:.20} activations"
    raise weights.error(
        "", f"{said} are not understood", "float 8 or 4, int 8 with int 8 activations, int 8 or 4 alone"
    )


_FP4: tuple[tuple[tuple[str, int], tuple[str, tuple[int, int]]], ...] = (
    (("tensor_group", 16), ("nvfp4_w4a16", (1, 16))),
    (("group", 16), ("nvfp4_w4a16", (1, 16))),
    (("group", 32), ("mxfp4_w4a16", (1, 32))),
)
"""4-bit floats by strategy and group size."""


def _quark(method: str, block: _Block) -> Quant:
    layer = block.inner("global_quant_config", block.get("global_quant_config"))
    value = layer.get("weight")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise layer.error("weight", f"is {value!r:.80}; must be an object", "weights that are quantised once")
    weight = layer.inner("weight", value)
    dtype: str = weight.one_of("dtype", weight.get("dtype"), _QUARK)
    if dtype == "mxfp4_w4a16":
        size = weight.get("group_size")
        if (weight.get("qscheme"), size) != ("per_group", 32):
            raise weight.error(
                "group_size", f"is {size!r:.20} under {weight.get('qscheme')!r:.40}", "32 under per_group"
            )
        return Quant(method, dtype, (1, 32))
    return Quant(method, dtype, per_channel=weight.one_of("qscheme", weight.get("qscheme"), _QSCHEMES) == "channel")


_QUARK = {"fp8_e4m3": "fp8_w8a8", "fp4": "mxfp4_w4a16", "int8": "int8_w8a8"}
_QSCHEMES = {"per_tensor": "tensor", "per_channel": "channel"}

_READERS: dict[str, Callable[[str, _Block], Quant]] = {
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "w8a8-fp8": _channel_fp8,
    "w8a8-int8": _channel_int8,
    "mxfp4": _mxfp4,
    "awq": _grouped_int,
    "awq-marlin": _grouped_int,
    "gptq": _grouped_int,
    "gptq-marlin": _grouped_int,
    "moe-wna16": _grouped_int,
    "auto-round": _grouped_int,
    "modelopt": _modelopt,
    "modelopt-fp8": _modelopt,
    "modelopt-fp4": _modelopt,
    "fp8-pb-wo": _modelopt,
    "nvfp4": _modelopt,
    "compressed-tensors": _compressed,
    "quark": _quark,
}
