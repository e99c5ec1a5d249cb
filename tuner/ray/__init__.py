"""Tuning on a Ray cluster: batch-size groups leased to GPUs. Ray is imported only in here, and only when asked for."""
