"""Steps as graphs: what they are padded to changes no result, there are few of them, and each is one launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.realengine.test_engine_loop import engine_for, plain, run  # noqa: E402, F401
from tokentwin.realengine.devices.cpu_device import CpuDevice  # noqa: E402
from tokentwin.realengine.step_graphs import (  # noqa: E402
    StepGraphs,
    largest_layout,
    mixed_layout,
    mixed_steps,
    pad,
)
from tokentwin.realengine.step_input import Batch, Layout, RowInput, pack  # noqa: E402
from tokentwin.serving.cost_model import TOKEN_BUCKETS, padded  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("overlapped", "drafts", "deployment"),
    [(False, 0, {}), (True, 0, {}), (True, 0, {"batch_invariant": True}), (False, 3, {})],
)
def test_mixed_steps_as_graphs_give_the_same_tokens(
    overlapped: bool,
    drafts: int,
    deployment: dict[str, Any],
    plain: list[list[int]],  # noqa: F811
) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1} if drafts else None
    engine = engine_for(scheduler={"async_scheduling": overlapped, "speculative": speculative}, **deployment)
    engine.runner.graph_mixed_steps(True)
    outputs, steps = run(engine, drawn=True)
    engine.close()
    assert outputs == plain
    assert all(step.graph for step in steps) and any(step.plan.prefill_rows for step in steps)


ENGINE: list[Any] = []


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from((1, 1, 2, 9, 20))), min_size=1, max_size=5), st.data())
def test_padding_changes_no_result(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """Hidden states and what is written to the cache, beside the null block; for a layout that is larger still, too."""
    if not ENGINE:
        ENGINE.append(engine_for())
    runner = ENGINE[0].runner
    inputs, used = [], 1
    for start, tokens in rows:
        need = -(-(start + tokens) // 4)
        ids = [7 * used + place for place in range(tokens)]
        inputs.append(RowInput(ids, start, np.arange(used, used + need, dtype=np.int32), 0))
        used += need
    step, sample_rows = pack(inputs, 4, 6, runner.attention.tiles)
    wanted = [sample for sample, row in enumerate(sample_rows) if row is not None]
    large = mixed_layout(step.layout)
    more = data.draw(st.sampled_from((large, large._replace(rows=large.rows + 3, tiles=5), mixed_layout(large))))
    results = []
    for packed in (step, pad(step, more)):
        runner.kv._tensor.zero_()
        batch = Batch.from_buffer(torch.from_numpy(packed.packed), packed.layout)
        with torch.inference_mode():
            hidden = runner.model.forward(batch.tokens, batch, runner.kv)
        results.append((hidden[wanted], runner.kv._tensor[:, :, 1:].clone()))
    for exact, got in zip(*results, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)


@given(
    st.integers(0, 300), st.lists(st.integers(2, 600), min_size=1, max_size=20), st.integers(0, 4), st.integers(16, 48)
)
def test_a_mixed_layout_holds_the_step_and_is_one_of_few(decodes, prefills, drafts, tile):
    decodes = padded(decodes)
    tokens = decodes + sum(prefills)
    samples = decodes + min(len(prefills) * (1 + drafts), sum(prefills))
    layout = Layout(decodes, decodes + len(prefills), tokens, samples, sum(-(-count // tile) for count in prefills))
    graphs = StepGraphs(CpuDevice(False), mixed=True)
    if tokens > TOKEN_BUCKETS[-1]:
        assert graphs.layout_for(layout) is None
        return
    graph = graphs.layout_for(layout)
    assert graph is not None and not graph.decodes_only and graph.tokens in TOKEN_BUCKETS
    for taken, size, most in zip(graph, layout, largest_layout(tokens), strict=True):
        assert size <= taken <= most
    assert graph.tokens <= max(4 / 3 * tokens, 128)
    assert StepGraphs(CpuDevice(False), mixed=False).layout_for(layout) is None


def test_warming_up_captures_each_number_of_tokens_and_samples() -> None:
    sizes = mixed_steps(2048, 256, lambda tokens: [tokens])
    layouts = [
        mixed_layout(Layout((n := padded(step.count(1))), n + 1, n + step[-1], n + 1, -(-step[-1] // 32)))
        for step in sizes
    ]
    assert {layout.tokens for layout in layouts} == set(TOKEN_BUCKETS)
    assert {layout.samples for layout in layouts if layout.tokens >= 512} == {64, 256}
    assert len(set(layouts)) <= 40
    assert all(sum(step) <= 2048 and len(step) <= 256 for step in sizes)


def test_the_mixed_graph_used_longest_ago_gives_way() -> None:
    captured: list[Callable[[], None]] = []
    device: Any = SimpleNamespace(capture=lambda work: captured.append(work) or work, release_graphs=lambda: None)
    graphs = StepGraphs(device, mixed=True)
    decode, mixed = Layout(8, 8, 8, 8), [Layout(8, 20, 16 + tokens, 8) for tokens in range(64)]
    for layout in (decode, *mixed, mixed[0], Layout(8, 20, 500, 8), mixed[0], decode):
        graphs.get(layout, lambda: None)  # type: ignore[arg-type, return-value]
    assert len(captured) == 66 and len(graphs) == 65
    graphs.get(mixed[1], lambda: None)  # type: ignore[arg-type, return-value]
    assert len(captured) == 67


def test_memory_of_graphs_counts_the_mixed_ones() -> None:
    """30 bytes for the first of a kind and 2 for each of the others."""
    used = [0]

    def run_sizes(sizes: list[int]) -> None:
        used[0] += 30 if len(sizes) in (64, 9) else 2

    device: Any = SimpleNamespace(used_bytes=lambda: used[0], release_graphs=lambda: None)
    for mixed, expected in ((False, 30 + 2 * 2), (True, 30 + 2 * 2 + 30 + 63 * 2)):
        memory = StepGraphs(device, mixed).memory([64, 32, 16], [[1] * 8 + [9], [5]], run_sizes)
        assert memory == expected


class Launches(TorchDispatchMode):
    """Counts what a GPU would run: torch's operations that are not only views, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        free = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")
        if not operation.is_view and not operation.name().startswith(free):
            self.names.append(operation.name())
        return out


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    from triton.runtime.jit import JITFunction

    with Launches() as launches:
        noted = lambda *a, **k: launches.names.append("kernel")  # noqa: E731
        monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: noted)
        yield launches


def test_a_mixed_step_is_one_launch_and_not_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B's step on our kernels, on torch's meta device, up to the head. docs/kernels.md has both."""
    pytest.importorskip("triton", reason="triton is not installed (Linux on x86_64 only)")
    from lab.gpu_suite.ragged_batch import backend_for
    from tokentwin.realengine.attention.kv_cache import KvCache
    from tokentwin.realengine.kernels.launches import INTERPRETING
    from tokentwin.realengine.models.model import Model
    from tokentwin.realengine.models.weights import random_spec, shapes

    if INTERPRETING:
        pytest.skip("the interpreter launches nothing")
    meta, spec = torch.device("meta"), random_spec("random:llama-3.1-8b")
    attention, ops = backend_for("triton", spec, 16, meta, 8192)
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device=meta) for name, shape in shapes(spec)}
    model, kv = Model(spec, state, torch.bfloat16, meta, ops, attention), KvCache(spec, 2, 16, torch.bfloat16, meta)
    rows = [RowInput([0] * size, 0, np.zeros(32, np.int32), 0) for size in [1] * 40 + [300]]
    step = pack(rows, 16, 64, attention.tiles).step
    again = pack(rows[1:], 16, 64, attention.tiles).step  # of another size, for which the same graph serves
    graphs = StepGraphs(CpuDevice(False), mixed=True)
    layout = graphs.layout_for(step.layout)
    assert layout is not None
    step = pad(step, layout)
    batch = Batch.from_buffer(torch.from_numpy(step.packed).to(meta), layout)
    with counting(monkeypatch) as eager:
        model.forward(batch.tokens, batch, kv)
    assert len(eager.names) == 10 * spec.num_layers + 7  # embedding, two plans, zeros, gathers, the last norm
    replays: list[Layout] = []
    monkeypatch.setattr(CpuDevice, "capture", lambda self, work: (work(), lambda: replays.append(layout))[1])
    with counting(monkeypatch) as captured:
        graphs.get(layout, lambda: model.forward(batch.tokens, batch, kv))()
    assert captured.names == eager.names and replays == [layout]
    with counting(monkeypatch) as replayed:
        graphs.get(graphs.layout_for(again.layout), lambda: model.forward(batch.tokens, batch, kv))()
    assert not replayed.names and replays == [layout, layout]
