"""The sources of a model: a Hugging Face folder, the downloaded SmolLM2, or random weights of a named architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from tokentwin.realengine.models.linear import StoredWeight
from tokentwin.realengine.models.mlp import ROUTER, mixture_shapes
from tokentwin.realengine.models.quantised_checkpoint import read_quantised
from tokentwin.realengine.models.random_routers import row_scales
from tokentwin.realengine.runnable import check_runnable
from tokentwin.serving.data_file import parse_json
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.model_catalogue import find_model, models
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "intermediate_size": 256,
    "max_positions": 4096,
    "rope_theta": 10000.0,
}
_ALLOWED = ("rotary_emb.inv_freq", "self_attn.k_scale", "self_attn.v_scale")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SIXTEEN_EXPERTS = {"num_experts": 16, "experts_per_token": 4, "moe_intermediate_size": 64}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 256},
    "qwen2-moe": {
        "qkv_bias": True,
        **_SIXTEEN_EXPERTS,
        "shared_intermediate_size": 128,
        "shared_gate": True,
        "dense_at": (0,),
    },
    "qwen3-moe": {"qk_norm": True, **_SIXTEEN_EXPERTS},
}
RANDOM = {
    **{
        name: ModelSpec(**{**_SMALL, "family": name.replace("-", "_"), **shape}, name=f"random:{name}")
        for name, shape in _SHAPES.items()
    },
    "smollm2": find_model("SmolLM2-135M").model_copy(
        update={"name": "random:smollm2", "bos_id": 1, "eos_ids": (2,)}  # the ids of SmolLM2-135M-Instruct
    ),
}


def random_spec(model: str) -> ModelSpec:
    """Return the model `random:NAME`: one of `RANDOM`, or a model of the catalogue, with weights in 16 bits.

    Raises UserError if there is no such model, or if the engine cannot run it.
    """
    name = model.removeprefix("random:")
    if name in RANDOM:
        return RANDOM[name]
    catalogued = {known.lower(): known for known in models()}
    if name.lower() not in catalogued:
        near = get_close_matches(name.lower(), catalogued, 1)
        example = f"random:{catalogued[near[0]] if near else 'Qwen3-8B'}"
        remedy = (
            f"is not a known random model; choose one of {', '.join(RANDOM)}, or a model of the catalogue ({example})"
        )
        raise UserError("model", model, remedy)
    spec = find_model(catalogued[name.lower()])
    check_runnable(spec)
    if spec.checkpoint_quantization != "none":
        remedy = f"is stored in {spec.checkpoint_quantization}; random weights have 16 bits; choose another model"
        raise UserError("model", model, remedy)
    return spec.model_copy(update={"name": model, "bos_id": None, "eos_ids": ()})


@dataclass(frozen=True)
class ModelFiles:
    """A model that can be loaded. `folder` is its Hugging Face folder, if it has one.

    `state` has the weights by Hugging Face name. It is None for random weights, which each process makes itself, and if
    another process is to read the weights from the folder.
    """

    spec: ModelSpec
    state: dict[str, StoredWeight] | None
    source: str
    folder: Path | None = None

    @property
    def is_random(self) -> bool:
        return self.state is None and self.folder is None

    def to_send(self) -> ModelFiles:
        """Return these files in the form to send to another process, which reads the folder itself.

        The weights are left out, because they do not fit into shared memory.
        """
        return self if self.folder is None else replace(self, state=None)

    def weights(self, dtype: torch.dtype, device: torch.device) -> dict[str, StoredWeight]:
        """Return the weights by name; weights from files are on the CPU, in the type that the files have."""
        if self.state is not None:
            return self.state
        if self.folder is not None:
            return _read_weights(self.folder, self.spec)
        return random_state(self.spec, dtype, device=device)


def model_folder(model: str, home: Path) -> Path | None:
    """Return the folder of the model called `model`, or None for random weights; raise UserError if it is missing."""
    if model.startswith("random:"):
        random_spec(model)
        return None
    folder = home / "models" / "smollm2" if model == "smollm2" else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        if model == "smollm2":
            remedy = "is not on this machine yet; run `tokentwin model fetch smollm2`, or use random:smollm2"
            raise UserError("model", model, remedy)
        raise UserError("model", model, "has no config.json; give a Hugging Face folder, smollm2 or random:FAMILY")
    return folder


def load_model_files(model: str, home: Path) -> ModelFiles:
    """Return the model called `model`; raise UserError if it does not exist or its files are damaged."""
    folder = model_folder(model, home)
    if folder is None:
        return ModelFiles(random_spec(model), None, model)
    spec = spec_from_hf_config(_read_json(folder / "config.json"), name=folder.resolve().name)
    check_runnable(spec)
    spec = _with_generation_ends(spec, folder / "generation_config.json")
    state = _read_weights(folder, spec)
    _check(spec, state, folder)
    return ModelFiles(spec, state, model, folder)


def random_state(
    spec: ModelSpec, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, StoredWeight]:
    """Return seeded random weights, scaled by fan-in so that activations keep their size.

    Routers are made to choose experts unevenly. The weights differ between kinds of devices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    of_routers = torch.Generator().manual_seed(seed)
    state: dict[str, StoredWeight] = {}
    for name, shape in shapes(spec):
        if name.endswith("norm.weight"):
            state[name] = torch.ones(shape, dtype=dtype, device=device)
        elif name.endswith("bias"):
            state[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            drawn = torch.randn(shape, generator=generator, device=device)
            drawn.mul_(shape[-1] ** -0.5)
            if name.endswith(ROUTER):
                drawn.mul_(row_scales(spec.num_experts, spec.experts_per_token, of_routers).to(device)[:, None])
            state[name] = drawn.to(dtype)
    return state


def shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every weight of `spec`."""
    hidden, head = spec.hidden_size, spec.head_dim
    queries, keys = spec.num_heads * head, spec.num_kv_heads * head
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        at = f"model.layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, hidden)
            if spec.qkv_bias:
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
        if spec.qk_norm:
            yield f"{at}self_attn.q_norm.weight", (head,)
            yield f"{at}self_attn.k_norm.weight", (head,)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        if spec.num_experts and index not in spec.dense_at:
            for name, shape in mixture_shapes(spec):
                yield f"{at}{name}", shape
        else:
            yield f"{at}mlp.gate_proj.weight", (spec.intermediate_size, hidden)
            yield f"{at}mlp.up_proj.weight", (spec.intermediate_size, hidden)
            yield f"{at}mlp.down_proj.weight", (hidden, spec.intermediate_size)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("model", str(path.parent), f"{path.name} {error}") from None


def _with_generation_ends(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return `spec` with the end-of-sequence tokens of generation_config.json added.

    Chat models often list more of these tokens there than in config.json.
    """
    if not path.is_file():
        return spec
    config = _read_json(path)
    ends = config.get("eos_token_id") if isinstance(config, dict) else None
    if ends is None:
        return spec
    if not isinstance(ends, list):
        ends = [ends]
    if not all(isinstance(end, int) for end in ends):
        raise UserError("model", str(path.parent), f"{path.name}: eos_token_id must be a token id or a list of them")
    return spec.model_copy(update={"eos_ids": tuple(dict.fromkeys([*spec.eos_ids, *ends]))})


def _read_weights(folder: Path, spec: ModelSpec) -> dict[str, StoredWeight]:
    state = _read_state(folder)
    read_quantised(state, _read_json(folder / "config.json"), spec, str(folder))
    return state


def _read_state(folder: Path) -> dict[str, StoredWeight]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        state: dict[str, StoredWeight] = {}
        for name in names:
            state.update(load_file(folder / name))
    except (KeyError, TypeError, AttributeError):
        remedy = f"{index.name} has no weight_map to file names; fetch the model again"
        raise UserError("model", str(folder), remedy) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError("model", str(folder), f"safetensors cannot be read: {error}") from None
    return state


def _check(spec: ModelSpec, state: dict[str, StoredWeight], folder: Path) -> None:
    """Raise UserError for weights that are missing or unknown, or have a wrong type or shape.

    An unknown weight is as wrong as a missing one: with a bias that the engine ignores, the model writes fluent
    nonsense.
    """
    wanted = dict(shapes(spec))
    known = {*wanted, "lm_head.weight"}  # some files have a tied head, too
    for name, weight in state.items():
        if name not in known and not name.endswith(_ALLOWED):
            raise UserError("model", str(folder), f"has weight {name}, which a {spec.family} model does not use")
        if isinstance(weight, torch.Tensor) and weight.dtype not in _FLOATS:
            remedy = f"{name} is {weight.dtype}, which is neither a float nor told by quantization_config"
            raise UserError("model", str(folder), remedy)
    for name, shape in wanted.items():
        if name not in state:
            raise UserError("model", str(folder), f"has no weight {name}; is the folder complete?")
        if tuple(state[name].shape) != shape:
            remedy = f"{name} has shape {tuple(state[name].shape)}, but config.json says {shape}"
            raise UserError("model", str(folder), remedy)
