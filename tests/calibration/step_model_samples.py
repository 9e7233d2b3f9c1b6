"""A plain roofline, models and deployments for tests of the step model."""

import numpy as np

from tokentwin.calibration.operations import Estimate, Operation, floor_ns
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_spec import ModelSpec

LLAMA = ModelSpec(
    name="llama-8b",
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_positions=131072,
    rope_theta=5e5,
)
MIXTURE = LLAMA.model_copy(
    update={
        "name": "mixture",
        "num_experts": 64,
        "experts_per_token": 4,
        "moe_intermediate_size": 1024,
        "shared_intermediate_size": 2048,
        "dense_at": (0, 1),
        "sliding_window": 128,
        "sliding_layers": 16,
    }
)
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, num_blocks=20000)


def deployment(**changes: object) -> Deployment:
    return Deployment.model_validate({"device": "cuda", "scheduler": SCHEDULER, **changes})


class Roofline:
    """Kernel times at 80 % of the roofline, plus two microseconds."""

    gpu = find_gpu("H100")

    def time(self, operation: Operation) -> Estimate:
        ns = floor_ns(self.gpu, operation) / 0.8 + 2000.0
        return Estimate(ns, np.full_like(ns, 0.05), np.full_like(ns, int(TrustLevel.INTERPOLATED), dtype=np.int64))
