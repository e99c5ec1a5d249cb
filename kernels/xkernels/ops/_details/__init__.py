"""Triton kernels behind the public operators. Private: signatures change without notice."""
