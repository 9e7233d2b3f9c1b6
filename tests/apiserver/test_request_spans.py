"""Spans of a request: its phases follow one another without a gap, within the span of its client."""

from itertools import pairwise
from time import monotonic_ns, time_ns

import pytest

from tests.apiserver.collector import attributes, collector
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import Add, Delivered
from tokentwin.apiserver.request_spans import PHASES, RequestSpans

MS = 1_000_000
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = Add(7, [1], 64, 0, temperature=0.5, top_p=0.9, seed=3, operation="chat", answer_id="chatcmpl-1")
ASKED.traceparent = f"00-{TRACE}-{PARENT}-01"


class Clock:
    """A clock of a run that began a second ago and runs ten times as fast as real time."""

    def __init__(self):
        self.began_ns = monotonic_ns() - 1000 * MS

    def run_ns(self, monotonic_ns):
        return 10 * (monotonic_ns - self.began_ns)

    def monotonic_ns(self, run_ns):
        return self.began_ns + run_ns // 10


def row(**more):
    times = {"received_ns": 10, "arrival_ns": 30, "scheduled_ns": 60, "first_token_ns": 100, "finish_ns": 300}
    times |= {"first_text_ns": 110, "first_sent_ns": 120, "last_text_ns": 310, "last_sent_ns": 330, "end_ns": None}
    plain = {"request_id": 7, "replica": 2, "status": "finished", "reason": "", "prompt_tokens": 5, "output_tokens": 64}
    plain |= {"prefix_hit_tokens": 4, "preemptions": 1}
    row = plain | {name: None if ms is None else ms * MS for name, ms in times.items()}
    return row | {name: value * MS if name in times and value is not None else value for name, value in more.items()}


def spans_of(*rows, asked=ASKED):
    """Return the request's span, and the spans of its phases by name."""
    with collector() as collecting:
        spans = RequestSpans(collecting.url, "a-model", Clock())
        for row in rows:
            spans.request(row, asked)
        spans.close()
        sent = collecting.wait(len(rows))
        assert collecting.paths == {"/v1/traces"} and collecting.resource["service.name"] == "tokentwin"
    (whole,) = [span for span in sent if span.kind == span.SPAN_KIND_SERVER]
    phases = {span.name: span for span in sent if span is not whole}
    assert all(phase.parent_span_id == whole.span_id and phase.trace_id == whole.trace_id for phase in phases.values())
    return whole, phases


def took_ms(span):
    """Return the length of a span in ms of the run's time."""
    return round((span.end_time_unix_nano - span.start_time_unix_nano) / MS * 10)


def test_phases_follow_one_another_and_make_up_the_request():
    whole, phases = spans_of(row())
    assert list(phases) == list(PHASES)
    assert [took_ms(phase) for phase in phases.values()] == [20, 30, 40, 200, 10, 20]
    assert took_ms(whole) == 320
    for before, after in pairwise(phases.values()):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert abs(whole.start_time_unix_nano - (time_ns() - 999 * MS)) < 60_000 * MS


def test_the_clients_span_is_the_parent():
    whole, _ = spans_of(row())
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_parent_the_request_is_a_trace_of_its_own(header):
    whole, _ = spans_of(row(), asked=Add(7, [1], 64, 0, operation="chat", traceparent=header))
    assert not whole.parent_span_id and whole.trace_id


def test_attributes_are_those_of_the_genai_conventions():
    whole, _ = spans_of(row())
    assert whole.name == "chat a-model"
    attributes_sent = attributes(whole)
    assert attributes_sent.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(0.011)
    assert attributes_sent == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokentwin",
        "gen_ai.request.model": "a-model",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "a-model",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 64,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "tokentwin.request_id": 7,
        "tokentwin.replica": 2,
        "tokentwin.preemptions": 1,
    }
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    assert {name for name in attributes_sent if name.startswith("gen_ai.")} <= known


NEVER = {"first_text_ns": None, "first_sent_ns": None, "last_text_ns": None, "last_sent_ns": None}


def test_a_request_that_was_given_up_ends_in_its_phase():
    gone = row(**NEVER, first_token_ns=None, finish_ns=None, end_ns=90, status="cancelled", reason="its client went")
    whole, phases = spans_of(gone)
    assert {name: took_ms(phase) for name, phase in phases.items()} == {"tokenise": 20, "queue": 30, "prefill": 30}
    assert attributes(whole)["gen_ai.response.finish_reasons"] == ["abort"]
    assert whole.status.code == whole.status.STATUS_CODE_UNSET


def test_a_request_that_was_refused_says_why():
    none = {"scheduled_ns": None, "first_token_ns": None, "finish_ns": None}
    whole, phases = spans_of(row(**NEVER, **none, end_ns=31, status="rejected", reason="too many", replica=None))
    assert list(phases) == ["tokenise", "queue"]
    assert (whole.status.code, whole.status.message) == (whole.status.STATUS_CODE_ERROR, "too many")
    assert attributes(whole)["error.type"] == "rejected"


def test_a_stop_string_ends_decoding_though_the_engine_hears_of_it_later():
    whole, phases = spans_of(row(last_text_ns=280, last_sent_ns=290, finish_ns=305, output_tokens=9))
    assert took_ms(whole) == 280 and took_ms(phases["decode"]) == 180 and "detokenise" not in phases
    assert attributes(whole)["gen_ai.response.finish_reasons"] == ["stop"]


def test_the_ledger_sends_a_request_when_its_answer_is_delivered():
    clock = Clock()
    with collector() as collecting:
        ledger = Ledger(clock, LiveMetrics("a-model", 64), None, RequestSpans(collecting.url, "a-model", clock))
        asked = Add(7, [1], 64, clock.began_ns + MS, operation="chat")
        ledger.expects(7, asked)
        ended = row(arrival_ns=15)
        for name in ("received_ns", *NEVER):
            del ended[name]
        ledger.add_request(**ended)
        sent_ns = clock.began_ns + 40 * MS
        ledger.delivered(7, Delivered(7, sent_ns, sent_ns, sent_ns, sent_ns))
        ledger.close()
        spans = collecting.wait(1)
    assert [span.name for span in spans] == [*[*PHASES][:5], "chat a-model"]
    assert [took_ms(span) for span in spans] == [5, 45, 40, 200, 100, 390]


def test_a_collector_that_is_not_there_stops_nothing(caplog):
    spans = RequestSpans("http://127.0.0.1:9/v1/traces", "a-model", Clock())
    spans.request(row(), ASKED)
    spans.close()
    assert "127.0.0.1" in caplog.text
