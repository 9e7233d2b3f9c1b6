"""Encoders on GPUs of their own: when requests run, what is sent, and what becomes of requests in a crash."""

from random import Random

import pytest
from pydantic import ValidationError

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Item, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
ROOMY = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 4096}
IMAGE_US = 100.0  # to encode a token
WIDTH = 2 * 3584  # bytes of an embedding of Qwen2.5-VL-7B in bfloat16
SEND_NS = 20_000 + 100 * WIDTH // 50  # 100 embeddings over a link with 50 GB/s
ENCODE, SERVE = {"name": "encode", "role": "encode"}, {"name": "serve"}
APART = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
NO_CACHE = {"scheduler": {"enable_prefix_caching": False}}


def simulated(requests, pools, scheduler=None, multimodal=None, **fleet):
    """Return the rows of the requests, in order of id, and the totals."""
    sink = TableSink()
    deployment = Deployment(
        model="Qwen2.5-VL-7B",
        scheduler=SchedulerConfig(**ROOMY | (scheduler or {})),
        multimodal={"encoder_us_per_token": IMAGE_US, **(multimodal or {})},
        fleet={"pools": pools, **fleet},
    )
    cluster = Cluster(deployment, TokenCost(6 * MS, 18_000, 450), sink, steps=False)
    done = cluster.run(Workload(requests))
    return sink.requests.sort_by("request_id").to_pylist(), done


def with_image(id, tokens=100, content="", arrival_ns=0, prompt=150, **settings):
    return WorkloadRequest(id, arrival_ns, (("", prompt),), 3, items=(Item(10, tokens, content),), **settings)


def text(id, arrival_ns=0):
    return WorkloadRequest(id, arrival_ns, (("", 150),), 3)


def test_a_prompt_runs_when_its_embeddings_have_been_encoded_and_sent():
    (alone,), _ = simulated([text(0)], [SERVE])
    (row,), done = simulated([with_image(0)], [ENCODE, SERVE])
    assert row["queued_ns"] == 100 * 100_000  # the gateway routes it when the image is encoded
    assert row["first_token_ns"] - row["scheduled_ns"] == alone["first_token_ns"]  # no step encodes here
    assert row["scheduled_ns"] == pytest.approx(row["queued_ns"] + SEND_NS, abs=10)
    use = done.encoders_apart
    assert (use.requests, use.items, use.busy_ns, use.waiting_ns) == (1, 1, 10 * MS, 10 * MS)
    assert use.sending_ns == pytest.approx(SEND_NS, abs=10)


@pytest.mark.parametrize("order", ["after-prefill", "before-prefill"])
def test_prefill_pools_get_embeddings_and_decode_pools_none(order):
    pools = [APART[0], APART[1] | {"deployment": NO_CACHE}]
    (alone,), _ = simulated([text(0)], pools, decode_reserves=order)
    (row,), _ = simulated([with_image(0)], [ENCODE, *pools], decode_reserves=order)
    assert row["finish_ns"] - alone["finish_ns"] == pytest.approx(100 * 100_000 + SEND_NS, abs=10)
    assert row["transfer_ns"] == alone["transfer_ns"]


def test_text_passes_images_by():
    (plain,), _ = simulated([text(1)], [SERVE])
    rows, _ = simulated([with_image(0), text(1)], [ENCODE, SERVE])
    assert rows[1]["first_token_ns"] == plain["first_token_ns"]
    encoded, _ = simulated([with_image(0), text(1)], [SERVE])
    assert encoded[1]["first_token_ns"] > plain["first_token_ns"]  # a step encodes the image first


def test_images_of_a_request_are_encoded_by_several_replicas_at_once():
    items = tuple(Item(10 + 250 * n, 250) for n in range(4))
    request = WorkloadRequest(0, 0, (("", 1100),), 3, items=items)
    took = [simulated([request], [ENCODE | {"replicas": n}, SERVE])[0][0]["queued_ns"] for n in (1, 2, 4)]
    assert took == [100 * MS, 50 * MS, 25 * MS]


def test_one_image_is_encoded_once_and_sent_until_it_is_cached():
    pictures = [with_image(id, content="cat", arrival_ns=id * 500 * MS) for id in range(5)]
    rows, done = simulated(pictures, [ENCODE, SERVE], scheduler={"enable_prefix_caching": False})
    assert done.encoder.items == 1 and done.encoders_apart.items == 5
    assert done.encoders_apart.sending_ns == pytest.approx(SEND_NS, abs=10)
    assert [row["queued_ns"] - row["arrival_ns"] for row in rows] == [10 * MS, 0, 0, 0, 0]


def test_the_grammar_and_the_embeddings_of_a_request_must_both_be_there():
    for compile_ns in (1, 50 * MS):
        (row,), _ = simulated([with_image(0, structured=True, grammar_compile_ns=compile_ns)], [ENCODE, SERVE])
        assert row["scheduled_ns"] - row["queued_ns"] == pytest.approx(max(compile_ns, SEND_NS), abs=10)


def traffic(seed, count=60):
    chance, at = Random(seed), 0
    for id in range(count):
        at += chance.choice([0, MS, 30 * MS])
        items, offset = [], chance.randint(0, 30)
        for _ in range(chance.choice([0, 1, 3])):
            name = chance.randrange(6)
            items.append(Item(offset, 20 + 30 * name, chance.choice(["", f"image {name}"])))
            offset = items[-1].end + chance.randint(0, 20)
        prompt = (("", offset + chance.randint(1, 60)),)
        yield WorkloadRequest(id, at, prompt, chance.randint(1, 60), items=tuple(items))


@pytest.mark.parametrize("rest", [[SERVE | {"replicas": 2}], APART])
def test_every_request_ends_once_whatever_crashes(rest):
    crashes = [{"at_s": 0.05, "pool": "encode", "recovery_s": 0.1}, {"at_s": 0.4, "pool": rest[0]["name"]}]
    pools = [ENCODE | {"replicas": 2}, *rest]
    admission = {"patience": {"mean_s": 3.0, "until": "finish"}, "queue_timeout_s": 2.0}
    settings = {"num_blocks": 100, "max_num_seqs": 8}
    for seed in range(2):
        requests = list(traffic(seed))
        failures = {"crashes": [{**crash, "recovery_s": 0.1} for crash in crashes]}
        rows, done = simulated(requests, pools, settings, failures=failures, admission=admission)
        again, _ = simulated(requests, pools, settings, failures=failures, admission=admission)
        assert [row["request_id"] for row in rows] == [request.id for request in requests]
        assert rows == again
        assert sum(row["status"] == "finished" for row in rows) == done.finished > 30


def test_requests_with_several_items_are_rejected_once_if_no_encoder_can_take_them() -> None:
    album = WorkloadRequest(0, 0, (("", 400),), 3, items=(Item(10, 100, ""), Item(120, 100, ""), Item(230, 100, "")))
    last = {"crashes": [{"at_s": 0.005, "pool": "encode", "recovery_s": None}]}
    (row,), _ = simulated([album], [ENCODE, SERVE], failures=last)
    assert (row["status"], row["reason"]) == ("rejected", "no encoder replica is left")
    large = WorkloadRequest(0, 20 * MS, (("", 700),), 3, items=(Item(10, 300, ""), Item(330, 300, "")))
    between = {"crashes": [{"at_s": 0.005, "pool": "encode", "recovery_s": 0.1}]}
    (row,), _ = simulated([large], [ENCODE, SERVE], multimodal={"max_item_tokens": 200}, failures=between)
    assert row["status"] == "rejected" and "allows 256" in row["reason"]


def test_a_request_that_waits_for_embeddings_begins_again_when_its_decode_replica_crashes() -> None:
    """The prefill replica holds it no longer than its second transfer takes, although it was held there before."""
    pools = [ENCODE, APART[0], APART[1] | {"deployment": NO_CACHE, "replicas": 2}]
    slow = {"nic_gb_s": 1e-5 * WIDTH, "latency_us": 0.0}  # 100 embeddings take 10 ms
    crash = {"crashes": [{"at_s": 0.015, "pool": "decode", "recovery_s": None}]}
    settings = {"decode_reserves": "before-prefill", "links": slow, "failures": crash}
    (row,), _ = simulated([with_image(0, content="cat")], pools, **settings)
    assert (row["status"], row["attempts"]) == ("finished", 2)


def test_the_time_of_an_unencoded_request_runs_out_in_the_queue_and_not_after():
    pictures = [with_image(id) for id in range(6)]
    rows, _ = simulated(pictures, [ENCODE, SERVE], admission={"queue_timeout_s": 0.015})
    assert [row["status"] for row in rows] == ["finished"] * 3 + ["timed_out"] * 3  # the step begins 256 tokens


@pytest.mark.parametrize(
    "pools, settings, said",
    [
        ([ENCODE], {}, "needs a pool that prefills"),
        ([ENCODE | {"max_prompt_tokens": 5}, SERVE], {}, "takes no max_prompt_tokens"),
        ([ENCODE, SERVE], {"autoscaler": {"metric": "kv", "target": 0.5, "max_replicas": 2}}, "has no KV"),
        ([SERVE], {"encode_router": "random"}, "needs pools of role encode"),
        ([ENCODE | {"deployment": {"multimodal": None}}, SERVE], {}, r"encode\.deployment\.multimodal.*is missing"),
    ],
)
def test_what_does_not_go_together_is_refused(pools, settings, said):
    with pytest.raises((UserError, ValidationError), match=said):
        simulated([text(0)], pools, **settings)


def test_an_image_that_no_encoder_can_encode_is_rejected():
    (row,), _ = simulated([with_image(0, 300, prompt=400)], [ENCODE, SERVE], multimodal={"max_item_tokens": 200})
    assert row["status"] == "rejected" and "allows 256" in row["reason"]
