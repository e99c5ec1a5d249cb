"""Which device a leased worker may use, and the proof that no two workers got the same one.

Ray only allocates ids. What they mean to a process depends on when the mask is set: in Ray's own worker it can come
too late (Level Zero has counted its devices by then), so the work runs in a fresh process that has the mask in its
environment from the start and always uses ordinal 0. Ray up to 2.57 masks Intel devices by ONEAPI_DEVICE_SELECTOR, from
2.58 on by ZE_AFFINITY_MASK; both are understood. Whatever a mask says, the identity of the device is what counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from moegate.errors import DeviceLost, PoolError

__all__ = ["MASKS", "assert_distinct", "child_mask", "groups_for"]

MASKS: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "{id}",
    "HIP_VISIBLE_DEVICES": "{id}",
    "ZE_AFFINITY_MASK": "{id}",
    "ONEAPI_DEVICE_SELECTOR": "level_zero:{id}",
}
"""Mask variables that Ray sets, and how one id is written in each."""


def child_mask(ids: Sequence[str], environ: Mapping[str, str], intel: bool) -> dict[str, str]:
    """The mask variables for the process that does the work.

    Args:
        ids: accelerator ids of the lease, as texts (Ray gives numbers, texts or UUIDs); exactly one.
        environ: the environment of Ray's worker.
        intel: whether the node's devices are Intel's (`dpctl` counts them): only there Level Zero's variables apply.

    Returns:
        The variables that Ray set for this vendor, as they are; where it set none (a NOSET option), one made from the
        id. A CUDA mask on an Intel node is left out: Ray writes it where devices were declared by hand, and there it
        means nothing.

    Raises:
        PoolError: not one id.
    """
    if len(ids) != 1:
        raise PoolError(f"a lease must hold one GPU, this one holds {len(ids)}")
    names = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR") if intel else ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    found = {name: environ[name] for name in names if environ.get(name)}
    if found:
        # Only one of Intel's two: the selector would count again among what the mask has left.
        first = next(iter(found))
        return {first: found[first]} if intel else found
    return {names[0]: MASKS[names[0]].format(id=ids[0])}


def assert_distinct(identities: Iterable[str]) -> None:
    """Raise DeviceLost where two workers report the same physical device."""
    doubled = sorted(identity for identity, count in Counter(identities).items() if count > 1)
    if doubled:
        raise DeviceLost(
            f"{', '.join(doubled)}: two workers run on one device: their masks had no effect, their times mean nothing"
        )


def groups_for(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Deal batch sizes to `count` workers so that each has about the same work (large ones cost more)."""
    groups: list[list[int]] = [[] for _ in range(max(1, min(count, len(sizes))))]
    loads = [0.0] * len(groups)
    for size in sorted(sizes, reverse=True):
        lightest = min(range(len(groups)), key=lambda place: (loads[place], place))
        groups[lightest].append(size)
        loads[lightest] += 1.0 + size / 1024
    return [tuple(sorted(group)) for group in groups]
