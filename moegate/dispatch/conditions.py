"""Conditions of dispatch rows: each says why a row cannot serve, or None where it can."""

from __future__ import annotations

from moegate.dispatch.model import Capabilities, Condition, Problem


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
        return f"does not serve {problem.quant or 'unquantised'} weights"

    return check


def block_in(*shapes: tuple[int, int]) -> Condition:
    """The block of scales is one of `shapes`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        if problem.block_shape in shapes:
            return None
        said = list(problem.block_shape) if problem.block_shape else "no block"
        return f"serves blocks {', '.join(str(list(shape)) for shape in shapes)}, not {said}"

    return check


def deep_gemm_blocks(problem: Problem, caps: Capabilities) -> str | None:
    """DeepGEMM multiplies the block: [128,128]; [32,32] too on sm_90, and on sm_100 with power-of-two scales."""
    if problem.block_shape == (32, 32) and caps.platform == "cuda-sm100":
        return needs_ue8m0(problem, caps)
    return block_in((128, 128), (32, 32))(problem, caps)


def block_on(platform: str, *shapes: tuple[int, int]) -> Condition:
    """On `platform` the block of scales is one of `shapes`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return block_in(*shapes)(problem, caps) if caps.platform == platform else None

    return check


def fp8_here(problem: Problem, caps: Capabilities) -> str | None:
    """The platform multiplies FP8 matrices, or runs them through torch on the CPU."""
    if caps.platform in {"cuda-sm80", "npu"}:
        return f"{caps.platform} has no FP8 matrix unit"
    return None


def needs_scaled_mm(problem: Problem, caps: Capabilities) -> str | None:
    """torch has `scaled_mm` with block recipes: 2.11 on CUDA, 2.13 on XPU."""
    wanted = (2, 13) if caps.platform.startswith("xpu") else (2, 11)
    return needs_torch(*wanted)(problem, caps)


def needs_ue8m0(problem: Problem, caps: Capabilities) -> str | None:
    """The scales are powers of two, as MXFP8 wants them."""
    return None if problem.ue8m0 else "needs scales that are powers of two (ue8m0)"


def a2a_in(*backends: str) -> Condition:
    """The expert-parallel transport is one of `backends`."""

    def check(problem: Problem, caps: Capabilities) -> str | None:
        return None if problem.a2a in backends else f"needs all-to-all {' or '.join(backends)}, not {problem.a2a}"

    return check


def power_of_two_experts(problem: Problem, caps: Capabilities) -> str | None:
    """The number of experts is a power of two, at most 32 in a group."""
    if problem.experts & (problem.experts - 1):
        return f"needs a power of two experts, not {problem.experts}"
    if problem.groups and problem.experts // problem.groups > 32:
        return f"needs at most 32 experts a group, not {problem.experts // problem.groups}"
    return None
