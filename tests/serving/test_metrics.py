"""The metric registry: lookups, names elsewhere, and the glossary that is generated from it."""

from pathlib import Path

import pytest

from serving.errors import UserError
from serving.metrics import METRICS, TOOLS, glossary, metric, metric_of, prometheus_help, statistic

GLOSSARY = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_glossary_on_disk_is_the_registry():
    assert GLOSSARY.read_text(encoding="utf-8") == glossary(), "run: python -m serving.metrics > docs/metrics.md"


def test_a_metric_has_its_unit_in_its_name():
    for m in METRICS.values():
        assert m.definition and m.label
        assert not m.definition.endswith(".")
        assert (m.unit == "ms") == m.name.endswith("_ms"), m.name


def test_tools_that_disagree_on_a_word_are_told_apart():
    assert metric_of("aiperf", "inter_token_latency").name == "tpot_ms"
    assert metric_of("guidellm", "inter_token_latency_ms").name == "tpot_ms"
    assert metric_of("guidellm", "time_per_output_token_ms").name == "tpot_inclusive_ms"
    assert metric_of("vllm", "tpot").name == "tpot_ms"
    assert metric_of("prometheus", "vllm:inter_token_latency_seconds").name == "itl_ms"


def test_a_name_means_one_metric_within_a_tool():
    for tool in TOOLS:
        names = [n for m in METRICS.values() for n in m.names_in(tool)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "look_up", [lambda: metric("throughput"), lambda: metric_of("vllm", "ntpot"), lambda: statistic("p42")]
)
def test_an_unknown_name_is_answered_with_the_known_ones(look_up):
    with pytest.raises(UserError, match="is none of") as caught:
        look_up()
    assert "\n" not in str(caught.value)


def test_help_lines():
    assert metric("ttft_ms").axis == "TTFT (ms)"
    assert metric("ttft_ms").help.endswith("Lower is better.")
    hits, queries = prometheus_help("prefix_hit_rate")
    assert hits.startswith("# HELP vllm:prefix_cache_hits_total prefix hit rate: ")
    assert queries.startswith("# HELP vllm:prefix_cache_queries_total ")
    assert "\n" not in hits
    assert prometheus_help("mfu") == []
