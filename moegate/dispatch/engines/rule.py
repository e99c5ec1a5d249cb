"""One row of an engine's rules for its MoE backend, and how such a table is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moegate.configs.names import ConfigKey
from moegate.dispatch.model import Step
from moegate.families import Layout

Applies = Callable[[Layout, ConfigKey, str], bool]


@dataclass(frozen=True)
class BackendRule:
    """Where `applies` says so, `auto` becomes `backend`; `why` says it in words."""

    backend: str
    applies: Applies
    why: str


@dataclass(frozen=True)
class Resolved:
    """What an engine's dispatch comes to, and the rules that were looked at."""

    backend: str
    why: str
    chain: tuple[Step, ...] = ()


def first_rule(rules: tuple[BackendRule, ...], layout: Layout, key: ConfigKey, platform: str) -> Resolved:
    """The first rule that applies; the last one of a table always does."""
    chain: list[Step] = []
    for rule in rules:
        if rule.applies(layout, key, platform):
            chain.append(Step(rule.backend, True, rule.why))
            return Resolved(rule.backend, rule.why, tuple(chain))
        chain.append(Step(rule.backend, False, f"not here: {rule.why}"))
    raise AssertionError("the last rule of a table applies to everything")


def on(*prefixes: str) -> Applies:
    """The platform's name starts with one of `prefixes`."""
    return lambda layout, key, platform: platform.startswith(prefixes)


def always(layout: Layout, key: ConfigKey, platform: str) -> bool:
    """Everything."""
    return True


def quantised(*dtypes: str) -> Applies:
    """The key's dtype field is one of `dtypes`."""
    return lambda layout, key, platform: key.dtype in dtypes


def both(*conditions: Applies) -> Applies:
    """All of `conditions`."""
    return lambda layout, key, platform: all(condition(layout, key, platform) for condition in conditions)
