"""Container images: content-addressed, built by buildx bake or the SDK's classic builder, recorded for the keys."""

from __future__ import annotations

from orchestrator.images.build import Builder, ensure, write_provenance
from orchestrator.images.preflight import obstacle
from orchestrator.images.request import BuildFailure, BuiltImage

__all__ = ["BuildFailure", "Builder", "BuiltImage", "ensure", "obstacle", "write_provenance"]
