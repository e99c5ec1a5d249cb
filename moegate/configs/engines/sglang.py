"""SGLang 0.5.23's lookup, quirks included.

Its directory is named after the whole version text (`3.8.0+git4cff872c` -> `triton_3_8_0+git4cff872c`), so builds with
a suffix never match exactly. Fallback goes through every other `triton_*` entry newest first, newer ones before older
ones, and fails with ValueError on any of them that is no number. Device names are never translated. A down projection
without a file takes the up file, whose USE_TMA then counts for it too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moegate.configs.engines.lenient import read_like_engine
from moegate.configs.engines.raised import EngineRaises
from moegate.configs.names import ConfigKey, Projection, format_name
from moegate.configs.tree import Reason, Resolution

_PREFIX = "triton_"


def lookup(root: Path | None, key: ConfigKey, projection: Projection, triton: str) -> Resolution:
    """What `get_moe_configs` of SGLang returns for `key`, with the reason.

    `root` is what SGLANG_MOE_CONFIG_DIR would name, or its `configs/` folder; None is an empty `configs/`.

    Raises:
        EngineRaises: SGLang would fail.
    """
    name = format_name(key.on(key.device_name.replace(" ", "_")), projection)
    if root is None:
        return Resolution(key, projection, None, "default", engine="sglang")
    folder = _configs_folder(root)
    exact = f"{_PREFIX}{triton.replace('.', '_')}"
    searched = [f"{exact}/{name}"]
    if (folder / exact / name).exists():
        return _found(folder, searched, key, projection, "exact")
    for version in _other_versions(folder):
        if version == triton:
            continue
        searched.append(f"{_PREFIX}{version.replace('.', '_')}/{name}")
        if (folder / searched[-1]).exists():
            reason: Reason = "older-triton" if _numbers(version) < _numbers_of_running(triton) else "newer-triton"
            return _found(folder, searched, key, projection, reason)
    if projection == "down":
        up = lookup(root, key, "up", triton)
        reason = "default" if up.reason == "default" else "up-config"
        return replace(up, projection="down", reason=reason, searched=(*searched, *up.searched))
    return Resolution(key, projection, None, "default", None, tuple(searched), engine="sglang")


def _configs_folder(root: Path) -> Path:
    """`root/configs`, which SGLang goes into unasked; or `root` where it is that folder already."""
    if (root / "configs").is_dir():
        return root / "configs"
    if root.is_dir() and (root.name == "configs" or any(item.name.startswith(_PREFIX) for item in root.iterdir())):
        return root
    return root / "configs"


def _found(folder: Path, searched: list[str], key: ConfigKey, projection: Projection, reason: Reason) -> Resolution:
    configs = read_like_engine("sglang", folder / searched[-1])
    if not configs:  # an empty object is false: the default applies, and no warning says so
        return Resolution(key, projection, None, "default", None, tuple(searched), engine="sglang")
    return Resolution(key, projection, searched[-1], reason, None, tuple(searched), configs, "sglang")


def _other_versions(folder: Path) -> list[str]:
    try:
        names = [entry.name for entry in folder.iterdir()]
        versions = [name.removeprefix(_PREFIX).replace("_", ".") for name in names if name.startswith(_PREFIX)]
        return sorted(versions, key=_numbers, reverse=True)
    except OSError as error:
        raise EngineRaises("sglang", type(error).__name__, str(error), file=folder, fix="create configs/") from None
    except ValueError as error:
        raise EngineRaises(
            "sglang", "ValueError", str(error), file=folder, fix="rename the triton_* entry that is no version"
        ) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _numbers_of_running(triton: str) -> tuple[int, ...]:
    """The numbers of the running version; its suffix, if any, does not matter for older and newer."""
    parts: list[int] = []
    for part in triton.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
