"""Sampling, detokenisation, tokenizers and model files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from realengine.detokenizer import Detokenizer  # noqa: E402
from realengine.gguf_model import unpermute  # noqa: E402
from realengine.rope import Rope  # noqa: E402
from realengine.sampling import SamplingParams, sample  # noqa: E402
from realengine.segment_tokens import SegmentTokens  # noqa: E402
from realengine.weights import RANDOM, load_model_files  # noqa: E402
from serving.errors import UserError  # noqa: E402
from serving.model_spec import ModelSpec  # noqa: E402
from serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine


def decode_bytes(ids: list[int]) -> str:
    """A byte-level tokenizer at its most extreme: one token, one byte."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=30), st.data())
def test_pieces_make_up_the_text_and_no_character_is_split(text: str, data: st.DataObject) -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.text(alphabet="abé😺", max_size=20), st.lists(st.text(alphabet="abé😺", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string_to_be_completed(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(decode_bytes, stops)
    given_text = ""
    for byte in text.encode():
        given_text += detokenizer.push(byte)
        if detokenizer.stopped:
            break
    given_text += detokenizer.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert detokenizer.stopped == bool(ends)
    assert given_text == (text[: min(begin for end, begin in ends if end == min(ends)[0])] if ends else text)


def test_half_a_character_at_the_end_is_dropped() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(byte) for byte in "a😺".encode()[:-1]]
    assert "".join(pieces) + detokenizer.finish() == "a"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.floats(0.05, 1.0), st.floats(0.2, 3.0))
def test_draws_stay_within_top_k_and_top_p(seed: int, k: int, p: float, temperature: float) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed))
    order = logits[0].argsort(descending=True).tolist()
    probabilities = torch.softmax(logits[0] / temperature, -1)[order].tolist()
    nucleus = next((n for n in range(1, 21) if sum(probabilities[:n]) >= p - 1e-6), 20)
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, seed=seed)
    drawn = {sample(logits, [params], [step])[0] for step in range(20)}
    assert drawn <= set(order[: min(k, nucleus)])


def test_draws_depend_on_seed_and_step_only() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, seed=s) for s in range(6)]
    together = sample(logits, params, [3] * 6)
    assert together == [sample(logits[i : i + 1], [params[i]], [3])[0] for i in range(6)]
    many = [sample(logits[:1], [SamplingParams(temperature=1.0, seed=s)], [0])[0] for s in range(300)]
    assert len(set(many)) > 10


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    counts = [0, 0, 0]
    for step in range(3000):
        counts[sample(logits, [SamplingParams(temperature=1.0)], [step])[0]] += 1
    for count, share in zip(counts, (0.5, 0.3, 0.2), strict=True):
        assert abs(count / 3000 - share) < 4 * (share * (1 - share) / 3000) ** 0.5


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_sampling_is_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_both_rope_pairings_are_the_same_rotation() -> None:
    """Interleaved pairs on permuted rows give the scores that halves give: what GGUF and Hugging Face rely on."""
    spec = RANDOM["llama"]
    halves = Rope(spec, 64, torch.device("cpu"))
    pairs = Rope(spec.model_copy(update={"rope_interleaved": True}), 64, torch.device("cpu"))
    weight = torch.randn(spec.num_heads * spec.head_dim, 32)
    x = torch.randn(10, 32)
    cos, sin = halves.at(torch.arange(10), torch.float32)

    def scores(rope: Rope, weight: torch.Tensor) -> torch.Tensor:
        rotated = rope.rotate((x @ weight.T).view(10, spec.num_heads, spec.head_dim), cos, sin)
        return torch.einsum("qhd,khd->hqk", rotated, rotated)

    torch.testing.assert_close(scores(pairs, weight), scores(halves, unpermute(weight, spec.num_heads)))


def test_segment_tokens_keep_the_workload_s_promise() -> None:
    tokens = SegmentTokens(1000)
    first = WorkloadRequest(1, 0, (("sys", 40), ("", 5)), 10)
    second = WorkloadRequest(2, 0, (("sys", 40), ("out:1", 10), ("", 5)), 10)
    assert tokens.prompt(first)[:40] == tokens.prompt(second)[:40]
    assert tokens.prompt(second)[40:50] == tokens.output(first)
    assert tokens.prompt(first)[40:] != tokens.prompt(second)[50:]
    shorter = WorkloadRequest(3, 0, (("sys", 12),), 1)
    assert tokens.prompt(shorter) == tokens.prompt(first)[:12]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "is not one of"),
        ({}, "is not one of"),
        ({"architectures": ["LlamaForCausalLM"]}, "is needed"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"num_hidden_layers": -1}, "greater than"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, "sliding"),
    ],
)
def test_unsupported_models_are_one_line(config: dict[str, object], says: str) -> None:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 128,
    }
    config = config if config.keys() <= {"architectures"} and says != "sliding" else {**base, **config}
    with pytest.raises(UserError, match=says) as caught:
        ModelSpec.from_hf_config(config)
    assert "\n" not in str(caught.value)


def test_model_sizes_follow_from_the_spec() -> None:
    spec = RANDOM["smollm2"]
    state = load_model_files("random:qwen3", "float32", Path()).state
    assert RANDOM["qwen3"].parameters == sum(weight.numel() for weight in state.values())
    assert 134e6 < spec.parameters < 135e6
    assert spec.kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2


def test_damaged_model_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load_model_files(str(tmp_path), "float32", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_model_files(str(tmp_path), "float32", tmp_path)
    with pytest.raises(UserError, match="model fetch smollm2"):
        load_model_files("smollm2", "float32", tmp_path)
    with pytest.raises(UserError, match="random models are"):
        load_model_files("random:gpt", "float32", tmp_path)


@pytest.mark.slow
def test_smollm2_answers_sensibly(tmp_path: Path) -> None:
    """The real model, fetched into a folder of its own the first time."""
    from realengine.engine import Engine
    from realengine.generate import stream
    from realengine.smollm2 import fetch
    from realengine.tokenizer import Tokenizer
    from serving.config import Deployment, SchedulerConfig

    home = Path(os.environ.get("TOKENTWIN_HOME") or Path.home() / ".cache" / "tokentwin")
    try:
        folder = fetch(home)
    except UserError as error:
        pytest.skip(str(error))
    assert fetch(home) == folder
    tokenizer = Tokenizer(folder)
    text = "Größe 12345 naïve 😺\n  def f(x):\n\treturn x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 30
    scheduler = SchedulerConfig(max_model_len=512, num_blocks=60, max_num_batched_tokens=64)
    engine = Engine(Deployment(model="smollm2", scheduler=scheduler), load_model_files("smollm2", "bfloat16", home))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = "".join(stream(engine, question, 40, SamplingParams()))
    assert "Paris" in answer
    assert "".join(stream(engine, question, 40, SamplingParams(), stop=["Paris"])) == answer.split("Paris")[0]
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
