"""Rules that look at a folder as a whole: directories, pairs of projections, copies, provenance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moegate import canonical
from moegate.configs import ConfigKey
from moegate.configs.engines import EngineLookup
from moegate.configs.positions import line_of
from moegate.errors import UsageError
from moegate.kernels import LAUNCHERS, changed, code_hash, hash_of, kernel_files
from moegate.paths import is_file
from moegate.records import Provenance, read
from moegate.records.findings import Finding
from moegate.records.provenance import sidecar_name
from orchestrator.check.files import FileFacts
from orchestrator.check.rules import finding
from orchestrator.check.trees import Entry

# Settings that change generated code; a difference between two files of a pair means two different kernels.
CODEGEN_PREFIXES = ("TRITON_", "IGC_", "SYCL_", "NEO", "MLIR_", "LLVM_", "DISABLE_PTXAS", "HSA_", "AMDGCN_")

Pairs = dict[tuple[Path, str, ConfigKey], dict[str, FileFacts]]


def directory_finding(entry: Entry, shown: str) -> Finding:
    """A directory that holds configs under a name that is no Triton version."""
    plain = entry.name.lower().startswith("triton")
    why = "is no triton_X_Y_Z" if plain else "holds config files but is no triton_X_Y_Z: no lookup enters it"
    return finding("unparsable-triton-dir", shown, 1, f"{entry.name!r:.120} {why}")


def pair_findings(facts: Iterable[FileFacts], engine: EngineLookup) -> Iterator[Finding]:
    """Down files against the up files beside them."""
    if not engine.down_files:
        return
    pairs: Pairs = defaultdict(dict)
    elsewhere: dict[ConfigKey, str] = {}
    for file in facts:
        if file.parsed is None or not isinstance(file.parsed.key, ConfigKey) or file.parsed.backend:
            continue
        pairs[file.entry.path.parent, file.entry.directory, file.parsed.key][file.parsed.projection] = file
        if file.parsed.projection == "up":
            elsewhere.setdefault(file.parsed.key, file.shown)
    for (_, _, key), pair in pairs.items():
        down = pair.get("down")
        if down is None:
            continue
        up = pair.get("up")
        if up is None:
            said = f"; the nearest is {elsewhere[key]}" if key in elsewhere else ""
            yield finding("pair-missing", down.shown, 1, f"no up file for {key.words} beside this down file{said}")
        elif up.block_m and down.block_m:
            yield from _pair(up, down)


def _pair(up: FileFacts, down: FileFacts) -> Iterator[Finding]:
    only_up, only_down = sorted(set(up.block_m) - set(down.block_m)), sorted(set(down.block_m) - set(up.block_m))
    if only_up or only_down:
        parts = [f"{_some(sizes)} only in {where}" for where, sizes in (("up", only_up), ("down", only_down)) if sizes]
        yield finding("pair-keys-differ", down.shown, 1, "batch sizes " + " and ".join(parts))
    text: str | None = None
    for size in sorted(set(up.block_m) & set(down.block_m)):
        if up.block_m[size] == down.block_m[size]:
            continue
        text = down.entry.path.read_text(encoding="utf-8") if text is None else text
        yield finding(
            "pair-block-m-differ",
            down.shown,
            line_of(text, (str(size), "BLOCK_SIZE_M")),
            f"batch size {size}: down has BLOCK_SIZE_M {down.block_m[size]}, up has {up.block_m[size]}, and up's runs",
        )


def duplicate_findings(facts: Iterable[FileFacts]) -> Iterator[Finding]:
    """Files whose content equals an earlier file's."""
    first: dict[str, FileFacts] = {}
    for file in facts:
        if not file.digest:
            continue
        original = first.setdefault(file.digest, file)
        if original is not file:
            yield finding("duplicate-of", file.shown, 1, f"same content as {original.shown}: {_kind(original, file)}")


def _kind(original: FileFacts, copy: FileFacts) -> str:
    a, b = original.parsed, copy.parsed
    if a is None or b is None:
        return "copied"
    if a.key == b.key and a.projection != b.projection:
        return "down repeats up"
    if a.key == b.key:
        return f"copied from {original.entry.directory or 'another folder'} and not timed on this Triton"
    if a.key.device_name != b.key.device_name:
        return f"copied from {a.key.device_name}"
    return "copied from another shape"


def provenance_findings(facts: Iterable[FileFacts]) -> Iterator[Finding]:
    """What the sidecars say: partial sweeps, content changed since, another kernel, other code-generation settings.

    The kernels that will be served are the installed ones; without them no sidecar is compared with kernels.
    """
    now = {op: kernel_files(op) for op in LAUNCHERS}
    seen: dict[tuple[Path, ConfigKey], tuple[FileFacts, Provenance]] = {}
    for file in sorted(
        facts, key=lambda item: (item.parsed is not None and item.parsed.projection == "down", item.shown)
    ):
        sidecar = file.entry.path.with_name(sidecar_name(file.entry.name))
        if not is_file(sidecar):
            continue
        shown = file.shown.removesuffix(".json") + ".provenance.json"
        try:
            record = read(Provenance, sidecar)
        except UsageError as error:
            yield finding("stale-provenance", shown, error.line or 1, error.message, fix="write the sidecar again")
            continue
        yield from _one_provenance(file, shown, record, now)
        if file.parsed is None or not isinstance(file.parsed.key, ConfigKey):
            continue
        other = seen.setdefault((file.entry.path.parent, file.parsed.key), (file, record))
        if other[0] is not file and (names := _codegen_difference(other[1], record)):
            yield finding("codegen-env-differs", shown, 1, f"up and down were tuned with different {', '.join(names)}")


def _one_provenance(
    file: FileFacts, shown: str, record: Provenance, now: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    if record.config_sha256 and record.config_sha256 != canonical.file_digest(file.entry.path):
        yield finding("stale-provenance", shown, 1, "the config changed after this was written")
    if record.origin != "measured":
        return
    # A search that came to its end leaves out on purpose what it does not visit.
    ended = record.detail.get("strategy") == "racing" and record.detail.get("complete") is True
    if record.candidates and record.covered < record.candidates and not ended:
        share = record.covered / record.candidates
        yield finding(
            "partial-sweep",
            shown,
            1,
            f"{record.covered} of {record.candidates} candidates ({share:.1%}) were evaluated",
        )
    if record.engine == "moegate":
        why = [_other_kernel(record, now.get(record.op, {})), _contradiction(record)]
        if any(why):
            yield finding("stale-provenance", shown, 1, "; ".join(filter(None, why)))


def _contradiction(record: Provenance) -> str:
    """Where the kernel's hash is not that of the sources named beside it, by which alone they can be told; else empty.

    No kernel needs to be installed to see it: whoever edits the list by hand, so that it fits, is found out.
    """
    if not record.kernel_files or record.kernel_hash == hash_of(record.kernel_files):
        return ""
    told = f"{record.kernel_hash:.12}" or "empty"
    return f"it contradicts itself: kernel_hash is {told}, that of its kernel_files {hash_of(record.kernel_files)[:12]}"


def _other_kernel(record: Provenance, now: Mapping[str, str]) -> str:
    """How the kernel that was timed differs from the one that will be served, whose sources are `now`; else empty."""
    if not now or not record.kernel_hash:
        return ""
    if record.kernel_files:
        what = changed(record.kernel_files, now)
        return f"timed on another kernel: {what:.400} since" if what else ""  # a damaged sidecar names what it likes
    if record.kernel_hash == code_hash():
        return ""
    return (
        f"timed on kernel {record.kernel_hash[:12]}, a hash over all kernels as it was kept before there was one for "
        "each: whether this one has changed since cannot be told"
    )


def _codegen_difference(one: Provenance, other: Provenance) -> list[str]:
    a, b = _codegen(one.environment), _codegen(other.environment)
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def _codegen(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(CODEGEN_PREFIXES)}


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + (f" and {len(sizes) - 6} more" if len(sizes) > 6 else "")
