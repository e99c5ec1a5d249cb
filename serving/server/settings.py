"""What a server is started with: one record, from the command line to the worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["EpMode", "Graph", "Settings"]

Graph = Literal["eager", "full"]
EpMode = Literal["fast", "deterministic"]


@dataclass(frozen=True)
class Settings:
    """The worker's settings.

    `configs` is a folder, or None for the empty tree. `weights` is `random` or a folder. `slots` 0 and `length` 0 are
    chosen by the worker: from the device's kind, and from the model. `record` is where expert choices go. `ep_size` is
    the number of processes (on a GPU machine: devices) that share the experts, `ep_parts` how many dispatches a layer's
    rows travel in. `memory_share` is the part of the device's memory that weights and cache may take.
    """

    model: str
    weights: str = "random"
    dtype: str = "auto"
    backend: str = "auto"
    graph: Graph = "eager"
    configs: str | None = None
    seed: int = 0
    slots: int = 0
    length: int = 0
    prefill_tokens: int = 4096
    record: str | None = None
    record_min_tokens: int = 64
    threads: int = 0
    ep_size: int = 1
    ep_mode: EpMode = "fast"
    ep_parts: int = 1
    memory_share: float = 1.0

    @property
    def config_root(self) -> Path | None:
        """`configs` as a path."""
        return None if self.configs is None else Path(self.configs)
