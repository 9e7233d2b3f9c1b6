"""Finding models by name: in a catalogue of well-known models, in the local hub cache, or from a `config.json`."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from tokentwin.serving.data_file import bundled, read_json_file
from tokentwin.serving.deployments.editions import Stored, key, stored_by_name
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.hub_cache import cached_config
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import ATTENTION
from tokentwin.serving.errors import UserError

_CATALOGUE = Path(__file__).with_name("models.yaml")
_NEAREST = 3  # number of names suggested for an unknown name
_LONGEST_NAME = 80  # only this many characters of an unknown name are compared
PIPE = "-"  # the name of a config.json on standard input


def find_model(name_or_path: str) -> ModelSpec:
    """Return the model with this name in the catalogue, or the model of the `config.json` (or its folder) at this path.

    A name may be a Hugging Face id, in any case. The organisation is ignored, and so are editions that do not change
    shapes (Instruct, Base, hf, a date). `-FP8` is the model stored in fp8, `-NVFP4` or `-FP4` the model in NVFP4. For
    `-AWQ`, `-GPTQ-Int4`, `-GPTQ-Int8`, `w4a16` and `w8a16` the usual format of such editions is assumed. A name that
    the catalogue lacks is looked up in the local hub cache. `-` reads a `config.json` from standard input, once.
    Raises UserError that suggests similar names.
    """
    if name_or_path == PIPE:
        return _piped()
    path = Path(name_or_path).expanduser()
    is_folder = _is_folder(path)
    if is_folder or path.suffix == ".json":
        path = path / "config.json" if is_folder else path
        return spec_from_hf_config(read_json_file(path, "model"), path.resolve().parent.name or "model")
    name = name_or_path.rsplit("/", 1)[-1].lower()
    known = _by_name().get(name) or _by_key().get(key(name))
    if known is not None:
        return _edition(known, stored_by_name(name_or_path))
    if cached := cached_config(name_or_path):
        return spec_from_hf_config(read_json_file(cached, "model"), name_or_path.rsplit("/", 1)[-1])
    remedy = f"is not a known model{_near(name)}; see `tokentwin model list`, or give a config.json or its folder"
    raise UserError("model", name_or_path, remedy)


def pooling_model(name_or_path: str) -> ModelSpec | None:
    """Return the model if it is known and has no LM head, so that it answers pooling requests only; otherwise None."""
    try:
        model = find_model(name_or_path)
    except UserError:  # unknown shapes; a user's own cost model may still have times for this model
        return None
    return model if model.pooling else None


@cache
def _piped() -> ModelSpec:
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("model", PIPE, "reads a config.json from standard input, and nothing is piped; pipe one")
    try:
        config = json.loads(sys.stdin.read())
    except (ValueError, RecursionError) as error:
        raise UserError("model", PIPE, f"is not JSON on standard input ({error}); pipe a config.json") from None
    return spec_from_hf_config(config, "piped")


def _edition(known: str, stored: Stored | None) -> ModelSpec:
    """Return the model `known` of the catalogue as an edition stores it."""
    spec, entry = _catalogued(known), _entries()[known]
    if stored is None:
        return spec
    if spec.checkpoint_experts:  # editions differ only in their experts
        experts = {"nvfp4": "nvfp4", "fp8": ""}.get(stored.quantization, spec.checkpoint_experts)
        return spec.model_copy(update={"checkpoint_experts": experts})
    fields: dict[str, Any] = {"checkpoint_quantization": stored.quantization, "checkpoint_kept": ()}
    if stored.quantization == "nvfp4":
        projections = entry.get("nvfp4", ATTENTION if spec.num_experts else ())
        fields["checkpoint_kept"] = tuple((projection, tuple(range(spec.num_layers))) for projection in projections)
    elif stored.quantization == "fp8" and spec.checkpoint_quantization != "none":
        return spec  # the maker's own edition
    elif stored.quantization == "fp8":
        fields["checkpoint_quantization"] = entry.get("fp8", "fp8")
    elif stored.quantization == spec.checkpoint_quantization:
        return spec
    fields |= {"checkpoint_group_size": stored.group_size, "checkpoint_zero_points": stored.zero_points}
    return spec.model_copy(update=fields)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long for a path
        return False


def _near(name: str) -> str:
    """Return a clause that suggests known names similar to an unknown name; empty if there are none."""
    known = {key(known): entry for entry in _entries() for known in _names(entry)}
    close = get_close_matches(key(name)[:_LONGEST_NAME], known, 3 * _NEAREST, cutoff=0.5)
    near = list(dict.fromkeys(known[one] for one in close))[:_NEAREST]
    return f", but {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))} is" if near else ""


def _names(entry: str) -> tuple[str, ...]:
    """Return all names of an entry of the catalogue."""
    fields = _entries()[entry]
    return (entry, fields["id"].rsplit("/", 1)[-1], *fields.get("also", ()))


def hub_id(name: str) -> str:
    """Return the Hugging Face id of a name of the catalogue; any other name is returned unchanged."""
    entry = _entries().get(name)
    return entry["id"] if entry else name


@cache
def models() -> dict[str, ModelSpec]:
    """Return the catalogue of models, by name."""
    return {name: _catalogued(name) for name in _entries()}


def published_parameters() -> dict[str, tuple[float, float]]:
    """Return each model's published parameters in billions: all, and those of one token."""
    return {name: (entry["billions"][0], entry["billions"][1]) for name, entry in _entries().items()}


@cache
def _catalogued(name: str) -> ModelSpec:
    return spec_from_hf_config(_entries()[name], name)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = bundled(_CATALOGUE)
    return entries


@cache
def _by_name() -> dict[str, str]:
    """Return a mapping from every name of a model, in lower case, to its name in the catalogue."""
    return {known.lower(): name for name in _entries() for known in _names(name)}


@cache
def _by_key() -> dict[str, str]:
    """Return a mapping from the key of every name of a model (its id and other names) to its name in the catalogue."""
    return {key(known): name for name in reversed(_entries()) for known in _names(name)}  # the first model wins
