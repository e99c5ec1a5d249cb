"""The device table: names, aliases, limits."""

from __future__ import annotations

import pytest

from moegate import devices
from moegate.dispatch import PLATFORM_NAMES
from moegate.errors import UsageError


def test_every_row_is_complete_and_unique() -> None:
    names = [device.name for device in devices.DEVICES]
    assert len(names) == len(set(names))
    for device in devices.DEVICES:
        assert device.platform in PLATFORM_NAMES
        assert " " not in device.name
        if device.vendor != "cpu":
            assert device.smem_bytes is not None
            assert 64 * 1024 <= device.smem_bytes <= 232448
        for alias in device.aliases:
            assert "#" in alias.source or "http" in alias.source, f"{alias.name} has no source"


def test_no_alias_names_two_devices_as_a_spelling() -> None:
    said = [a.name for d in devices.DEVICES for a in d.aliases if a.relation == "spelling"]
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("Intel(R) Arc(TM) Pro B60 Graphics", "Intel(R)_Arc(TM)_Pro_B60_Graphics"),
        ("Intel(R) Graphics [0xe211]", "Intel(R)_Arc(TM)_Pro_B60_Graphics"),
        ("AMD_Instinct_MI308X_OAM", "AMD_Instinct_MI308X"),
        ("NVIDIA H200", "NVIDIA_H200"),
    ],
)
def test_spellings_find_their_device(spoken: str, name: str) -> None:
    found = devices.find(spoken)
    assert found is not None
    assert found.name == name


def test_variants_lend_files_in_one_direction_only() -> None:
    assert [name for name, _ in devices.lookup_names("NVIDIA H200 NVL")] == ["NVIDIA_H200_NVL", "NVIDIA_H200"]
    assert [name for name, _ in devices.lookup_names("NVIDIA H200")] == ["NVIDIA_H200"]
    assert [name for name, _ in devices.lookup_names("NVIDIA_H20-3e")] == ["NVIDIA_H20-3e", "NVIDIA_H20"]


def test_a_shared_fallback_name_is_never_translated() -> None:
    assert devices.lookup_names("AMD Radeon Graphics") == (("AMD_Radeon_Graphics", None),)
    assert [name for name, _ in devices.lookup_names("AMD_Instinct_MI300X")] == [
        "AMD_Instinct_MI300X",
        "AMD_Instinct_MI300X_OAM",
        "AMD_Radeon_Graphics",
    ]


def test_an_unknown_device_is_named_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match="NVIDIA_H200") as caught:
        devices.get("NVIDIA H2000")
    assert caught.value.field == "device_name"
    assert not devices.is_reported("NVIDIA_H100")
    assert devices.is_reported("NVIDIA_L20Y")


@pytest.mark.parametrize(
    ("said", "name"),
    [("B60", "Intel(R)_Arc(TM)_Pro_B60_Graphics"), ("mi300x", "AMD_Instinct_MI300X"), ("H200", "NVIDIA_H200")],
)
def test_a_part_of_a_name_leads_to_the_device(said: str, name: str) -> None:
    assert devices.near(said)[0] == name
    assert f"near: {name}" in str(devices.unknown(said))
    with pytest.raises(UsageError) as caught:
        devices.get(said)
    assert str(caught.value.fix).startswith(f"did you mean {name}")
    assert devices.unknown(name) is None


def test_the_b60_has_no_fp8_matrix_unit() -> None:
    b60 = devices.get("Intel(R)_Arc(TM)_Pro_B60_Graphics")
    assert not b60.fp8_matrix_unit
    assert b60.smem_bytes == 131072
    assert devices.get("NVIDIA_H200").fp8_matrix_unit


# The address and the UUID of one card as a driver's tool printed them (sgl-project/sglang#38873, intel/ipex-llm#11605),
# and the same bytes first byte first, as torch prints them.
INTEL = [
    ("00000000-0000-0017-0000-0000e2118086", "0000:17:00.0"),
    ("868011e2-0000-0000-1700-000000000000", "0000:17:00.0"),
    ("00000000-0000-0200-0000-00087d558086", "0000:00:02.0"),
    ("868011e2-0000-0100-c300-010000000000", "0001:c3:00.1"),
]


@pytest.mark.parametrize(("uuid", "address"), INTEL)
def test_an_intel_uuid_holds_the_address(uuid: str, address: str) -> None:
    assert devices.intel_address(uuid) == address
    assert devices.physical_identity("xpu", uuid, None) == address


@pytest.mark.parametrize("uuid", ["1234", "868011e2-0000-0000-1700-0000000000zz", "4c1f0e2a-" * 4, "f" * 32])
def test_another_uuid_holds_none(uuid: str) -> None:
    assert devices.intel_address(uuid) is None
    assert devices.physical_identity("xpu", uuid, None) == f"GPU-{uuid}"


def test_host_and_process_agree_on_a_name() -> None:
    assert devices.physical_identity("cuda", "6f1c", "0:3:0.0") == "GPU-6f1c"
    assert devices.physical_identity("rocm", "6f1c", "0:3:0.0") == "0000:03:00.0"
    assert devices.physical_identity("rocm", None, "0000:A1:00.0") == "0000:a1:00.0"
    assert devices.physical_identity("xpu", None, "83:00.0") == "0000:83:00.0"
    assert devices.physical_identity("xpu", None, None) is None


@pytest.mark.parametrize(
    ("kind", "name", "vendor"),
    [
        ("cuda", "NVIDIA_H200", "nvidia"), ("rocm", "AMD Radeon Graphics", "amd"),
        ("xpu", "Intel(R) Graphics", "intel"), ("cpu", "some processor", "cpu"), ("cuda", "AMD Instinct MI300X", "amd"),
    ],
)  # fmt: skip
def test_a_live_device_has_its_names_vendor_or_its_kinds(kind: str, name: str, vendor: str) -> None:
    assert devices.vendor_by(kind, name) == vendor
