"""The radix tree against a plain list of known prefixes, token by token."""

from random import Random

import pytest

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.content import SegmentContent
from tokentwin.serving.kv.radix_pool import RadixPool
from tokentwin.serving.kv.radix_tree import RadixNode, RadixTree
from tokentwin.serving.request import Request
from tokentwin.serving.workload import Span, WorkloadRequest


def sequence(chance: Random) -> list[Span]:
    """Return the spans of a sequence from a few segments, so that many sequences share beginnings."""
    spans: list[Span] = []
    at = 0
    for _ in range(chance.randint(1, 4)):
        tokens = chance.choice([1, 2, 3, 5, 8])
        spans.append((chance.choice("ab"), at, at + tokens))
        at += tokens
    return spans


def tokens_of(spans: list[Span]) -> list[tuple[object, int]]:
    return [(name, at - begin) for name, begin, end in spans for at in range(begin, end)]


def common(one: list[tuple[object, int]], other: list[tuple[object, int]], page: int) -> int:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // page * page


@pytest.mark.parametrize("page", [1, 2, 4])
def test_matches_equal_those_of_all_known_sequences(page: int) -> None:
    chance = Random(page)
    tree, known = RadixTree(page), list[list[tuple[object, int]]]()
    locked: list[RadixNode] = []
    for _ in range(400):
        spans = sequence(chance)
        own = tokens_of(spans)
        most = chance.randint(0, len(own))
        longest = max((common(own[:most], other, page) for other in known), default=0)
        node = tree.match(spans, most)
        assert node.end == longest
        if chance.random() < 0.5:
            whole = len(own) // page * page
            before = max((common(own[:whole], other, page) for other in known), default=0)
            found, node = tree.insert(spans, whole)
            assert (found, node.end) == (before, whole)
            known.append(own[:whole])
        if chance.random() < 0.3:
            tree.lock(node)
            locked.append(node)
        elif locked and chance.random() < 0.5:
            tree.unlock(locked.pop(chance.randrange(len(locked))))
        tree.check()


def test_a_request_that_wants_all_logits_of_its_prompt_reads_nothing_from_the_cache() -> None:
    pool = RadixPool(SchedulerConfig(num_blocks=100, block_size=1), SegmentContent(1))
    for id, skips in enumerate([False, False, True]):
        request = Request(WorkloadRequest(id, 0, (("shared", 20),), 3, skip_reading_prefix_cache=skips))
        assert pool.match(request, 19).end == (19 if id == 1 else 0)
        pool.hold(request, pool.match(request, 0))
        pool.extend(request, 20)
        pool.checkpoint(request, 20)
        pool.drop(request)
    assert pool.tree.tokens == 20


def test_the_leaf_used_longest_ago_is_evicted_first_and_none_with_a_lock() -> None:
    tree = RadixTree(1)
    for name in "abc":
        tree.insert([("shared", 0, 4), (name, 4, 4 + "abc".index(name) + 1)], 5 + "abc".index(name))
    kept = tree.match([("shared", 0, 4), ("a", 4, 5)], 5)
    tree.lock(kept)
    assert [evicted(tree) for _ in range(3)] == [2, 3, 0]  # b, then c; a and its beginning are locked
    tree.unlock(kept)
    assert [evicted(tree) for _ in range(3)] == [1, 4, 0]
    assert tree.tokens == tree.locked_tokens == 0
    tree.check()


def evicted(tree: RadixTree) -> int:
    """Return the number of tokens of the next leaf that is evicted; 0 if there is none."""
    leaf = tree.evict_leaf()
    return 0 if leaf is None else leaf.end - leaf.start


def test_pages_with_identities_follow_splits() -> None:
    tree = RadixTree(2)
    tree.insert([("a", 0, 8)], 8, [1, 2, 3, 4])
    known, node = tree.insert([("a", 0, 4), ("b", 4, 8)], 8, [5, 6, 7, 8])
    assert (known, tree.ids_to(node)) == (4, [1, 2, 7, 8])
    assert tree.ids_to(tree.match([("a", 0, 8)], 6)) == [1, 2, 3]
    assert sorted(tree.ids()) == [1, 2, 3, 4, 7, 8]
    tree.check()
