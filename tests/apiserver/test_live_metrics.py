"""The metrics of a running server: vLLM's names, types, labels and buckets, and numbers that move as vLLM's do."""

from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.sim.fleet_samples import COST, MS, ROOMY, S
from tokentwin.apiserver.engine_messages import Admitted, StepEnd
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics, ReplicaNow
from tokentwin.apiserver.messages import About, Add, Late
from tokentwin.apiserver.twin import AnswerLengths, Twin
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.metrics import METRICS
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.sim.live_cluster import LiveCluster

LONGEST = 1024

# vLLM 0.33: vllm/v1/metrics/loggers.py and buckets.py. A server without LoRA, speculation or KV from elsewhere shows
# these and no others.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TTFT = (*TTFT, 2560)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCIES = {  # those of the Live page
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
}
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OF_AN_ENGINE = {"model_name", "engine"}
VLLM = {
    "vllm:num_requests_running": ("gauge", OF_AN_ENGINE),
    "vllm:num_requests_waiting": ("gauge", OF_AN_ENGINE),
    "vllm:num_requests_waiting_by_reason": ("gauge", OF_AN_ENGINE | {"reason"}),
    "vllm:engine_sleep_state": ("gauge", OF_AN_ENGINE | {"sleep_state"}),
    "vllm:kv_cache_usage_perc": ("gauge", OF_AN_ENGINE),
    "vllm:prefix_cache_queries": ("counter", OF_AN_ENGINE),
    "vllm:prefix_cache_hits": ("counter", OF_AN_ENGINE),
    "vllm:external_prefix_cache_queries": ("counter", OF_AN_ENGINE),
    "vllm:external_prefix_cache_hits": ("counter", OF_AN_ENGINE),
    "vllm:mm_cache_queries": ("counter", OF_AN_ENGINE),
    "vllm:mm_cache_hits": ("counter", OF_AN_ENGINE),
    "vllm:num_preemptions": ("counter", OF_AN_ENGINE),
    "vllm:prompt_tokens": ("counter", OF_AN_ENGINE),
    "vllm:prompt_tokens_by_source": ("counter", OF_AN_ENGINE | {"source"}),
    "vllm:prompt_tokens_cached": ("counter", OF_AN_ENGINE),
    "vllm:prompt_tokens_cached_by_source": ("counter", OF_AN_ENGINE | {"source"}),
    "vllm:generation_tokens": ("counter", OF_AN_ENGINE),
    "vllm:request_success": ("counter", OF_AN_ENGINE | {"finished_reason"}),
    "vllm:admission_rejections": ("counter", {"model_name", "reason"}),
    "vllm:request_prompt_tokens": LENGTH,
    "vllm:request_generation_tokens": LENGTH,
    "vllm:request_max_num_generation_tokens": LENGTH,
    "vllm:request_params_max_tokens": LENGTH,
    "vllm:request_prefill_kv_computed_tokens": LENGTH,
    "vllm:request_params_n": (1, 2, 5, 10, 20),
    "vllm:request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "vllm:iteration_tokens_total": STEP,
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_inference_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:request_decode_time_seconds": LATENCY,
    "vllm:cache_config_info": (
        "gauge",
        # of vLLM's settings, those that these engines have
        {"engine", "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"}
        | {"kv_cache_size_tokens", "num_gpu_blocks"},
    ),
}
DRAFTING = {
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
}
PROCESS = {"cpu_seconds", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "open_fds", "max_fds"}
OURS = {"tokentwin:lateness_seconds", "tokentwin:recording", "tokentwin:stalled_seconds", "http_requests"}
OURS |= {f"process_{name}" for name in PROCESS}
SPLITS = {
    "reason": {"capacity", "deferred", "max_num_queued_reqs", "max_num_queued_tokens"},
    "sleep_state": {"awake", "weights_offloaded", "discard_all"},
    "source": {"local_compute", "local_cache_hit", "external_kv_transfer"}
    | {"device", "host", "p2p", "disk", "external_unspecified"},
    "finished_reason": {"stop", "length", "abort", "error", "repetition"},
}


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def one_replica(number=0, holds=True):
    return ReplicaNow(number, holds, 4095, Deployment())


class Scraped:
    """The samples of a scrape: `s["name", "label=value"]`, the name without its prefix, summed over other labels."""

    def __init__(self, text):
        self.samples = [sample for family in families(text).values() for sample in family.samples]

    def __getitem__(self, key):
        name, *labels = (key,) if isinstance(key, str) else key
        wanted = [tuple(label.split("=")) for label in labels]
        values = [
            sample.value
            for sample in self.samples
            if sample.name == f"vllm:{name}" and all(sample.labels[label] == value for label, value in wanted)
        ]
        assert values, key
        return sum(values)

    def engines(self):
        return {sample.labels["engine"] for sample in self.samples if sample.name == "vllm:num_requests_running"}


class Wire:
    """Stands for the exchange between processes, and keeps what was delivered to whom."""

    def __init__(self):
        self.given, self.ends = {}, {}

    def give(self, id, tokens, logprobs=None):
        self.given.setdefault(id, []).extend(tokens)

    def give_prompt(self, id, cached, logprobs=None): ...

    def give_pooled(self, id, pooled):
        self.given[id] = pooled

    def end(self, id, finish, reason="", status=0):
        self.ends[id] = finish

    def flush(self, due_ns): ...


class Rows:
    """A recording that keeps the rows of requests."""

    goes_on = True

    def __init__(self):
        self.requests = []

    def arrived(self, request): ...
    def add_step(self, row): ...

    def add_request(self, row):
        self.requests.append(row)


class Served:
    """A twin on a clock that a test moves, and its metrics."""

    def __init__(self, fleet=None, lengths=None, **scheduler):
        self.now_ns, self.wire, self.rows = 7 * S, Wire(), Rows()
        deployment = Deployment(scheduler=SchedulerConfig(**(ROOMY | scheduler)))
        fleet = parse(FleetConfig, fleet, where="fleet") if fleet else None
        self.twin = Twin(
            About("a-model", LONGEST, [0], "", 1000, True, 16),
            lambda sink, on_tokens: LiveCluster(deployment, COST, sink, fleet=fleet, block=1, on_tokens=on_tokens),
            self.wire,
            AnswerLengths(lengths),
            range(100, 612),
            16,
            1.0,
            lambda: self.now_ns,
        )
        drafts = deployment.scheduler.speculative
        self.metrics = LiveMetrics("a-model", LONGEST, drafts.num_speculative_tokens if drafts else 0)
        self.ledger = self.twin.ledger = Ledger(self.twin, self.metrics, self.rows)
        self.next_id = 0

    def ask(self, prompt, max_tokens, received_ms_ago=0):
        """Ask with the given token ids, or with a number of tokens that no other request shares."""
        id, self.next_id = self.next_id, self.next_id + 1
        if isinstance(prompt, int):
            prompt = [10_000 * (id + 1) + at for at in range(prompt)]
        asked = Add(id, prompt, max_tokens, self.now_ns - received_ms_ago * MS)
        self.ledger.expects(id, asked)
        self.twin.add(id, asked)
        self.twin.turn()
        return id

    def wait(self, ms=None):
        """Let `ms` pass; without `ms`, the time to the next event."""
        wait_s = self.twin.turn() if ms is None else ms / 1e3
        if wait_s is not None:
            self.now_ns += round(wait_s * S)
            self.twin.turn()
        return wait_s

    def until_idle(self):
        while self.wait() is not None:
            pass
        for id in list(self.wire.ends):
            self.ledger.delivered(id, None)

    def scrape(self):
        return Scraped(self.metrics.text(self.twin.replicas(), self.ledger.records))


# What there is


def test_names_types_labels_and_buckets_are_vllms():
    scraped = families(LiveMetrics("a-model", LONGEST).text([one_replica()], records=False))
    assert set(scraped) == set(VLLM) | OURS
    for name, expected in VLLM.items():
        family = scraped[name]
        if isinstance(expected[0], str):
            assert (family.type, {frozenset(sample.labels) for sample in family.samples}) == (
                expected[0],
                {frozenset(expected[1])},
            )
            continue
        edges = [float(sample.labels["le"]) for sample in family.samples if sample.name == f"{name}_bucket"]
        assert family.type == "histogram" and edges == sorted(edges) and {*edges} >= {*expected, float("inf")}, name
        if name in LATENCIES:  # finer buckets, which tell a step of 7 ms from one of 10 ms
            assert all(right <= 1.2 * left for left, right in pairwise(edges) if 0.01 <= left < right <= 0.9), name
        else:
            assert edges == [*expected, float("inf")], name
        assert all(set(sample.labels) - {"le"} == OF_AN_ENGINE for sample in family.samples)
    assert not any(sample.name.endswith("_created") for family in scraped.values() for sample in family.samples)
    for label, values in SPLITS.items():
        assert {s.labels[label] for f in scraped.values() for s in f.samples if label in s.labels} == values


def test_drafts_are_counted_where_there_can_be_any():
    drafts = SpeculativeConfig(method="ngram", draft_us=0, num_speculative_tokens=4, acceptance_rate=0.6)
    served = Served(speculative=drafts)
    for _ in range(3):
        served.ask(20, 60)
    served.until_idle()
    text = served.metrics.text(served.twin.replicas(), records=False)
    assert set(families(text)) == set(VLLM) | OURS | DRAFTING
    scraped = Scraped(text)
    for name, column in (("drafts", "drafts"), ("draft_tokens",) * 2, ("accepted_tokens",) * 2):
        recorded = sum(row[column] for row in served.rows.requests)
        assert scraped[f"spec_decode_num_{name}_total"] == recorded > 0
    by_position = [scraped["spec_decode_num_accepted_tokens_per_pos_total", f"position={at}"] for at in range(4)]
    assert sum(by_position) == scraped["spec_decode_num_accepted_tokens_total"]
    assert scraped["spec_decode_num_drafts_total"] > by_position[0] > by_position[3] > 0
    assert by_position == sorted(by_position, reverse=True)
    assert scraped["generation_tokens_total"] == 180


def test_help_is_the_registrys_where_that_defines_the_metric():
    scraped = families(LiveMetrics("a-model", LONGEST).text([one_replica()], records=False))
    for known in METRICS.values():
        if known.scope in ("request", "token"):
            for name in known.prometheus:
                assert scraped[name].documentation == f"{known.label}: {known.definition}."
    assert all(family.documentation for family in scraped.values())


def test_label_values_are_escaped():
    text = LiveMetrics('say "hi"\\\n', LONGEST).text([one_replica()], records=False)
    names = {sample.labels.get("model_name") for family in families(text).values() for sample in family.samples}
    assert names == {'say "hi"\\\n', None}


# How it moves


def test_gauges_tell_what_schedulers_held_after_their_last_steps():
    served = Served(max_num_seqs=2)
    for _ in range(3):
        served.ask(160, 4)
    before = served.scrape()
    assert before["num_requests_running"] == 0  # no step has ended, so nothing is known of them, as in vLLM
    served.wait()
    first = served.scrape()
    assert (first["num_requests_running"], first["num_requests_waiting"]) == (1, 2)
    served.wait()
    running = served.scrape()
    assert (running["num_requests_running"], running["num_requests_waiting"]) == (2, 1)
    assert running["num_requests_waiting_by_reason", "reason=capacity"] == 1
    assert running["kv_cache_usage_perc"] == pytest.approx((11 + 10) / 4095)  # 161 and 160 tokens
    served.until_idle()
    idle = served.scrape()
    assert [idle[f"num_requests_{what}"] for what in ("running", "waiting")] == [0, 0]
    assert idle["kv_cache_usage_perc"] == 0


def test_gauges_are_zero_when_the_last_client_has_gone():
    served = Served()
    id = served.ask(100, 500)
    served.wait()
    assert served.scrape()["num_requests_running"] == 1
    served.twin.abort(id, "its client went away")
    served.wait(0)
    served.wait(1)
    after = served.scrape()
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    assert after["request_success_total", "finished_reason=abort"] == 1
    assert after["e2e_request_latency_seconds_count"] == 0


def test_histograms_of_tokens_fill_as_the_tokens_come():
    served = Served()
    served.ask(100, 5, received_ms_ago=3)
    served.wait()
    first = served.scrape()
    assert first["time_to_first_token_seconds_count"] == 1 and first["inter_token_latency_seconds_count"] == 0
    assert first["time_to_first_token_seconds_sum"] > 0.003 + 0.006 + 100 * 18e-6  # since HTTP had it
    assert first["prompt_tokens_total"] == 100 and first["generation_tokens_total"] == 1
    assert first["iteration_tokens_total_sum"] == 100
    served.wait()
    served.wait()
    later = served.scrape()
    assert later["inter_token_latency_seconds_count"] == 2 and later["generation_tokens_total"] == 3
    assert later["e2e_request_latency_seconds_count"] == later["request_success_total"] == 0
    served.until_idle()
    ended = served.scrape()
    assert ended["request_success_total", "finished_reason=length"] == ended["request_success_total"] == 1
    assert ended["inter_token_latency_seconds_count"] == 4


def test_cached_prompts_count_when_they_are_admitted():
    served = Served()
    prompt = list(range(64))
    served.ask(prompt, 2)
    served.until_idle()
    served.ask([*prompt, *range(500, 510)], 3)
    served.wait()
    scraped = served.scrape()
    assert (scraped["prefix_cache_queries_total"], scraped["prefix_cache_hits_total"]) == (64 + 74, 64)
    assert scraped["prompt_tokens_by_source_total", "source=local_cache_hit"] == 64
    assert scraped["prompt_tokens_by_source_total", "source=local_compute"] == 64 + 10
    assert scraped["prompt_tokens_cached_by_source_total", "source=device"] == scraped["prompt_tokens_cached_total"]
    assert scraped["request_success_total"] == 1  # the second goes on


def test_an_embedding_counts_its_prompt_and_its_latency_but_no_tokens():
    served = Served()
    served.ask(100, 0)
    served.until_idle()
    scraped = served.scrape()
    assert scraped["request_success_total", "finished_reason=stop"] == scraped["e2e_request_latency_seconds_count"] == 1
    assert scraped["prompt_tokens_total"] == 100 and scraped["generation_tokens_total"] == 0
    assert scraped["time_to_first_token_seconds_count"] == scraped["request_decode_time_seconds_count"] == 0


def test_at_the_end_metrics_agree_with_the_rows():
    fleet = {"pools": [{"replicas": 3}], "router": {"name": "round-robin"}}
    served = Served(fleet, lengths=lambda number: 1 + number * 37 % 60, num_blocks=40, max_num_seqs=16)
    shared = list(range(900, 1000))
    for number in range(60):
        served.ask(shared[: number % 4 * 16] + [7000 * number + at for at in range(1 + number * 13 % 90)], 50)
        served.wait(number % 5)
    for id in (11, 23, 58):
        served.twin.abort(id, "stop" if id == 23 else "its client went away")
    served.until_idle()
    rows = served.rows.requests
    assert len(rows) == 60 and sum(row["preemptions"] for row in rows) > 3
    for engine in ("0", "1", "2"):
        mine = [row for row in rows if str(row["replica"]) == engine]
        done = [row for row in mine if row["status"] == "finished"]
        scraped = served.scrape()

        def value(name, *labels, scraped=scraped, engine=engine):
            return scraped[name, f"engine={engine}", *labels]

        began = [row for row in mine if row["first_token_ns"] is not None]
        assert value("generation_tokens_total") == sum(row["output_tokens"] for row in mine)
        assert value("prompt_tokens_total") == sum(row["prompt_tokens"] for row in began)
        assert value("prefix_cache_hits_total") == sum(row["prefix_hit_tokens"] for row in mine)
        assert value("num_preemptions_total") == sum(row["preemptions"] for row in mine)
        assert value("request_success_total") == len(mine)
        assert value("request_success_total", "finished_reason=stop") == sum(row["output_tokens"] < 50 for row in done)
        for name, start, end in (
            ("time_to_first_token", "received_ns", "first_token_ns"),
            ("e2e_request_latency", "received_ns", "finish_ns"),
            ("request_queue_time", "arrival_ns", "scheduled_ns"),
            ("request_prefill_time", "scheduled_ns", "first_token_ns"),
            ("request_decode_time", "first_token_ns", "finish_ns"),
            ("request_inference_time", "scheduled_ns", "finish_ns"),
        ):
            counted = began if name == "time_to_first_token" else done
            assert value(f"{name}_seconds_count") == len(counted)
            took_s = sum(row[end] - row[start] for row in counted) / S
            assert value(f"{name}_seconds_sum") == pytest.approx(took_s, abs=1e-9)
        gaps = sum(max(row["output_tokens"] - 1, 0) for row in mine)
        assert value("inter_token_latency_seconds_count") == gaps
        assert value("request_generation_tokens_sum") == sum(row["output_tokens"] for row in done)
        assert value("request_params_max_tokens_sum") == 50 * len(done)
        assert value("request_num_preemptions_sum") == sum(row["preemptions"] for row in done)


def test_counts_never_fall_and_replicas_that_ended_disappear():
    fleet = {
        "pools": [{"replicas": 2}],
        "router": {"name": "round-robin"},
        "failures": {"crashes": [{"replica": 1, "at_s": 0.2, "recovery_s": 0.3}]},
    }
    served = Served(fleet)
    scrapes = []
    for _ in range(12):
        served.ask(50, 30)
        served.wait(50)
        scrapes.append(served.scrape())
    assert [scrape.engines() for scrape in (scrapes[0], scrapes[5], scrapes[-1])] == [{"0", "1"}, {"0"}, {"0", "2"}]
    for before, after in pairwise(scrapes):
        for engine in before.engines() & after.engines():
            for name in ("generation_tokens_total", "prompt_tokens_total", "inter_token_latency_seconds_count"):
                assert after[name, f"engine={engine}"] >= before[name, f"engine={engine}"]


def test_a_row_may_come_before_its_last_step():
    metrics = LiveMetrics("a-model", LONGEST)
    metrics.expects(0, 0)
    metrics.step(StepEnd(0, 5 * MS, 1, 0, 0, 0.1, 8, 1, [0], [Admitted(0, 8, 0, 0)], ()))
    row = {"request_id": 0, "replica": 0, "status": "finished", "reason": "", "prompt_tokens": 8, "output_tokens": 2}
    row |= {"prefix_hit_tokens": 0, "arrival_ns": 0, "scheduled_ns": 0, "first_token_ns": 5 * MS, "finish_ns": 9 * MS}
    metrics.request(row | {"preemptions": 0}, Add(0, [], 2, 0))
    metrics.step(StepEnd(0, 9 * MS, 0, 0, 0, 0.0, 1, 1, [0], [], ()))
    scraped = Scraped(metrics.text([one_replica()], records=False))
    assert scraped["inter_token_latency_seconds_sum"] == pytest.approx(0.004)
    assert not metrics._lives


def test_a_preemption_is_counted_once_though_it_may_come_before_the_end_of_the_step_that_admitted():
    """The overlapped loop plans a step, which may preempt, before it reports the end of the step before."""
    metrics = LiveMetrics("a-model", LONGEST)
    metrics.expects(0, 0)
    for number in range(2):
        metrics.step(StepEnd(0, number * MS, 1, 0, 0, 0.1, 8, 0, [], [Admitted(0, 8, 0, 1)], ()))
    assert Scraped(metrics.text([one_replica()], records=False))["num_preemptions_total"] == 1


def test_requests_that_are_refused_are_counted_as_vllm_does():
    served = Served({"admission": {"max_queued": 2}}, max_num_seqs=1)
    for _ in range(5):
        served.ask(20, 4)
    served.ask(2000, 4)  # it can never fit
    served.until_idle()
    scraped = served.scrape()
    refused = sum(row["status"] == "rejected" and row["replica"] is None for row in served.rows.requests)
    assert scraped["admission_rejections_total", "reason=max_num_queued_reqs"] == refused > 0
    assert scraped["request_success_total"] == sum(row["status"] == "finished" for row in served.rows.requests)
    assert not served.metrics._lives


def test_lateness_is_summed_over_api_processes_and_recording_is_told():
    metrics = LiveMetrics("a-model", LONGEST)
    counts = [0] * 13
    counts[0], counts[12] = 4, 1
    for _ in range(2):
        metrics.late(Late(counts, 7.5))
    scraped = families(metrics.text([one_replica()], records=True))
    values = {sample.name: sample.value for sample in scraped["tokentwin:lateness_seconds"].samples}
    assert (values["tokentwin:lateness_seconds_count"], values["tokentwin:lateness_seconds_sum"]) == (10, 15)
    assert scraped["tokentwin:recording"].samples[0].value == 1


def test_one_replica_is_told_of_alone_and_the_others_go_on_counting():
    served = Served({"pools": [{"replicas": 2}], "router": {"name": "round-robin"}})
    served.ask(20, 3)
    served.ask(20, 3)
    served.until_idle()
    now = served.twin.replicas()
    alone = Scraped(served.metrics.text(now, False, only=1))
    assert alone.engines() == {"1"} and alone["generation_tokens_total"] == 3
    assert len(families(served.metrics.text(now, False, only=1))["vllm:cache_config_info"].samples) == 1
    assert not Scraped(served.metrics.text(now, False, only=7)).engines()  # it has crashed
    assert served.scrape()["generation_tokens_total"] == 6


def test_the_cache_is_described_by_replica():
    served = Served({"pools": [{"replicas": 2}]}, num_blocks=512)
    infos = families(served.metrics.text(served.twin.replicas(), False))["vllm:cache_config_info"].samples
    assert [(info.labels["engine"], info.labels["num_gpu_blocks"], info.labels["block_size"]) for info in infos] == [
        ("0", "512", "16"),
        ("1", "512", "16"),
    ]


def test_a_twin_pauses_while_its_machine_stalls():
    served = Served()
    served.twin.on_stall = served.metrics.stalled
    served.ask(20, 10)
    served.wait(ms=5000)
    stalled_ns = served.wire.stalled_ns
    assert not served.wire.ends  # the tokens of these 5 s do not come at once
    assert 4.9 * S < stalled_ns < 5 * S
    assert served.twin.run_ns(served.now_ns) == 5 * S - stalled_ns
    served.until_idle()
    counted = families(served.metrics.text([one_replica()], True))["tokentwin:stalled_seconds"].samples
    assert [sample.value for sample in counted] == [stalled_ns / S]


def test_a_request_that_comes_before_the_turn_after_a_stall_is_received_when_the_run_paused():
    served = Served()
    served.ask(20, 10)
    served.twin.turn()
    served.now_ns += 5 * S
    asked = Add(9, list(range(20)), 10, served.now_ns - MS)
    assert served.twin.refusal(9, asked) is None
    stalled_ns = served.wire.stalled_ns
    assert served.twin.run_ns(asked.received_ns) == 5 * S - stalled_ns < 0.1 * S
    served.now_ns += 5 * S
    served.twin.plant("")
    assert served.wire.stalled_ns == stalled_ns  # nothing new is planted, so the time does not matter
    served.twin.plant("{}")
    assert served.wire.stalled_ns == stalled_ns + 5 * S


def test_adapters_of_running_and_waiting_requests_are_named_as_in_vllm():
    metrics, replica = (
        LiveMetrics("a-model", LONGEST),
        one_replica()._replace(deployment=Deployment(lora=LoraConfig(max_loras=2))),
    )
    metrics.step(StepEnd(0, 5, 2, 1, 0, 0.5, 8, 2, [], [], (), ("legal,tax", "medical")))
    (lora,) = families(metrics.text([replica], True))["vllm:lora_requests_info"].samples
    assert lora.labels == {"max_lora": "2", "running_lora_adapters": "legal,tax", "waiting_lora_adapters": "medical"}
    assert "vllm:lora_requests_info" not in families(metrics.text([one_replica()], True))
