"""Selection: a pure function from (op, problem, capabilities, request) to a backend and the chain it walked.

An explicit request is looked up first and is honoured or refused with the reason; the order of the rows matters to
`auto` alone, so no row can stand in the way of a request.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from moegate.dispatch.model import Capabilities, Condition, DispatchRefused, Problem, Row, Selection, Step
from moegate.dispatch.platforms import platform_name
from moegate.dispatch.rows import OPS, ROWS
from moegate.errors import UsageError

AUTO = "auto"


def select(
    op: str,
    problem: Problem,
    caps: Capabilities,
    request: str = AUTO,
    *,
    rows: tuple[Row, ...] = ROWS,
) -> Selection:
    """Choose the backend of `op`.

    Args:
        op: a name of `rows.OPS`.
        problem: what is to be computed.
        caps: what this process (or a simulated one) can do.
        request: `auto` or a backend's name.
        rows: the table, for simulations.

    Raises:
        UsageError: no such op.
        DispatchRefused: the requested backend does not exist or cannot serve, or nothing can.
    """
    platform = platform_name(caps.platform)
    caps = replace(caps, platform=platform)  # conditions compare names, whatever a live device calls itself
    mine = tuple(row for row in rows if row.op == op)
    if not mine:
        near = difflib.get_close_matches(op, OPS, n=1)
        raise UsageError(f"unknown op {op!r:.60}", field="op", fix=f"one of {', '.join(near or OPS)}")
    if request != AUTO:
        return _explicit(op, platform, mine, problem, caps, request)
    chain: list[Step] = []
    for row in mine:
        why = (
            _unable(row, problem, caps, platform)
            or _not_for_auto(row, problem, caps, platform)
            or _refused_by(row.asks, problem, caps)
        )
        if why is None:
            chain.append(Step(row.backend, True, row.reason))
            return Selection(op, platform, request, row.backend, tuple(chain))
        chain.append(Step(row.backend, False, why))
    able = _able(platform, mine, problem, caps)
    fix = f"ask by name for one that can serve here: {', '.join(able)}" if able else "nothing here serves this problem"
    raise DispatchRefused(f"no backend of {op} can serve on {platform}: {chain[-1].why}", chain=tuple(chain), fix=fix)


def refusal(row: Row, problem: Problem, caps: Capabilities, platform: str) -> str | None:
    """Why `row` cannot serve, or None; the device is asked last."""
    return _unable(row, problem, caps, platform) or _refused_by(row.asks, problem, caps)


def _unable(row: Row, problem: Problem, caps: Capabilities, platform: str) -> str | None:
    """As `refusal`, without asking the device."""
    if platform not in row.platforms:
        return f"not on {platform}"
    return _refused_by(row.when, problem, caps)


def _refused_by(conditions: tuple[Condition, ...], problem: Problem, caps: Capabilities) -> str | None:
    return next((why for condition in conditions if (why := condition(problem, caps)) is not None), None)


def _not_for_auto(row: Row, problem: Problem, caps: Capabilities, platform: str) -> str | None:
    if row.auto is not None and platform not in row.auto:
        return f"on {platform} only by name"
    why = _refused_by(row.auto_when, problem, caps)
    return None if why is None else f"only by name: {why}"


def _explicit(
    op: str, platform: str, rows: tuple[Row, ...], problem: Problem, caps: Capabilities, request: str
) -> Selection:
    row = next((row for row in rows if row.backend == request), None)
    if row is None:
        raise DispatchRefused(
            f"{op} has no backend {request!r:.60}", fix=f"auto or one of {', '.join(row.backend for row in rows)}"
        )
    why = refusal(row, problem, caps, platform)
    if why is None:
        return Selection(op, platform, request, request, (Step(request, True, "requested by name"),))
    raise DispatchRefused(
        f"{op}: {request} cannot serve on {platform}: {why}",
        chain=(Step(request, False, why),),
        fix=_instead(platform, rows, row, problem, caps),
    )


def _instead(platform: str, rows: tuple[Row, ...], row: Row, problem: Problem, caps: Capabilities) -> str:
    """What to do where `row` cannot serve: the interpreter, where nothing but that is missing; else who can."""
    able = _able(platform, rows, problem, caps)
    ask = f"ask for auto or one that can serve here: {', '.join(able)}" if able else "nothing here serves this problem"
    if not caps.interpreter and refusal(row, problem, replace(caps, interpreter=True), platform) is None:
        return f"set TRITON_INTERPRET=1, or {ask}"
    return ask


def _able(platform: str, rows: tuple[Row, ...], problem: Problem, caps: Capabilities) -> list[str]:
    return [row.backend for row in rows if refusal(row, problem, caps, platform) is None]
