"""GPUs by their datasheets, and how many KV blocks fit on one.

Datasheet numbers are ceilings, not what a kernel reaches: calibration measures that.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import UserError
from serving.model_spec import ModelSpec

_GB = 10**9


class GpuSpec(BaseModel):
    """One GPU: memory, its bandwidth, and dense bf16 rate, as its maker states them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory_bytes: int = Field(gt=0, description="memory on the GPU")
    memory_bytes_per_s: int = Field(gt=0, description="memory bandwidth")
    bf16_flop_per_s: int = Field(gt=0, description="dense bf16 operations a second, without sparsity")
    source: str = Field(description="where the numbers are from")

    def kv_blocks(
        self, model: ModelSpec, block_size: int, dtype_bytes: int = 2, utilization: float = 0.9, reserved_bytes: int = 0
    ) -> int:
        """KV blocks that fit beside the weights: (memory x utilization - weights - reserved) / block.

        `reserved_bytes` is for activations and graphs, which only a profile run can tell. Raises UserError if not
        one block fits.
        """
        left = int(self.memory_bytes * utilization) - model.weight_bytes(dtype_bytes) - reserved_bytes
        blocks = left // (block_size * model.kv_bytes_per_token(dtype_bytes))
        if blocks < 1:
            need = model.weight_bytes(dtype_bytes) / _GB
            raise UserError(
                "gpu", self.name, f"{model.name} has {need:.1f} GB of weights: no KV block fits beside them"
            )
        return blocks


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec(
            name="A100-80G",
            memory_bytes=80 * _GB,
            memory_bytes_per_s=2_039 * _GB,
            bf16_flop_per_s=312 * 10**12,
            source="NVIDIA A100 80GB SXM datasheet",
        ),
        GpuSpec(
            name="L40S",
            memory_bytes=48 * _GB,
            memory_bytes_per_s=864 * _GB,
            bf16_flop_per_s=362 * 10**12,
            source="NVIDIA L40S datasheet",
        ),
        GpuSpec(
            name="H100",
            memory_bytes=80 * _GB,
            memory_bytes_per_s=3_350 * _GB,
            bf16_flop_per_s=989 * 10**12,
            source="NVIDIA H100 SXM datasheet",
        ),
        GpuSpec(
            name="H200",
            memory_bytes=141 * _GB,
            memory_bytes_per_s=4_800 * _GB,
            bf16_flop_per_s=989 * 10**12,
            source="NVIDIA H200 SXM datasheet",
        ),
    )
}


def find_gpu(name: str) -> GpuSpec:
    """The catalogued GPU called `name`."""
    if name not in GPUS:
        raise UserError("gpu", name, f"is not one of {', '.join(GPUS)}")
    return GPUS[name]
