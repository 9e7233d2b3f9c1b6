"""Images in the simulator: what is encoded when, and how long it takes. Decisions: `test_conformance.py`."""

from random import Random

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.encoder_cache import EncoderCache
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.workload import Item, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.encoder import EncoderUse
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
ROOMY = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 4096}
IMAGE_US = 100.0  # to encode a token


def simulated(requests, leaps=True, multimodal=None, **scheduler):
    """Return the rows of the requests, in order of id, and what was encoded."""
    sink = TableSink()
    read = {"encoder_us_per_token": IMAGE_US} if multimodal is None else multimodal
    deployment = Deployment(scheduler=SchedulerConfig(**ROOMY | scheduler), multimodal=read or None)
    cluster = Cluster(deployment, TokenCost(6 * MS, 18_000, 450), sink, steps=False, leaps=leaps)
    done = cluster.run(Workload(requests))
    return sink.requests.sort_by("request_id").to_pylist(), done.encoder


def with_image(id, tokens=100, content="", arrival_ns=0, prompt=150, offset=10):
    items = (Item(offset, tokens, content),)
    return WorkloadRequest(id, arrival_ns, (("", prompt),), 3, items=items)


def traffic(seed, count=50):
    chance, at, made = Random(seed), 0, []
    for id in range(count):
        at += chance.choice([0, MS, 60 * MS])
        items, offset = [], chance.randint(0, 30)
        for _ in range(chance.choice([0, 1, 3])):
            name = chance.randrange(6)
            items.append(Item(offset, 20 + 30 * name, f"image {name}"))
            offset = items[-1].end + chance.randint(0, 20)
        prompt = (("shared", 40), ("", offset + chance.randint(1, 60)))
        made.append(WorkloadRequest(id, at, prompt, chance.randint(1, 60), items=tuple(items)))
    return made


def test_the_step_that_computes_an_image_encodes_it_first():
    plain = WorkloadRequest(0, 0, (("", 150),), 3)
    (before,), _ = simulated([plain])
    (after,), use = simulated([with_image(0)])
    assert after["first_token_ns"] - before["first_token_ns"] == 100 * 100_000
    assert after["finish_ns"] - before["finish_ns"] == 100 * 100_000
    assert use == EncoderUse(1, 100, 100 * 100_000)


def test_one_image_is_encoded_once_while_it_is_cached():
    pictures = [with_image(id, content="cat", arrival_ns=id * 500 * MS) for id in range(5)]
    assert simulated(pictures)[1].items == 1
    others = [with_image(id, arrival_ns=id * 500 * MS) for id in range(5)]
    assert simulated(others)[1].items == 5  # images without a content are all different


def test_a_step_encodes_no_more_than_its_budget():
    """Two images of which one fits into the cache: the second request waits until the first has computed its image."""
    pair = [with_image(0, 300, prompt=310), with_image(1, 300, prompt=310)]
    small = {"encoder_us_per_token": IMAGE_US, "max_item_tokens": 300}
    roomy = {**small, "max_item_tokens": 600}
    late = [simulated(pair, multimodal=read)[0][1] for read in (small, roomy)]
    assert late[0]["first_token_ns"] > late[1]["first_token_ns"]


def test_equal_text_over_other_images_is_no_prefix():
    def request(id, content):
        items = (Item(16, 64, content),)
        return WorkloadRequest(id, id * 500 * MS, (("template", 112),), 3, items=items)

    rows, _ = simulated([request(0, "cat"), request(1, "dog"), request(2, "cat")])
    assert [row["prefix_hit_tokens"] for row in rows] == [0, 16, 96]


@pytest.mark.parametrize("overlapped", [False, True])
def test_leaps_are_exact(overlapped):
    for seed in range(2):
        requests = traffic(seed)
        settings = {"async_scheduling": overlapped, "num_blocks": 120, "max_num_seqs": 8}
        assert simulated(requests, True, **settings) == simulated(requests, False, **settings)


@pytest.mark.parametrize(
    "multimodal, request_, reason",
    [
        ({}, with_image(0), "the deployment reads none"),
        ({"max_item_tokens": 200, "encoder_us_per_token": 1}, with_image(0, 300, prompt=400), "allows 256"),
        (
            {"disable_chunked_mm_input": True, "encoder_us_per_token": 1, "max_item_tokens": 999},
            with_image(0, 300, prompt=400),
            "more than 256 in a step",
        ),
    ],
)
def test_what_can_never_be_encoded_is_rejected(multimodal, request_, reason):
    (row,), _ = simulated([request_], multimodal=multimodal)
    assert row["status"] == "rejected" and reason in row["reason"]


def test_an_encoder_that_nobody_knows_needs_a_time():
    with pytest.raises(UserError, match=r"multimodal\.tower.*set encoder_us_per_token"):
        simulated([with_image(0)], multimodal={"max_item_tokens": 500})


def test_the_cache_never_holds_more_than_it_has_room_for():
    """Against a plain list of contents, the longest idle first."""
    chance, cache = Random(1), EncoderCache(100)
    held: dict[tuple[str, int], set[int]] = {}
    idle: list[tuple[str, int]] = []
    requests = [
        Request(WorkloadRequest(id, 0, (("", 500),), 1, items=(Item(0, 10 + 5 * (id % 9), f"i{id % 9}"),)))
        for id in range(40)
    ]
    for _ in range(2000):
        request = chance.choice(requests)
        item = request.arrived.items[0]
        content = item.content, item.tokens
        if cache.refers(request):
            cache.release(request)
            held[content].discard(request.id)
            if not held[content]:
                idle.append(content)
            continue
        hit = cache.hit(request, 0)
        assert hit == (content in held)
        if hit:
            idle = [one for one in idle if one != content]
        elif cache.make_room(item.tokens):
            while sum(tokens for _, tokens in held) + item.tokens > 100:
                del held[idle.pop(0)]
            cache.store(request, 0)
            held[content] = set()
        else:
            assert sum(tokens for (name, tokens) in held if (name, tokens) not in idle) + item.tokens > 100
            continue
        held[content].add(request.id)


def test_an_image_that_no_step_can_encode_whole_is_an_error():
    """vLLM 0.33 waits for ever: two requests with the threshold, but a single request is not held to it."""
    settings = {"multimodal": {"encoder_us_per_token": 1.0, "disable_chunked_mm_input": True}}
    assert simulated([with_image(0)], long_prefill_token_threshold=64, **settings)[0][0]["status"] == "finished"
    with pytest.raises(UserError, match=r"long_prefill_token_threshold: 64: is less than an image has"):
        simulated([with_image(0), with_image(1)], long_prefill_token_threshold=64, **settings)
