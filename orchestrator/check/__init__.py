"""Config and dispatch regressions, found at the pull request: no GPU, no torch, a second or two."""

from __future__ import annotations
