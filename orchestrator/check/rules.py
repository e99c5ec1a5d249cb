"""The rules of `orchestrator check`: one table, each row with what it means, how to fix it and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping

from moegate.records.findings import Finding, RuleText, Severity

_LOOKUP = "docs/explain.md"
_SGLANG = "sglang 0.5.23, fused_moe_triton_config.py"

RULES: tuple[RuleText, ...] = (
    RuleText(
        "unparsable-name",
        "error",
        "The file name is no config key in any spelling: no lookup ever opens the file.",
        "name it E=..,N=..,device_name=..[,dtype=..][,block_shape=[n, k]][,per_channel_quant=True][_down].json",
        _LOOKUP,
    ),
    RuleText(
        "empty-device",
        "error",
        "The device name is empty: the tuner ran where no device could be asked for its name.",
        "rename the file to the device it was tuned on",
        _LOOKUP,
    ),
    RuleText(
        "bad-value",
        "error",
        "The file is no JSON, or a value cannot be launched: the engine fails or falls back.",
        "write the value the message asks for",
        _LOOKUP,
    ),
    RuleText(
        "block-k-exceeds-group",
        "error",
        "BLOCK_SIZE_K above the group of scales applies one scale to two groups: "
        "wrong results where the kernel does not clamp it.",
        "use a BLOCK_SIZE_K that divides the block's k",
        "vllm-project/vllm#43506",
    ),
    RuleText(
        "pair-block-m-differ",
        "error",
        "Up and down share one sorting of the tokens, so down runs with up's "
        "BLOCK_SIZE_M, which it was not timed with.",
        "tune both projections together",
        "sgl-project/sglang#10567, torchada#93",
    ),
    RuleText(
        "smem-exceeds",
        "error",
        "The pipeline's buffers alone exceed what one block may use on this device: the first forward pass fails.",
        "reduce num_stages or the tile",
        "sgl-project/sglang#28019, #28077, #6001",
    ),
    RuleText(
        "compile-failed",
        "error",
        "The compiler refuses this config for the file's device.",
        "re-tune this batch size",
        "facts of `tuner compile`",
    ),
    RuleText(
        "dispatch-changed",
        "error",
        "Another backend, or another order of backends, would serve.",
        "accept it in the same change: `orchestrator dispatch lock`",
        "docs/dispatch.md",
    ),
    RuleText(
        "coverage-lost",
        "error",
        "A key that had tuned configs before has none, or worse ones, now.",
        "restore the file or the batch size, or tune the new key",
        _LOOKUP,
    ),
    RuleText(
        "family-drift",
        "error",
        "A model's E, N, top-k or layers are derived differently than before: its configs "
        "are looked up under another name.",
        "undo the change, or rename and re-tune the configs",
        _LOOKUP,
    ),
    RuleText(
        "bad-model-config",
        "error",
        "The model config does not say what its MoE layers look like.",
        "add the field that the message names",
        _LOOKUP,
    ),
    RuleText(
        "fallback-device-name",
        "warning",
        "Drivers give this name to parts they do not know: several devices share it.",
        "name the file after the device it was tuned on",
        "sgl-project/sglang#3492, vllm-project/vllm#27623",
    ),
    RuleText(
        "unparsable-triton-dir",
        "warning",
        "The directory is named after no Triton version; SGLang raises ValueError "
        "for every fallback lookup while it exists.",
        "name it triton_X_Y_Z",
        _SGLANG,
    ),
    RuleText(
        "unknown-field",
        "warning",
        "A parameter that the kernel or the device's compiler does not know.",
        "remove it or correct its spelling",
        _LOOKUP,
    ),
    RuleText(
        "missing-field",
        "warning",
        "A parameter is left to the compiler's default, which no tuner timed.",
        "add the parameter",
        _LOOKUP,
    ),
    RuleText(
        "unsorted-keys",
        "warning",
        "Batch sizes out of order: between two that are equally near, the first in the file wins.",
        "sort the batch sizes ascending",
        _SGLANG,
    ),
    RuleText(
        "pair-missing",
        "warning",
        "A down file without its up file: up runs on other configs than down was tuned with.",
        "add the up file beside it",
        "sgl-project/sglang#10567",
    ),
    RuleText(
        "pair-keys-differ",
        "warning",
        "Up and down cover different batch sizes: between them one is interpolated.",
        "tune both projections for the same batch sizes",
        "sgl-project/sglang#10567",
    ),
    RuleText(
        "duplicate-of",
        "warning",
        "The same content as another file: copied, not tuned.",
        "tune this key, or delete the copy and rely on the reviewed alias",
        "sgl-project/sglang#6974, #3492",
    ),
    RuleText(
        "unreachable",
        "warning",
        "No device, Triton, backend or request forms this name in this engine.",
        "rename the file to what the engine asks for",
        "vllm-project/vllm#23271",
    ),
    RuleText(
        "spills",
        "warning",
        "The compiled kernel spills registers.",
        "re-tune with spilling configs demoted",
        "facts of `tuner compile`",
    ),
    RuleText(
        "block-io-lost",
        "warning",
        "Descriptor loads did not become hardware block loads.",
        "set USE_TMA to false, or the code-generation switch that the message names",
        "intel/intel-xpu-backend-for-triton#7306",
    ),
    RuleText(
        "partial-sweep",
        "warning",
        "The tuner saw only part of its space: the file is no full sweep, nor a search that came to its end.",
        "finish the sweep (`tuner tune --effort full`)",
        "sgl-project/sglang#28723 review",
    ),
    RuleText(
        "stale-provenance",
        "warning",
        "Timed on other sources of its kernel, the content changed since, or the sidecar contradicts itself.",
        "re-tune on the kernel that will be served",
        _LOOKUP,
    ),
    RuleText(
        "codegen-env-differs",
        "warning",
        "Up and down were tuned under different code-generation settings.",
        "tune both projections in one run",
        _LOOKUP,
    ),
    RuleText(
        "resolution-changed",
        "warning",
        "A key resolves to another file, or to other values, than before.",
        "check that the change is meant and measured",
        _LOOKUP,
    ),
)

BY_ID: Mapping[str, RuleText] = {rule.id: rule for rule in RULES}


def finding(
    rule: str, file: str, line: int, message: str, *, fix: str | None = None, severity: Severity | None = None
) -> Finding:
    """One finding of `rule`, with the row's severity and fix unless the place knows better."""
    row = BY_ID[rule]
    return Finding(rule, severity or row.severity, file, line, message, fix or row.fix)


def texts(findings: tuple[Finding, ...]) -> tuple[RuleText, ...]:
    """The rows of the rules that found something, in table order."""
    used = {item.rule for item in findings}
    return tuple(rule for rule in RULES if rule.id in used)
