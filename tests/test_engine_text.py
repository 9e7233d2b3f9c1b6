"""Sampling, detokenisation, tokenizers and model files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from realengine.detokenizer import Detokenizer  # noqa: E402
from realengine.gguf_model import unpermute  # noqa: E402
from realengine.rope import Rope  # noqa: E402
from realengine.sampling import SamplingParams  # noqa: E402
from realengine.segment_tokens import SegmentTokens  # noqa: E402
from realengine.weights import RANDOM, load_model_files  # noqa: E402
from serving.errors import UserError  # noqa: E402
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


def test_both_rope_pairings_are_the_same_rotation() -> None:
    """Interleaved pairs on permuted rows give the scores that halves give: what GGUF and Hugging Face rely on."""
    spec = RANDOM["llama"]
    halves = Rope(spec, 64, torch.device("cpu"))
    pairs = Rope(spec.model_copy(update={"rope_interleaved": True}), 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(spec.num_heads * spec.head_dim, 32, generator=generator)
    x = torch.randn(10, 32, generator=generator)
    cos, sin = halves.at(torch.arange(10), torch.float32)

    def scores(rope: Rope, weight: torch.Tensor) -> torch.Tensor:
        rotated = rope.rotate((x @ weight.T).view(10, spec.num_heads, spec.head_dim), cos, sin)
        return torch.einsum("qhd,khd->hqk", rotated, rotated)

    torch.testing.assert_close(
        scores(pairs, weight), scores(halves, unpermute(weight, spec.num_heads)), atol=1e-3, rtol=1e-5
    )


def test_segment_tokens_keep_the_workload_s_promise() -> None:
    tokens = SegmentTokens(1000)
    first = WorkloadRequest(1, 0, (("sys", 40), ("", 5)), 10)
    second = WorkloadRequest(2, 0, (("sys", 40), ("out:1", 10), ("", 5)), 10)
    assert tokens.prompt(first)[:40] == tokens.prompt(second)[:40]
    assert tokens.prompt(second)[40:50] == tokens.output(first)
    assert tokens.prompt(first)[40:] != tokens.prompt(second)[50:]
    shorter = WorkloadRequest(3, 0, (("sys", 12),), 1)
    assert tokens.prompt(shorter) == tokens.prompt(first)[:12]


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
