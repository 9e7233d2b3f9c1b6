"""The settings of images, videos and audio, and the encoders (vision towers) of well-known models.

vLLM takes the size of the largest item from the model's processor. The budget of a step and the encoder cache have room
for it, and otherwise for `max_num_batched_tokens` embeddings (`compute_mm_encoder_budget`, release 0.33).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from tokentwin.serving.data_file import bundled
from tokentwin.serving.deployments.editions import key
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

_CATALOGUE = Path(__file__).with_name("towers.yaml")


class MultimodalConfig(Settings):
    """Images, videos and audio of requests, which an encoder turns into embeddings at their placeholder tokens."""

    tower: str | None = Field(
        None, description="model whose encoder it is, such as Qwen2.5-VL-7B; null: that of the deployment's model"
    )
    max_item_tokens: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="placeholder tokens of the largest item, as the model's processor limits it (max_pixels); null: "
        "the processor's default, or if the tower is not known, the size of a step",
    )
    disable_chunked_mm_input: bool = Field(
        False, description="compute the placeholder tokens of an item in one step, or begin none in this step"
    )
    mm_encoder_tp_mode: Literal["weights", "data"] = Field(
        "weights",
        description="with tensor parallelism: split each layer of the encoder (weights), or give each device a share "
        "of the items (data)",
    )
    encoder_us_per_token: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="microseconds to encode one placeholder token, if it was measured; null: predicted from the tower",
    )


class Tower(Settings):
    """The shapes of an encoder; see towers.yaml."""

    models: tuple[str, ...]
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    gated: bool
    patch_elements: int = Field(ge=1)
    patches_per_token: int = Field(ge=1)
    window_patches: int = Field(0, ge=0)
    full_layers: int = Field(0, ge=0)
    mergers: int = Field(1, ge=0)
    width: int = Field(1, ge=1)
    max_item_tokens: int = Field(ge=1)
    source: str

    @property
    def merged_size(self) -> int:
        """The inputs of a merger: the patches of one token."""
        return self.hidden_size * self.patches_per_token

    def parameters(self, hidden_size: int, devices: int = 1) -> int:
        """Return the number of weights on one of `devices`; `hidden_size` is that of the model that reads embeddings.

        Norms and biases are left out. They are less than 0.1 %.
        """
        attention = 4 * self.hidden_size**2
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        merger = self.merged_size**2 + self.merged_size * hidden_size
        ends = self.mergers * merger if self.mergers else self.hidden_size * hidden_size
        return (self.num_layers * (attention + mlp) + ends) // devices + self.patch_elements * self.hidden_size


@cache
def towers() -> dict[str, Tower]:
    """Return the towers by the keys of the names of the models that have them."""
    by_key: dict[str, Tower] = {}
    for entry in bundled(_CATALOGUE).values():
        tower = Tower(**entry)
        by_key |= dict.fromkeys(map(key, tower.models), tower)
    return by_key


def find_tower(model: str, multimodal: MultimodalConfig) -> Tower | None:
    """Return the encoder of `model`, whatever the edition of its name (Instruct, AWQ); None if it is not known.

    Raises UserError if `multimodal` names a tower that is not known.
    """
    tower = towers().get(key(multimodal.tower or model))
    if tower is None and multimodal.tower is not None:
        known = ", ".join(sorted(name for one in towers().values() for name in one.models[:1]))
        remedy = f"is not known; name a model such as {known}, or set encoder_us_per_token"
        raise UserError("multimodal.tower", multimodal.tower, remedy)
    return tower


def encoder_settings(model: str, multimodal: MultimodalConfig, max_num_batched_tokens: int) -> dict[str, int | bool]:
    """Return the scheduler's settings of the encoder: its budget of a step and the size of its cache, in embeddings."""
    tower = find_tower(model, multimodal)
    largest = multimodal.max_item_tokens or (tower.max_item_tokens if tower else 0)
    return {
        "max_num_encoder_input_tokens": max(max_num_batched_tokens, largest),
        "encoder_cache_size": max(max_num_batched_tokens, largest),
        "disable_chunked_mm_input": multimodal.disable_chunked_mm_input,
    }
