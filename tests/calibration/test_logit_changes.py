"""What penalties and scored prompts add to the steps of a GPU."""

import pytest

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.step_plan import StepPlan

MODEL = "Llama-3.1-8B"


def cost(**parallel):
    return predicted_cost("H100", Deployment(model=MODEL, **parallel))


def added_us(cost, **amounts):
    step = {"decode_rows": 64, "decode_context": 64_000, "decode_squares": 64_000_000, "sampled_rows": 64}
    plain, more = (cost.step_ns(StepPlan.from_amounts(**step, **added)) for added in ({}, amounts))
    return (more - plain) / 1e3


def test_penalties_move_the_logits_and_counts_of_their_rows_through_memory():
    gpu, model, priced = gpus()["H100"], find_model(MODEL), cost()
    few, many = (added_us(priced, changed_rows=rows) for rows in (8, 64))
    roofline_us = 56 * 12.125 * model.vocab_size / gpu.memory_bytes_per_s * 1e6
    assert roofline_us <= many - few <= 2 * roofline_us
    assert "extrapolated" in priced.logits_said


def test_a_scored_prompt_takes_the_time_of_its_logits_in_parts():
    priced = cost()
    once, twice, half = (added_us(priced, scored_tokens=tokens) for tokens in (1024, 2048, 512))
    assert twice == pytest.approx(2 * once, rel=1e-3)
    assert half < once < 2.2 * half
    model, gpu = find_model(MODEL), gpus()["H100"]
    assert once > 1e6 * 2 * 1024 * model.vocab_size * model.hidden_size / gpu.bf16_flop_per_s


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_only_the_last_stage_and_all_devices_of_a_group_change_logits(parallel):
    alone, shared = (added_us(cost(**how), changed_rows=32) for how in ({}, parallel))
    assert shared == pytest.approx(alone, rel=0.02)
    if "pipeline_parallel_size" in parallel:
        priced = cost(**parallel)
        plans = [StepPlan.from_amounts(decode_rows=1, sampled_rows=1, changed_rows=rows) for rows in (0, 32)]
        first, last = zip(*map(priced.stages_ns, plans), strict=True)
        assert first[0] == first[1] and last[0] < last[1]
