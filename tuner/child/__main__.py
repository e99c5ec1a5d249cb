"""`python -P -m tuner.child`: answers requests on standard input, one JSON line each; see `tuner.child.worker`."""

from __future__ import annotations

from tuner.child.worker import serve

serve()
