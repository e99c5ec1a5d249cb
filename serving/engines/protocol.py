"""What every engine answers: how it is started, when it is ready, and what it really ran."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from moegate.errors import InfraError
from serving import apikey
from serving.account import Account

__all__ = ["Command", "Engine", "Launched", "Spec", "get_json", "is_up"]

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Spec:
    """What a person asked for.

    `model` is a folder with a config.json, or that file. `weights` is `random` or a folder. `configs` is a folder of
    tuned configs, or None for an empty tree. `port` 0 is any free one. `slots` and `length` 0 leave the choice to the
    engine. `memory_share` is the part of a device's memory that this server may plan with: less than 1 where others
    stay on the device. `extra` goes to the engine's command line as it is.
    """

    model: Path
    weights: str = "random"
    dtype: str = "auto"
    backend: str = "auto"
    graph: Literal["eager", "full"] = "eager"
    configs: Path | None = None
    port: int = 0
    seed: int = 0
    tp: int = 1
    ep: int = 1
    slots: int = 0
    length: int = 0
    memory_share: float = 1.0
    record_routing: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def model_folder(self) -> Path:
        """The folder that holds config.json."""
        return self.model if self.model.is_dir() else self.model.parent


@dataclass(frozen=True)
class Command:
    """How to start a server: its argv, and variables on top of the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launched:
    """A server that has been started: what it was asked, where it answers, and where its log is."""

    spec: Spec
    base_url: str
    log: Path
    work: Path


class Engine(Protocol):
    """One engine."""

    name: str
    ready_s: float
    """Seconds until a server that is not ready has failed."""

    def command(self, spec: Spec, work: Path, port: int) -> Command:
        """How to start it. `work` is an empty folder of this launch. UsageError for what it cannot do."""

    def base_url(self, work: Path, port: int) -> str | None:
        """Where it answers; None while that is not known yet."""

    def account(self, launched: Launched) -> Account:
        """What it ran, asked for after the load. InfraError where it cannot be found out."""


def get_json(base_url: str, path: str, timeout_s: float = 10.0) -> Any:
    """GET a JSON document from a server on this host; InfraError where there is none, UsageError without its key."""
    try:
        status, data = _get(base_url, path, timeout_s)
        if status == 401:
            raise apikey.refused(base_url + path)
        if status != 200:
            raise InfraError(f"{base_url}{path} answers {status}")
        return json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise InfraError(f"{base_url}{path}: {error}") from None


def is_up(base_url: str) -> bool:
    """Whether `/health` answers 200."""
    try:
        return _get(base_url, "/health", 2.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _get(base_url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or HOST, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=apikey.headers())
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
