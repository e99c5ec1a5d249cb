"""Compile every kernel for hardware that is not here, and say what came out: memory, registers, spills, block loads."""
