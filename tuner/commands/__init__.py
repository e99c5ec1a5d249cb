"""One file per sub-command."""

MOST_TOKENS = 1 << 20
"""A step of more tokens is nobody's: 4096 is the most that config files are made for."""
