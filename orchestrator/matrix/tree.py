"""Read YAML into a tree that remembers its lines, and in which every scalar is still the text that was written.

YAML 1.1 turns `no` into False, `3.10` into 3.1, `010` into 8 and `12:30` into 750, and keeps the last of two
equal keys. So nothing is typed here: the tree is built from parser events (no recursion, no construction), and
the schema decides what a text means. Tags, merge keys and a second document are refused; aliases are allowed until
they multiply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moegate.errors import UsageError

__all__ = [
    "MAX_BYTES",
    "Mapping_",
    "Node",
    "Scalar",
    "Sequence_",
    "change",
    "dotted",
    "find",
    "line_of",
    "parse",
    "plain",
]

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 200_000  # counted with aliases expanded: a bomb is refused before it is unfolded


@dataclass(frozen=True)
class Scalar:
    """One value as written. `bare` is false where it was quoted."""

    text: str
    line: int
    bare: bool
    size: int = 1


@dataclass
class Sequence_:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)
    size: int = 1


@dataclass
class Mapping_:
    """A mapping; `lines` are those of its keys."""

    line: int
    items: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    size: int = 1


Node = Scalar | Sequence_ | Mapping_


class Text(str):
    """A scalar on its way to the schema: its text, and whether it was bare (unquoted)."""

    bare: bool = True

    @classmethod
    def of(cls, scalar: Scalar) -> Text:
        """Wrap a scalar of the tree."""
        text = cls(scalar.text)
        text.bare = scalar.bare
        return text


def find(tree: Node, place: Sequence[str | int]) -> Node | None:
    """The node at a place (keys and indices from the top), or None where nothing was written."""
    node: Node | None = tree
    for step in place:
        if isinstance(node, Mapping_):
            node = node.items.get(str(step))
        elif isinstance(node, Sequence_) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
        else:
            return None
    return node


def line_of(tree: Mapping_, place: Sequence[str | int]) -> int:
    """The line of a key or list entry; the nearest line above where the place itself was not written."""
    node: Node = tree
    line = 1
    for step in place:
        if isinstance(node, Mapping_) and str(step) in node.items:
            line, node = node.lines[str(step)], node.items[str(step)]
        elif isinstance(node, Sequence_) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            line = node.line
        else:
            break
    return line


def plain(node: Node) -> Any:
    """Turn a tree into dicts, lists and `Text`, for the schema. Depth is bounded by `parse`."""
    if isinstance(node, Scalar):
        return Text.of(node)
    if isinstance(node, Sequence_):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.items.items()}


def parse(path: Path) -> Mapping_:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UsageError: with the file, the line and what would be right.
    """
    root = _nodes(path, _read(path))
    if root is None:
        raise UsageError("is empty", file=path, line=1, fix="start with `schema: 1` and `name: ...`")
    if not isinstance(root, Mapping_):
        raise UsageError(
            "the top level must be a mapping of keys", file=path, line=root.line, fix="start with `schema: 1`"
        )
    return root


def _nodes(path: Path, text: str, at: int | None = None) -> Node | None:
    """at: the line that every node is said to be of, where the text is not the file's."""
    builder = _Builder(path, at)
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        for event in _events(yaml.parse(text, Loader=loader)):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise UsageError(_yaml_problem(error.problem or str(error), text, line), file=path, line=line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else None
        raise UsageError(
            f"character {error.character!r} is not allowed in YAML", file=path, line=line, fix="remove it"
        ) from None
    return builder.root


_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")


def change(tree: Mapping_, path: Path, setting: str) -> Mapping_:
    """Return the tree with one value replaced or added: `cells[2].load.requests=8`, as error messages name places.

    Raises:
        UsageError: the place is not one of this tree, or the value is not YAML.
    """
    key, mark, text = setting.partition("=")
    steps = [int(number) if number else name for name, number in _STEP.findall(key)]
    if not mark or not steps or dotted(steps) != key:
        raise UsageError(f"{setting[:80]!r} is not PLACE=VALUE", field="--set", fix="such as cells[2].load.requests=8")
    try:
        setting.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{setting[:80]!r} is not UTF-8", field="--set", fix="write it as the matrix would hold it"
        ) from None
    try:
        value = _nodes(path, text, line_of(tree, steps))
    except UsageError as error:
        raise UsageError(f"{key}: {error.message}", field="--set", fix="a value as the matrix would hold it") from None
    if value is None:
        raise UsageError(f"{key} has no value", field="--set", fix=f"write {key}=VALUE")
    found = _with(tree, steps, value)
    if not isinstance(found, Mapping_):
        raise UsageError(f"there is no {key} in {path}", field="--set", fix="a place as error messages name it")
    return found


def _with(node: Node | None, steps: Sequence[str | int], value: Node) -> Node | None:
    """A copy of the node, down to the place; None where a step leads nowhere. Aliases elsewhere keep what they hold."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if isinstance(node, Mapping_):
        name = str(step)
        inner = _with(node.items.get(name), rest, value)
        lines = {**node.lines, name: node.lines.get(name, node.line)}
        return None if inner is None else Mapping_(node.line, {**node.items, name: inner}, lines, node.size)
    if isinstance(node, Sequence_) and isinstance(step, int) and step < len(node.items):
        inner = _with(node.items[step], rest, value)
        items = [inner if index == step else item for index, item in enumerate(node.items)]
        return None if inner is None else Sequence_(node.line, [item for item in items if item is not None], node.size)
    return None


def dotted(place: Sequence[str | int]) -> str:
    """A place as messages name it: `cells[2].load.requests`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else str(step))
    return text


def _events(events: Any) -> Iterator[Any]:
    """Yield events; the C parser raises ValueError-like errors for odd characters as the Python one does."""
    yield from events


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise UsageError("is a folder", file=path, fix="name the matrix file in it")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}", file=path, fix="name an existing matrix, such as matrix.yaml"
        ) from None
    except ValueError:
        raise UsageError("is not a file name", file=repr(str(path))) from None
    if len(data) > MAX_BYTES:
        raise UsageError("is larger than 1 MiB", file=path, fix="a matrix is a page or two; let axes multiply instead")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"is not UTF-8 (byte 0x{data[error.start]:02x})", file=path, line=line, fix="save it as UTF-8"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError("holds a NUL character", file=path, line=line, fix="save it as UTF-8 text")
    return text


def _yaml_problem(problem: str, text: str, line: int | None) -> str:
    lines = text.splitlines()
    here = lines[line - 1] if line is not None and 0 < line <= len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())] or "'\\t'" in problem:
        return "is indented with a tab (fix: YAML indents with spaces)"
    return f"is not YAML: {problem}"


class _Builder:
    """Builds the tree from events with a stack of its own, so that depth is a number and not a crash."""

    def __init__(self, path: Path, at: int | None = None) -> None:
        self.path, self._at = path, at
        self.root: Node | None = None
        self._documents = 0
        self._nodes = 0
        self._stack: list[tuple[Sequence_ | Mapping_, str | None]] = []
        self._key: tuple[str, int] | None = None
        self._anchors: dict[str, Node] = {}
        self._open: set[int] = set()

    def take(self, event: Any) -> None:
        """Consume one parser event."""
        name = type(event).__name__
        line = event.start_mark.line + 1 if self._at is None else self._at
        if name == "DocumentStartEvent":
            self._documents += 1
            if self._documents > 1:
                self._fail("holds a second document", line, "keep one matrix per file; remove the `---`")
        elif name == "ScalarEvent":
            self._refuse_tag(event, line)
            bare = event.style is None or event.style == ""
            self._place(Scalar(event.value, line, bare), line, event.anchor)
        elif name == "AliasEvent":
            self._alias(event.anchor, line)
        elif name in ("SequenceStartEvent", "MappingStartEvent"):
            self._refuse_tag(event, line)
            self._begin(Sequence_(line) if name == "SequenceStartEvent" else Mapping_(line), line, event.anchor)
        elif name in ("SequenceEndEvent", "MappingEndEvent"):
            self._end()

    def _fail(self, message: str, line: int, fix: str, field_: str | None = None) -> None:
        raise UsageError(message, file=self.path, line=line, field=field_, fix=fix)

    def _refuse_tag(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!"):
            self._fail(f"has the tag {event.tag!r}", line, "write the value without a tag; the schema knows its type")

    def _count(self, size: int, line: int) -> None:
        self._nodes += size
        if self._nodes > MAX_NODES:
            self._fail(f"unfolds to more than {MAX_NODES} values", line, "remove the aliases (`*name`) that multiply")

    def _alias(self, anchor: str, line: int) -> None:
        node = self._anchors.get(anchor)
        if node is None:
            self._fail(f"alias *{anchor} names no anchor before it", line, f"define &{anchor} first")
            return
        if id(node) in self._open:
            self._fail(f"alias *{anchor} contains itself", line, "remove it")
        self._place(node, line, None)

    def _begin(self, node: Sequence_ | Mapping_, line: int, anchor: str | None) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self._fail(f"is nested more than {MAX_DEPTH} levels deep", line, "a matrix needs six")
        if self._is_key():
            self._fail("a key must be a single word", line, "write `name: value`")
        self._count(1, line)
        key = self._key[0] if self._key else None
        self._attach(node, line)
        if anchor:
            self._anchors[anchor] = node
        self._stack.append((node, key))
        self._open.add(id(node))
        self._key = None

    def _end(self) -> None:
        node, _ = self._stack.pop()
        self._open.discard(id(node))
        children = node.items if isinstance(node, Sequence_) else node.items.values()
        node.size = 1 + sum(child.size for child in children)

    def _is_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1][0], Mapping_) and self._key is None

    def _place(self, node: Node, line: int, anchor: str | None) -> None:
        if self._is_key():
            self._take_key(node, line)
            return
        if isinstance(node, Scalar) and node.bare and node.text == "" and self._key is not None:
            self._fail("has no value", line, "write a value, or remove the key", self._path(self._key[0]))
        self._count(node.size, line)
        if anchor:
            self._anchors[anchor] = node
        self._attach(node, line)

    def _take_key(self, node: Node, line: int) -> None:
        parent = self._stack[-1][0]
        assert isinstance(parent, Mapping_)
        if not isinstance(node, Scalar):
            self._fail("a key must be a single word", line, "write `name: value`")
            return
        if node.text == "<<" and node.bare:
            self._fail("merge keys (`<<`) are not read", line, "repeat the keys, or use `defaults`")
        if node.text in parent.items:
            first = parent.lines[node.text]
            self._fail(
                f"key {node.text!r} appears twice (first on line {first})", line, "keep one", self._path(node.text)
            )
        self._key = (Text.of(node), line)

    def _path(self, key: str) -> str:
        names = []
        for depth, (node, name) in enumerate(self._stack):
            if name is not None:
                names.append(name)
            elif depth and isinstance(self._stack[depth - 1][0], Sequence_):
                above = self._stack[depth - 1][0]
                names.append(str(len(above.items) - 1))
            del node
        return ".".join([*names, key])

    def _attach(self, node: Node, line: int) -> None:
        if not self._stack:
            self.root = node if not (isinstance(node, Scalar) and node.bare and node.text == "") else None
            return
        parent = self._stack[-1][0]
        if isinstance(parent, Sequence_):
            if isinstance(node, Scalar) and node.bare and node.text == "":
                self._fail("a list entry has no value", line, "write a value, or remove the dash")
            parent.items.append(node)
        elif self._key is not None:
            key, key_line = self._key
            parent.items[key] = node
            parent.lines[key] = key_line
            self._key = None
