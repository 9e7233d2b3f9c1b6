"""The times of LoRA adapters in vLLM, from the shapes of a model and constants fitted to published measurements.

The measurements are those of Agullo et al. (arXiv 2508.08343, their repository GPULLMAdapterOptimization): vLLM 0.8.5
(V1 engine, CUDA graphs) with Llama-3.1-8B and Qwen2.5-7B on an H100 with 64 GB (2.0 TB/s), ranks 8 to 32, 8 to 384
slots, and 1 to 250 requests at once. The constants of kernels come from Llama; `tests/calibration/test_adapter_fit.py`
predicts Qwen with them. Other GPUs and releases are extrapolated.

For each adapted GEMM of a layer vLLM runs two more kernels, shrink and expand (Punica, arXiv 2310.18547). Their grid
has blocks for every slot, used or not; most of the time goes into blocks that find nothing to do, and into the latency
of the small matrices, not into reading them.
"""

from __future__ import annotations

from tokentwin.serving.adapter_times import AdapterTimes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.lora import adapted_linears, adapter_elements, adapter_tensors
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES

_KERNELS = 2  # of an adapted GEMM
_KERNEL_NS = 1_200.0
_SLOT_NS = 55.0  # of a kernel, for each slot and for the base model
_SLOT_RANK_NS = 37.0  # more for each 16 of the rank
_SLOT_TILE_NS = 43.0  # more for each tile of tokens beyond the first
_ADAPTER_NS = 1_200.0  # of a kernel, for each adapter in the step, beside reading its matrices
_COPY_NS = 11_000.0  # of a matrix that is copied into a slot, beside its bytes
_LOAD_NS = 100_000.0  # of a matrix that is loaded into host memory, beside its bytes
_LOAD_BYTES_PER_S = 1.75e9  # files in the operating system's cache; a cold disk is slower
SPREAD = 2.0  # factor between the estimate and either end of its 90 % interval, by the scatter of the measurements

SAID = (
    "the times of adapters are extrapolated from vLLM 0.8.5 with dense models of 7B and 8B on an H100 "
    "(arXiv 2508.08343), good to a factor of 2"
)


def fitted_times(model: ModelSpec, gpu: GpuSpec, deployment: Deployment) -> AdapterTimes | None:
    """Return the times of the adapters of `deployment`; None if it serves none.

    Raises UserError for a model with parts of which the adapters are not known.
    """
    lora = deployment.lora
    if lora is None:
        return None
    width, rank = DTYPE_BYTES[deployment.dtype], lora.max_lora_rank
    linears = adapted_linears(model, lora, deployment.tensor_parallel_size)
    kernels = _KERNELS * len(linears) * model.num_layers
    whole_bytes = width * adapter_elements(model, lora, 1)
    own_bytes = width * adapter_elements(model, lora, deployment.tensor_parallel_size)
    per_slot = _SLOT_NS + _SLOT_RANK_NS * -(-rank // 16)
    moved = width * model.num_layers * sum(linear.moved(rank) for linear in linears)
    load_ns = adapter_tensors(model, lora) * _LOAD_NS + 1e9 * whole_bytes / _LOAD_BYTES_PER_S
    return AdapterTimes(
        step_ns=kernels * (_KERNEL_NS + (lora.max_loras + 1) * per_slot),
        tile_ns=kernels * (lora.max_loras + 1) * _SLOT_TILE_NS,
        adapter_ns=kernels * _ADAPTER_NS + 1e9 * own_bytes / gpu.memory_bytes_per_s,
        token_ns=1e9 * moved / gpu.memory_bytes_per_s,
        copy_ns=adapter_tensors(model, lora) * _COPY_NS + 1e9 * own_bytes / gpu.pcie_bytes_per_s,
        load_ns=load_ns if lora.load_ms is None else 1e6 * lora.load_ms,
    )
