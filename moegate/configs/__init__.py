"""Tuned config files: their names, their values and their lookup, without a device and without torch."""

from __future__ import annotations

from moegate.configs.defaults import default_config
from moegate.configs.names import (
    ConfigKey,
    DenseKey,
    ParsedName,
    Projection,
    format_dense_name,
    format_name,
    parse_name,
)
from moegate.configs.tree import Candidate, ConfigTree, Pair, Reason, Resolution, TreeFile
from moegate.configs.values import BATCH_SIZES, FIELDS, load_config, nearest, parse_config
from moegate.configs.versions import Version, directory_name, parse_directory, parse_version

__all__ = [
    "BATCH_SIZES",
    "FIELDS",
    "Candidate",
    "ConfigKey",
    "ConfigTree",
    "DenseKey",
    "Pair",
    "ParsedName",
    "Projection",
    "Reason",
    "Resolution",
    "TreeFile",
    "Version",
    "default_config",
    "directory_name",
    "format_dense_name",
    "format_name",
    "load_config",
    "nearest",
    "parse_config",
    "parse_directory",
    "parse_name",
    "parse_version",
]
