"""Session-aware eviction on the real engine: the simulator repeats every decision of a run."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers makes the models; install the dev extra")

from tests.realengine.tiny_models import save  # noqa: E402
from tokentwin.calibration.validation.decision_replay import replay_decisions  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402

pytestmark = pytest.mark.engine
MS = 1_000_000


def sessions() -> Workload:
    """Return four sessions of three turns each, and single requests between the turns."""
    requests: list[WorkloadRequest] = []
    for turn in range(3):
        for session in range(4):
            before = [request for request in requests if request.session == f"s{session}"]
            history = (*before[-1].prompt, (f"out:{before[-1].id}", 4)) if before else ((f"s{session}", 12),)
            prompt = (*history, (f"s{session}.{turn}", 8))
            at_ns, think_ns = len(requests) * MS, 3 * MS if turn else None
            requests.append(
                WorkloadRequest(len(requests), at_ns, prompt, 4, session=f"s{session}", turn=turn, think_ns=think_ns)
            )
            requests += [WorkloadRequest(len(requests) + n, at_ns, (("", 30),), 3) for n in range(2)]
    return Workload(requests)


def test_a_recorded_run_is_decided_again(tmp_path: Path) -> None:
    save("llama", tmp_path / "model")
    settings = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    scheduler = SchedulerConfig.model_validate({**settings, "num_blocks": 50, "kv_eviction": "session"})
    deployment = Deployment(model=str(tmp_path / "model"), dtype="float32", scheduler=scheduler)
    engine = Engine(deployment, load_model_files(str(tmp_path / "model"), Path()), None)
    record(sessions(), engine, tmp_path / "run")
    engine.close()
    replayed = replay_decisions(Recording.load(tmp_path / "run"))
    assert replayed.exact and replayed.identical_requests == 36, replayed.first_difference
