"""The time that DeepEP takes to send tokens to their experts and back: closed forms of few numbers for each GPU.

An exchange takes

    start + doubling log2(nodes) + the longer of
    bytes within the node / (share of NVLink) and bytes to other nodes / (share of the link)

In its low-latency mode a token goes to each of its experts. In its high-throughput mode it goes once to each node that
has one of its experts, and from there once to each device. The form assumes that experts are chosen evenly (`Exchange`
counts the copies). Starts and shares of NVLink are fitted to tables of one node of each GPU, with 2,048 to 7,168
elements a token and 1 to 10 experts. The doubling and the share of the link are fitted to a table of 1 to 8 nodes of
H100 with InfiniBand NDR. The numbers are in `gpus/exchanges.json`, made by `python -m lab.kernels.fit --forms
exchanges`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calibration.kernels.inter_node import INTER_NODE_SIGMA, rate_between_nodes
from calibration.kernels.times import Estimate, floor_ns
from calibration.operations import Exchange
from calibration.trust import TrustLevel
from serving.deployments.gpu_spec import GpuSpec
from serving.deployments.inter_node import InterNodeConfig
from serving.errors import UserError

EXCHANGES = Path(__file__).with_name("gpus") / "exchanges.json"
SEVERAL_NODES = ("H100", InterNodeConfig().of_a_device)  # GPU and link of the table of several nodes
_HIDDEN, _TOPK = (2048, 7168), (1, 10)
_OTHERS_SIGMA = 0.4  # an estimate for GPUs without a table


@dataclass(frozen=True)
class ExchangeForm:
    """One direction in one mode.

    `error` is the standard error of its log time at measured points of one node, `error_apart` at points of several
    nodes. The points had up to `most_tokens` tokens on a device and up to `most_nodes` nodes.
    """

    start_ns: float
    doubling_ns: float
    share: float
    share_apart: float
    error: float
    error_apart: float
    most_tokens: float
    most_nodes: float

    def ns(self, gpu: GpuSpec, exchange: Exchange) -> Any:
        """Return nanoseconds, with the shape of `exchange.elements`."""
        within = 1e9 * exchange.sent_within_node / (self.share * gpu.link_bytes_per_s)
        if exchange.link is None:
            return self.start_ns + within
        steps = np.log2(exchange.nodes)
        apart = 1e9 * exchange.sent_between_nodes / (self.share_apart * rate_between_nodes(gpu, exchange))
        waits = steps * self.doubling_ns + (1 + steps) * exchange.link.latency_ns
        return self.start_ns + waits + np.maximum(within, apart)


def exchange_time(gpu: GpuSpec, exchange: Exchange) -> Estimate:
    """Return the time by the GPU's own form, or by the geometric mean of all other GPUs' forms.

    The standard error is larger beyond the measured sizes. Raises UserError for GPUs without NVLink, for which DeepEP
    has no kernels.
    """
    if gpu.link_bytes_per_s <= gpu.pcie_bytes_per_s:
        remedy = f"needs NVLink, which {gpu.name} lacks; leave it out"
        raise UserError("all2all_backend", exchange.backend, remedy)
    known = read_exchanges()
    forms = [known[gpu.name]] if gpu.name in known else list(known.values())
    fits = [of_gpu[exchange.form] for of_gpu in forms]
    logs = np.log([form.ns(gpu, exchange) for form in fits])
    ns = np.maximum(np.exp(logs.mean(axis=0)), floor_ns(gpu, exchange))
    apart = exchange.nodes > 1
    measured = (
        gpu.name in known and _HIDDEN[0] <= exchange.hidden <= _HIDDEN[1] and _TOPK[0] <= exchange.topk <= _TOPK[1]
    )
    measured &= not apart or ((gpu.name, exchange.link) == SEVERAL_NODES and exchange.nodes <= fits[0].most_nodes)
    within = measured & (np.asarray(exchange.elements) <= fits[0].most_tokens * exchange.hidden)
    error = float(np.mean([form.error_apart if apart else form.error for form in fits]))
    beyond = np.hypot(error, INTER_NODE_SIGMA if apart else _OTHERS_SIGMA)
    level = np.where(within, TrustLevel.INTERPOLATED, TrustLevel.EXTRAPOLATED).astype(np.int8)
    return Estimate(ns, np.where(within, error, beyond), level)


@cache
def read_exchanges() -> dict[str, dict[str, ExchangeForm]]:
    """Return the forms of every GPU that has a table, by `mode/phase`."""
    data = json.loads(EXCHANGES.read_text(encoding="utf-8"))
    return {
        gpu: {key: ExchangeForm(**numbers) for key, numbers in about["forms"].items()} for gpu, about in data.items()
    }
