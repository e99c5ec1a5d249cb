"""The moegate engine: a small MoE decoder served over HTTP, to prove what tuning is worth where nothing else can run.

Two processes, each executed anew: one speaks HTTP and never imports torch, the other (`worker`) holds the device. They
talk over a socket pair, so that a slow step never delays a time stamp and a slow client never delays a step.
"""
