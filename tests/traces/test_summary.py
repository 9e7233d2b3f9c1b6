"""Summaries: the published traces' known numbers, and prefix reuse against a count token by token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.summary import PrefixReuse, summarise

SHARED = Path(__file__).parents[3] / "shared" / "data"

# Computed independently of this code when the traces were collected. Their percentiles took the neighbouring
# order statistic at times, hence the tolerance.
FACTS = {
    "azure/AzureLLMInferenceTrace_conv.csv": (
        (19_366, 3501.7, 5.53, 1.09, 507),
        (1155, 1020, 4083, 4142, 14050),
        (211, 129, 451, 601, 1000),
    ),
    "azure/AzureLLMInferenceTrace_code.csv": (
        (8_819, 3435.9, 2.57, 13.15, 632),
        (2048, 1469, 7303, 7436, 7437),
        (28, 13, 90, 251, 1899),
    ),
    "mooncake/conversation_trace.jsonl": (
        (12_031, 3537.0, 3.40, 3.03, 247),
        (12035, 6909, 39550, 85400, 126195),
        (343, 350, 698, 1119, 2000),
    ),
}


@pytest.mark.parametrize("file", FACTS)
def test_published_traces_have_their_known_numbers(file):
    if not (SHARED / file).exists():
        pytest.skip(f"needs {file} in ../shared/data")
    summary = summarise(read_workload(SHARED / file), block_size=512)
    (count, span, rate, cv, peak), prompt, output = FACTS[file]
    assert (summary.requests, summary.peak_minute) == (count, peak)
    assert summary.span_s == pytest.approx(span, abs=0.05)
    assert summary.request_rate == pytest.approx(rate, abs=0.005)
    assert summary.interarrival_cv == pytest.approx(cv, abs=0.005)
    for lengths, known in ((summary.prompt, prompt), (summary.output, output)):
        assert lengths.mean == pytest.approx(known[0], abs=0.5)
        assert (lengths.p50, lengths.max) == (known[1], known[4])
        assert (lengths.p95, lengths.p99) == pytest.approx(known[2:4], rel=0.005)
    if "mooncake" in file:
        assert round(100 * summary.prefix_hit_rate, 1) == 37.4
        assert round(100 * summary.prefix_block_hit_rate, 1) == 36.6
    else:
        assert summary.prefix_hit_tokens == 0


def tokens_of(request):
    return [
        (name, j) if name != PRIVATE else (request.id, part, j)
        for part, (name, n) in enumerate(request.prompt)
        for j in range(n)
    ]


@st.composite
def conversations(draw):
    requests: list[WorkloadRequest] = []
    for id_ in range(draw(st.integers(1, 8))):
        segment = st.tuples(st.sampled_from(["", "a", "a", "b", "c"]), st.integers(1, 4))
        base = draw(st.sampled_from([(), *((*r.prompt, (f"out:{r.id}", r.output_len)) for r in requests)]))
        prompt = (*base, *draw(st.lists(segment, min_size=1, max_size=3)))
        requests.append(WorkloadRequest(id_, id_, prompt, draw(st.integers(1, 3))))
    return requests


@given(conversations())
def test_prefix_reuse_equals_a_count_token_by_token(requests):
    reuse, cached = PrefixReuse(), []
    for request in requests:
        tokens = tokens_of(request)
        longest = 0
        for other in cached:
            pairs = zip(tokens, other, strict=False)
            most = min(len(tokens), len(other))
            longest = max(longest, next((i for i, (a, b) in enumerate(pairs) if a != b), most))
        assert reuse.hit(request) == longest
        cached.append(tokens + [(f"out:{request.id}", j) for j in range(request.output_len - 1)])


def test_percentiles_are_order_statistics():
    requests = [WorkloadRequest(i, i * 10**9, (("", n),), 1) for i, n in enumerate(range(100, 0, -1))]
    prompt = summarise(Workload(requests)).prompt
    assert (prompt.min, prompt.p50, prompt.p90, prompt.p95, prompt.p99, prompt.max) == (1, 50, 90, 95, 99, 100)


def test_one_request_has_no_rate():
    summary = summarise(Workload([WorkloadRequest(0, 5, (("a", 3),), 2, tenant="t")]))
    assert summary.request_rate is None and summary.interarrival_cv is None
    assert summary.peak_minute == 1
    assert summary.tenants == {"t": 1}
    with pytest.raises(UserError, match="holds no requests"):
        summarise(Workload([]))


def test_hits_by_block():
    requests = [WorkloadRequest(i, i, (("a", 40), ("", 10)), 2) for i in range(2)]
    summary = summarise(Workload(requests), block_size=16)
    assert (summary.prefix_hit_tokens, summary.prefix_hit_blocks) == (40, 2)
    assert summary.prefix_block_hit_rate == 2 / 8


def test_adapters_are_counted_and_share_no_prefix():
    requests = [WorkloadRequest(k, k, (("sys", 32),), 2, adapter=name) for k, name in enumerate(["", "a", "a", "b"])]
    found = summarise(Workload(requests))
    assert found.adapters == {"": 1, "a": 2, "b": 1} and found.prefix_hit_tokens == 32
