"""One file per sub-command."""

FEW_SIZES = (1, 2, 4, 8)
"""Batch sizes where nobody names any, under Triton's interpreter and for a bench."""

MOST_TOKENS = 1 << 20
"""A step of more tokens is nobody's: 4096 is the most that config files are made for."""
