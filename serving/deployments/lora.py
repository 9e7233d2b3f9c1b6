"""The settings of LoRA adapters, with vLLM's names, and the memory that vLLM sets aside for them.

vLLM allocates every slot when it starts, for the highest rank and all target modules, whichever adapters come later.
Of a column-parallel projection the first matrix is whole on every device, of a row-parallel one the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import TerseSettings

if TYPE_CHECKING:
    from tokentwin.serving.deployments.model_spec import ModelSpec

Module = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]  # vLLM's names: one GEMM each
_WITH_VOCABULARY = ("llama", "qwen3")  # families whose embedding and head vLLM adapts, too
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoraConfig(TerseSettings):
    """LoRA adapters of one engine. One request uses at most one adapter."""

    seldom_set = ("adapters",)

    max_loras: int = Field(1, ge=1, le=10_000, description="number of adapters on the device and in one step")
    max_lora_rank: int = Field(16, description="highest rank of an adapter; every slot has room for it")
    max_cpu_loras: int | None = Field(
        None, ge=1, le=1_000_000, description="number of adapters in host memory; null: max_loras"
    )
    target_modules: tuple[Module, ...] | None = Field(
        None, min_length=1, description="projections that adapters may change; null: all of them"
    )
    adapters: str | None = Field(
        None,
        min_length=1,
        description="real engine only: a folder that has the PEFT folder of each adapter under the adapter's name, or "
        "random:RANK for random adapters of any name",
    )
    load_ms: float | None = Field(
        None,
        ge=0,
        le=1e7,
        description="ms to load an adapter from disk into host memory, if it was measured; null: estimated",
    )

    @model_validator(mode="after")
    def _host_memory_holds_the_slots(self) -> LoraConfig:
        if self.max_lora_rank not in _RANKS:
            raise ValueError(f"max_lora_rank must be one of {', '.join(map(str, _RANKS))}, as in vLLM")
        if self.random_rank is not None and not 1 <= self.random_rank <= self.max_lora_rank:
            raise ValueError(f"adapters must have a rank of 1 to max_lora_rank {self.max_lora_rank} after random:")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras must be at least max_loras {self.max_loras}")
        return self

    @property
    def host_loras(self) -> int:
        """The number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def random_rank(self) -> int | None:
        """The rank of random adapters, 0 if it is not a number; None if adapters come from a folder."""
        if self.adapters is None or not self.adapters.startswith("random:"):
            return None
        rank = self.adapters.removeprefix("random:")
        return int(rank) if rank.isascii() and rank.isdecimal() else 0

    def timing(self) -> LoraConfig:
        """Return the settings that our engine's step times depend on; the others have their defaults."""
        return LoraConfig(max_lora_rank=self.max_lora_rank, target_modules=self.target_modules, load_ms=self.load_ms)


class AdaptedLinear(NamedTuple):
    """Adapted projections that one GEMM computes: the inputs, and the outputs of each projection, on one device."""

    inputs: int
    outputs: tuple[int, ...]

    def elements(self, rank: int) -> int:
        """Return the number of elements of an adapter's matrices of this `rank`."""
        return rank * sum(self.inputs + out for out in self.outputs)

    def moved(self, rank: int) -> int:
        """Return how many elements the kernels read and write for one token; intermediate sums count double."""
        return sum(self.inputs + 4 * rank + 2 * out for out in self.outputs)


def adapted_linears(model: ModelSpec, lora: LoraConfig, tp: int) -> list[AdaptedLinear]:
    """Return the adapted projections of one layer on one of `tp` devices.

    Raises UserError for a model with parts of which the adapters are not known here.
    """
    for part, there in (("experts", model.num_experts), ("latent attention", model.latent), ("states", model.linear)):
        if there:
            raise UserError("lora", model.name, f"is not known for models with {part}; leave lora out")
    heads, kv_heads = model.num_heads // tp, max(model.num_kv_heads // tp, 1)
    hidden, inter = model.hidden_size, model.intermediate_size // tp
    queries, keys = heads * model.head_dim, kv_heads * model.head_dim
    linears: dict[str, AdaptedLinear] = {
        "qkv_proj": AdaptedLinear(hidden, (queries, keys, keys)),
        "o_proj": AdaptedLinear(queries, (hidden,)),
        "gate_up_proj": AdaptedLinear(hidden, (inter, inter)),
        "down_proj": AdaptedLinear(inter, (hidden,)),
    }
    return [linears[name] for name in lora.target_modules or linears]


def slot_elements(model: ModelSpec, lora: LoraConfig, tp: int) -> int:
    """Return the number of elements of one slot for all layers of `model`, on one of `tp` devices."""
    vocabulary = lora.target_modules is None and model.family in _WITH_VOCABULARY
    more = 2 * lora.max_lora_rank * (model.vocab_size + model.hidden_size) if vocabulary else 0
    return adapter_elements(model, lora, tp) + more


def adapter_elements(model: ModelSpec, lora: LoraConfig, tp: int) -> int:
    """Return the number of elements of one adapter of the highest rank, on one of `tp` devices.

    An adapter rarely changes the vocabulary, so it is smaller than its slot.
    """
    linears = adapted_linears(model, lora, tp)
    return model.num_layers * sum(linear.elements(lora.max_lora_rank) for linear in linears)


def adapter_tensors(model: ModelSpec, lora: LoraConfig) -> int:
    """Return the number of matrices of one adapter: two for each adapted projection of each layer."""
    return 2 * model.num_layers * sum(len(linear.outputs) for linear in adapted_linears(model, lora, 1))
