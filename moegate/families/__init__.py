"""Model families: what a Hugging Face config.json says about a model's MoE layers, without torch."""

from __future__ import annotations

from moegate.families.layout import Layout, config_file, layout_of, load_layout
from moegate.families.quant import Quant
from moegate.families.table import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "Layout", "Quant", "config_file", "layout_of", "load_layout"]
