"""The operations of a layer, in the form in which they are checked and timed.

An operation has random inputs of one size, the call that the engine makes, and the error of the result against float64.
It also has the bytes and FLOPs that any implementation must move and compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.gpu_suite.ragged_batch import Draw, Numbers, backend_for, batch_of, layer_spec
from lab.gpu_suite.references import distance_from_draw, normalised, relative_error
from tokentwin.realengine.kernels.launches import Shape
from tokentwin.realengine.models.layer_ops import LayerOps, Routing, Scores
from tokentwin.realengine.models.linear import DenseProjection, Fp8Projection, Fp8Rows, PackedWeight, round_to_fp8
from tokentwin.realengine.models.weight_loader import rounded
from tokentwin.realengine.step_input import Batch

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
NAME = {torch.float32: "float32", torch.float16: "float16", _BF16: "bf16", _FP8: "fp8"}
LIMIT = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    _FP8: 0.07,
}  # limits of `relative_error` by dtype: a few roundings; for fp8, a single rounding
_DRAW_LIMIT = 1e-4  # limit of the error of a cumulative probability, a sum of 150,000 float32 numbers
_EPS = 1e-5
_KINDS = (
    (0.0, 5, 0.5), (1.0, 0, 1.0), (0.7, 1, 1.0), (1.3, 50, 1.0), (1.0, 0, 0.9), (0.8, 40, 0.95), (2.0, 0, 1e-6),
    (1.0, 9000, 0.5),
)  # fmt: skip
"""Settings of random sampling: temperature, top-k, top-p."""

Outputs = tuple[Tensor, ...]


class Cost(NamedTuple):
    """The bytes and FLOPs that an operation must move and compute; activations are in bf16.

    Each input is read once and each output written once; a multiply-add of a matrix product counts as two operations.
    """

    bytes: int
    flops: int = 0


class Prepared(NamedTuple):
    """A prepared operation.

    Attributes:
        make: makes inputs from a seed
        call: calls the operation on inputs, which it may change
        error: returns the error of the result of `call` for such inputs; None if only times matter
    """

    make: Callable[[int], tuple[Any, ...]]
    call: Callable[..., Outputs]
    error: Callable[[tuple[Any, ...], Outputs], float] | None = None


class Operation(NamedTuple):
    """An operation at one size; `case` distinguishes it from others of its kernel.

    An error above `limit` is a fault. `about` has the columns of the grid that describe its size.
    """

    kernel: str
    case: str
    dtype: torch.dtype
    limit: float
    prepare: Callable[[], Prepared]
    cost: Cost = Cost(0)
    about: Mapping[str, Any] = {}


class On(NamedTuple):
    """The device of operations, and their `backend`, as in a deployment.

    `settings` are attributes of the backend's objects with other values than the engine's.
    """

    device: torch.device
    backend: str
    settings: Mapping[str, Any] = {}

    def ops(self, dtype: torch.dtype, **spec: Any) -> LayerOps:
        """Return the layer operations other than attention; `spec` are further settings of the model."""
        model = layer_spec(Shape("any", 1, 1, 64, dtype, dtype, 16)).model_copy(update={"norm_eps": _EPS, **spec})
        return self.with_settings(backend_for(self.backend, model, 16, self.device, 128).ops)

    def with_settings(self, made: Any) -> Any:
        """Return `made` with those of the `settings` that it has."""
        for name in self.settings.keys() & set(dir(made)):
            setattr(made, name, self.settings[name])
        return made

    def about(self, tokens: int, inputs: int, outputs: int, **more: Any) -> dict[str, Any]:
        sizes = {"backend": self.backend, "tokens": tokens, "inputs": inputs, "outputs": outputs}
        return {"part": "", "dtype": "bf16", **sizes, **more}


class Mixture(NamedTuple):
    """The sizes of a layer's experts (MoE).

    `inner` is the inner size of one expert, `experts` the number of experts, `topk` the number of experts per token,
    and `quantization` the type to which weights are rounded, as `Deployment` names it.
    """

    hidden: int
    inner: int
    experts: int
    topk: int
    quantization: str = "none"


class Packing(NamedTuple):
    """Sizes of a packed weight; `zeros` is True if groups have a zero point, and `group` 0 means all inputs."""

    outputs: int
    inputs: int
    bits: int
    group: int = 0
    zeros: bool = False

    def weight(self, numbers: Numbers, dtype: torch.dtype) -> PackedWeight:
        """Return random words, with scales that make the weight's products about as large as the activations."""
        group = self.group or self.inputs
        words = numbers(self.outputs, self.inputs * self.bits // 32, dtype=torch.float32, scale=1e9).to(torch.int32)
        scale = numbers(self.outputs, -(-self.inputs // group), dtype=dtype, scale=2.0**-self.bits * self.inputs**-0.5)
        zero = (numbers(*scale.shape, dtype=torch.float32).abs() * 2).to(torch.uint8) if self.zeros else None
        return PackedWeight(words, scale, zero, self.bits, group)

    def dense(self, weight: PackedWeight) -> Tensor:
        """Return the unpacked weight in float64."""
        zero = torch.full_like(weight.scale, 2 ** (self.bits - 1)) if weight.zero is None else weight.zero
        scale, zero = (
            part.double().repeat_interleave(weight.group, 1)[:, : self.inputs] for part in (weight.scale, zero)
        )
        return (weight.integers().double() - zero) * scale


def gemm(on: On, tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Operation:
    """Return a projection in bf16, or in fp8 (weights and activations) with a float32 scale for each output."""

    def prepare() -> Prepared:
        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            weight = numbers(outputs, inputs)
            projection = DenseProjection(weight) if dtype == _BF16 else Fp8Projection(*round_to_fp8(weight))
            return projection, numbers(tokens, inputs)

        return Prepared(make, lambda projection, x: (projection(x),))

    weights = inputs * outputs * dtype.itemsize + (4 * outputs if dtype == _FP8 else 0)
    cost = Cost(weights + 2 * tokens * (inputs + outputs), 2 * tokens * inputs * outputs)
    about = on.about(tokens, inputs, outputs, dtype=NAME[dtype]) | {"backend": "torch"}
    return Operation("gemm", f"{tokens} x {inputs} x {outputs}", dtype, LIMIT[dtype], prepare, cost, about)


def packed_gemm(on: On, packing: Packing, tokens: int, dtype: torch.dtype = _BF16) -> Operation:
    """Return a projection by packed integers; each group has a 16-bit scale, and may have a one-byte zero point."""
    inputs, outputs = packing.inputs, packing.outputs

    def prepare() -> Prepared:
        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            weight, x = packing.weight(numbers, dtype), numbers(tokens, inputs, dtype=dtype)
            return x, on.ops(dtype).packed(weight, dtype, None), weight

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            x, _, weight = given
            return relative_error(out[0], x.double() @ packing.dense(weight).T)

        return Prepared(make, lambda x, projection, _: (projection(x),), error)

    groups = outputs * -(-inputs // (packing.group or inputs))
    weights = inputs * outputs * packing.bits // 8 + (3 if packing.zeros else 2) * groups
    cost = Cost(weights + 2 * tokens * (inputs + outputs), 2 * tokens * inputs * outputs)
    about = on.about(tokens, inputs, outputs, dtype=f"int{packing.bits}")
    return Operation("packed_gemm", f"{tokens} tokens, {packing}", dtype, LIMIT[dtype], prepare, cost, about)


def grouped_gemm(on: On, mixture: Mixture, tokens: int, dtype: torch.dtype = _BF16, others: int = 0) -> Operation:
    """Return the experts of a layer, chosen at random; the first `others` of them belong to another rank.

    The cost is for bf16 weights, and for the expected number of chosen experts if tokens choose evenly.
    """
    hidden, inner, experts, topk, quantization = mixture
    own = experts - others

    def prepare() -> Prepared:
        ops = on.ops(dtype, num_experts=experts)

        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            x = numbers(tokens, hidden, dtype=dtype)
            stored = [
                [rounded(numbers(*shape, dtype=dtype, scale=shape[1] ** -0.5), quantization) for _ in range(own)]
                for shape in ((2 * inner, hidden), (hidden, inner))
            ]
            shares, chosen = numbers(tokens, experts, dtype=torch.float32).softmax(-1).topk(topk)
            ordered, choices = chosen.flatten().sort(stable=True)
            bounds = torch.arange(others, experts + 1, device=on.device)
            routing = Routing(choices, torch.searchsorted(ordered, bounds, out_int32=True), shares)
            return x, *(ops.expert_weights(matrix, own, dtype) for matrix in stored), routing, stored, chosen

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            """Return the error against the definition, expert by expert."""
            x, _, _, routing, stored, chosen = given
            expected, x, shares = torch.zeros_like(x, dtype=torch.float64), x.double(), routing.shares.double()
            for expert, weights in enumerate(zip(*stored, strict=True), others):
                gate_up, down = (w if isinstance(w, Tensor) else w.dense(torch.float64) for w in weights)
                token, number = (chosen == expert).nonzero(as_tuple=True)
                answer = _swiglu(x[token] @ gate_up.double().T) @ down.double().T
                expected.index_add_(0, token, answer * shares[token, number, None])
            return relative_error(out[0], expected)

        return Prepared(make, lambda x, gate_up, down, routing, *_: (ops.experts(x, gate_up, down, routing),), error)

    touched = experts * (1 - (1 - topk / experts) ** tokens)
    weights = 3 * hidden * inner  # of one expert
    cost = Cost(round(2 * touched * weights) + 2 * 2 * tokens * hidden, 2 * tokens * topk * weights)
    about = on.about(tokens, hidden, hidden)
    return Operation("grouped_gemm", f"{tokens} tokens, {mixture}", dtype, LIMIT[dtype], prepare, cost, about)


def router(on: On, mixture: Mixture, tokens: int, dtype: torch.dtype = _BF16) -> Operation:
    """Return the routing of tokens by their scores; its error is that of the weights, or infinite for a wrong order."""
    experts, topk = mixture.experts, mixture.topk

    def prepare() -> Prepared:
        ops = on.ops(dtype, num_experts=experts, experts_per_token=topk, norm_topk_prob=True)

        def make(seed: int) -> tuple[Any, ...]:
            return (Numbers(on.device, seed)(tokens, experts, dtype=dtype, scale=2),)

        def call(logits: Tensor) -> Outputs:
            chosen, routing = ops.route(Scores(logits, None, range(experts)))
            return chosen, *routing

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            chosen, choices, offsets, shares = out
            ordered, places = chosen.flatten().sort(stable=True)
            ends = torch.bincount(ordered, minlength=experts).cumsum(0)
            if not (torch.equal(choices, places) and torch.equal(offsets[1:].long(), ends) and int(offsets[0]) == 0):
                return float("inf")
            scores = given[0].double().softmax(-1)
            best = scores.topk(topk).values
            mine = scores.gather(1, chosen.long())  # equal scores may be chosen in any order
            worst = max(relative_error(mine.sort(descending=True).values, best), 0.0)
            return max(worst, relative_error(shares, mine / mine.sum(-1, keepdim=True)))

        return Prepared(make, call, error)

    cost, about = Cost(tokens * (2 * experts + 16 * topk)), on.about(tokens, experts, topk)
    return Operation("router", f"{tokens} tokens, {topk} of {experts}", dtype, 1e-5, prepare, cost, about)


def add_rms_norm(
    on: On, tokens: int, size: int, dtype: torch.dtype = _BF16, add: bool = True, fp8: bool = False
) -> Operation:
    """Return the addition to the residual and the RMSNorm; the new residual must be the rounded sum.

    Without `add`, only the norm is computed. With `fp8`, its output is rows of e4m3.
    """

    def prepare() -> Prepared:
        ops = on.ops(dtype)

        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            return *numbers(2, tokens, size, dtype=dtype, scale=3), numbers(size, dtype=dtype)

        def call(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
            return *_parts(ops.add_norm(x, residual if add else None, weight, fp8)), residual if add else x

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            x, residual, weight = given
            summed = (x.double() + residual.double()).to(dtype) if add else x
            normed = relative_error(_whole(out[:-1]), normalised(out[-1].double(), weight.double(), _EPS))
            return max(normed, relative_error(out[-1], summed.double()))

        return Prepared(make, call, error)

    what = f"{tokens} x {size}" + ", no residual" * (not add) + ", to fp8" * fp8
    cost, about = Cost(2 * size * (4 * tokens + 1)), on.about(tokens, size, size)
    return Operation("add_rms_norm", what, dtype, LIMIT[_FP8 if fp8 else dtype], prepare, cost, about)


def silu_mul(on: On, tokens: int, size: int, dtype: torch.dtype = _BF16, fp8: bool = False) -> Operation:
    """Return SwiGLU's product of `[tokens, 2 * size]`; with `fp8` its output is rows of e4m3."""

    def prepare() -> Prepared:
        ops = on.ops(dtype)

        def make(seed: int) -> tuple[Any, ...]:
            return (Numbers(on.device, seed)(tokens, 2 * size, dtype=dtype, scale=4),)

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            return relative_error(_whole(out), _swiglu(given[0].double()))

        return Prepared(make, lambda gate_up: _parts(ops.silu_mul(gate_up, fp8)), error)

    what = f"{tokens} x {size}{', to fp8' if fp8 else ''}"
    cost, about = Cost(2 * 3 * tokens * size), on.about(tokens, 2 * size, size)
    return Operation("silu_mul", what, dtype, LIMIT[_FP8 if fp8 else dtype], prepare, cost, about)


def argmax(on: On, rows: int, vocab: int, dtype: torch.dtype = _BF16) -> Operation:
    """Return greedy sampling; its error is the number of rows that do not give the first largest logit's token.

    In the first row two logits are equally large, to check this rule.
    """

    def prepare() -> Prepared:
        batch, ops = _sampling(on, [None] * rows, dtype)

        def make(seed: int) -> tuple[Any, ...]:
            logits = Numbers(on.device, seed)(batch.layout.samples, vocab, dtype=dtype, scale=3)
            logits[0, -1] = logits[0, vocab // 2] = 9.0
            return (logits,)

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            (logits,) = given
            places = torch.arange(vocab, device=on.device)
            largest = logits == logits.max(dim=1, keepdim=True).values
            return float((out[0] != torch.where(largest, places, vocab).amin(dim=1)).sum())

        return Prepared(make, lambda logits: (ops.sample(logits, batch, True),), error)

    cost, about = Cost(rows * (2 * vocab + 4)), on.about(rows, vocab, 1, rows=rows)
    return Operation("argmax", f"{rows} x {vocab}", dtype, 0.0, prepare, cost, about)


def draw(
    on: On, rows: int, vocab: int, dtype: torch.dtype = _BF16, kinds: Sequence[tuple[float, int, float]] = _KINDS
) -> Operation:
    """Return random sampling; its error is the largest distance from a row's random number to its token's interval.

    The interval is the token's part of the cumulative probability, from 0 to 1.
    """

    def prepare() -> Prepared:
        numbers = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).tolist()
        hows: list[Draw] = [(*kinds[(3 + index) % len(kinds)], number) for index, number in enumerate(numbers)]
        batch, ops = _sampling(on, hows, dtype)

        def make(seed: int) -> tuple[Any, ...]:
            logits = Numbers(on.device, seed)(batch.layout.samples, vocab, dtype=dtype, scale=3)
            logits[:, vocab // 7 : vocab // 5] = -torch.inf
            return (logits,)

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            drawn = zip(given[0], hows, out[0].tolist(), strict=False)
            return max(distance_from_draw(row, how, token) for row, how, token in drawn)

        return Prepared(make, lambda logits: (ops.sample(logits, batch, False),), error)

    part = "temperature {:g}, top-k {}, top-p {:g}".format(*kinds[0])
    cost, about = Cost(rows * (2 * vocab + 4 + 16)), on.about(rows, vocab, 1, rows=rows, part=part)
    return Operation("draw", f"{rows} x {vocab}", dtype, _DRAW_LIMIT, prepare, cost, about)


def token_mask(on: On, rows: int, vocab: int, dtype: torch.dtype = _BF16) -> Operation:
    """Return the masking of every second row; its error is the number of wrong logits."""

    def prepare() -> Prepared:
        ops, samples = on.ops(dtype), torch.arange(0, rows, 2, dtype=torch.int32, device=on.device)

        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            bits = numbers(len(samples), -(-vocab // 32), dtype=torch.float32, scale=1e9).to(torch.int32)
            return numbers(rows, vocab, dtype=dtype), bits

        def call(logits: Tensor, bits: Tensor) -> Outputs:
            ops.mask(logits, samples, bits)
            return (logits,)

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            wanted, bits = given
            allowed = (bits[..., None] >> torch.arange(32, device=on.device) & 1).flatten(1)[:, :vocab] == 1
            wanted[::2] = torch.where(allowed, wanted[::2], -torch.inf)
            return float((out[0] != wanted).sum())

        return Prepared(make, call, error)

    return Operation("token_mask", f"{rows} x {vocab}", dtype, 0.0, prepare)


def _sampling(on: On, draws: Sequence[Draw | None], dtype: torch.dtype) -> tuple[Batch, LayerOps]:
    """Return a step that samples once for each of `draws`, and for padding rows."""
    shape = Shape("sample", 1, 1, 64, dtype, dtype, 16)
    attention, ops = backend_for(on.backend, layer_spec(shape), 16, on.device, 128)
    return batch_of([(1, 1)] * len(draws), 16, attention, on.device, draws=draws), ops


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return gate / (1 + (-gate).exp()) * up


def _parts(output: Tensor | Fp8Rows) -> Outputs:
    return (output.rows, output.scale) if isinstance(output, Fp8Rows) else (output,)


def _whole(parts: Outputs) -> Tensor:
    """Return the tensor that `_parts` took apart, in float64."""
    return parts[0].double() * parts[1] if len(parts) > 1 else parts[0].double()
