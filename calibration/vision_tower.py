"""The time to encode images and videos: the operations of a vision tower, priced by the kernel tables of a GPU.

A tower is a stack of layers whose tokens are patches, and a merger that makes an embedding of several patches. Its
attention reaches over one frame, or in some layers over a window of it. Kernel times are measured ones where the tables
have such shapes. No tower was measured as a whole, so its times are extrapolated.

In a published trace of vLLM 0.19.1 (vllm-project/vllm issue 41267: Qwen2.5-VL-7B, one H100, an image of 1080p in a
prompt of 2,718 tokens), encoding and prefill take 126 ms; `tests/calibration/test_vision_tower.py` compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokentwin.calibration.operations import Collective, Elementwise, Gemm, KernelTimes, Operation, PrefillAttention
from tokentwin.calibration.steps.launches import launches
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.multimodal import Tower, find_tower
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Item

SPREAD = 2.0  # factor between the estimate and either end of its 90 % interval: a guess, for lack of measurements
SAID = (
    "the encoder's times are extrapolated from kernel times, good to a factor of 2; set encoder_us_per_token if you "
    "measured it"
)


class TowerTimes:
    """`EncoderTimes` of a vision tower on the devices of one engine."""

    def __init__(
        self,
        tower: Tower,
        model: ModelSpec,
        kernels: KernelTimes,
        deployment: Deployment,
        launch_ns: float,
        factor: float,
    ) -> None:
        self._made = tower, model, kernels, deployment, launch_ns
        self._factor = factor
        self._priced = lru_cache(maxsize=4096)(self._price)

    def scaled(self, factor: float) -> TowerTimes:
        return TowerTimes(*self._made, self._factor * factor)

    def on(self, deployment: Deployment) -> TowerTimes:
        tower, model, kernels, _, launch_ns = self._made
        return TowerTimes(tower, model, kernels, deployment, launch_ns, self._factor)

    def __reduce__(self) -> tuple[type[TowerTimes], tuple[object, ...]]:
        return type(self), (*self._made, self._factor)

    def encode_ns(self, items: Sequence[Item]) -> int:
        """Return the time of one batch of items. Audio raises UserError, because a vision tower does not read it."""
        for item in items:
            if item.kind == "audio":
                remedy = "has no known encoder; set multimodal.encoder_us_per_token to a measured time"
                raise UserError("items.kind", item.kind, remedy)
        return round(self._factor * self._priced(tuple(sorted((item.tokens, item.frames) for item in items))))

    def _price(self, sizes: tuple[tuple[int, int], ...]) -> float:
        tower, model, kernels, deployment, launch_ns = self._made
        operations = tower_operations(tower, model, deployment, sizes)
        device_ns = sum(operation.count * float(kernels.time(operation).ns) for operation in operations)
        return max(device_ns, launch_ns * float(launches(operations)))  # vLLM runs the tower without CUDA graphs


def tower_times(model: ModelSpec, kernels: KernelTimes, deployment: Deployment, launch_ns: float) -> TowerTimes | None:
    """Return the times of the tower of `deployment`; None if it has none, or none that is known.

    Raises UserError if the tower's heads cannot be split.
    """
    tower = find_tower(deployment.model, deployment.multimodal) if deployment.multimodal else None
    if tower is None:
        return None
    tp = deployment.tensor_parallel_size
    if tower.num_heads % tp and deployment.multimodal and deployment.multimodal.mm_encoder_tp_mode == "weights":
        remedy = f"must divide the encoder's {tower.num_heads} heads; set multimodal.mm_encoder_tp_mode to data"
        raise UserError("tensor_parallel_size", tp, remedy)
    return TowerTimes(tower, model, kernels, deployment, launch_ns, 1.0)


def tower_operations(
    tower: Tower, model: ModelSpec, deployment: Deployment, sizes: Iterable[tuple[int, int]]
) -> list[Operation]:
    """Return the operations on one device that encode items of `sizes`: (placeholder tokens, frames).

    With `mm_encoder_tp_mode: data`, each device has the whole tower and an equal share of the patches.
    """
    assert deployment.multimodal is not None
    tp = deployment.tensor_parallel_size
    shares, devices = (tp, 1) if deployment.multimodal.mm_encoder_tp_mode == "data" else (1, tp)
    dtype, hidden, heads = deployment.dtype, tower.hidden_size, tower.num_heads // devices
    inter, head_dim = -(-tower.intermediate_size // devices), hidden // tower.num_heads
    frames = pairs = windowed = tokens = 0.0
    for placed, parts in sizes:
        patches = placed * tower.patches_per_token / parts  # of a frame
        tokens += placed / shares
        frames += parts / shares
        pairs += parts * patches**2 / shares
        windowed += parts * patches * min(tower.window_patches, patches) / shares
    patches = tokens * tower.patches_per_token
    windows = tower.num_layers - tower.full_layers if tower.window_patches else 0
    layers, shape = tower.num_layers, (heads, heads, head_dim, dtype)
    up = 2 * inter if tower.gated else inter
    operations: list[Operation] = [
        Gemm("encoder patches", patches, hidden, tower.patch_elements, dtype),
        Gemm("encoder qkv", patches, 3 * heads * head_dim, hidden, dtype, layers),
        Gemm("encoder attention out", patches, hidden, heads * head_dim, dtype, layers),
        Gemm("encoder up", patches, up, hidden, dtype, layers),
        Gemm("encoder down", patches, hidden, inter, dtype, layers),
        PrefillAttention("encoder attention", frames, patches, 0.0, pairs, *shape, count=layers - windows),
        Elementwise("encoder norms", patches * 8.0 * hidden, count=2 * layers),
        Elementwise("encoder rotary", patches * 8.0 * heads * head_dim, count=layers),
        Elementwise("encoder activation", patches * 2.0 * (up + inter), count=layers),
    ]
    if windows:
        rows = patches / tower.window_patches
        attention = PrefillAttention("encoder windows", rows, patches, 0.0, windowed, *shape, count=windows)
        operations.append(attention)
    if tower.mergers:
        merged = tower.merged_size // devices
        operations.append(Gemm("encoder merge", tokens, merged, tower.merged_size, dtype, tower.mergers))
        operations.append(Gemm("encoder project", tokens, model.hidden_size, merged, dtype, tower.mergers))
    else:
        operations.append(Gemm("encoder project", tokens, model.hidden_size, hidden, dtype))
    if devices > 1:
        operations.append(Collective("encoder all-reduce", "all_reduce", devices, patches * hidden, 2 * layers))
    elif shares > 1:
        gathered = tokens * shares * model.hidden_size * tower.width
        operations.append(Collective("encoder gather", "all_gather", shares, gathered))
    return operations
