"""A policy cannot win by misstating its work: wrong sums, lengths or KV end the run in a one-line error."""

from pathlib import Path
from typing import Any

import pytest

from tokentwin.serving.contract import Breach
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

CHEATS = Path(__file__).with_name("cheating_policies.py")
COST = TokenCost(6_000_000, 20_000, 400)
LIMITS = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=4, num_blocks=200, max_model_len=640)


def requests() -> list[WorkloadRequest]:
    """Return new requests, since some cheats write to them."""
    system = ("system", 70)
    prompts = [(system, (f"user{id}", 130)) if id % 3 else (("", 170),) for id in range(10)]
    return [WorkloadRequest(id, id // 4 * 99_000_000, prompts[id], 40) for id in range(10)]


CAUGHT = {
    "Shrinks_prefill_tokens": ("sums", r"its prefill_tokens is 64; its rows have 128"),
    "Shrinks_prefill_rows": ("sums", r"its prefill_rows is 0; its rows have 1"),
    "Shrinks_prefill_pairs": ("sums", r"its prefill_pairs is \d+; its rows have"),
    "Shrinks_prefill_context": ("sums", r"its prefill_context is 64; its rows have 128"),
    "Shrinks_decode_rows": ("sums", r"its decode_(rows|context) is \d+; its rows have"),
    "Shrinks_decode_context": ("sums", r"its decode_context is \d+; its rows have"),
    "Shrinks_decode_squares": ("sums", r"its decode_squares is \d+; its rows have"),
    "Shrinks_sampled_rows": ("sums", r"its sampled_rows is \d; its rows have"),
    "ShrinksTheSet": ("sums", r"(the context of its decode set|its decode_context) is \d+; its (members|rows) have"),
    "ShrinksSquares": ("sums", r"(the squares of its decode set|its decode_squares) is \d+; its (members|rows) have"),
    "ShrinksForAMoment": ("sums", r"its decode_context is \d+; its rows have \d+"),
    "PadsWithLess": ("rows", r"is padded with Padding\(rows=-1"),
    "HidesRows": ("rows", r"starts after \d+ tokens; the prefix cache can hold \d+ of them"),
    "SaysComputed": ("rows", r"request 0: starts after 85 tokens; the prefix cache can hold 0 of them"),
    "SaysFound": ("rows", r"request 0: starts after 80 tokens; the prefix cache can hold 0 of them"),
    "SkipsAhead": ("rows", r"goes on after \d+ tokens; \d+ were computed or found"),
    "Stops": ("requests", r"finishes with 5 output tokens; it has to get 40"),
    "StopsTheSet": ("requests", r"finishes with \d+ output tokens; it has to get 40"),
    "EndsEarly": ("requests", r"finishes before step \d+ has ended, which computes it"),
    "SamplesEarly": ("rows", r"samples after 128 of 170 known tokens"),
    "ShortensAnswers": ("requests", r"request 0: has max_len 171; it came with 210"),
    "ShortensAnswersLater": ("requests", r"request 0: has max_len 174; it came with 210"),
    "ShortensPrompts": ("requests", r"request 0: has prompt_len 85; it came with 170"),
    "ShortensWhatArrives": ("requests", r"request 0: has max_len 171; it came with 210"),
    "TakesAnother": ("requests", r"request 0: add\(\) returned a request made of another than request 0"),
    "KnowsMore": ("requests", r"request 0: begins with 0 tokens computed and 174 known; it has 170"),
    "ArrivesLater": ("requests", r"request 0: came with arrival_ns 0, which is \d+ now"),
    "RaisesPriority": ("requests", r"request 0: has priority -1; it came with 0"),
    "FreesPrompts": ("KV", r"holds \d+ KV blocks; what was computed of those that run takes \d+"),
    "FreesUnfinishedPrompts": ("KV", r"computes tokens up to \d+ and holds|has \d+ tokens computed and holds 0 KV blo"),
    "DropsRequests": ("requests", r"finishes with status aborted"),
    "AnotherPlan": ("sums", r"its decode_rows is 1"),
}


def run(policy: str, steps: bool, overlapped: bool, shares_prefixes: bool = True, **limits: Any) -> TableSink:
    limits = {"async_scheduling": overlapped, **limits}
    deployment = Deployment(policy=policy, scheduler=LIMITS.model_copy(update=limits))
    sink = TableSink()
    Cluster(deployment, COST, sink, steps=steps, shares_prefixes=shares_prefixes).run(Workload(requests()))
    return sink


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("name", CAUGHT)
def test_a_cheat_is_one_line(name: str, steps: bool, overlapped: bool) -> None:
    if name == "EndsEarly" and not overlapped:
        pytest.skip("needs a step in flight")
    if name in ("ShrinksTheSet", "ShrinksSquares", "StopsTheSet") and steps:
        pytest.skip("needs steps that are skipped")
    rule, says = CAUGHT[name]
    with pytest.raises(Breach, match=says) as caught:
        run(f"{CHEATS}:{name}", steps, overlapped)
    assert caught.value.rule == rule and "\n" not in str(caught.value)
