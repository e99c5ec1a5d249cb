"""The key of one launch: who does not have it gets a 401, so no other user of the host joins a measurement.

It travels in the environment, which other users cannot read, and never on a command line, which they can. `serving
launch` makes one for its server and for the command that it runs; a person sets MOEGATE_API_KEY to choose it.
"""

from __future__ import annotations

import hmac
import os
import secrets

from moegate.errors import UsageError

__all__ = ["VARIABLE", "admits", "ensure", "headers", "refused"]

VARIABLE = "MOEGATE_API_KEY"


def ensure() -> str:
    """The key of this process and its children, made where there is none."""
    return os.environ.setdefault(VARIABLE, secrets.token_urlsafe(24))


def headers() -> dict[str, str]:
    """What a client of this process sends along."""
    key = os.environ.get(VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def admits(authorization: str) -> bool:
    """Whether a request's Authorization header opens a server of this process. Without a key everybody may come in."""
    wanted = headers().get("Authorization")
    return wanted is None or hmac.compare_digest(authorization.encode(), wanted.encode())


def refused(url: str) -> UsageError:
    """What a person is told whose request came back as a 401: both ways to have the server's key."""
    sent = f"the {VARIABLE} that is set here is not its own" if VARIABLE in os.environ else "none is set here"
    return UsageError(
        f"{url} answers 401: it wants the key of its launch, and {sent}",
        fix="start it with `serving launch --announce FILE` and give `--launch FILE` here, or export the same "
        f"{VARIABLE} for both",
    )
