"""A fit of the time that the API server and the client add to requests, from recordings by the server and the client.

The API process does one piece of work at a time, so a measured time is the work itself plus the wait for earlier work.
The recordings say when every request arrived and when the engine had sampled every token. The fit finds the time of
each kind of work (its price) for which a queue in that order best explains the measured times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.calibration.steps.features import CPU_FEATURES, STEP_FEATURES, MeasuredSteps
from tokentwin.calibration.steps.fit import predict
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.known_speed import machine_slowdown
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.traces.metrics.client_view import matched, seen_from_outside
from tokentwin.traces.recording import Recording, notes_of

Floats = NDArray[np.float64]
_FEWEST = 10  # minimum number of requests
_WORK = ("request_ns", "prompt_token_ns", "outputs_ns", "chunk_ns")
_SCALE_NS = (1e6, 1e3, 1e6, 1e5)  # usual sizes of the prices in `_WORK`, which the fit uses as units
_USUAL_NS = 1e6  # a usual error; larger ones count less, because they come from disturbances of the machine


def front_door_of(server: Recording) -> FrontDoor | None:
    """Return the front door of a run: as noted by a simulated run, else as fitted to the recording.

    A front door is the API server with the client's connection. The result is None for a run without a front door and
    for too few requests. A fitted front door has no times of the client, which the server does not record.
    """
    noted = notes_of(server.run).get("front_door")
    if noted is not None:
        return FrontDoor.model_validate(noted)
    if not server.filled("requests", ["received_ns"]):
        return None
    served = server.requests.filter(pc.equal(server.requests.column("status"), "finished"))
    return _explaining(served) if served.num_rows >= _FEWEST else None


def fit_front_door(server: Recording, client: Recording, calibration: Calibration | None = None) -> FrontDoor:
    """Return the front door that best explains both recordings, fitted by least squares with non-negative times.

    vLLM's API server records nothing, so its times come from the scheduler and the clients. With a `calibration` of the
    engine, the result also has the time that the engine lost because the API process ran on the same machine.

    Raises UserError for recordings of different runs and for too few requests.
    """
    served, sent = matched(server, client)
    finished = pc.and_(pc.equal(served.column("status"), "finished"), pc.equal(sent.column("status"), "finished"))
    served, sent = served.filter(finished), sent.filter(finished)
    if not server.filled("requests", ["received_ns"]):
        served = seen_from_outside(served, sent, server.steps)
    if served.num_rows < _FEWEST:
        remedy = f"has {served.num_rows} requests that finished at {client.path}, too; at least {_FEWEST} are needed"
        raise UserError("served", str(server.path), remedy)
    before_ns = _column(served, "first_sent_ns") - _column(served, "received_ns")
    ttft_ns = _column(sent, "first_token_ns") - _column(sent, "arrival_ns")
    return _explaining(
        served,
        client_ns=max(float(np.median(ttft_ns - before_ns)), 0.0),
        **({} if calibration is None else _lost(server, calibration)),
        source=f"{served.num_rows} requests of {server.path.name}, sent by {client.path.name}",
    )


def _explaining(served: pa.Table, **known: Any) -> FrontDoor:
    """Return the front door that best explains the times of the API process, with the fields of `known` added."""
    last_ns = float(np.mean(_column(served, "last_sent_ns") - _column(served, "last_text_ns")))
    return FrontDoor(**dict(zip(_WORK, _work(_Served(served)), strict=True)), last_ns=last_ns, **known)


class _Served:
    """The work of the API process, and three measured times of each request. A time is NaN if it is not known."""

    def __init__(self, requests: pa.Table) -> None:
        self.received_ns = _column(requests, "received_ns")
        self.prompt_tokens = _column(requests, "prompt_tokens")
        times = requests.column("token_times_ns").combine_chunks()
        self.tokens_ns = times.flatten().to_numpy().astype(np.float64)
        counts = times.value_lengths().to_numpy()
        ends = np.cumsum(counts)
        self._last = ends - 1
        self._first = np.concatenate(([0], ends[:-1]))
        # The tokens of one step are in the order of its rows, which is the order of arrivals.
        arrival_ns = _column(requests, "arrival_ns")
        known_ns = np.where(np.isnan(arrival_ns), self.received_ns, arrival_ns)
        whose = np.concatenate([self.received_ns, np.repeat(known_ns, counts)])
        self._line = np.lexsort((whose, np.concatenate([self.received_ns, self.tokens_ns])))
        names = ("arrival_ns", "first_text_ns", "last_text_ns")
        self.measured_ns = np.concatenate([_column(requests, name) for name in names])

    def predicted_ns(self, prices: Floats) -> Floats:
        """Predict the times of `measured_ns` at these prices, with the queue of `sim.api_server` (Lindley 1952)."""
        request_ns, prompt_token_ns, outputs_ns, chunk_ns = prices
        came = np.concatenate([self.received_ns, self.tokens_ns + outputs_ns])
        work = np.concatenate(
            [request_ns + prompt_token_ns * self.prompt_tokens, np.full(len(self.tokens_ns), chunk_ns)]
        )
        worked = np.cumsum(work[self._line])
        done = np.empty(len(came))
        done[self._line] = worked + np.maximum.accumulate((came + work)[self._line] - worked)
        tokenised, texts = np.split(done, [len(self.received_ns)])
        predicted: Floats = np.concatenate([tokenised, texts[self._first], texts[self._last]])
        return predicted


def _work(served: _Served) -> list[float]:
    """Return the fitted prices of work in nanoseconds, none of them negative."""
    from scipy.optimize import least_squares

    scale = np.array(_SCALE_NS)

    def off(prices: Floats) -> Floats:
        return np.nan_to_num((served.predicted_ns(prices * scale) - served.measured_ns) / _USUAL_NS)

    start = np.full(len(scale), 0.5)
    fit = least_squares(off, start, bounds=(0, np.inf), loss="soft_l1", diff_step=np.full(len(scale), 1e-3))
    return [float(price) for price in fit.x * scale]


def _lost(server: Recording, calibration: Calibration) -> dict[str, float]:
    """Return the time that the engine lost to the API process on the same machine, at the calibrated machine's speed.

    For steps, it is the wall time that other processes took, less what they took during the calibration. For the host's
    work between steps, it is the measured time less the calibration's prediction, at the machine's slowdown in the run.
    The recording of a simulated run has no slowdown; there it is the time by which steps took longer than predicted.
    """
    measured = MeasuredSteps([server.steps])
    host_ns = measured.cpu @ np.array([calibration.cpu_prices_ps[name] / 1000 for name in CPU_FEATURES])
    machine = machine_slowdown([server], calibration)
    if machine is None:
        step_ns, slowdown = measured.step_ns - predict(calibration, measured), np.ones(len(measured))
    else:
        step_ns = (measured.step_ns - measured.own_ns * machine.taken) / machine.slowness(measured)
        slowdown = machine.slowdown(measured)
    rows, waited = measured.step[:, list(STEP_FEATURES).index("sampled_rows")], ~np.isnan(measured.cpu_ns)
    engine = _prices(step_ns, rows)
    host = _prices((measured.cpu_ns / slowdown - host_ns)[waited], rows[waited])
    return dict(zip(("engine_step_ns", "engine_row_ns", "host_step_ns", "host_row_ns"), (*engine, *host), strict=True))


def _prices(times_ns: Floats, amounts: Floats) -> tuple[float, float]:
    """Fit the times by a constant and a price per unit of amount, neither of them negative."""
    from scipy.optimize import nnls

    scale = max(float(amounts.max()), 1.0)
    prices, _ = nnls(np.column_stack([np.ones(len(amounts)), amounts / scale]), times_ns)
    return float(prices[0]), float(prices[1]) / scale


def _column(table: pa.Table, name: str) -> Floats:
    values: Floats = pc.cast(table.column(name), pa.float64()).to_numpy()
    return values
