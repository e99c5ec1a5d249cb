"""Leases of single GPUs: the mask of each, and which batch sizes it gets."""

from __future__ import annotations

import pytest

from moegate.errors import DeviceLost, PoolError
from tuner.ray.masks import assert_distinct, child_mask, groups_for


@pytest.mark.parametrize(
    ("ids", "environ", "intel", "mask"),
    [
        (["2"], {"CUDA_VISIBLE_DEVICES": "2"}, False, {"CUDA_VISIBLE_DEVICES": "2"}),
        (["1"], {"HIP_VISIBLE_DEVICES": "1"}, False, {"HIP_VISIBLE_DEVICES": "1"}),
        (["3"], {"ZE_AFFINITY_MASK": "3"}, True, {"ZE_AFFINITY_MASK": "3"}),  # Ray 2.58 and later
        (["3"], {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"}, True, {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"}),  # before
        # Both at once would count twice: the selector renumbers what the mask has left.
        (["3"], {"ZE_AFFINITY_MASK": "3", "ONEAPI_DEVICE_SELECTOR": "level_zero:3"}, True, {"ZE_AFFINITY_MASK": "3"}),
        (["0"], {"CUDA_VISIBLE_DEVICES": "0"}, True, {"ZE_AFFINITY_MASK": "0"}),  # declared by hand on an Intel node
        (["GPU-5f"], {}, False, {"CUDA_VISIBLE_DEVICES": "GPU-5f"}),  # NOSET: made from the id, which may be a UUID
        (["2"], {"ZE_AFFINITY_MASK": ""}, True, {"ZE_AFFINITY_MASK": "2"}),
    ],
)
def test_masks(ids: list[str], environ: dict[str, str], intel: bool, mask: dict[str, str]) -> None:
    assert child_mask(ids, environ, intel) == mask


@pytest.mark.parametrize("ids", [[], ["0", "1"]])
def test_a_lease_is_one_gpu(ids: list[str]) -> None:
    with pytest.raises(PoolError, match="one GPU"):
        child_mask(ids, {}, False)


def test_one_device_twice_is_an_error() -> None:
    assert_distinct(["GPU-a", "GPU-b"])
    with pytest.raises(DeviceLost, match="GPU-a"):
        assert_distinct(["GPU-a", "GPU-b", "GPU-a"])


def test_groups_cover_every_size_once_and_balance() -> None:
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096]
    groups = groups_for(sizes, 4)
    assert sorted(size for group in groups for size in group) == sizes
    loads = [sum(1 + size / 1024 for size in group) for group in groups]
    assert max(loads) < 1.3 * min(loads)
    assert groups_for([1, 2], 8) == [(2,), (1,)]
