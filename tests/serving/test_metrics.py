"""The metric registry: lookups, names elsewhere, and the glossary that is generated from it."""

from pathlib import Path

import pytest

from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS, TERMS, TOOLS, defined_in, glossary, metric

GLOSSARY = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_glossary_on_disk_is_the_registry():
    assert GLOSSARY.read_text(encoding="utf-8") == glossary(), (
        "run: python -m tokentwin.serving.metrics > docs/metrics.md"
    )


def test_a_metric_has_its_unit_in_its_name():
    for m in METRICS.values():
        assert m.definition and m.label
        assert not m.definition.endswith(".")
        assert (m.unit == "ms") == m.name.endswith("_ms"), m.name


def test_tools_that_disagree_on_a_word_are_told_apart():
    assert "inter_token_latency" in METRICS["tpot_ms"].aiperf
    assert "inter_token_latency_ms" in METRICS["tpot_ms"].guidellm
    assert "time_per_output_token_ms" in METRICS["tpot_inclusive_ms"].guidellm
    assert "tpot" in METRICS["tpot_ms"].vllm
    assert "vllm:inter_token_latency_seconds" in METRICS["itl_ms"].prometheus


def test_a_name_means_one_metric_within_a_tool():
    for tool in TOOLS:
        names = [n for m in METRICS.values() for n in m.names_in(tool)]
        assert len(names) == len(set(names))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match="is not a known metric; choose one of ttft_ms") as caught:
        metric("throughput")
    assert "\n" not in str(caught.value)


def test_help_lines():
    assert metric("ttft_ms").axis == "TTFT (ms)"
    assert metric("ttft_ms").help.endswith("Lower is better.")


def test_the_terms_of_a_text_are_defined_once_and_everyday_words_are_not():
    said = defined_in("Inclusive TPOT and TTFTs: attainment 3 %, TTFT p99; SLO attainment")
    assert [part.partition(":")[0] for part in said.split("\n\n")] == [
        "inclusive TPOT (ms)", "TTFT (ms)", "SLO attainment (fraction)",
    ]  # fmt: skip
    assert defined_in("running and waiting at no cost, busy") is None
    assert all(defined_in(term) for term in TERMS)
