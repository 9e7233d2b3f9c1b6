"""Step: the time of one engine step on a GPU, operation by operation, and its uncertainty."""

from __future__ import annotations

import streamlit as st

from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.explanation import Explanation, explain, token_life
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.trust import Trust, weakest
from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import data_table, figure, heading, mistake
from tokentwin.dashboard.step_page.charts import parts_bar, roofline
from tokentwin.dashboard.step_page.operation_table import operation_table
from tokentwin.dashboard.url import check_numbers, choose, in_url, number, usual_first
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.deployments.weight_types import weights_dtype
from tokentwin.serving.errors import UserError


@in_url
def show() -> None:
    """Draw the page. Inputs live in the URL."""
    st.title("What a step costs", anchor=False)
    st.caption(
        "The time of one engine step by operation, predicted from measured kernels and corrected by measured engines."
    )
    left, right = st.columns([1, 3], gap="large")
    with left:
        model = choose("Model", list(models()), "model")
        gpu = choose("GPU", usual_first("H100", gpus()), "gpu", help="`tokentwin gpus` lists their rates and prices.")
        devices = int(choose("Tensor parallel", ["1", "2", "4", "8"], "tp"))
        rows = number(
            "Decoding requests", "rows", 0, 4096, 64, help="Number of requests that get one more token in this step."
        )
        context = number(
            "Context of each (tokens)",
            "context",
            0,
            131_072,
            1024,
            help="Tokens in the context of each decoding request.",
        )
        prompts = number(
            "Prompt chunks", "prompts", 0, 64, 0, help="Number of prompts of which this step computes a part."
        )
        chunk = number("Tokens per chunk", "chunk", 2, 32_768, 512)
        past = number("Cached tokens before each chunk", "past", 0, 131_072, 0)
    with right:
        if not rows and not prompts:
            st.info("This step is empty. Set decoding requests or prompt chunks.")
            return
        sizes = uniform_step(rows, context, prompts, chunk, past)
        try:
            check_numbers()
            stated, spec = Deployment(model=model, device="cuda", tensor_parallel_size=devices), find_gpu(gpu)
            deployment, defaults = with_engine_defaults(stated, spec)
            cost = predicted_cost(gpu, deployment)
            explanation = explain(cost, sizes)
        except UserError as error:
            mistake(error)
            return
        _show(explanation, cost, rows)
        st.caption(defaults)
        st.header("Tensors in this step", anchor=False, help=_LIFE)
        life = token_life(cost.model, cost.deployment, sizes)
        columns = {
            "stage": [stage.name for stage in life],
            "shape": [" x ".join(f"{size:,}" for size in stage.shape) for stage in life],
            "type": [stage.dtype for stage in life],
            "times": [stage.times for stage in life],
            "MB": [stage.bytes / 1e6 for stage in life],
        }
        data_table(columns, {"MB": "%.3f"})


def _show(explanation: Explanation, cost: OperationCost, rows: int) -> None:
    low, high = explanation.interval
    limit = f" (least certain: {explanation.why})" if explanation.why else ""
    why = "measured steps cover it" if explanation.level < 0 else f"{explanation.level.clause}{limit}"
    trust = Trust(explanation.level.word, explanation.untaught or why)
    heading(f"{explanation.step_ns / 1e6:,.2f} ms", trust, marked=True)
    tokens = f", {rows / explanation.step_ns * 1e9:,.0f} decoded tokens per second" if rows else ""
    st.caption(
        f"90 % interval {low * explanation.step_ns / 1e6:,.2f} to {high * explanation.step_ns / 1e6:,.2f} ms{tokens}; "
        f"before the step, the CPU needs {explanation.host_ns / 1e6:,.2f} ms, which async scheduling hides"
    )
    figure(parts_bar(explanation.parts_ns), "parts", "By part", trust)
    roofs = roofline(explanation.operations, cost.kernels.gpu, weights_dtype(cost.model, cost.deployment))
    kernels = weakest((o.trust for o in explanation.operations), "kinds of kernel")
    figure(roofs, "roofline", "What bounds it", kernels, _ROOF)
    amounts: dict[str, list[float]] = {
        "times": [o.count for o in explanation.operations],
        "GFLOP": [o.flops / 1e9 for o in explanation.operations],
        "MB": [o.bytes / 1e6 for o in explanation.operations],
        "time (µs)": [o.ns / 1e3 for o in explanation.operations],
    }
    operation_table(blocks, explanation.operations, **amounts)


_ROOF = (
    "Each point is an operation, at its FLOPs per byte and its FLOP/s. Larger points take more of the step's time. "
    "The line is the limit of the GPU's datasheet. Operations with little computation are in the table only."
)
_LIFE = "The tensors on one device through which the tokens of the step pass, from token ids to sampled ids."
