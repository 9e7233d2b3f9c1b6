"""Sentences of the command line on a page."""

import pytest

pytest.importorskip("streamlit")

from tokentwin.dashboard.shown import literal, prose


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "2 replicas would break ttft_ms p99<=1000 (3,085 ms)",
            "2 replicas would break TTFT p99 ≤ 1,000 ms (3,085 ms)",
        ),
        ("tpot_ms p99.9<=35.5", "TPOT p99.9 ≤ 35.5 ms"),
        ("tpot_ms<=50", "TPOT ≤ 50 ms"),
        ("ttft p50<=1e6", "TTFT p50 ≤ 1,000,000 ms"),
        ("attainment>=0.995 (4 % break e2e_ms<=30000)", "attainment ≥ 99.5 % (4 % break E2E ≤ 30,000 ms)"),
        ("3 replicas x TP4 H100 = 12 GPUs", "3 replicas × TP4 H100 = 12 GPUs"),
        ("14 x TP2 H100", "14 × TP2 H100"),
        ("what_ever p99<=3 of 2x", "what_ever p99<=3 of 2x"),
        ("", ""),
    ],
)
def test_objectives_are_in_words_and_the_rest_as_it_is(said, shown):
    assert prose(said) == shown


def test_nothing_in_it_is_markdown():
    assert (
        literal("$5 *and* <b>_x_</b> at ttft_ms p99<=2") == "\\$5 \\*and\\* \\<b\\>\\_x\\_\\</b\\> at TTFT p99 ≤ 2 ms"
    )
