"""Which functions of an engine's source decide dispatch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watched:
    """One function whose branches are dispatch rows.

    Args:
        file: its path's end, as in the repository and in a wheel (`layers/quantization/fp8_utils.py`).
        name: qualified name (`Fp8MoEMethod.apply`).
        assigns: names whose assignment is a row too, besides return and raise.
        calls: calls whose first argument is a row (`MoeRunner(backend, ...)`).
        request: words that mean the user's explicit choice.
        explicit_first: whether no branch may depend on the platform alone before the request was looked at.
    """

    file: str
    name: str
    assigns: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    explicit_first: bool = False
