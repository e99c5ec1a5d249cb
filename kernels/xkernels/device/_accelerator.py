"""What the accelerators' torch modules have in common; the vendor leaves add what differs.

torch gives CUDA, ROCm and XPU one module each with nearly the same functions. A leaf passes its module in, which is
also how tests simulate a device that is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from xkernels.device.protocol import Event, Graph


class AcceleratorEvent:
    """A timing event of an accelerator's stream."""

    def __init__(self, module: Any) -> None:
        self._event = module.Event(enable_timing=True)

    def record(self) -> None:
        """Mark this point on the current stream."""
        self._event.record()

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from here to `later`."""
        if not isinstance(later, AcceleratorEvent):
            raise TypeError(f"elapsed_ms needs an event of the same device, not {type(later).__name__}")
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


class Accelerator:
    """Common part of the CUDA, ROCm and XPU leaves, over one torch module (`torch.cuda` or `torch.xpu`).

    A leaf names torch's type, the module's class of graphs, the field of a stream that holds its handle, and what moves
    tensors between processes.
    """

    torch_type: str
    graph_class: str
    queue_field: str = "cuda_stream"
    transport: str = "nccl"  # which on ROCm is RCCL

    def __init__(self, index: int = 0, module: Any = None) -> None:
        self.index = index
        self._module = module if module is not None else getattr(torch, self.torch_type)
        self._side: Any = None
        self._small: Any = None
        self._properties: Any = None

    def torch_device(self) -> torch.device:
        """The torch device of this index."""
        return torch.device(self.torch_type, self.index)

    def properties(self) -> Any:
        """torch's properties record of this device, asked for once: kernels' launchers look at it."""
        if self._properties is None:
            self._properties = self._module.get_device_properties(self.index)
        return self._properties

    def features(self) -> frozenset[str]:
        """Nothing beyond plain Triton."""
        return frozenset()

    def queue(self) -> int:
        """The handle of the current stream."""
        return int(getattr(self._module.current_stream(self.index), self.queue_field))

    def capturing(self) -> bool:
        """Whether the current stream is being captured; False where this torch build cannot tell."""
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return bool(asked()) if asked is not None else False

    def current(self) -> AbstractContextManager[Any]:
        """Make this the current device."""
        return self._module.device(self.index)

    def synchronize(self) -> None:
        """Wait for all issued work."""
        self._module.synchronize(self.index)

    def event(self) -> Event:
        """A timing event."""
        return AcceleratorEvent(self._module)

    @contextmanager
    def stream(self) -> Iterator[Any]:
        """A side stream, joined on both ends."""
        side = self._module.Stream(self.index)
        before = self._module.current_stream(self.index)
        side.wait_stream(before)
        with self._module.stream(side):
            yield side
        before.wait_stream(side)

    def beside(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Two pieces of work at once, `first` on a side stream that is forked here and joined at the end."""
        if self._side is None:  # one for good: libraries keep a workspace per stream
            self._side = self._module.Stream(self.index)
        side, main = self._side, self._module.current_stream(self.index)
        side.wait_stream(main)
        with self._module.stream(side):
            one = first()
        two = second()
        main.wait_stream(side)
        return one, two

    def capture(self, work: Callable[[], Any], warmups: int = 1, small: bool = False) -> Graph | None:
        """Capture `work`; None where this torch build has no graph class for the device."""
        graph_class = getattr(self._module, self.graph_class, None)
        if graph_class is None:
            return None
        if small and hasattr(self._module, "graph_pool_handle"):
            return self._capture_small(graph_class(), work, warmups)
        with self.stream():
            for _ in range(warmups):
                work()
        self.synchronize()
        graph: Graph = graph_class()
        with self._module.graph(graph):
            work()
        return graph

    def _capture_small(self, graph: Any, work: Callable[[], Any], warmups: int) -> Graph:
        """One pool and one stream for all of them: torch's own way empties the allocator's cache before each."""
        pool, side = self._small_pool()
        before = self._module.current_stream(self.index)
        side.wait_stream(before)
        with self._module.stream(side):
            for _ in range(warmups):
                work()
            graph.capture_begin(pool=pool)
            try:
                work()
            finally:
                graph.capture_end()
        before.wait_stream(side)
        captured: Graph = graph
        return captured

    def _small_pool(self) -> tuple[Any, Any]:
        """The pool and the stream of small captures, and a graph kept for good: a pool dies with its last graph."""
        if self._small is None:
            pool, side = self._module.graph_pool_handle(), self._module.Stream(self.index)
            keeper = getattr(self._module, self.graph_class)()
            with self._module.stream(side):
                keeper.capture_begin(pool=pool)
                kept = torch.zeros(1, device=self.torch_device())
                keeper.capture_end()
            self._small = (pool, side, keeper, kept)
        pool, side, _, _ = self._small
        return pool, side

    def seed(self, value: int) -> None:
        """Seed this device and the CPU."""
        torch.manual_seed(value)
        self._module.manual_seed_all(value)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._module.mem_get_info(self.index)
        return int(free), int(total)

    def peak_memory(self) -> int:
        """Peak allocated bytes."""
        return int(self._module.max_memory_allocated(self.index))

    def reset_peak_memory(self) -> None:
        """Restart the peak counter."""
        self._module.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Release cached memory."""
        self._module.empty_cache()
