"""The smallest tensor-parallel size is the first that a simulation accepts."""

import pytest

from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.smallest_engine import smallest_tensor_parallel_size
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("Llama-3.1-70B", "H100", {}),
        ("Llama-3.1-70B", "H100", {"quantization": "fp8"}),
        ("GLM-4.6", "H200", {}),
        ("gpt-oss-120b", "H100", {}),
        ("DeepSeek-V3", "B200", {}),
        ("Qwen3-32B", "L40S", {"pipeline_parallel_size": 2}),
        ("Qwen3-Next-80B-A3B", "H100", {}),
        ("Qwen3-0.6B", "L4", {}),
    ],
)
def test_it_is_the_first_that_a_simulation_accepts(model: str, gpu: str, settings: dict[str, object]) -> None:
    base = Deployment.model_validate({"model": model, "device": "cuda", "gpu_memory_utilization": 0.9, **settings})
    size = smallest_tensor_parallel_size(find_model(model), base, find_gpu(gpu))
    assert size is not None

    def accepted(wide: int) -> bool:
        try:
            price_scenario(Workload([]), None, gpu, base.model_copy(update={"tensor_parallel_size": wide}))
        except UserError:
            return False
        return True

    assert accepted(size) and not any(accepted(wide) for wide in (1, 2, 4, 8) if wide < size)


def test_a_gpu_that_is_too_small_has_none() -> None:
    large = "Qwen3-Coder-480B-A35B"
    assert smallest_tensor_parallel_size(find_model(large), Deployment(model=large), find_gpu("T4")) is None
