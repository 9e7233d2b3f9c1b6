"""The models by name: a catalogue of well-known ones, or any `config.json`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from serving.data_file import bundled, read_json_file
from serving.deployments.hf_config import spec_from_hf_config
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import ATTENTION
from serving.errors import UserError

_CATALOGUE = Path(__file__).with_name("models.yaml")
_NEAREST = 3  # names that are suggested for an unknown one
_LONGEST_NAME = 80  # longest name that is compared with others
_EDITION = re.compile(
    r"-(instruct|chat|base|it|hf|thinking|fp8|nvfp4|fp4-v2|fp4|dynamic|awq|gptq|int4|int8|quantized[.]w[48]a16|w[48]a16|\d{4})(?=-|$)"
)
_PACKED = {  # editions in integers: bits, inputs that share a scale, whether they have zero points
    "awq": (4, 128, True),
    "w8a16": (8, 0, False),
    "w4a16": (4, 128, False),
    "gptq-int8": (8, 128, False),
    "gptq": (4, 128, False),
}


def find_model(name_or_path: str) -> ModelSpec:
    """Return the model of a catalogued name, or of the `config.json` (or its folder) at that path.

    A name may be a Hugging Face id, in any case: the organisation, and editions that leave shapes alone (Instruct,
    Base, hf, a date), are passed over. `-FP8` is the same model stored in fp8, `-NVFP4` or `-FP4` in NVFP4; `-AWQ`,
    `-GPTQ-Int4`, `-GPTQ-Int8`, `w4a16` and `w8a16` are stored as such editions usually are. Raises UserError that
    suggests similar names.
    """
    path = Path(name_or_path).expanduser()
    is_folder = _is_folder(path)
    if is_folder or path.suffix == ".json":
        return _from_file(path / "config.json" if is_folder else path)
    name = name_or_path.rsplit("/", 1)[-1].lower()
    known = _by_key().get(_key(name))
    if known is None:
        remedy = f"is not a known model{_near(name)}; see `tokentwin model list`, or give a config.json or its folder"
        raise UserError("model", name_or_path, remedy)
    spec, entry = _spec(known), _entries()[known]
    if spec.checkpoint_experts:  # editions differ in their experts alone
        if "-nvfp4" in name:
            return spec.model_copy(update={"checkpoint_experts": "nvfp4"})
        return spec.model_copy(update={"checkpoint_experts": ""}) if "fp8" in name else spec
    if "-fp4" in name or "-nvfp4" in name:
        projections = entry.get("nvfp4", ATTENTION if spec.num_experts else ())
        kept = tuple((projection, tuple(range(spec.num_layers))) for projection in projections)
        fields: dict[str, Any] = {"checkpoint_quantization": "nvfp4", "checkpoint_kept": kept}
        return spec.model_copy(update=fields)
    if spec.checkpoint_quantization != "none":
        return spec
    if "fp8" in name:
        return spec.model_copy(update={"checkpoint_quantization": entry.get("fp8", "fp8")})
    stored = next((packed for edition, packed in _PACKED.items() if edition in name), None)
    if stored is None:
        return spec
    bits, group, zeros = stored
    named = ("checkpoint_quantization", "checkpoint_group_size", "checkpoint_zero_points")
    return spec.model_copy(update=dict(zip(named, (f"int{bits}", group, zeros), strict=True)))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long for a path
        return False


def _near(name: str) -> str:
    """Return a clause with known names that an unknown name may stand for; empty if no name is like it."""
    lowered = {known.lower(): known for known in models()}
    near = [lowered[one] for one in get_close_matches(name[:_LONGEST_NAME], lowered, _NEAREST, cutoff=0.4)]
    return f", but {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))} is" if near else ""


def hub_id(name: str) -> str:
    """Return the Hugging Face id of a name of the catalogue; any other name as it is."""
    entry = _entries().get(name)
    return entry["id"] if entry else name


@cache
def models() -> dict[str, ModelSpec]:
    """Return the catalogue of models, by name."""
    return {name: _spec(name) for name in _entries()}


@cache
def _spec(name: str) -> ModelSpec:
    return spec_from_hf_config(_entries()[name], name)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = bundled(_CATALOGUE)
    return entries


@cache
def _by_key() -> dict[str, str]:
    """Return the catalogue's name of every name that a model goes by."""
    return {
        _key(known): name for name, entry in _entries().items() for known in (name, entry["id"], *entry.get("also", ()))
    }


def _key(name: str) -> str:
    """Return the part of a name that all editions of a model share."""
    return _EDITION.sub("", name.rsplit("/", 1)[-1].lower()).removeprefix("meta-")


def _from_file(path: Path) -> ModelSpec:
    return spec_from_hf_config(read_json_file(path, "model"), path.resolve().parent.name or "model")
