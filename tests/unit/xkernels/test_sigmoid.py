"""The fast sigmoid's error, from the hardware's bounds: exp2 within 2 units of the last place, 1/x within 1."""

from __future__ import annotations

import itertools

import numpy as np


def test_the_fast_sigmoid_keeps_its_stated_error() -> None:
    x = np.concatenate([np.linspace(-87, 87, 200_001), np.linspace(-1, 1, 50_001)]).astype(np.float32)
    exact, worst = 1 / (1 + np.exp(-x.astype(np.float64))), np.zeros(x.size)
    scaled = x * np.float32(-1.4426950408889634)  # rounded: the error that grows with |x|
    for power, inverse in itertools.product((-2, 0, 2), (-1, 0, 1)):
        exp2 = np.exp2(scaled.astype(np.float64)).astype(np.float32)
        exp2 = (exp2 + np.spacing(exp2) * np.float32(power)).astype(np.float32)
        total = (exp2 + np.float32(1)).astype(np.float64)
        got = (1 / total).astype(np.float32)
        got = (got + np.spacing(got) * np.float32(inverse)).astype(np.float64)
        worst = np.maximum(worst, np.abs(got - exact) / exact)
    bound = (4 + np.abs(x)) * 2.0**-23
    assert (worst <= bound).all()
    assert (worst > bound / 8).any()  # the bound is not idle
