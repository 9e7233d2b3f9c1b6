"""Pooling requests on the engine: the final hidden state of the last token is that of transformers."""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from tests.realengine.test_engine_model import engine_for  # noqa: E402
from tests.realengine.tiny_models import save  # noqa: E402
from tokentwin.serving.request import Status  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_states_are_those_of_transformers_beside_requests_that_generate(
    family: str, overlapped: bool, tmp_path: Path
) -> None:
    """In chunks, with cached prefixes, after preemptions, and for a prompt of one token."""
    judge = save(family, tmp_path)
    settings = {"max_num_batched_tokens": 16, "num_blocks": 40, "scheduler_reserve_full_isl": False}
    engine = engine_for(tmp_path, async_scheduling=overlapped, **settings)
    chance = random.Random(2)
    shared = [chance.randrange(96) for _ in range(21)]
    prompts = [[chance.randrange(96) for _ in range(size)] for size in (1, 2, 40, 63)]
    prompts += [shared + [chance.randrange(96) for _ in range(size)] for size in (3, 9, 30)]
    states: dict[int, list[float]] = {}
    asked = []
    for id, prompt in enumerate(prompts):
        request = WorkloadRequest(id, 0, ((f"p{id}", len(prompt)),), 12 if id % 3 == 1 else 0)
        asked.append(engine.add(request, prompt, on_pooled=lambda state, id=id: states.__setitem__(id, state)))
    while engine.step():
        pass
    assert all(request.status is Status.FINISHED for request in asked)
    assert states.keys() == {id for id in range(len(prompts)) if id % 3 != 1}
    for id, state in states.items():
        with torch.no_grad():
            wanted = judge.model(torch.tensor([prompts[id]])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(state), wanted, atol=1e-4, rtol=1e-4)
    assert [request.outputs for request in asked if request.pools] == [0] * len(states)
