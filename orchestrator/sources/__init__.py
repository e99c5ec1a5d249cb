"""The code of an arm with a `source`: a commit, read from git as data and installed into an environment of its own."""

from __future__ import annotations

from orchestrator.sources.commit import Layout, layout_of, unpack
from orchestrator.sources.environments import Environment, Sources, Start, cache_root, old_environments

__all__ = ["Environment", "Layout", "Sources", "Start", "cache_root", "layout_of", "old_environments", "unpack"]
