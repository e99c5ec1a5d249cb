"""Our own engine (`serving.server`): it tells everything about itself at `/v1/server_info`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moegate.errors import UsageError
from moegate.records import DeviceIdentity, Proof, from_json
from serving.account import Account
from serving.engines.protocol import Command, Launched, Spec, get_json

__all__ = ["MoegateEngine"]

_ADDRESS = "address"


class MoegateEngine:
    """Starts `python -m serving.server`; it binds the port itself and writes where."""

    name = "moegate"
    ready_s = 300.0

    def command(self, spec: Spec, work: Path, port: int) -> Command:
        """One process for HTTP, which starts one for the device."""
        if spec.tp not in (1, spec.ep):
            raise UsageError(f"tp {spec.tp}: only experts are spread out", field="tp", fix="1, or as many as ep")
        argv = [sys.executable, "-P", "-m", "serving.server", f"--model={spec.model}", f"--weights={spec.weights}",
                f"--dtype={spec.dtype}", f"--backend={spec.backend}", f"--graph={spec.graph}", f"--seed={spec.seed}",
                f"--slots={spec.slots}", f"--length={spec.length}", f"--port={spec.port}",
                f"--ep-size={spec.ep}", f"--configs={spec.configs or 'none'}",
                f"--address-file={work / _ADDRESS}"]  # fmt: skip
        if spec.memory_share < 1:
            argv.append(f"--memory-share={spec.memory_share:g}")
        if spec.record_routing is not None:
            argv.append(f"--record-routing={spec.record_routing}")
        return Command((*argv, *spec.extra))

    def base_url(self, work: Path, port: int) -> str | None:
        """What the server wrote once it had a port."""
        file = work / _ADDRESS
        return file.read_text(encoding="ascii").strip() if file.is_file() else None

    def account(self, launched: Launched) -> Account:
        """Read `/v1/server_info`."""
        info = get_json(launched.base_url, "/v1/server_info")
        return Account(
            device=from_json(DeviceIdentity, info["device"]),
            proof=from_json(Proof, info["proof"]),
            environment={**info["versions"], **info["environment"], **_spread(info["expert_parallel"])},
            batch_sizes=info["batch_sizes"],
            peak_memory_bytes=info["peak_memory_bytes"],
            interpreter=info["interpreter"],
        )


def _spread(told: dict[str, Any] | None) -> dict[str, str]:
    """How the experts are spread, and the grids of kernels that wait for all of their blocks, in words."""
    if told is None:
        return {}
    grids = "".join(
        f"; {grid['kernel']} {grid['dtype']}: grid {grid['blocks']} of {grid['wanted']} wanted, "
        f"{grid['resident']} resident"
        for grid in told["grids"]
    )
    return {"expert_parallel": f"{told['size']} ranks, {told['mode']}, {told['wire']} on the wire{grids}"}
