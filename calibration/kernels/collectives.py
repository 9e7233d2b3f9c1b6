"""The times of collectives and of exchanges of experts' tokens, as closed forms with a few fitted parameters.

One algorithm on g devices takes

    start + rank (g - 1) + bytes sent by a device / (share of the link's rate) * (g / 2)^crowding

This is Hockney's model (Parallel Computing 20, 1994) with two additions: a synchronisation for each further rank, and
crowding on links that devices share, such as PCIe. A *one-shot* all-reduce reads every other device's whole message. A
*ring* sends 2 (g - 1) / g of the message. A *switch* that adds (NVLS) gets the message once. A kernel uses the fastest
of its algorithms. Its time therefore never falls with more bytes or devices. An engine chooses its kernel like this:

- over NVLink, up to a limit of bytes: FlashInfer's all-reduce, which also does the norm after it (Blackwell), or vLLM's
  own (other GPUs), where it is faster than NCCL; beyond the limit NCCL;
- over PCIe, if devices can read each other's memory: vLLM's own all-reduce for pairs, in the same way;
- over PCIe, if they cannot: NCCL through the host's memory, for which there are no measurements here;
- over PCIe, among more than two devices: the time depends on the machine's board, not on the GPU. The time used is the
  mean over the known boards, and its error covers their spread;
- over several nodes: NCCL, with one time within a node and one between nodes (below).

The fitted parameters of a GPU are in `gpus/collectives.json`, made by `python -m lab.kernels.fit --forms collectives`.

DeepEP sends tokens to their experts and back. An exchange takes

    start + doubling log2(nodes) + the longer of
    bytes within the node / (share of NVLink) and bytes to other nodes / (share of the link)

In its low-latency mode a token goes to each of its experts. In its high-throughput mode it goes once to each node that
has one of its experts, and from there once to each device. The form assumes that experts are chosen evenly (`Exchange`
counts the copies). `start` and the share of NVLink are fitted to tables of one node of each GPU, with 2,048 to 7,168
elements per token and 1 to 10 experts per token. `doubling` and the share of the link between nodes are fitted to a
table of 1 to 8 nodes of H100 with InfiniBand NDR. The parameters are in `gpus/exchanges.json`, made by `python -m
lab.kernels.fit --forms exchanges`.

The time of collectives between nodes is NCCL's own closed form of its rings and trees. In a collective of g devices on
each of n nodes, the devices of a node share its work, and every device exchanges its share with its counterparts on
other nodes. A ring takes n - 1 steps (an all-reduce twice as many), each with a latency, plus the bytes that a ring
sends. A tree takes 2 log2(n) steps up and down, plus the bytes of both ways. The latencies and the shares of the link's
rate are the constants by which NCCL chooses its algorithm (`hwLat`, row NET, and `ncclTopoTuneModel` in NVIDIA/nccl,
src/graph/tuning.cc). They are known for the protocol for small messages (LL) and for the one for large messages
(Simple), and the fastest combination counts. These constants rank algorithms and leave out a part of every collective:
16 H20 on two nodes took 46 to 48 microseconds for up to a kilobyte (NVIDIA/nccl issue 1244), where they give 26. The
difference is added. No collective between nodes was measured here, so the standard error is an estimate; it covers 75
microseconds on three nodes of H100 (issue 1453) and 93 on two of A100 (issue 812).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tokentwin.calibration.operations import Collective, Estimate, Exchange, floor_ns
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.inter_node import InterNodeConfig
from tokentwin.serving.errors import UserError

INTER_NODE_SIGMA = 0.4


class _Protocol(NamedTuple):
    """An NCCL protocol: nanoseconds of a step from node to node, and the share of the link's rate that it reaches."""

    hop_ns: float
    share: float


_BOTH_WAYS_NS = 21_000.0  # measured time of a small all-reduce between nodes beyond NCCL's constants; half for one way
_RING = (_Protocol(2_700.0, 1 / 4), _Protocol(9_600.0, 1.0))
_TREE = (_Protocol(5_000.0, 0.9 / 3.8), _Protocol(50_000.0, 0.9))


def rate_between_nodes(gpu: GpuSpec, operation: Collective) -> float:
    """Return the bytes per second that a device can send to other nodes, limited by its link and by PCIe."""
    assert operation.link is not None
    return min(operation.link.bytes_per_s, gpu.pcie_bytes_per_s)


def between_nodes_ns(gpu: GpuSpec, operation: Collective) -> Any:
    """Return the nanoseconds that `operation` adds to its time within a node."""
    assert operation.link is not None
    nodes, sent = operation.nodes, np.asarray(operation.sent_between_nodes, dtype=np.float64)
    steps = 1 if operation.kind == "p2p" else nodes - 1
    both_ways = 2 if operation.kind == "all_reduce" else 1
    ways = [(protocol, both_ways * steps, sent) for protocol in _RING]
    if operation.kind == "all_reduce":  # a tree moves a node's whole share; a ring leaves out the node's own part
        ways += [(protocol, 2 * (nodes - 1).bit_length(), sent * nodes / (nodes - 1)) for protocol in _TREE]
    rate = rate_between_nodes(gpu, operation)
    beyond = 0.0 if operation.kind == "p2p" else _BOTH_WAYS_NS * both_ways / 2
    return beyond + np.minimum.reduce(
        [
            hops * (protocol.hop_ns + operation.link.latency_ns) + 1e9 * moved / (protocol.share * rate)
            for protocol, hops, moved in ways
        ]
    )


EXCHANGES = Path(__file__).with_name("gpus") / "exchanges.json"
SEVERAL_NODES = ("H100", InterNodeConfig().of_a_device)  # GPU and link of the only measured table with several nodes
_HIDDEN, _TOPK = (2048, 7168), (1, 10)
_OTHERS_SIGMA = 0.4  # standard error of log time for GPUs without a table, estimated


@dataclass(frozen=True)
class ExchangeForm:
    """The closed form of one direction of an exchange (to the experts or back) in one of DeepEP's modes.

    `error` is the standard error of log time at measured points on one node, and `error_apart` at points on several
    nodes. The measured points had up to `most_tokens` tokens per device and up to `most_nodes` nodes.
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
        """Return the time of `exchange` in nanoseconds, with the shape of `exchange.elements`."""
        within = 1e9 * exchange.sent_within_node / (self.share * gpu.link_bytes_per_s)
        if exchange.link is None:
            return self.start_ns + within
        steps = np.log2(exchange.nodes)
        apart = 1e9 * exchange.sent_between_nodes / (self.share_apart * rate_between_nodes(gpu, exchange))
        waits = steps * self.doubling_ns + (1 + steps) * exchange.link.latency_ns
        return self.start_ns + waits + np.maximum(within, apart)


def exchange_time(gpu: GpuSpec, exchange: Exchange) -> Estimate:
    """Return the time of an exchange by the GPU's own form, or else the geometric mean of all other GPUs' forms.

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
    """Return the forms of every GPU that has a table, by GPU name and then by `mode/phase`."""
    data = json.loads(EXCHANGES.read_text(encoding="utf-8"))
    return {
        gpu: {key: ExchangeForm(**numbers) for key, numbers in about["forms"].items()} for gpu, about in data.items()
    }


COLLECTIVES = Path(__file__).with_name("gpus") / "collectives.json"

Algorithm = Literal["one_shot", "ring", "switch"]

_MIB = 2**20

# Largest message (bytes) for which engines use their own all-reduce, by number of devices. The sources are vLLM's
# all_reduce_utils.py, and vLLM's PassConfig for FlashInfer's fusion with the norm, which is on by default for
# Blackwell.
_HOPPER = {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB // 4}
_B200 = {2: 2 * _MIB, 4: 2 * _MIB, 8: _MIB}
_B300 = {2: 4 * _MIB, 4: 4 * _MIB, 8: 4 * _MIB}
_OTHER_NVLINK = {2: 8 * _MIB, 4: 8 * _MIB, 8: 8 * _MIB}
_CUSTOM = {"H100": _HOPPER, "H200": _HOPPER, "B200": _B200, "GB200": _B200, "B300": _B300, "GB300": _B300}
_FUSED = {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB}
FUSING = ("B200", "B300", "GB200", "GB300")
_PCIE = {2: 8 * _MIB}

_HOST_SHARE = 0.26  # share of PCIe's rate for copies through the host's memory: 16 GB/s over PCIe 5, 8 GB/s over PCIe 4
_HOST_SIGMA = 0.35
_NVLINK_SIGMA = 0.26  # standard error of log time, from errors for GPUs that were left out in turn
_STAND_IN = {"p2p": "all_to_all"}  # in an all-to-all of twice the message, each of two devices sends one half


@dataclass(frozen=True)
class Line:
    """The closed form of one algorithm; `share` is the share of the link's rate that it reaches."""

    start_ns: float
    rank_ns: float
    share: float
    crowding: float = 0.0
    algorithm: Algorithm = "ring"

    def ns(self, operation: Collective, link_bytes_per_s: float) -> Any:
        """Return the time of `operation` in nanoseconds, with the shape of `operation.elements`."""
        gpus = operation.gpus
        message = 2.0 * np.asarray(operation.elements, dtype=np.float64)
        sent = {"one_shot": message * (gpus - 1), "ring": operation.bytes, "switch": message}[self.algorithm]
        rate = self.share * link_bytes_per_s * (gpus / 2) ** -self.crowding
        return self.start_ns + self.rank_ns * (gpus - 1) + 1e9 * sent / rate


@dataclass(frozen=True)
class ClosedForm:
    """The closed form of one kernel: the fastest of its algorithms `lines`.

    `error` is the standard error of log time at measured points. The points had messages of up to `most_bytes` bytes
    and up to `most_gpus` GPUs.
    """

    lines: Sequence[Line]
    error: float
    most_bytes: float = 0.0
    most_gpus: int = 0

    def ns(self, operation: Collective, link_bytes_per_s: float) -> Any:
        return np.minimum.reduce([line.ns(operation, link_bytes_per_s) for line in self.lines])


_THROUGH_HOST: Mapping[str, ClosedForm] = {}
_HOST = ClosedForm((Line(8_000.0, 4_000.0, _HOST_SHARE, 0.3),), _HOST_SIGMA)


@dataclass(frozen=True)
class Collectives:
    """Times of one GPU's collectives: by its own forms, or the geometric mean over GPUs with its kind of link.

    Attributes:
        forms: one mapping for each GPU, from kernel (such as `nccl/all_gather`, `custom/all_reduce`,
            `fused/all_reduce`) to closed form
        own: True if the forms were fitted to measurements of this GPU
        boards: forms of other PCIe boards, used for more than two devices; an empty mapping is the path through the
            host's memory
    """

    gpu: GpuSpec
    forms: Sequence[Mapping[str, ClosedForm]]
    own: bool
    boards: Sequence[Mapping[str, ClosedForm]] = ()

    def time(self, operation: Collective) -> Estimate:
        """Return the time of `operation`.

        It is never shorter than the link's rate allows, and never shorter for more bytes, more devices or more nodes.
        """
        if isinstance(operation, Exchange):
            return exchange_time(self.gpu, operation)
        if operation.nodes > 1:
            return self._on_several_nodes(operation)
        elements = np.asarray(operation.elements, dtype=np.float64)
        estimates = [self._time_by(forms, operation) for forms in self._counting(operation)]
        logs = np.array([np.log(ns) for ns, _ in estimates])
        ns = np.maximum(np.exp(logs.mean(axis=0)), floor_ns(self.gpu, operation))
        error = np.array([error for _, error in estimates]).mean(axis=0)
        if not over_nvlink(self.gpu) and len(estimates) > 1:  # an unknown board varies like the known ones
            error = np.hypot(_HOST_SIGMA, logs.std(axis=0, ddof=1) * np.sqrt(1 + 1 / len(estimates)))
        elif not self.own and self.forms[0]:
            error = np.hypot(_NVLINK_SIGMA, logs.std(axis=0))
        nccl = self.forms[0].get(_nccl(operation))
        known = self.own and nccl is not None and operation.gpus <= nccl.most_gpus and operation.kind not in _STAND_IN
        within = known & (2.0 * elements <= (nccl.most_bytes if nccl else 0.0))
        level = np.where(within, TrustLevel.INTERPOLATED, TrustLevel.EXTRAPOLATED).astype(np.int8)
        return Estimate(ns, np.broadcast_to(error, ns.shape), level)

    def _counting(self, operation: Collective) -> list[Mapping[str, ClosedForm]]:
        """Return the forms over which `time` takes the mean."""
        return [*self.forms, *(self.boards if operation.gpus > 2 else ())]

    def _on_several_nodes(self, operation: Collective) -> Estimate:
        """Return the time within a node plus the time between nodes.

        It is never shorter than the time with all devices on one node.
        """
        own = -(-operation.gpus // operation.nodes)
        shared = {"all_to_all": 1 / operation.nodes, "p2p": 0.0}.get(operation.kind, 1.0) * (own > 1)
        within = replace(operation, gpus=max(own, 2), elements=shared * operation.elements, nodes=1, link=None)
        inside, alone = self._by_nccl(within), self._by_nccl(replace(operation, nodes=1, link=None))
        ns = np.maximum(inside + between_nodes_ns(self.gpu, operation), alone)
        far = np.full(ns.shape, TrustLevel.EXTRAPOLATED, dtype=np.int8)
        return Estimate(np.maximum(ns, floor_ns(self.gpu, operation)), np.full(ns.shape, INTER_NODE_SIGMA), far)

    def _by_nccl(self, operation: Collective) -> Any:
        """Return NCCL's nanoseconds within a node."""
        fitted = [
            self._time_by({key: form for key, form in forms.items() if "nccl/" in key}, operation)[0]
            for forms in self._counting(operation)
        ]
        return np.exp(np.log(fitted).mean(axis=0))

    def fuses(self, operation: Collective) -> Any:
        """Return True where the kernel of this all-reduce also does the norm after it."""
        limit = taken_up_to("fused", self.gpu, operation.gpus) if operation.fusible else 0
        return 2.0 * np.asarray(operation.elements) <= limit

    def _time_by(self, forms: Mapping[str, ClosedForm], operation: Collective) -> tuple[Any, Any]:
        link = self.gpu.link_bytes_per_s
        sent = Collective("", "all_to_all", 2, 2.0 * operation.elements) if operation.kind == "p2p" else operation
        if not forms:
            ns = _HOST.ns(sent, self.gpu.pcie_bytes_per_s)
            return ns, np.full(np.shape(ns), _HOST.error)
        nccl = forms[_nccl(operation)]
        ns = nccl.ns(sent, link)
        error = np.full(np.shape(ns), nccl.error)
        for kernel in ("custom", "fused") if operation.fusible else ("custom",):
            form = forms.get(f"{kernel}/{operation.kind}")
            if form is not None:
                own = form.ns(operation, link)
                limit = taken_up_to(kernel, self.gpu, operation.gpus)
                taken = (2.0 * np.asarray(operation.elements) <= limit) & (own < ns)
                ns, error = np.where(taken, own, ns), np.where(taken, form.error, error)
        return ns, error


def taken_up_to(kernel: str, gpu: GpuSpec, gpus: int) -> int:
    """Return the largest message in bytes for which engines use their `custom` or `fused` all-reduce.

    Limits are known for some numbers of devices. The result is the limit of the smallest such number that is at least
    `gpus`, or 0 if there is none.
    """
    if kernel == "fused":
        limits = _FUSED if gpu.name in FUSING else {}
    else:
        limits = _CUSTOM.get(gpu.name, _OTHER_NVLINK) if over_nvlink(gpu) else _PCIE
    return next((limits[number] for number in sorted(limits) if number >= gpus), 0)


def over_nvlink(gpu: GpuSpec) -> bool:
    """Return True if the GPUs of a node are connected by links that are faster than PCIe."""
    return gpu.link_bytes_per_s > gpu.pcie_bytes_per_s


def collectives_of(gpu: GpuSpec) -> Collectives:
    """Return the collectives of `gpu`, as measured on it or on GPUs with its kind of link, else through host memory."""
    if not over_nvlink(gpu) and not gpu.peer_access:
        return Collectives(gpu, [{}], False)
    known = _bundled()
    if gpu.name not in known:
        return transferred(gpu, known)
    others = {name: forms for name, forms in known.items() if name != gpu.name}
    boards = () if over_nvlink(gpu) else (*_alike(gpu, others), _THROUGH_HOST)
    return Collectives(gpu, [known[gpu.name]], True, boards)


def transferred(gpu: GpuSpec, known: Mapping[str, Mapping[str, ClosedForm]]) -> Collectives:
    """Return the collectives of `gpu` from `known` GPUs with the same kind of link, scaled to the rate of its link."""
    boards = () if over_nvlink(gpu) else (_THROUGH_HOST,)
    return Collectives(gpu, _alike(gpu, known), False, boards)


def _alike(gpu: GpuSpec, known: Mapping[str, Mapping[str, ClosedForm]]) -> list[Mapping[str, ClosedForm]]:
    """Return the forms of GPUs with the kind of link that `gpu` has."""
    return [forms for name, forms in known.items() if over_nvlink(find_gpu(name)) == over_nvlink(gpu)]


def read_forms(data: Mapping[str, Any]) -> dict[str, dict[str, ClosedForm]]:
    """Return the forms of every GPU in a file like `gpus/collectives.json`."""
    return {
        gpu: {
            key: ClosedForm(
                tuple(Line(**line) for line in form["lines"]), form["error"], form["most_bytes"], form["most_gpus"]
            )
            for key, form in about["forms"].items()
        }
        for gpu, about in data.items()
    }


@cache
def _bundled() -> dict[str, dict[str, ClosedForm]]:
    return read_forms(json.loads(COLLECTIVES.read_text(encoding="utf-8")))


def _nccl(operation: Collective) -> str:
    return f"nccl/{_STAND_IN.get(operation.kind, operation.kind)}"
