"""What is known of other engines' dispatch: their rules for MoE backends, and which functions of theirs to watch."""

from __future__ import annotations
