"""The routed experts as this process runs them: backend, configs, counts, and the proof of all three."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moegate import canonical, kernels
from moegate.configs import ConfigTree, Pair
from moegate.dispatch import Capabilities, Problem, Selection, select
from moegate.errors import InfraError
from moegate.records import ConfigUse, Proof
from serving.server.spec import DecoderSpec
from serving.server.weights import MoeWeights
from xkernels import device as devices
from xkernels.ops.expert_parallel import EpLayout, EpPeerLost, ep_fused_experts
from xkernels.ops.few_rows import Chosen
from xkernels.ops.fused_experts import expert_slots, function_of, fused_experts
from xkernels.ops.prepared import PreparedExperts, prepare_experts
from xkernels.ops.topk import Router, router_logits, router_logits_reference, topk, topk_reference
from xkernels.probes import asking

__all__ = ["Experts", "capabilities", "kernel_hash", "named"]

OP = "fused_experts"
OTHERS = ("topk", "store_kv_cache", "decode_attention")
CONFIGURED = "triton"  # the one backend that looks tuned configs up

ExpertConfigs = tuple[dict[str, Any], dict[str, Any]]


def capabilities(live: devices.Device) -> Capabilities:
    """What this process can do, as dispatch asks."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return Capabilities(live.platform(), torch.__version__, triton, devices.is_interpreted(), ask=asking(live))


@functools.cache
def kernel_hash() -> str:
    """Hash over all kernels' sources: with the same hash two processes run the same kernels."""
    return kernels.code_hash() or ""


@functools.cache
def tuned_kernel_hash() -> str:
    """Hash of the experts' own kernel, as provenance has it of the configs that were tuned for it."""
    return kernels.hash_of(kernels.kernel_files(OP))


class Experts:
    """Runs the experts of every MoE layer and keeps account of it.

    Args:
        spec: the decoder.
        dtype: activations and weights.
        live: the device.
        request: a backend's name, or `auto`; what cannot be honoured raises DispatchRefused.
        configs: root of the config tree; None is the empty tree (every lookup answers `default`).
        ep: number of ranks that share the experts; `share` must then be called before the first layer runs.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        live: devices.Device,
        request: str,
        configs: Path | None,
        ep: int = 1,
    ) -> None:
        self.spec = spec
        name = str(dtype).removeprefix("torch.")
        self.caps = capabilities(live)
        problem = Problem(dtype=name, experts=spec.experts, topk=spec.topk, hidden=spec.hidden, groups=spec.groups)
        self.selection: Selection = select(OP, problem, self.caps, request)
        self.others = {op: select(op, problem, self.caps).resolved for op in OTHERS}
        fused = self.others["topk"] == CONFIGURED
        self._choose = topk if fused else topk_reference
        self._logits = router_logits if fused else router_logits_reference
        self.fused = all(backend == CONFIGURED for backend in self.others.values())
        self.tree = ConfigTree(configs)
        self.pair: Pair | None = None
        if self.selection.resolved == CONFIGURED:
            key = spec.layout.key(config_device(live), dtype=name, fuse_shared=False, tp=ep, ep=ep)
            self.pair = self.tree.resolve_pair(key, triton=self.caps.triton or "")
        self.router = Router(
            spec.topk, spec.scoring, spec.renormalise, spec.routed_scaling, spec.groups, spec.top_groups
        )
        self.rows: Counter[int] = Counter()
        self._configs = functools.cache(self._configs_for)
        self.layout: EpLayout | None = None
        self._call_others: Callable[[int], None] | None = None

    def share(self, layout: EpLayout, call_others: Callable[[int], None] | None) -> None:
        """Run every layer over the ranks of `layout`; `call_others` tells them which layer it is (on rank 0)."""
        self.layout, self._call_others = layout, call_others

    def prepare(self, moe: MoeWeights) -> PreparedExperts:
        """Bring a layer's experts, or this rank's share of them, into the kernels' layout."""
        mine = slice(None) if self.layout is None else self.layout.local_experts
        return prepare_experts(moe.w1[mine], moe.w2[mine])

    def route(self, moe: MoeWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows of `x` [M, H]: weights float32 and ids int32, both [M, topk]."""
        return self._choose(self._logits(x, moe.router), self.router, moe.correction)

    def block(self, m: int) -> int | None:
        """Rows of a block that `m` rows' choice has to be aligned in; None where the experts align it themselves."""
        up, _ = (None, None) if self.layout is not None else self._configs(m)
        return None if up is None else int(up["BLOCK_SIZE_M"])

    def slots(self, x: torch.Tensor, experts: PreparedExperts, chosen: Chosen, layer: int) -> torch.Tensor:
        """Routed experts of one layer before their sum: `x` [M, H] -> [M, slots, H], one slot where that is done here.

        `chosen`: aligned in blocks of `block(M)`.
        """
        if chosen.alignment is None:
            return self(x, experts, chosen.weights, chosen.ids, layer)[:, None]
        up, down = self._counted(x.shape[0])
        assert up is not None
        assert down is not None
        return expert_slots(x, experts, chosen.weights, chosen.alignment, up, down)

    def __call__(self, x: torch.Tensor, experts: PreparedExperts, weights: torch.Tensor, ids: torch.Tensor, layer: int
                 ) -> torch.Tensor:  # fmt: skip
        """Routed experts of one layer; `x` [M, H] -> [M, H]."""
        if self.layout is not None:
            if self._call_others is not None:
                self._call_others(layer)
            try:
                return ep_fused_experts(x, experts, weights, ids, self.layout, configs=self._counted)
            except EpPeerLost as error:
                raise InfraError(f"an expert rank is gone: {error}") from None
        up, down = self._counted(x.shape[0])
        return fused_experts(x, experts, weights, ids, backend=self.selection.resolved, up=up, down=down)

    def proof(self) -> Proof:
        """What was asked, what ran, and which config every batch size got."""
        return Proof(
            engine="moegate",
            requested_backend=self.selection.requested,
            resolved_backend=self.selection.resolved,
            chain=tuple(asdict(step) for step in self.selection.chain),
            configs_root=None if self.tree.root is None else str(self.tree.root),
            configs_digest=_tree_digest(self.tree.root),
            configs=tuple(use for m in sorted(self.rows) for use in self._uses(m)),
            calls={self.selection.resolved: self.rows.total()},
            kernel_hash=kernel_hash(),
            kernels={OP: tuned_kernel_hash()},
            functions={
                OP: named(function_of(self.selection.resolved)),
                "topk": named(self._choose),
                "router": named(self._logits),
            },
        )

    def _counted(self, m: int) -> ExpertConfigs | tuple[None, None]:
        self.rows[m] += 1
        return self._configs(m)

    def _configs_for(self, m: int) -> ExpertConfigs | tuple[None, None]:
        return (None, None) if self.pair is None else self.pair.for_batch(m, self.spec.topk)

    def _uses(self, m: int) -> list[ConfigUse]:
        if self.pair is None:
            return []
        up, down = self.pair.for_batch(m, self.spec.topk)
        return [
            ConfigUse(OP, found.projection, m, found.file, found.reason, config, found.alias, self.rows[m])
            for found, config in ((self.pair.up, up), (self.pair.down, down))
        ]


@functools.cache
def _tree_digest(root: Path | None) -> str:
    return canonical.digest([]) if root is None else canonical.tree_digest(root)


def named(function: Callable[..., Any]) -> str:
    """The name of a function as an import would spell it."""
    module = getattr(function, "__module__", None) or "torch"  # methods of torch.Tensor have none
    return f"{module}.{function.__qualname__}"


def config_device(live: devices.Device) -> str:
    """The device name that config files use: under the interpreter and on the CPU it is `cpu`."""
    return "cpu" if live.kind == "cpu" else live.identity().name
