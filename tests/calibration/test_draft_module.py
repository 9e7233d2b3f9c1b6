"""Multi-token prediction: the module's weights, its cost in steps and memory, and models without one."""

import numpy as np
import pytest

from tests.calibration.step_model_samples import Roofline
from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import draft_module
from tokentwin.serving.errors import UserError

SMALL = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, enable_prefix_caching=False)


def deployed(k: int, name: str = "DeepSeek-V3", **more: object) -> Deployment:
    drafts = {"method": "mtp", "num_speculative_tokens": k, "acceptance_rate": 0.8}
    scheduler = {**SMALL.model_dump(), **({"speculative": drafts} if k else {})}
    return Deployment.model_validate({"model": name, "tensor_parallel_size": 8, "scheduler": scheduler, **more})


def test_the_module_weighs_what_was_published() -> None:
    module = draft_module(find_model("DeepSeek-V3"))
    assert (module.parameters - module.embedding_parameters) / 1e9 == pytest.approx(11.5, rel=0.01)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Kimi-K2.5"])
def test_a_model_without_one_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="has no layers for multi-token prediction"):
        kv_capacity(find_model(name), find_gpu("B300"), deployed(1, name))


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-5-FP8", "Qwen3.5-397B-A17B-FP8"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_step_ends_with_a_pass_for_each_draft_token(name: str, k: int) -> None:
    model, kernels = find_model(name), Roofline()
    cost = OperationCost(model, deployed(k, name), kernels)
    sizes = uniform_step(8, 100, 1, 20, 0, drafts=k)
    drafting = [operation for operation in cost.operations(sizes) if operation.name.startswith("draft")]
    module, alone = draft_module(model), deployed(0, name)
    first = OperationCost(module, alone, kernels).operations(sizes)
    assert [o.count for o in drafting if o.name.endswith("experts")] == [1] if k == 1 else [1, k - 1]
    assert {o.name for o in drafting if o.name.startswith("draft ")} == {f"draft {o.name}" for o in first}
    assert float(np.asarray(cost.parts(sizes)["drafting"])) > 0


def test_weights_and_kv_of_the_module_count_in_memory() -> None:
    model, gpu = find_model("DeepSeek-V3"), find_gpu("B200")
    plain, drafted = kv_capacity(model, gpu, deployed(0)), kv_capacity(model, gpu, deployed(1))
    assert drafted.block * 61 == plain.block * 62
    assert (drafted.weights - plain.weights) * 8 / 1e9 == pytest.approx(11.5 + 0.9, rel=0.1)  # and what is not shared
    assert drafted.num_blocks < plain.num_blocks


def test_the_module_stays_in_16_bits_beside_nvfp4() -> None:
    module = draft_module(find_model("nvidia/DeepSeek-R1-FP4"))
    assert module.checkpoint_quantization == "none"


def test_its_cost_is_not_stated() -> None:
    with pytest.raises(ValueError, match="takes its time from the model"):
        Deployment.model_validate(
            {"scheduler": {"speculative": {"method": "mtp", "num_speculative_tokens": 1, "draft_us": 5.0}}}
        )
