"""The twin of a server before any question: an engine's defaults, and step times as believed for its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentwin.calibration.steps.external_calibration import blind
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.step_times import CorrectedKernels, LinearPrices
from tokentwin.planning.learn.twin import Setting, Twin
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model

_UTILIZATION = 0.9
_BLOCKS_ASSUMED = 1000  # KV blocks of a device whose memory is not known


def believed_twin(base: Deployment, gpu: str, known: dict[str, Any]) -> Twin:
    """Return the twin with the defaults of the deployment's engine on `gpu`; `known` settings replace them."""
    spec = find_gpu(gpu)
    deployment, _ = with_engine_defaults(base, spec)
    sized = deployment.model_copy(update={"gpu_memory_utilization": _UTILIZATION})
    blocks = kv_capacity(find_model(deployment.model), spec, sized).num_blocks
    calibration = blind(gpu, deployment)
    times = CorrectedKernels(gpu, calibration.correction, calibration.host.launches)
    return Twin(base, _defaults(deployment, blocks, known), times)


def guessed_twin(base: Deployment, answers: Sequence[Answer], replicas: int, known: dict[str, Any]) -> Twin:
    """Return the twin of a device without kernel times: linear prices from the first answers, lone prompts first."""
    lone, *more = answers
    deployment = base.model_copy(update={"device": "cpu"})  # linear prices of a GPU would be those of our engine
    setting = _defaults(base, _BLOCKS_ASSUMED, known)
    dealt = [part for answer in more for part in _dealt(answer, replicas)]
    return Twin(deployment, setting, LinearPrices.guessed(lone, dealt, setting.applied(deployment)))


def _defaults(deployment: Deployment, blocks: int, known: dict[str, Any]) -> Setting:
    sized = deployment.rescheduled(num_blocks=blocks)
    return Setting.of(sized)._replace(**known)


def _dealt(answer: Answer, replicas: int) -> list[Answer]:
    """Return the answer of each engine, as if a router had sent them requests in turn."""
    ids = sorted(answer.tokens_ns)
    return [answer.only(ids[engine::replicas]) for engine in range(replicas)]
