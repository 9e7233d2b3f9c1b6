"""Requests share a prefix if and only if their first tokens, their adapters and their salts are equal."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tokentwin.serving.kv.content import TokenContent, block_keys
from tokentwin.serving.request import Request
from tokentwin.serving.workload import WorkloadRequest

SIZE = 2


@dataclass
class Sequence:
    tokens: list[int]
    salt: str


owners = st.tuples(st.sampled_from(["", "a", "ab"]), st.sampled_from(["", "a", "b", "ab"]))
sequences = st.tuples(owners, st.lists(st.integers(0, 1), min_size=2, max_size=6))


@given(st.lists(sequences, min_size=2, max_size=6))
@examples(5)
def test_blocks_are_shared_by_equal_beginnings_of_one_owner(asked: list[tuple[tuple[str, str], list[int]]]) -> None:
    content = TokenContent({id: Sequence(tokens, salt) for id, ((_, salt), tokens) in enumerate(asked)}, SIZE)
    found: dict[bytes, object] = {}
    for id, ((adapter, salt), tokens) in enumerate(asked):
        request = Request(WorkloadRequest(id, 0, (("", len(tokens)),), 1, adapter=adapter))
        for count, key in enumerate(block_keys(request, len(tokens) // SIZE, content), 1):
            prefix = adapter, salt, tokens[: count * SIZE]
            assert found.setdefault(key, prefix) == prefix
            assert content.opening(request, count * SIZE) == (adapter, salt, *tokens[: count * SIZE])
    prefixes = [tuple(map(str, one)) for one in found.values()]  # type: ignore[call-overload]
    assert len(set(prefixes)) == len(prefixes)
