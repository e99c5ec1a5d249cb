"""Which layers of a model have experts: one rule for each placement of `table`.

A list that is there is read, never passed over. What cannot be told without a field, and what two fields say
otherwise, is an error. Steps that are missing are 1, as in the models' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from moegate.families.fields import Fields
from moegate.families.table import Placement

_MAX_LAYERS = 10_000

_FLAGS: Mapping[Any, bool] = {0: False, 1: True}
_MLP_TYPES: Mapping[Any, bool] = {"dense": False, "sparse": True, "moe": True, "hash_moe": True}
_BLOCK_TYPES: Mapping[Any, bool] = {
    "moe": True, "mlp": False, "mamba": False, "attention": False, "linear_attention": False, "full_attention": False,
}  # fmt: skip
_LETTERS: Mapping[Any, bool] = {"E": True, "M": False, "*": False, "-": False}

_Layers = tuple[int, ...]
_Rule = Callable[[Fields, int], _Layers]


def moe_layers(placement: Placement, fields: Fields, layers: int) -> _Layers:
    """Indices of the layers with experts.

    Raises:
        UsageError: a field that places them is missing, makes no sense, or says otherwise than another.
    """
    rule, names = _RULES[placement]
    typed = _flagged(fields.flags("mlp_layer_types", _MLP_TYPES, layers))
    if typed is None:
        return rule(fields, layers)
    said = [name for name in names if fields.get(name) is not None]
    if said and rule(fields, layers) != typed:
        raise fields.error("mlp_layer_types", f"places the experts otherwise than {' and '.join(said)}")
    return typed


def _flagged(flags: tuple[bool, ...] | None) -> _Layers | None:
    return None if flags is None else tuple(place for place, flag in enumerate(flags) if flag)


def _step(fields: Fields, name: str) -> int:
    return fields.optional((name,), 1, _MAX_LAYERS, low=1)


def _all(fields: Fields, layers: int) -> _Layers:
    return tuple(range(layers))


def _first_dense(fields: Fields, layers: int) -> _Layers:
    dense = fields.optional(("first_k_dense_replace", "num_dense_layers"), 0, _MAX_LAYERS)
    return tuple(place for place in _by_frequency(fields, layers) if place >= dense)


def _by_frequency(fields: Fields, layers: int) -> _Layers:
    """By `moe_layer_freq`: a flag for each layer, or every how many layers one has experts."""
    if isinstance(fields.get("moe_layer_freq"), list):
        return _words(fields, layers, name="moe_layer_freq", words=_FLAGS, form=list)
    return tuple(range(0, layers, _step(fields, "moe_layer_freq")))


def _sparse_step(fields: Fields, layers: int) -> _Layers:
    step, dense = _step(fields, "decoder_sparse_step"), fields.places("mlp_only_layers")
    return tuple(place for place in range(layers) if place not in dense and (place + 1) % step == 0)


def _interleave(fields: Fields, layers: int) -> _Layers:
    if listed := fields.places("moe_layers"):
        return tuple(sorted(place for place in listed if place < layers))
    step = _step(fields, "interleave_moe_layer_step")
    return tuple(place for place in range(layers) if (place + 1) % step == 0)


def _period(fields: Fields, layers: int) -> _Layers:
    period = fields.integer(("expert_layer_period",), _MAX_LAYERS)
    offset = fields.integer(("expert_layer_offset",), period - 1, low=0)
    return tuple(range(offset, layers, period))


def _listed(fields: Fields, layers: int, *, names: tuple[str, ...]) -> _Layers:
    """By whichever of `names` the model has: text with a letter, or a list with a word, for each layer."""
    found = {name: _LISTS[name](fields, layers) for name in names if fields.get(name) is not None}
    if not found:
        raise fields.missing(*names)
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise fields.error(name, f"places the experts otherwise than {first}")
    return found[first]


def _words(
    fields: Fields, layers: int, *, name: str, words: Mapping[Any, bool], form: type[list[Any]] | type[str]
) -> _Layers:
    return _flagged(fields.flags(name, words, layers, form=form)) or ()


_LISTS: Mapping[str, _Rule] = {
    "hybrid_override_pattern": partial(_words, name="hybrid_override_pattern", words=_LETTERS, form=str),
    "layers_block_type": partial(_words, name="layers_block_type", words=_BLOCK_TYPES, form=list),
    "moe_layer_freq": _by_frequency,
}
_PATTERN = ("hybrid_override_pattern", "layers_block_type", "moe_layer_freq")
_FREQUENCY = ("moe_layer_freq", "hybrid_override_pattern", "layers_block_type")

_RULES: Mapping[Placement, tuple[_Rule, tuple[str, ...]]] = {
    "all": (_all, ()),
    "first-dense": (_first_dense, ("first_k_dense_replace", "num_dense_layers", "moe_layer_freq")),
    "sparse-step": (_sparse_step, ("decoder_sparse_step", "mlp_only_layers")),
    "interleave": (_interleave, ("moe_layers", "interleave_moe_layer_step")),
    "period": (_period, ("expert_layer_period",)),
    "frequency-list": (partial(_listed, names=_FREQUENCY), _FREQUENCY),
    "pattern": (partial(_listed, names=_PATTERN), _PATTERN),
}
"""Each rule, and the fields that it reads where a model has them."""
