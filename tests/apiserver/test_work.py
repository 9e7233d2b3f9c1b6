"""One budget for the work of a request; beside any request, `/health` answers within a second of the server's time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.apiserver.served import TWIN, Server, serving
from tests.apiserver.test_hostile import peak_mb
from tests.budget import examples
from tokentwin.apiserver.messages import Add
from tokentwin.apiserver.openai_api.json_pieces import PIECE, json_pieces
from tokentwin.apiserver.openai_api.protocol import CompletionRequest
from tokentwin.apiserver.openai_api.refusal import Refusal
from tokentwin.apiserver.openai_api.work import BUDGET, check_work
from tokentwin.realengine.logit_rules import LogitRules

MOST_S, MOST_MB = 1.0, 500
LONG = 130_000  # tokens of a prompt


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-model-len", 131_072, "--speed", 20)
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, *options) as server:
        yield server
        assert "Traceback" not in server.said


def api_s(server: Server) -> float:
    """Return the seconds of CPU that the process which handles HTTP has used."""
    (pid,) = server.processes()["api"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


factors = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 30, 1000, 20_000, LONG]),
        "prompts": st.sampled_from([1, 2, 32, 1000]),
        "n": st.sampled_from([1, 4, 128]),
        "max_tokens": st.sampled_from([1, 16, 200]),
        "logprobs": st.sampled_from([None, 0, 5, 20]),
        "prompt_logprobs": st.sampled_from([None, 0, 5, 20]),
        "echo": st.booleans(),
        "stream": st.booleans(),
        "return_token_ids": st.booleans(),
        "schema": st.sampled_from([0, 250_000]),
        "allowed": st.sampled_from([0, 4096]),
    }
)
ONE: dict[str, Any] = {"tokens": LONG, "prompts": 1, "max_tokens": 1}
COUNTS = ("n", "max_tokens", "prompts", "tokens", "schema", "allowed")
LITTLE: dict[str, Any] = {**ONE, "tokens": 1}


@given(factors)
@example({**ONE, "prompt_logprobs": 20})
@example({**ONE, "prompt_logprobs": 6})
@example({**ONE, "prompt_logprobs": 20, "n": 4})
@example({**ONE, "n": 128})
@example({**ONE, "n": 128, "echo": True})
@example({**ONE, "n": 7, "tokens": 30_000, "echo": True, "logprobs": 1, "stream": True})
@example({**LITTLE, "prompts": 32, "n": 128})
@example({**LITTLE, "prompts": 4096})
@example({**LITTLE, "prompts": 4096, "n": 128})
@example({**LITTLE, "prompts": 500_000})
@example({**LITTLE, "n": 5000})
@example({**LITTLE, "n": 4000, "schema": 250_000})
@example({**LITTLE, "n": 4000, "allowed": 4096})
@examples(0.2)
def test_health_answers_beside_any_product_of_factors(server: Server, factors: dict[str, Any]) -> None:
    tokens, prompts = factors["tokens"], factors["prompts"]
    given = {name: value for name, value in factors.items() if name not in ("tokens", "prompts")}
    if size := given.pop("schema", 0):
        given["structured_outputs"] = {"json": {"const": 1, "description": "a" * size}}
    if allowed := given.pop("allowed", 0):
        given["allowed_token_ids"] = list(range(allowed))
    if given.get("stream"):
        given.pop("prompt_logprobs", None)
    prompt = [[5 + at % 90] * tokens for at in range(min(prompts, 500_000 // tokens))]
    rest, answers = peak_mb(server), []

    def ask() -> None:
        answers.append(server.complete(**{**given, "prompt": prompt}))

    asking = Thread(target=ask)
    asking.start()
    while asking.is_alive():
        began_s = api_s(server)
        assert server.ask("GET", "/health").status == 200
        assert api_s(server) - began_s < MOST_S
        sleep(0.02)
    (answer,) = answers
    assert answer.status == 200 or answer.error["param"] in ("n", "prompt", "prompt_logprobs", "logprobs")
    assert peak_mb(server) - rest < MOST_MB


@given(factors, st.sampled_from([*COUNTS, "logprobs", "prompt_logprobs"]))
@examples(5)
def test_more_of_any_factor_is_more_work(factors: dict[str, Any], more: str) -> None:
    def refused(factors: dict[str, Any]) -> bool:
        names = ("n", "max_tokens", "echo", "return_token_ids")
        body = CompletionRequest(prompt="a", **{name: factors[name] for name in names})
        one = Add(0, [1] * factors["tokens"], factors["max_tokens"], 0, logprobs=factors["logprobs"])
        one.prompt_logprobs = factors["prompt_logprobs"]
        one.grammar, one.rules = "a" * factors["schema"], LogitRules(allowed=(1,) * factors["allowed"])
        try:
            check_work(body, [one] * factors["prompts"])
        except Refusal:
            return True
        return False

    larger = {**factors, more: (factors[more] or 0) + 1}
    assert refused(larger) or not refused(factors)
    rows = factors["n"] * factors["prompts"]
    read = factors["tokens"] + (factors["schema"] + factors["allowed"]) // 4
    if rows * (read + factors["max_tokens"]) > BUDGET:
        assert refused(factors)


values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(allow_nan=False)
documents = st.recursive(values, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=20)


@given(documents)
@examples(5)
def test_pieces_are_the_document(document: Any) -> None:
    def lazy(value: Any, as_iterator: bool = True) -> Any:
        """Return `value` with iterators for lists."""
        if isinstance(value, dict):
            return {name: lazy(one) for name, one in value.items()}
        return iter(value) if isinstance(value, list) and as_iterator else value

    for one in (document, lazy(document), {"choices": [lazy({"a": document})]}):
        whole = json.loads(b"".join(json_pieces(one)))
        assert whole == document or whole == {"choices": [{"a": document}]}


def test_a_long_document_comes_in_pieces_that_are_made_when_they_are_read() -> None:
    made = []
    pieces = json_pieces({"numbers": (made.append(number) or number for number in range(10**5))})
    assert PIECE <= len(next(pieces)) < PIECE + 100 and len(made) < 20_000
