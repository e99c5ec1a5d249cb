"""Which experts the module names of a quantisation block mean: what it leaves out, and what a group of it is for.

Names are full ones, parts of one, patterns with `*`, or regular expressions after `re:`. They come with the model, so
no pattern is run: a name is read as words, and one that may mean the experts but cannot be told is an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

ALL_KINDS = frozenset(("gate", "up", "down"))

_KINDS = {
    "gate": ("gate",), "up": ("up",), "down": ("down",), "gate_up": ("gate", "up"),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "gate_up_proj": ("gate", "up"),
    "w1": ("gate",), "w2": ("down",), "w3": ("up",), "w13": ("gate", "up"),
}  # fmt: skip
"""The projections of an expert by the words that names have for them."""

_SHORT = frozenset(("gate", "up", "down", "gate_up"))
"""Words that mean a projection only where experts are named: elsewhere `gate` is the router."""

_PLACES = frozenset((
    "model", "language_model", "backbone", "transformer", "layer", "layers", "blocks", "block_sparse_moe", "mlp", "moe",
    "ffn", "feed_forward", "mixer",
))  # fmt: skip
"""Words on the way to the experts: a name of these alone means all that is below."""

_EXPERTS = frozenset(("expert", "experts"))
_NEUTRAL = frozenset(("_proj", "proj", "weight"))
_SHARED = re.compile(r"shared_?experts?(_gate)?")
_LAYER = re.compile(r"\blayers?\.(\d{1,5})\b")
_EXPERT = re.compile(r"\bexperts?\.(\d{1,5})\b")
_PROJECTION = re.compile(r"(\.?)\(?([a-z0-9_|]+)\)?(_proj)?")
_WILDCARD = re.compile(r"\\[dw][+*]?|\[0-9\][+*]?|\[\^\.\][+*]|\.?[*+]")


class Unclear(ValueError):
    """A name that may mean the experts, or some of them."""


@dataclass(frozen=True)
class Named:
    """Experts that a name means. `layer`, `expert`: None for all of them. `kinds`: of their projections."""

    layer: int | None = None
    expert: int | None = None
    kinds: frozenset[str] = ALL_KINDS

    @property
    def everything(self) -> bool:
        """Whether these are all experts of all layers."""
        return self == Named()


def experts_named(name: str, *, exact: bool = False) -> Named | None:
    """The routed experts that `name` means, None if it means none.

    Args:
        name: an entry of a list of modules.
        exact: whether a name without `re:` is a full one, as in compressed-tensors.

    Raises:
        Unclear: it may mean some of them.
    """
    pattern = name.startswith("re:")
    text = _SHARED.sub("shared", name.removeprefix("re:").lower().replace("\\.", "."))
    if "mtp" in text:
        return None  # the layers that predict further tokens are not counted among the model's
    layer, expert = _LAYER.search(text), _EXPERT.search(text)
    words = _words(_EXPERT.sub("experts", _LAYER.sub("layers", text)))
    if any("expert" in word for word in words):
        if "(?" in text or words - _PLACES - _EXPERTS - _NEUTRAL - _KINDS.keys():
            raise Unclear
        kinds = frozenset(kind for word in words for kind in _KINDS.get(word, ()))
        if exact and not pattern and layer is None:
            raise Unclear
        return Named(_number(layer), _number(expert), kinds or ALL_KINDS)
    if exact and not pattern:
        return None
    if kinds := _by_projection(text):
        return Named(kinds=kinds)
    if layer is not None and words <= _PLACES and not text.endswith("$"):
        return Named(_number(layer))
    for part in text.split("|"):
        words = _words(part)
        if words <= _PLACES and (words or "|" not in text) and not part.endswith("$"):
            raise Unclear
    return None


def _by_projection(text: str) -> frozenset[str]:
    """The projections that a pattern means wherever they are, such as `.*(gate|up|down)_proj$`: the experts' too."""
    parts = [text] if "(" in text else text.split("|")
    return frozenset(kind for part in parts for kind in _last_projections(part))


def _last_projections(pattern: str) -> frozenset[str]:
    ends = pattern.replace(".+", ".*").removesuffix("$").removesuffix("*").removesuffix(".")
    way, wildcard, last = ends.rpartition("*")
    match = _PROJECTION.fullmatch(last)
    if not wildcard or match is None or _words(way) - _PLACES:
        return frozenset()
    found = [word + (match[3] or "") for word in match[2].split("|")]
    if not match[1] and set(found) & {"proj", "_proj"}:
        return ALL_KINDS
    return frozenset(kind for word in found if word not in _SHORT for kind in _KINDS.get(word, ()))


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z0-9_]+", _WILDCARD.sub(".", text)) if word)


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(match[1])


@dataclass
class LeftOut:
    """What names leave out of a model's experts."""

    layers: tuple[int, ...]
    experts: int
    _all: set[str] = field(default_factory=set)
    _found: dict[int, dict[int | None, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))

    def add(self, names: Iterable[Named]) -> None:
        """Take more names."""
        for name in names:
            if name.layer is None:
                if name.expert is not None:
                    raise Unclear
                self._all |= name.kinds
            elif name.layer in self.layers:
                self._found[name.layer][name.expert] |= name.kinds

    def left_layers(self) -> tuple[int, ...]:
        """The layers whose experts are left out.

        Raises:
            Unclear: some experts or projections of a layer are, others not.
        """
        if self._all:
            if self._all != ALL_KINDS:
                raise Unclear
            return self.layers
        for found in self._found.values():
            whole = found[None] >= ALL_KINDS
            if not whole and not all(found[expert] >= ALL_KINDS for expert in range(self.experts)):
                raise Unclear
        return tuple(sorted(self._found))
