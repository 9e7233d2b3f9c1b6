"""The engine's model against transformers: the same weights must give the same logits and the same greedy tokens."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from tests.realengine.tiny_models import CONFIGS, greedy, save  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.logit_rules import Logprob  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams  # noqa: E402
from tokentwin.realengine.step_input import Batch, RowInput, pack  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.request import Status  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("models")
    return {family: (folder / family, save(family, folder / family)) for family in CONFIGS}


def engine_for(folder: Path, **scheduler: Any) -> Engine:
    settings = {"max_model_len": 200, "max_num_batched_tokens": 64, "num_blocks": 100, "block_size": 4}
    config = SchedulerConfig(**{**settings, **scheduler})
    deployment = Deployment(model=str(folder), dtype="float32", scheduler=config)
    return Engine(deployment, load_model_files(str(folder), Path()))


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_agree_with_transformers(family: str, models: dict[str, tuple[Path, Any]]) -> None:
    folder, judge = models[family]
    engine = engine_for(folder)
    tokens = torch.randint(0, 96, (1, 150), generator=torch.Generator().manual_seed(1))
    blocks = np.array(random.Random(0).sample(range(1, 100), 38), dtype=np.int32)
    with torch.no_grad():
        wanted = judge(tokens).logits[0]
    for start, end in ((0, 70), (70, 71), (71, 149), (149, 150)):  # chunks and single tokens
        row = RowInput(tokens[0, start:end].tolist(), start, blocks, 0)
        step = pack([row], 4, 8, engine.runner.attention.tiles).step
        batch = Batch.from_buffer(torch.from_numpy(step.packed), step.layout)
        with torch.inference_mode():
            model = engine.runner.model
            logits = model.compute_logits(model.forward(batch.tokens, batch, engine.runner.kv))
        torch.testing.assert_close(logits[0], wanted[end - 1], atol=1e-4, rtol=0)


def test_the_likelihood_of_each_token_is_that_of_transformers(models: dict[str, tuple[Path, Any]]) -> None:
    """And of the likeliest beside it, in steps with requests that do not want to know it, in the plain and in the
    overlapped loop."""
    folder, judge = models["qwen3"]
    for overlapped in (False, True):
        engine = engine_for(folder, async_scheduling=overlapped, max_num_seqs=3)
        heard: dict[int, list[tuple[int, Logprob | None]]] = {}
        for number, prompt in enumerate(prompts()[:4]):
            heard[number] = []
            engine.add(
                WorkloadRequest(number, 0, (("", len(prompt)),), 6),
                prompt,
                sampling=SamplingParams(0.8, seed=number),
                on_token=lambda token, logprob, mine=heard[number]: bool(mine.append((token, logprob))),
                logprobs=None if number % 2 else number,
            )
        while engine.step():
            pass
        for number, prompt in enumerate(prompts()[:4]):
            tokens = [token for token, _ in heard[number]]
            with torch.no_grad():
                judged = judge(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
            if number % 2:
                assert [likely for _, likely in heard[number]] == [None] * 6
                continue
            for (token, likely), logprobs in zip(heard[number], judged[len(prompt) - 1 :], strict=False):
                assert likely is not None and likely.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
                best = logprobs.topk(number)
                assert [other for other, _ in likely.top] == best.indices.tolist()
                assert [at for _, at in likely.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_sharded_weights_are_the_same(models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = models["llama"]
    save("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = (load_model_files(str(f), Path()).state for f in (folder, tmp_path))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


PROMPT_LENGTHS = (1, 3, 4, 8, 17, 33, 60)
OUTPUTS = 24


def prompts() -> list[list[int]]:
    """Return prompts of many lengths, of which the last three share 28 tokens."""
    draw = random.Random(5)
    shared = [draw.randrange(96) for _ in range(28)]
    alone = [[draw.randrange(96) for _ in range(n)] for n in PROMPT_LENGTHS]
    return alone + [shared + [draw.randrange(96) for _ in range(n)] for n in (0, 5, 12)]


@pytest.fixture(scope="module")
def wanted(models: dict[str, tuple[Path, Any]]) -> list[list[int]]:
    """Return what transformers generates for each prompt."""
    return greedy(models["qwen3"][1], prompts(), OUTPUTS)


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 5},
    "threshold": {"long_prefill_token_threshold": 3},
    "no caching": {"enable_prefix_caching": False},
    "large blocks": {"block_size": 16},
    "preemption": {"num_blocks": 26, "scheduler_reserve_full_isl": False},
    "preemption by priority": {
        "num_blocks": 26,
        "scheduler_reserve_full_isl": False,
        "policy": "priority",
        "forget_withdrawn": True,
    },
    "preemption without caching": {"num_blocks": 26, "enable_prefix_caching": False},
}


@pytest.mark.parametrize(
    ("setting", "policy"),
    [(setting, "vllm") for setting in SETTINGS]
    + [(setting, policy) for setting in list(SETTINGS)[::3] for policy in ("static", "prefill-first", "sglang")],
)
def test_greedy_output_does_not_depend_on_scheduling(setting, policy, models, wanted):
    config = SchedulerConfig(
        **{"max_model_len": 200, "max_num_batched_tokens": 64, "num_blocks": 100, "block_size": 4, **SETTINGS[setting]}
    )
    folder, _ = models["qwen3"]
    deployment = Deployment(model=str(folder), dtype="float32", policy=policy, scheduler=config)
    engine = Engine(deployment, load_model_files(str(folder), Path()))
    sequences = {}
    waiting = list(enumerate(prompts()))
    preempted = hits = 0
    while waiting or engine.scheduler.requests:
        for number, prompt in waiting[:2]:  # two arrivals a step
            request = engine.add(WorkloadRequest(number, number, (("", len(prompt)),), OUTPUTS, number % 3), prompt)
            assert request.status is Status.WAITING, request.reason
            sequences[number] = engine.sequences[number]
        del waiting[:2]
        step = engine.step()
        assert step is not None
        preempted += len(step.plan.preempted)
        hits += sum(request.cached for request in step.plan.admitted)
    assert [sequences[n].outputs for n in range(len(wanted))] == wanted
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    if policy == "vllm":
        assert preempted or not setting.startswith("preemption")
        assert bool(hits) == ("without caching" not in setting and setting != "no caching")


def test_early_stop_and_abort_return_their_blocks(models: dict[str, tuple[Path, Any]], wanted: list[list[int]]) -> None:
    engine = engine_for(models["qwen3"][0])
    stop = wanted[4][6]
    for number in (4, 5):
        engine.add(WorkloadRequest(number, 0, (("", PROMPT_LENGTHS[number]),), OUTPUTS), prompts()[number])
    stopped = engine.sequences[4]
    stopped._stop_ids = (stop,)
    engine.step()
    engine.step()
    engine.abort(5)
    while engine.scheduler.requests:
        engine.step()
    assert stopped.outputs == wanted[4][: wanted[4].index(stop) + 1]
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
