"""Reading fields of one model config, whose text model may sit in a section of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegate.errors import UsageError

Section = tuple[str, Mapping[str, Any]]
"""A section's name, empty for the top level, and its fields."""


def dig(section: Mapping[str, Any], name: str) -> Any:
    """The field `name`, whose dots go into nested objects; None where it is not there."""
    value: Any = section
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


class Fields:
    """Reads fields: the chosen section first, then the top level; differences are noted.

    Args:
        sections: the chosen one first, the top level last; where only one is given, that is it.
        others: further sections with a text model. Nothing is read from them, but what they say otherwise is noted.
        file: named in errors. architecture: named where it needs a field.
    """

    def __init__(
        self, sections: tuple[Section, ...], others: tuple[Section, ...], file: str | None, architecture: str
    ) -> None:
        self._sections, self._others = sections, others
        self._file, self._architecture = file, architecture
        self.conflicts: list[str] = []

    @property
    def nested(self) -> str:
        """The chosen section, empty for the top level."""
        return self._sections[0][0]

    def get(self, name: str) -> Any:
        """The value of `name`, None where no section has it."""
        values = [(where, value) for where, section in self._sections if (value := dig(section, name)) is not None]
        if not values:
            return None
        where, ours = values[0]
        for other, section in (*self._sections, *self._others):
            theirs = dig(section, name)
            if theirs is not None and theirs != ours:
                self._note(name, where, ours, other, theirs)
        return ours

    def _note(self, name: str, where: str, ours: Any, other: str, theirs: Any) -> None:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            part = next(key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key))
            name, ours, theirs = f"{name}.{part:.60}", ours.get(part), theirs.get(part)
        places = [f"in {place}" if place else "at the top" for place in (where, other)]
        note = f"{name} is {ours!r:.40} {places[0]} and {theirs!r:.40} {places[1]}: the former counts"
        if note not in self.conflicts:
            self.conflicts.append(note)

    def object_with(self, *names: str) -> Mapping[str, Any]:
        """The first of `names` that is there, as an object of that one field, else an empty one."""
        return next(({name: value} for name in names if (value := self.get(name)) is not None), {})

    def integer(self, names: tuple[str, ...], high: int, low: int = 1) -> int:
        """An integer from `low` to `high` under the first of `names` that is there; UsageError otherwise."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, list) and value and all(item == value[0] for item in value):
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise self.error(name, f"is {value!r:.60}; must be an integer from {low} to {high}")
            return value
        raise self.missing(*names)

    def optional(self, names: tuple[str, ...], default: int, high: int, low: int = 0) -> int:
        """As `integer`, but missing gives `default`; so does false, which some write for none."""
        present = tuple(name for name in names if self.get(name) is not None and self.get(name) is not False)
        return self.integer(present, high, low) if present else default

    def flags(
        self, name: str, words: Mapping[Any, bool], layers: int, *, form: type[list[Any]] | type[str] = list
    ) -> tuple[bool, ...] | None:
        """What a list (or text: `form`) with one of `words` for each layer says; None where it is missing.

        Raises:
            UsageError: it is no such list, is shorter than the model, or has another word.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, form):
            said = "text with a letter" if form is str else "a list with an entry"
            raise self.error(name, f"is {value!r:.60}; must be {said} for each layer")
        if len(value) < layers:
            raise self.error(name, f"tells of {len(value)} layers of {layers}", f"one entry for each of the {layers}")
        found = []
        for place, word in enumerate(value[:layers]):
            if isinstance(word, list | dict) or word not in words:
                known = ", ".join(map(str, words))
                raise self.error(name, f"is {word!r:.40} at layer {place}", f"one of {known} for each layer")
            found.append(words[word])
        return tuple(found)

    def places(self, name: str) -> frozenset[int]:
        """The layers that a list of indices names; none where it is missing."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(name, f"is {value!r:.60}; must be a list of layer indices")
        return frozenset(value)

    def missing(self, *names: str) -> UsageError:
        """That one of `names` is needed."""
        where = self.nested
        fix = f"add {' or '.join(names)}" + (f" to {where}" if where else "")
        return self.error(names[0], f"is missing; {self._architecture} needs it", fix)

    def error(self, name: str, said: str, fix: str | None = None) -> UsageError:
        """That the field `name` is wrong."""
        return UsageError(said, file=self._file, field=name, fix=fix)
