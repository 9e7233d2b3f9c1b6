"""LoRA adapters from PEFT folders, or random ones of any name.

An adapter changes the weight W of a projection to W + s B A, with the matrices A `[rank, in]` and B `[out, rank]` and
the scale s = lora_alpha / rank, or lora_alpha / sqrt(rank) with `use_rslora` (Hu et al., arXiv 2106.09685;
Kalajdzievski, arXiv 2312.03732). Here the scale is a part of B. What the engine would compute wrongly is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from tokentwin.realengine.models.lora_slots import Matrices, target_projections
from tokentwin.realengine.models.weights import shapes
from tokentwin.serving.data_file import read_json_file
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError, reason

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_RANDOM_SIZE = 0.5  # size of a random adapter's change, relative to what the projection gives without it


class _PeftConfig(BaseModel):
    """The fields of PEFT's `adapter_config.json` that matter, with the values that the engine computes correctly."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    use_dora: Literal[False] | None = False
    lora_bias: Literal[False] | None = False
    fan_in_fan_out: Literal[False] | None = False
    modules_to_save: Literal[None] = None
    layer_replication: Literal[None] = None
    alora_invocation_tokens: Literal[None] = None
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal", "lora_ga"] = True  # others change the model, too
    rank_pattern: dict[str, int] | None = Field(None, max_length=0)
    alpha_pattern: dict[str, float] | None = Field(None, max_length=0)

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def folder_adapters(lora: LoraConfig) -> list[str]:
    """Return the names of all adapters in the folder that `lora` names; none for random adapters."""
    if lora.adapters is None or lora.random_rank is not None:
        return []
    return sorted(path.parent.name for path in Path(lora.adapters).expanduser().glob(f"*/{_CONFIG}"))


class AdapterFiles:
    """The adapters of the model `spec` that `lora.adapters` names.

    Raises UserError if it names a folder that does not exist.
    """

    def __init__(self, lora: LoraConfig, spec: ModelSpec) -> None:
        assert lora.adapters is not None
        self._lora = lora
        self._folder = Path(lora.adapters).expanduser() if lora.random_rank is None else None
        if self._folder is not None and not self._folder.is_dir():
            raise UserError("lora.adapters", lora.adapters, "is not a folder; give one, or random:RANK")
        wanted = target_projections(lora)
        weights = {name.removesuffix(".weight"): shape for name, shape in shapes(spec) if name.endswith(".weight")}
        self._shapes = {name: shape for name, shape in weights.items() if name.rpartition(".")[2] in wanted}
        self._checked: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of all adapters in the folder; none for random adapters, which have any name."""
        return folder_adapters(self._lora)

    def check(self, name: str) -> None:
        """Raise UserError if there is no adapter called `name`, or if the engine cannot run it."""
        if self._folder is None or name in self._checked:
            return
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise UserError(
                "adapter", name, f"has no {_CONFIG} in a folder of its name in {self._folder}; there: {known}"
            )
        config = self._config(name)
        if config.r > self._lora.max_lora_rank:
            remedy = f"has rank {config.r}; raise lora.max_lora_rank, which is {self._lora.max_lora_rank}"
            raise UserError("adapter", name, remedy)
        from safetensors import safe_open

        with self._reading(name), safe_open(self._path(name, _TENSORS), "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        self._check_shapes(name, shapes, config.r)
        self._checked.add(name)

    def read(self, name: str) -> Matrices:
        """Return the matrices of an adapter that was checked."""
        if self._lora.random_rank is not None:
            return self._random(name, self._lora.random_rank)
        from safetensors.torch import load_file

        with self._reading(name):
            tensors = load_file(self._path(name, _TENSORS))
        scale = self._config(name).scale
        return {
            module: (tensors[_key(module, "A")].float(), tensors[_key(module, "B")].float() * scale)
            for module in self._shapes
            if _key(module, "A") in tensors
        }

    def _config(self, name: str) -> _PeftConfig:
        path = self._path(name, _CONFIG)
        return parse(_PeftConfig, read_json_file(path, "adapter"), where=str(path))

    def _path(self, name: str, file: str) -> Path:
        assert self._folder is not None
        return self._folder / name / file

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:
            said = reason(error) if isinstance(error, OSError) else error
            raise UserError("adapter", name, f"{_TENSORS} cannot be read: {said}") from None

    def _check_shapes(self, name: str, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
        known: dict[str, tuple[int, ...]] = {}
        for module, (outputs, inputs) in self._shapes.items():
            pair = {_key(module, "A"): (rank, inputs), _key(module, "B"): (outputs, rank)}
            if len(pair.keys() & shapes.keys()) == 1:
                raise UserError("adapter", name, f"has one matrix of {module}, not both; is the file complete?")
            known |= pair
        for key, shape in shapes.items():
            if key not in known:
                remedy = (
                    f"has {key}, which is of no projection in lora.target_modules; choose another adapter or target"
                )
                raise UserError("adapter", name, remedy)
            if shape != known[key]:
                raise UserError("adapter", name, f"{key} has shape {shape}, but this model and rank need {known[key]}")

    def _random(self, name: str, rank: int) -> Matrices:
        """Return normal matrices that depend only on the name and the rank."""
        seed = int.from_bytes(blake2b(f"{rank} {name}".encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn((rows, columns), generator=generator) * columns**-0.5

        return {
            module: (drawn(rank, inputs), drawn(outputs, rank) * _RANDOM_SIZE)
            for module, (outputs, inputs) in self._shapes.items()
        }


def _key(module: str, matrix: str) -> str:
    """Return PEFT's name of the matrix A or B of a module."""
    return f"base_model.model.{module}.lora_{matrix}.weight"
