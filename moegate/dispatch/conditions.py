"""Conditions of dispatch rows: each says why a row cannot serve, or None where it can."""

from __future__ import annotations

from collections.abc import Mapping

from moegate.dispatch.model import Capabilities, Condition, Problem
from moegate.dispatch.platforms import NO_FP8_UNIT

Block = tuple[int, int]


def needs_torch(major: int = 0, minor: int = 0) -> Condition:
    """torch is there, and new enough where a version is given."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        if caps.torch is None:
            return "torch is not installed"
        if major and not caps.torch_at_least(major, minor):
            return f"torch {caps.torch} is older than {major}.{minor}"
        return None

    return check


def needs_triton(problem: Problem, caps: Capabilities) -> str | None:
    """Triton is there, and on the CPU its interpreter is on."""
    if caps.triton is None:
        return "triton is not installed"
    if caps.platform == "cpu" and not caps.interpreter:
        return "on the CPU Triton kernels run in the interpreter only (TRITON_INTERPRET=1)"
    return None


def needs_package(name: str) -> Condition:
    """Another project's kernels are importable."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if name in caps.packages else f"package {name} is not installed"

    return check


def needs_fact(name: str, words: str) -> Condition:
    """The live device is known to have something: where nobody told, it has not."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if caps.probe(name) else f"needs {words}, and this device is not known to be one"

    return check


def driver_below(major: int, *platforms: str) -> Condition:
    """On `platforms` the driver is older than `major`, or not known."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        found = caps.driver_major
        if caps.platform not in platforms or found is None or found < major:
            return None
        return f"driver {caps.driver} is {major} or newer"

    return check


def needs_env(name: str, default: bool = False) -> Condition:
    """A variable that switches the row on is set."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if caps.flag(name, default) else f"{name} is not 1"

    return check


def needs_probe(name: str, words: str) -> Condition:
    """The live device did not refuse something; where nobody asked it, the row may be tried."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return f"this device refuses {words}" if caps.probe(name) is False else None

    return check


def quant_in(*schemes: str | None) -> Condition:
    """The weights are stored in one of `schemes`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        if problem.quant in schemes:
            return None
        return f"does not serve {_weights(problem)}"

    return check


def meant_for(*schemes: str | None) -> Condition:
    """The weights are those that `auto` means a row for; by name it serves others too."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        said = ", ".join(scheme or "unquantised" for scheme in schemes)
        return None if problem.quant in schemes else f"auto takes it for {said} weights"

    return check


def _weights(problem: Problem) -> str:
    return f"{problem.quant or 'unquantised'} weights"


def quant_only_on(quant: str, *platforms: str) -> Condition:
    """Weights in `quant` are for `platforms` alone."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        if problem.quant != quant or caps.platform in platforms:
            return None
        return f"serves {quant} weights on {', '.join(platforms)} alone"

    return check


def block_in(*shapes: Block) -> Condition:
    """The block of scales is one of `shapes`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        if problem.block_shape in shapes:
            return None
        return f"serves blocks {_blocks(shapes)}, not {_block(problem.block_shape)}"

    return check


def serves(schemes: Mapping[str | None, tuple[Block | None, ...]]) -> Condition:
    """The weights are in one of `schemes`, in a block that it may have there; None is one scale per tensor or row."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        blocks = schemes.get(problem.quant)
        if blocks is None:
            return f"does not serve {_weights(problem)}"
        if problem.block_shape in blocks:
            return None
        return f"serves {_weights(problem)} in blocks {_blocks(blocks)}, not {_block(problem.block_shape)}"

    return check


def _blocks(blocks: tuple[Block | None, ...]) -> str:
    return ", ".join(_block(block) for block in blocks)


def _block(block: Block | None) -> str:
    return "no block" if block is None else str(list(block))


def activation_in(*names: str) -> Condition:
    """The activation between the projections is one of `names`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if problem.activation in names else f"has {', '.join(names)}, not {problem.activation}"

    return check


def deep_gemm_blocks(problem: Problem, caps: Capabilities) -> str | None:
    """DeepGEMM multiplies the block: [128,128]; [32,32] too on sm_90, and on sm_100 with power-of-two scales."""
    if problem.block_shape == (32, 32) and caps.platform == "cuda-sm100":
        return needs_ue8m0(problem, caps)
    return block_in((128, 128), (32, 32))(problem, caps)


def block_on(platform: str, *shapes: Block) -> Condition:
    """On `platform` the block of scales is one of `shapes`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return block_in(*shapes)(problem, caps) if caps.platform == platform else None

    return check


def fp8_here(problem: Problem, caps: Capabilities) -> str | None:
    """The platform multiplies FP8 matrices, or runs them through torch on the CPU."""
    return f"{caps.platform} has no FP8 matrix unit" if caps.platform in NO_FP8_UNIT else None


def bfloat16_or_cpu(problem: Problem, caps: Capabilities) -> str | None:
    """The answer is bfloat16, the one result that scaled_mm has for scales per row on every GPU; a CPU has all."""
    if problem.dtype == "bfloat16" or caps.platform == "cpu":
        return None
    return f"may round {problem.dtype} to bfloat16 on {caps.platform}"


def triton_e4m3(problem: Problem, caps: Capabilities) -> str | None:
    """Triton compiles torch's FP8 type (float8_e4m3fn) for the platform."""
    return f"Triton has no float8_e4m3fn on {caps.platform}" if caps.platform == "cuda-sm80" else None


def triton_fp8(problem: Problem, caps: Capabilities) -> str | None:
    """As `triton_e4m3`, where the weights are FP8."""
    return triton_e4m3(problem, caps) if problem.quant == "fp8_w8a8" else None


def needs_scaled_mm(problem: Problem, caps: Capabilities) -> str | None:
    """torch has `scaled_mm` with block recipes: 2.11 on CUDA, 2.13 on XPU."""
    wanted = (2, 13) if caps.platform.startswith("xpu") else (2, 11)
    return needs_torch(*wanted)(problem, caps)


def needs_ue8m0(problem: Problem, caps: Capabilities) -> str | None:
    """The scales are powers of two, as MXFP8 wants them."""
    return None if problem.ue8m0 else "needs scales that are powers of two (ue8m0)"


def npu_scales(problem: Problem, caps: Capabilities) -> str | None:
    """The scales are powers of two, or the engine is told to make them so as it loads the weights."""
    name = "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8"
    return None if problem.ue8m0 or caps.flag(name) else f"needs scales that are powers of two (ue8m0), or {name}=1"


def a2a_in(*backends: str) -> Condition:
    """The expert-parallel transport is one of `backends`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if problem.a2a in backends else f"needs all-to-all {' or '.join(backends)}, not {problem.a2a}"

    return check


def power_of_two_experts(problem: Problem, caps: Capabilities) -> str | None:
    """The number of experts is known and a power of two, at most 32 in a group."""
    if not problem.experts:
        return "needs to know the number of experts"
    if problem.experts & (problem.experts - 1):
        return f"needs a power of two experts, not {problem.experts}"
    if problem.groups and problem.experts // problem.groups > 32:
        return f"needs at most 32 experts a group, not {problem.experts // problem.groups}"
    return None
