"""Tokens that stand for a trace's segments."""

from tokentwin.realengine.offered_workload import SegmentTokens
from tokentwin.serving.workload import WorkloadRequest


def test_segment_tokens_keep_the_workload_s_promise() -> None:
    tokens = SegmentTokens(1000)
    first = WorkloadRequest(1, 0, (("sys", 40), ("", 5)), 10)
    second = WorkloadRequest(2, 0, (("sys", 40), ("out:1", 10), ("", 5)), 10)
    assert tokens.prompt(first)[:40] == tokens.prompt(second)[:40]
    assert tokens.prompt(second)[40:50] == tokens.output(first)
    assert tokens.prompt(first)[40:] != tokens.prompt(second)[50:]
    shorter = WorkloadRequest(3, 0, (("sys", 12),), 1)
    assert tokens.prompt(shorter) == tokens.prompt(first)[:12]
