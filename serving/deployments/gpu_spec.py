"""GPUs as their datasheets describe them: a small catalogue, and files of a user's own.

Datasheet rates are upper bounds that kernels do not reach; calibration measures what they reach. Prices are defaults
with a date.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from tokentwin.serving.data_file import bundled, read_yaml
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

_OF_NO_MATTER = re.compile(
    r"nvidia|amd|intel|google|instinct|tesla|geforce|sxm\d?|oam|ac|hbm\d?e?|nvl\d+|gpu|generation|blackwell|edition"
    r"|server|workstation|superchip|habana|cloud"
)
_OTHER_NAMES = {
    "gaudi3": "gaudi-3",
    "hl-325l": "gaudi-3",
    "tpuv5e": "tpu-v5e",
    "v5litepod": "tpu-v5e",
    "tpuv6e": "tpu-v6e",
    "trillium": "tpu-v6e",
    "tpuv7": "tpu-v7",
    "tpu7x": "tpu-v7",
    "ironwood": "tpu-v7",
}
_NEAREST = 3  # number of names suggested for an unknown name
_LONGEST_NAME = 80  # only this many characters of an unknown name are compared
_MEMORY = re.compile(r"\d+g")
_CATALOGUE = Path(__file__).with_name("gpus.yaml")


class GpuSpec(Settings):
    """One GPU: its memory, bandwidths, dense GEMM rates and price. `gpus.yaml` explains each number."""

    name: str
    generation: str = Field("", description="architecture, such as Hopper; GPUs with the same name count as similar")
    memory_bytes: int = Field(gt=0, description="memory that CUDA reports, which is less than the advertised size")
    memory_bytes_per_s: float = Field(gt=0, description="memory bandwidth")
    bf16_flop_per_s: float = Field(gt=0, description="dense 16-bit operations per second, without sparsity")
    fp8_flop_per_s: float | None = Field(
        None, gt=0, description="dense fp8 operations per second; null: the GPU has no fp8 tensor cores"
    )
    fp4_flop_per_s: float | None = Field(
        None, gt=0, description="dense fp4 operations per second; null: the GPU has no fp4 tensor cores"
    )
    sm_count: int = Field(gt=0, description="streaming multiprocessors, or compute units")
    link_bytes_per_s: float = Field(gt=0, description="bandwidth to another GPU of the node, in one direction")
    pcie_bytes_per_s: float = Field(gt=0, description="bandwidth to the host, in one direction")
    power_w: float | None = Field(
        None, gt=0, description="limit of the board's power in watts, for energy and power limits; null: not known"
    )
    linked_gpus: int | None = Field(
        None, ge=1, description="number of GPUs that the link joins, such as those of a server; null: not known"
    )
    peer_access: bool = Field(True, description="whether GPUs can read each other's memory over PCIe")
    usd_per_hour: float = Field(ge=0, description="price of one GPU in dollars per hour")
    price_as_of: str = Field(description="date of the price")
    price_source: str = Field(description="source of the price")
    source: str = Field(description="source of the other numbers")

    def flop_per_s(self, dtype: str) -> float:
        """Return the peak rate of GEMMs with weights of type `dtype`, named as in `Deployment`.

        If the GPU has no unit for a type, engines compute in 16 bits, and so does this rate. Weights in mxfp4 are
        multiplied by 16-bit or fp8 activations, weights in nvfp4 by activations in nvfp4. If there is an fp4 unit, its
        rate is the upper bound for both.
        """
        return self._own_rates.get(dtype) or self.bf16_flop_per_s

    def has_unit_for(self, dtype: str) -> bool:
        """Return whether the GPU has a peak rate for GEMMs with weights of `dtype`, a type of fewer than 16 bits."""
        return self._own_rates.get(dtype) is not None

    @property
    def _own_rates(self) -> dict[str, float | None]:
        return {
            **dict.fromkeys(("fp8", "fp8_block"), self.fp8_flop_per_s),
            **dict.fromkeys(("mxfp4", "nvfp4"), self.fp4_flop_per_s),
        }


def find_gpu(name_or_path: str) -> GpuSpec:
    """Return the GPU of the catalogue with this name, or the GPU that a YAML file describes.

    It also reads names as drivers (`NVIDIA H100 80GB HBM3`) and other tools (`h100_sxm`) write them.
    Raises UserError if there is no such GPU or file, or if the file describes several GPUs.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        entries = _specs(read_yaml(path, "gpu"), path)
        if len(entries) != 1:
            raise UserError("gpu", name_or_path, f"describes {len(entries)} GPUs; give a file with exactly one")
        return next(iter(entries.values()))
    name = catalogue_name(name_or_path)
    if name not in gpus():
        remedy = f"is not a known GPU{_near(name_or_path)}; choose one of {', '.join(gpus())}, or give a YAML file"
        raise UserError("gpu", name_or_path, remedy)
    return gpus()[name]


def catalogue_name(name_or_path: str) -> str:
    """Return the catalogue's name of a GPU; a path and an unknown name stay as they are."""
    if name_or_path in gpus():
        return name_or_path
    known, wanted = {_words(name): name for name in gpus()}, _words(name_or_path)
    name = known.get(wanted) or known.get(frozenset(word for word in wanted if not _MEMORY.fullmatch(word)))
    return name or name_or_path


def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name without its maker, form factor and memory type.

    PCIe and NVL are GPUs of their own.
    """
    lowered = _OTHER_NAMES.get(name.lower(), name.lower())
    words = re.split(r"[ _-]+", lowered)
    return frozenset(re.sub(r"^(\d+)gb$", r"\1g", word) for word in words if word and not _OF_NO_MATTER.fullmatch(word))


def _near(name: str) -> str:
    """Return a clause that suggests known names similar to an unknown name; empty if there are none."""
    lowered = {known.lower(): known for known in gpus()}
    near = [lowered[one] for one in get_close_matches(name.lower()[:_LONGEST_NAME], lowered, _NEAREST, cutoff=0.6)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@cache
def gpus() -> dict[str, GpuSpec]:
    """Return the catalogue of GPUs, by name."""
    return _specs(bundled(_CATALOGUE), _CATALOGUE)


def _specs(data: Any, path: Path) -> dict[str, GpuSpec]:
    if not isinstance(data, dict) or not all(isinstance(entry, dict) for entry in data.values()):
        raise UserError("gpu", str(path), "must map a GPU's name to its numbers; see docs/models-and-gpus.md")
    return {str(name): parse(GpuSpec, {"name": str(name), **entry}, where=str(name)) for name, entry in data.items()}
