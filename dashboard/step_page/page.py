"""Step: what one engine step costs on a GPU, operation by operation, and how sure that is."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from calibration.operations import uniform_step
from calibration.provenance import Provenance, weakest
from calibration.steps.explanation import Explanation, explain
from calibration.steps.operation_cost import OperationCost
from calibration.steps.predict import predicted_cost
from dashboard.badge import figure, heading
from dashboard.mistake import mistake
from dashboard.number_columns import number_columns
from dashboard.step_page.charts import parts_bar, roofline
from dashboard.url import choose, in_url, number
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import gpus
from serving.deployments.kv_capacity import weights_dtype
from serving.deployments.model_catalogue import models
from serving.errors import UserError


@in_url
def show() -> None:
    """The page. Inputs live in the URL."""
    st.title("What a step costs", anchor=False)
    st.caption("Where the time of one engine step goes, from kernel tables and what measured engines taught.")
    left, right = st.columns([1, 3], gap="large")
    with left:
        model = choose("Model", list(models()), "model")
        gpu = choose(
            "GPU", sorted(gpus(), key=lambda name: name != "H100"), "gpu", help="Rates and prices: `tokentwin gpus`."
        )
        devices = int(choose("Tensor parallel", ["1", "2", "4", "8"], "tp"))
        rows = number("Decode rows", "rows", 0, 4096, 64)
        context = number("Tokens before each", "context", 0, 131_072, 1024)
        prompts = number("Prompt chunks", "prompts", 0, 64, 0)
        chunk = number("Tokens of each chunk", "chunk", 2, 32_768, 512)
        past = number("Tokens before each chunk", "past", 0, 131_072, 0)
    with right:
        if not rows and not prompts:
            st.info("An empty step: give it decode rows or prompt chunks.")
            return
        sizes = uniform_step(rows, context, prompts, chunk, past)
        try:
            cost = predicted_cost(gpu, Deployment(model=model, device="cuda", tensor_parallel_size=devices))
            found = explain(cost, sizes)
        except UserError as error:
            mistake(error)
            return
        _show(found, cost, rows)


def _show(found: Explanation, cost: OperationCost, rows: int) -> None:
    low, high = found.interval
    why = f"{found.why} is what is known least" if found.why else "none of its parts is uncertain enough to tell"
    provenance = Provenance(found.coverage.name.lower(), why)
    heading(f"{found.step_ns / 1e6:,.2f} ms", provenance)
    tokens = f", {rows / found.step_ns * 1e9:,.0f} decoded tokens a second" if rows else ""
    st.caption(
        f"plausible {low * found.step_ns / 1e6:,.2f} to {high * found.step_ns / 1e6:,.2f} ms{tokens}; "
        f"{found.host_ns / 1e6:,.2f} ms of CPU time before it, which async scheduling hides"
    )
    figure(parts_bar(found.parts_ns), "parts", "By part", provenance)
    roofs = roofline(found.operations, cost.kernels.gpu, weights_dtype(cost.model, cost.deployment))
    kernels = weakest((o.provenance for o in found.operations), "kinds of kernel")
    figure(roofs, "roofline", "What bounds it", kernels, _ROOF)
    st.dataframe(
        pd.DataFrame(
            {
                "operation": [o.name for o in found.operations],
                "standing": [o.coverage.name.lower() for o in found.operations],
                "times": [o.count for o in found.operations],
                "GFLOP": [o.flops / 1e9 for o in found.operations],
                "MB": [o.bytes / 1e6 for o in found.operations],
                "time (µs)": [o.ns / 1e3 for o in found.operations],
                "of roofline (%)": [100 * o.utilisation for o in found.operations],
                "bound by": [o.bound for o in found.operations],
                "known to (± %)": [100 * o.sigma for o in found.operations],
            }
        ),
        hide_index=True,
        column_config=number_columns(
            dict.fromkeys(("GFLOP", "MB", "time (µs)", "of roofline (%)", "known to (± %)"), "%.1f")
        ),
    )


_ROOF = (
    "Every kind of kernel at its FLOPs per byte and its rate; the larger, the more of the step's time. None can be "
    "above the line, which is the datasheet's. What computes nothing worth mentioning is in the table only."
)
