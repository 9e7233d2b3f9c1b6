"""Files in YAML, read as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serving.errors import UserError, reason

# A value of the wrong kind for its tag, such as the date 2020-99-99, is none of PyYAML's own errors.
_MALFORMED = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


def read_yaml(path: str | Path, field: str) -> Any:
    """What the file holds. Raises UserError of `field`, which names the file, where it cannot be read."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error)}") from None
    except _MALFORMED as error:
        raise UserError(field, str(path), f"is not YAML: {error}") from None


def read_mapping(path: str | Path, field: str, example: str) -> dict[str, Any]:
    """`read_yaml` of a file of settings. `example` is the page of the documentation that shows one."""
    data = read_yaml(path, field)
    if not isinstance(data, dict):
        raise UserError(field, str(path), f"must be a mapping of settings; see {example} for an example")
    return data
