"""Tiled attention and attention with its scores in memory give what float64 from the definition gives."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.budget import examples  # noqa: E402
from tests.realengine.test_engine_loop import engine_for, plain, run  # noqa: E402, F401
from tokentwin.calibration.operations import PrefillAttention, uniform_step  # noqa: E402
from tokentwin.calibration.step_operations import step_operations  # noqa: E402
from tokentwin.realengine.attention.kv_cache import LayerKv  # noqa: E402
from tokentwin.realengine.attention.torch_attention import Span, TorchAttention, UnfusedAttention  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.deployments.model_catalogue import find_model  # noqa: E402

pytestmark = pytest.mark.engine
PAGE = 4


@examples(0.5)
@given(st.integers(0, 2**32))
def test_both_are_what_float64_says(seed: int) -> None:
    chance = random.Random(seed)
    made = torch.Generator().manual_seed(seed % 2**31)
    kv_heads, group, dim = chance.choice([1, 2]), chance.choice([1, 3]), chance.choice([8, 16])
    blocks = torch.randperm(40, generator=made)
    keys, values = (torch.randn(40, kv_heads, PAGE, dim, generator=made) for _ in range(2))
    spans, first, used = [], 0, 0
    for _ in range(chance.randrange(1, 4)):
        count, past = chance.choice([1, chance.randrange(2, 9)]), chance.randrange(12)
        seen = past + count
        table = blocks[used : used - (-seen // PAGE)]
        mask = None if count == 1 else torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        spans.append(Span(first, count, 0, seen, table, mask))
        first, used = first + count, used + len(table)
    queries = torch.randn(first, kv_heads * group, dim, generator=made)
    expected = torch.zeros_like(queries, dtype=torch.float64)
    for start, count, _, seen, table, _ in spans:
        mine = [x[table].transpose(0, 1).flatten(1, 2)[:, :seen].double() for x in (keys, values)]
        for token in range(count):
            for head in range(kv_heads * group):
                k, v = (x[head // group, : seen - count + token + 1] for x in mine)
                weights = (k @ queries[start + token, head].double() / dim**0.5).softmax(0)
                expected[start + token, head] = weights @ v
    for backend in (TorchAttention, UnfusedAttention):
        attention = backend.__new__(backend)  # its only setting is the size of a block, which plans use
        attended = attention.attend(queries, spans, LayerKv(keys, values, 1.0, 1.0))
        assert torch.allclose(attended.double(), expected, atol=1e-5)


def test_the_engine_says_the_same_with_either(plain: list[list[int]]) -> None:  # noqa: F811
    engine = engine_for(attention="unfused")
    assert engine.runner.attention.name == "unfused"
    assert run(engine, drawn=True)[0] == plain
    engine.close()


def test_scores_in_memory_move_what_the_definition_writes_and_reads() -> None:
    """Of 512 tokens after 1,000: 32 heads x 512 x 1,512 scores, written and read before and after the softmax."""
    model, sizes = find_model("Llama-3.1-8B"), uniform_step(0, 0, 1, 512, 1000, 0)
    made = {}
    for attention in ("auto", "unfused"):
        deployment = Deployment(model="Llama-3.1-8B", attention=attention, scheduler=SchedulerConfig())
        made[attention] = {op.name: op for op in step_operations(model, deployment, sizes)}
    added = made["unfused"].keys() - made["auto"].keys()
    (scores,) = (made["unfused"][name] for name in added)
    assert scores.bytes == 4 * 2 * 32 * 512 * 1512
    tiled = made["auto"]["prefill attention"]
    assert isinstance(tiled, PrefillAttention)
    assert scores.flops + tiled.flops == 4 * 32 * 128 * 512 * 1512
