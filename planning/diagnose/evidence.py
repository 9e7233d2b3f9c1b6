"""The evidence of a recorded run: the data from which symptoms are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokentwin.calibration.expert_routing import busiest_over_mean
from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.run_explanation import (
    MEASURED_COLUMNS,
    PREDICTED_COLUMNS,
    PartTimes,
    explain_run,
    measured_parts,
)
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.kv_layout import kv_bytes_per_token
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.metrics.client_view import as_clients_saw
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.tables import Floats

_IDLE_NS = 5_000_000  # a longer wait for the next plan is idle time, not work of the host
_COLUMNS = [
    "replica", "step", "plan_ns", "start_ns", "end_ns", "prefill_rows", "decode_rows", "running", "waiting",
    "used_blocks", "preempted",
]  # fmt: skip


class Evidence:
    """The data of a recording from which symptoms are found. Step means are weighted by time; None without steps.

    MFU and MBU refer to the peak rates of `peak`, or of the GPU that the run names.

    Raises UserError for a recording without a finished request.
    """

    def __init__(
        self, recording: Recording, slo: Mapping[str, float] | None = None, peak: GpuSpec | None = None
    ) -> None:
        self.metrics = RunMetrics.from_recording(recording, slo, peak)
        self.run = recording.run
        self.deployment = recorded_deployment(recording)
        if not self.metrics.finished.any():
            remedy = "has no finished request, so nothing can be explained; give another recording"
            raise UserError("recording", self.run["run_id"], remedy)
        steps = recording.table("steps", _COLUMNS)
        self.has_steps = steps.num_rows > 0
        self._steps = {name: steps[name].cast("float64").to_numpy() for name in _COLUMNS}
        self._recording = recording
        rare = recording.filled("steps", ["expert_imbalance"])
        self._recorded_imbalance = recording.table("steps", rare).column(0).to_pylist() if rare else []
        self.parts: dict[str, float] = {}

    @cached_property
    def seen(self) -> RunMetrics:
        """The metrics of the requests as clients saw them; without an API server, the engine's metrics."""
        if not self._recording.filled("requests", ["received_ns"]):
            return self.metrics
        return RunMetrics(as_clients_saw(self._recording.requests))

    def explain_by(self, scenario: PricedScenario) -> None:
        """Fill `parts` with the share of each part in the steps' time, as the engine timed it, else as cost models say.

        `parts` stays empty if neither is available. The steps of each pool are explained by the pool's cost model.
        """
        timed = measured_parts(self._recording.table("steps", [*MEASURED_COLUMNS]))
        tables = [timed] if timed else list(self._explained(scenario))
        totals: dict[str, float] = {}
        for parts in (parts for regimes in tables for parts in regimes.values()):
            for name, ns in parts.items():
                totals[name] = totals.get(name, 0.0) + ns
        whole = sum(totals.values())
        self.parts = {name: ns / whole for name, ns in totals.items()} if whole else {}

    def _explained(self, scenario: PricedScenario) -> Iterator[PartTimes]:
        """Yield the part times of the steps that each cost model times; nothing if one of the models has no parts."""
        costs = {pool.config.name: pure(pool.cost) for pool in scenario.all_pools}
        steps = self._recording.table("steps", ["replica", *PREDICTED_COLUMNS])
        pools, first = {life["replica"]: life["pool"] for life in self.run["replica_lives"] or []}, next(iter(costs))
        whose = np.array([id(costs[pools.get(at, first)]) for at in steps["replica"].to_pylist()])
        models = list({id(cost): cost for cost in costs.values()}.values())
        for cost in models if all(isinstance(cost, OperationCost) for cost in models) else []:
            mine = steps.filter(pa.array(whose == id(cost)))
            if isinstance(cost, OperationCost) and mine.num_rows:
                yield explain_run(cost, mine).parts_ns

    @cached_property
    def requests(self) -> list[WorkloadRequest]:
        """The offered requests; empty if the recording does not hold them."""
        try:
            return list(self._recording.workload().requests)
        except UserError:
            return []

    @cached_property
    def tier_loads(self) -> tuple[float, float]:
        """Lower bounds of the time to load KV from tiers: mean ms per simulated request, and share of a replica's run.

        They are the loaded bytes divided by the stated rates.
        """
        tiers, admitted = self.deployment.kv_tiers, np.isfinite(self.metrics.values("queue_ms")).sum()
        if tiers is None or not admitted or self.run["clock"] != "virtual":
            return 0.0, 0.0
        token_bytes = kv_bytes_per_token(self.deployment, tiers.kv_bytes_per_token, "kv_tiers.kv_bytes_per_token")
        loaded = token_bytes * self.metrics.looked_up_tokens / admitted  # bytes, if the whole prompt were loaded
        rates = self.metrics.tier_hit_rates()
        load_ns = sum(loaded * rates.get(tier.name, 0.0) / tier.read_gb_s for tier in tiers.tiers)
        return load_ns / 1e6, load_ns * admitted / (self.run["duration_ns"] or 1) / (self.run["replicas"] or 1)

    @cached_property
    def step_ns(self) -> Floats:
        return self._steps["end_ns"] - self._steps["start_ns"]

    @cached_property
    def host_share(self) -> float:
        """The share of the time with work to do in which no step ran."""
        order = np.lexsort((self._steps["step"], self._steps["replica"]))
        replica, plan, start, end = (self._steps[name][order] for name in ("replica", "plan_ns", "start_ns", "end_ns"))
        follows = (replica[1:] == replica[:-1]) & (plan[1:] - end[:-1] <= _IDLE_NS)
        between = float(np.maximum(start[1:] - end[:-1], 0.0)[follows].sum())
        return between / (between + float(self.step_ns.sum()))

    def time_share(self, steps: NDArray[np.bool_]) -> float:
        """Return the share of the time of all steps that the steps in the mask `steps` take."""
        return float(self.step_ns[steps].sum() / max(self.step_ns.sum(), 1.0))

    def step(self, name: str) -> Floats:
        return self._steps[name]

    @cached_property
    def prompt_share(self) -> float:
        """The share of the steps' time that prompts add: the time of their steps beyond that of decodes alone."""
        prompts = self._steps["prefill_rows"] > 0
        if not prompts.any():
            return 0.0
        plain = float(np.median(self.step_ns[~prompts])) if (~prompts).any() else 0.0
        decodes = np.where(self._steps["decode_rows"] > 0, plain, 0.0)
        return float(np.maximum(self.step_ns - decodes, 0.0)[prompts].sum() / self.step_ns.sum())

    @cached_property
    def expert_imbalance(self) -> float:
        """Expert tokens on the busiest device over the mean: recorded, else stated, else by chance in a mean step."""
        devices, stated = self.deployment.expert_parallel_size, self.deployment.expert_imbalance
        recorded = [dict(by_devices).get(devices) for by_devices in self._recorded_imbalance if by_devices]
        values = [value for value in recorded if value is not None]
        if values:
            return float(np.mean(values))
        tokens = self.metrics.step_mean("batch_tokens") if stated == "random" else None
        if tokens is None:
            return 1.0 if isinstance(stated, str) else stated
        routed = tokens * self.deployment.data_parallel_size
        return float(busiest_over_mean(find_model(self.deployment.model), self.deployment, routed))

    @cached_property
    def kv_usage(self) -> Floats:
        return self.metrics.values("kv_usage")
