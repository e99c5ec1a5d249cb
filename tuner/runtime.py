"""For commands that run kernels in their own process: choose the interpreter before Triton is imported."""

from __future__ import annotations

import os

from moegate.version import own_version

__all__ = ["ensure_runnable", "environment_words"]


def ensure_runnable() -> None:
    """On a machine without an accelerator, switch this process to Triton's interpreter before Triton is imported."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if "TRITON_INTERPRET" in os.environ:
        return
    from tuner.pipeline import interpreter_env

    os.environ.update(interpreter_env())


def environment_words() -> dict[str, str]:
    """Versions of what runs and the variables that change code."""
    import platform

    import torch

    from tuner.pipeline import codegen_variables

    words = {"moegate": own_version(), "torch": torch.__version__, "python": platform.python_version()}
    words |= codegen_variables(os.environ)
    try:
        import triton
    except ImportError:
        return words
    return {**words, "triton": triton.__version__}
