"""The time that an API server and its clients add to a request: their work, queueing for it, and a slower engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ConfigDict, Field

from tokentwin.serving.adapter_times import adapter_times
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.data_file import parse_json
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.settings import Settings
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.whole_file import whole_file

FILE = "front_door.json"


class FrontDoor(Settings):
    """The times of one API process in ns. The process does one piece of work at a time.

    An engine on the same machine takes `engine_step_ns` longer for each step, and `engine_row_ns` longer for each token
    that the step samples. Between steps the engine's process also hands out the tokens; this takes `host_step_ns` more
    CPU time for each step, and `host_row_ns` for each sampled token.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    client_ns: float = Field(
        0, ge=0, description="time from a request's arrival until the server has it: the client's delay and the network"
    )
    request_ns: float = Field(0, ge=0, description="work on each request before the engine gets it")
    prompt_token_ns: float = Field(0, ge=0, description="work on each prompt token")
    outputs_ns: float = Field(0, ge=0, description="transfer of a step's tokens from the engine to the API process")
    chunk_ns: float = Field(0, ge=0, description="detokenising and writing each chunk of an answer")
    last_ns: float = Field(0, ge=0, description="time from an answer's last text until the complete answer is written")
    engine_step_ns: float = Field(0, ge=0, description="additional time of each step of the engine")
    engine_row_ns: float = Field(0, ge=0, description="additional time for each token that the engine samples")
    host_step_ns: float = Field(0, ge=0, description="additional CPU time of the engine between two steps")
    host_row_ns: float = Field(0, ge=0, description="additional CPU time of the engine for each token that it samples")
    own_processes: bool = Field(False, description="True if each engine of a fleet has an API process of its own")
    learnt: bool = Field(
        False,
        description="True if a server's answers taught the times: requests then have the times that clients see "
        "instead of the server's",
    )
    source: str = Field("", description="recordings that the times were fitted to")

    @classmethod
    def load(cls, path: str | Path) -> FrontDoor:
        """Read a front door from a file or its directory. Raises UserError if the file is missing or damaged."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        try:
            return cls.model_validate(parse_json(path.read_bytes()))
        except OSError as error:
            remedy = f"cannot be read: {reason(error)}; make one with calibrate --from-served"
            raise UserError("front-door", str(path), remedy) from None
        except ValueError:
            remedy = "is not a front-door file; make one with calibrate --from-served"
            raise UserError("front-door", str(path), remedy) from None

    def save(self, folder: Path) -> None:
        """Write the front door into `folder`, as a whole file or not at all. Raises UserError if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(folder / FILE) as file:
                file.write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError("out", str(folder), f"cannot be written: {reason(error)}") from None

    def beside(self, cost: CostModel) -> CostModel:
        """Return the cost model of an engine that shares its CPU with this API process; `cost` is that engine alone."""
        return Beside(cost, self) if any((*self._step, *self._host)) else cost

    @property
    def outside_ms(self) -> float:
        """The time that a lone request takes outside the engine until its first text, in ms; its prompt is short."""
        return (self.client_ns + self.request_ns + self.outputs_ns + self.chunk_ns) / 1e6

    @property
    def queues_texts(self) -> bool:
        """True if texts wait for one another; otherwise every text takes the same time after its token."""
        return not self.learnt or self.chunk_ns > 0

    def without_queue(self) -> FrontDoor:
        """Return the front door with texts that do not wait for one another, which is much faster to simulate."""
        return self.model_copy(update={"chunk_ns": 0.0, "outputs_ns": self.outputs_ns + self.chunk_ns})

    @property
    def said(self) -> str:
        """A sentence about the latencies behind this front door and its source; empty unless the times were learnt."""
        if not self.learnt:
            return ""
        outside = f"a lone request takes {self.outside_ms:.1f} ms outside the engine"
        return f"latencies are those that clients see: {outside}" + (f" ({self.source})" if self.source else "")

    @property
    def _step(self) -> tuple[float, float]:
        return self.engine_step_ns, self.engine_row_ns

    @property
    def _host(self) -> tuple[float, float]:
        return self.host_step_ns, self.host_row_ns


class Beside:
    """A cost model that adds a time to each step of `cost`; the added time grows with the tokens that it samples."""

    def __init__(self, cost: CostModel, front_door: FrontDoor) -> None:
        self._cost = cost
        self._step = front_door._step
        self._host = front_door._host
        self.adapters = adapter_times(cost)

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cost.cpu_ns(plan) + _longer_ns(self._host, plan.sampled_rows)

    def step_ns(self, plan: StepPlan) -> int:
        return self._cost.step_ns(plan) + _longer_ns(self._step, plan.sampled_rows)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        more_ns = _longer_ns(self._host, rows) + _longer_ns(self._step, rows)
        return [ns + more_ns for ns in self._cost.decode_run_ns(rows, context, squares, steps)]


def _longer_ns(prices: tuple[float, float], sampled: int) -> int:
    per_step, per_token = prices
    return round(per_step + per_token * sampled)
