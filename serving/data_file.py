"""Reading YAML and JSON files as data.

The readers refuse mistakes that the formats allow: a name that is set twice, and data nested deeper than Python can
follow. In YAML they also refuse octal and base-60 numbers, and aliases that expand to far more than is written. Files
of tokentwin 0.2 and earlier have other names for `trust` and its `level`, which `with_present_names` replaces.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from tokentwin.serving.errors import UserError, reason

_MOST_REPEATED = 1_000_000  # characters that the aliases of a file may add
_OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # YAML 1.1: octal and base-60 numbers
_NO_TEXT = re.compile("[\ud800-\udfff]")  # lone surrogates
_MERGE = "tag:yaml.org,2002:merge"
# PyYAML raises errors other than its own for a value that does not fit its tag, such as the date 2020-99-99.
_MALFORMED = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


def parse_yaml(text: str) -> Any:
    """Return the data in `text`. Raises ValueError with a message that completes a sentence beginning with its name."""
    try:
        return yaml.load(text, _Loader)
    except _Refused as error:
        raise ValueError(f"cannot be read: {error}") from None
    except _MALFORMED as error:
        raise ValueError(f"is not YAML: {error}") from None


def read_yaml(path: str | Path, field: str) -> Any:
    """Return the data in the file. Raises UserError about `field` that names the file if it cannot be read."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise UserError(field, str(path), str(error)) from None


def bundled(path: Path) -> Any:
    """Return the data in one of our own files, without checking it for errors.

    PyYAML's C loader reads the file if it is installed, because it is ten times as fast.
    """
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_mapping(path: str | Path, field: str, example: str) -> dict[str, Any]:
    """Return the mapping in a YAML file of settings. `example` is the documentation page that shows such a file."""
    data = read_yaml(path, field)
    if not isinstance(data, dict):
        raise UserError(field, str(path), f"must be a mapping of settings; see {example} for an example")
    return data


class _Refused(yaml.YAMLError):
    """Data that YAML allows and we refuse."""

    def __init__(self, node: yaml.Node, problem: str) -> None:
        super().__init__(f"line {node.start_mark.line + 1}: {problem}")


class _Loader(yaml.SafeLoader):
    """A loader that checks the YAML nodes before it makes Python objects of them."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _length(node, {}) - self.index > _MOST_REPEATED:
            raise _Refused(node, f"its aliases expand to more than {_MOST_REPEATED:,} characters; use fewer")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise _Refused(key, f"{key.value} is set twice; leave one of them out")
            if key.tag != _MERGE:
                seen.add((key.tag, str(key.value)))
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if _NO_TEXT.search(node.value):
            raise _Refused(node, "an escape is not a valid character; leave it out")
        if node.tag.endswith((":int", ":float")) and _OLD_NUMBER.fullmatch(node.value):
            raise _Refused(node, f"{node.value} is not a decimal number; write it as one, or put text in quotes")
        return node


_Loader.add_implicit_resolver(  # a number such as 1e5, which YAML 1.1 reads as text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _length(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return the number of characters in the node with each alias expanded; infinite if the node contains itself."""
    if node not in known:
        known[node] = float("inf")
        if isinstance(node, yaml.ScalarNode):
            known[node] = len(node.value) + 1
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else chain.from_iterable(node.value)
            known[node] = 1 + sum(_length(part, known) for part in parts)
    return known[node]


def parse_json(text: str | bytes, **how: Any) -> Any:
    """Return the data in `text`; `how` is passed on to `json.loads`. Raises ValueError that says what is wrong."""
    try:
        return json.loads(text, object_pairs_hook=_object, **how)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"is not JSON: {error.msg} at {place}") from None
    except UnicodeDecodeError:
        raise ValueError("is not JSON: it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # for example, a name occurs twice, or a number has too many digits
        raise ValueError(f"is not JSON: {error}") from None


def read_json_file(path: str | Path, field: str, advice: str = "") -> Any:
    """Return the data in the file. Raises UserError about `field` that names the file and ends in `advice`."""
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error)}{advice}") from None
    except ValueError as error:
        raise UserError(field, str(path), f"{error}{advice}") from None


def no_constant(name: str) -> Any:
    """Raise ValueError. As `parse_constant` of `json.loads` it refuses NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice; leave one of them out")
    return members


_PRESENT_NAMES = {"standing": "trust", "standing_reason": "trust_reason", "mark": "level"}


def present_name(name: str) -> str:
    """Return the present name of a key or a column."""
    return _PRESENT_NAMES.get(name, name)


def with_present_names(value: Any) -> Any:
    """Return plain JSON data with its keys renamed to their present names, at any depth."""
    if isinstance(value, dict):
        return {present_name(name): with_present_names(part) for name, part in value.items()}
    return [with_present_names(part) for part in value] if isinstance(value, list) else value
