"""What we import only where it is needed: which extra brings it, and how a person installs that."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXTRAS", "install"]

EXTRAS: Mapping[str, str] = {
    "torch": "cpu", "triton": "cpu", "ray": "ray", "dpctl": "xpu", "aiohttp": "serve", "safetensors": "serve",
    "starlette": "serve", "uvicorn": "serve",
}  # fmt: skip
"""Module -> the extra that brings it."""


def install(extra: str) -> str:
    """The fix for what an extra brings: from a checkout, since what an index has by our name is not ours."""
    return f"python -m pip install -e '.[{extra}]' in moegate's checkout"
