"""The fast sigmoid's error, from the hardware's bounds: exp2 within 2 units of the last place, 1/x within 1."""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np

from xkernels.ops._details import activation


class Language:
    """Triton's language as `_sigmoid` sees it on CUDA: each instruction as many units off as it may be."""

    float32, constexpr = np.float32, staticmethod(lambda x: x)

    def __init__(self, power: int, inverse: int) -> None:
        self.instructions = {"ex2.approx.ftz.f32": (np.exp2, power), "rcp.approx.ftz.f32": (np.reciprocal, inverse)}
        self.done: list[str] = []

    def inline_asm_elementwise(self, text: str, constraints: str, args: list[Any], **_: Any) -> Any:
        name = text.split()[0]
        function, units = self.instructions[name]
        self.done.append(name)
        (x,) = args
        assert x.dtype == np.float32
        out = function(x.astype(np.float64)).astype(np.float32)
        return out + np.spacing(out) * np.float32(units)


def fast(x: Any, language: Language) -> Any:
    """What the kernels' own `_sigmoid` answers on CUDA."""
    source = getattr(activation._sigmoid, "fn", activation._sigmoid)
    names = {"tl": language, "is_cuda": lambda: True, "_ASKS_TARGET": True, "INTERPRETED": False}
    return types.FunctionType(source.__code__, names)(x)


def test_the_fast_sigmoid_keeps_its_stated_error() -> None:
    x = np.concatenate([np.linspace(-87, 87, 200_001), np.linspace(-1, 1, 50_001)]).astype(np.float32)
    exact, worst = 1 / (1 + np.exp(-x.astype(np.float64))), np.zeros(x.size)
    for power, inverse in itertools.product((-2, 0, 2), (-1, 0, 1)):
        language = Language(power, inverse)
        got = fast(x, language).astype(np.float64)
        assert len(language.done) == 2  # the fast form, not the exact one
        worst = np.maximum(worst, np.abs(got - exact) / exact)
    bound = (4 + np.abs(x)) * 2.0**-23
    assert (worst <= bound).all()
    assert (worst > bound / 8).any()  # the bound is not idle
