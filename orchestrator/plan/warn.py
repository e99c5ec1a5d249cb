"""What a person should know about a plan before it runs."""

from __future__ import annotations

from collections import Counter

from moegate import devices
from moegate.records import Plan
from orchestrator.plan.estimate import duration, run_seconds

__all__ = ["warnings"]


def warnings(plan: Plan) -> tuple[str, ...]:
    """Return one line per thing that will limit what the run can show."""
    found = [*_undetectable(plan), *_interpreter(plan), *_budget(plan), *_names(plan)]
    return tuple(found)


def _undetectable(plan: Plan) -> list[str]:
    """2^-confirm > q / cells: then no result, however large, can be called significant.

    Controls and A/A cells are a family of their own, in which a move could not be told either.
    """
    if plan.compare is None:
        return []
    from moegate.stats import detectable, pairs_to_detect

    out = []
    judged = [cell for cell in plan.cells if cell.family and cell.kind != "accuracy"]
    families = Counter(cell.judged_in for cell in judged)
    for family, cells in families.items():
        if not detectable(plan.compare.confirm, plan.gate.q, cells):
            need = pairs_to_detect(plan.gate.q, cells)
            out.append(
                f"confirm {plan.compare.confirm} cannot find anything in {cells} {family} cells at q {plan.gate.q:g}: "
                f"write confirm: {need} or more"
            )
    return out


def _interpreter(plan: Plan) -> list[str]:
    used = {cell.pool for cell in plan.cells}
    names = [pool.name for pool in plan.pools if pool.device == "cpu" and pool.name in used]
    if not names:
        return []
    return [
        f"pool {', '.join(names)} runs Triton kernels in Triton's interpreter: "
        "its timings are real, and no claim about hardware"
    ]


def _budget(plan: Plan) -> list[str]:
    total = run_seconds(((cell.pool, cell.estimate_s or 0.0) for cell in plan.cells), plan.pools)
    if plan.gate.budget_s is None or total <= plan.gate.budget_s:
        return []
    work, budget = duration(total), duration(plan.gate.budget_s)
    return [f"about {work} of work for a budget of {budget}: cells may be cut off"]


def _names(plan: Plan) -> list[str]:
    """A pool whose device is called otherwise has none, which a run would say only once it looks for it."""
    asked = ((pool.name, pool.device_name) for pool in plan.pools if pool.device_name)
    return [
        f"pool {pool}: no device that we know is called {name} (near: {', '.join(devices.near(name))})"
        for pool, name in asked
        if not devices.is_reported(name)
    ]
