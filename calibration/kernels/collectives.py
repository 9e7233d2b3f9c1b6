"""The time of a collective: closed forms of few numbers, by kind of link and by algorithm.

One algorithm on g devices takes

    start + rank (g - 1) + bytes sent by a device / (share of the link's rate) * (g / 2)^crowding

(Hockney's model, Parallel Computing 20, 1994, with a synchronisation for each further rank, and with links that devices
share, as PCIe's are). A *one-shot* all-reduce reads every other device's whole message, a *ring* sends 2 (g - 1) / g of
it, and a *switch* that adds (NVLS) takes it once. A kernel takes the fastest of its algorithms, so its time grows with
bytes and devices, as the time of each algorithm does. An engine chooses its kernel like this:

- over NVLink, up to a number of bytes: FlashInfer's all-reduce, which also does the norm behind it (Blackwell), or
  vLLM's own (other GPUs); beyond that NCCL. The faster of the two counts where both may serve;
- over PCIe, where devices read each other's memory: the same for pairs;
- over PCIe, where they do not: NCCL through the host's memory, of which there are no measurements here;
- over PCIe, among more than two devices: the time depends on the machine's board, not on the GPU. The measured board
  of a GPU is one among several, and the error is the distance between them;
- over several nodes: NCCL, with one time within a node and one between nodes (`inter_node.py`).

The numbers of a GPU are in `gpus/collectives.json`, made by `python -m lab.kernels.fit --forms collectives`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from calibration.kernels.exchanges import exchange_time
from calibration.kernels.inter_node import INTER_NODE_SIGMA, between_nodes_ns
from calibration.kernels.times import Estimate, floor_ns
from calibration.operations import Collective, Exchange
from calibration.trust import TrustLevel
from serving.deployments.gpu_spec import GpuSpec, find_gpu

COLLECTIVES = Path(__file__).with_name("gpus") / "collectives.json"

Algorithm = Literal["one_shot", "ring", "switch"]

_MIB = 2**20

# Messages up to which engines take their own all-reduce, by number of devices. The sources are vLLM's
# all_reduce_utils.py, and vLLM's PassConfig for FlashInfer's fusion with the norm, which is on by default for
# Blackwell.
_HOPPER = {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB // 4}
_B200 = {2: 2 * _MIB, 4: 2 * _MIB, 8: _MIB}
_B300 = {2: 4 * _MIB, 4: 4 * _MIB, 8: 4 * _MIB}
_OTHER_NVLINK = {2: 8 * _MIB, 4: 8 * _MIB, 8: 8 * _MIB}
_CUSTOM = {"H100": _HOPPER, "H200": _HOPPER, "B200": _B200, "GB200": _B200, "B300": _B300}
_FUSED = {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB}
FUSING = ("B200", "B300", "GB200")
_PCIE = {2: 8 * _MIB}

_HOST_SHARE = 0.26  # share of PCIe's rate, in and out of the host's memory: 16 GB/s over PCIe 5, 8 over PCIe 4
_HOST_SIGMA = 0.35
_NVLINK_SIGMA = 0.26  # 9 of 10 errors of GPUs left out in turn lie within 1.645 of it
_STAND_IN = {"p2p": "all_to_all"}  # two devices exchange halves of twice the message


@dataclass(frozen=True)
class Line:
    """One algorithm; `share` is its share of the link's rate."""

    start_ns: float
    rank_ns: float
    share: float
    crowding: float = 0.0
    algorithm: Algorithm = "ring"

    def ns(self, operation: Collective, link_bytes_per_s: float) -> Any:
        """Return nanoseconds, with the shape of `operation.elements`."""
        gpus = operation.gpus
        message = 2.0 * np.asarray(operation.elements, dtype=np.float64)
        sent = {"one_shot": message * (gpus - 1), "ring": operation.bytes, "switch": message}[self.algorithm]
        rate = self.share * link_bytes_per_s * (gpus / 2) ** -self.crowding
        return self.start_ns + self.rank_ns * (gpus - 1) + 1e9 * sent / rate


@dataclass(frozen=True)
class ClosedForm:
    """The fastest of some algorithms.

    `error` is the standard error of the log time at measured points. Their largest messages had `most_bytes` bytes, and
    they had up to `most_gpus` GPUs.
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
    """Collectives of one GPU: the geometric mean of `forms`, which are its own or those of GPUs with its kind of link.

    Attributes:
        forms: closed forms by kernel: `nccl/all_gather`, `custom/all_reduce`, `fused/all_reduce`
        own: whether the forms were fitted to measurements of this very GPU
        boards: forms of other PCIe boards, empty for the way through the host's memory; they count among more than two
            devices
    """

    gpu: GpuSpec
    forms: Sequence[Mapping[str, ClosedForm]]
    own: bool
    boards: Sequence[Mapping[str, ClosedForm]] = ()

    def time(self, operation: Collective) -> Estimate:
        """Return the time of `operation`.

        It is never below the link's rate, and never less for more bytes, more devices or more nodes.
        """
        if isinstance(operation, Exchange):
            return exchange_time(self.gpu, operation)
        if operation.nodes > 1:
            return self._on_several_nodes(operation)
        elements = np.asarray(operation.elements, dtype=np.float64)
        estimates = [self._of(forms, operation) for forms in self._counting(operation)]
        logs = np.array([np.log(ns) for ns, _ in estimates])
        ns = np.maximum(np.exp(logs.mean(axis=0)), floor_ns(self.gpu, operation))
        error = np.array([error for _, error in estimates]).mean(axis=0)
        if not over_nvlink(self.gpu) and len(estimates) > 1:  # one more board, like the known ones
            error = np.hypot(_HOST_SIGMA, logs.std(axis=0, ddof=1) * np.sqrt(1 + 1 / len(estimates)))
        elif not self.own and self.forms[0]:
            error = np.hypot(_NVLINK_SIGMA, logs.std(axis=0))
        nccl = self.forms[0].get(_nccl(operation))
        known = self.own and nccl is not None and operation.gpus <= nccl.most_gpus and operation.kind not in _STAND_IN
        within = known & (2.0 * elements <= (nccl.most_bytes if nccl else 0.0))
        level = np.where(within, TrustLevel.INTERPOLATED, TrustLevel.EXTRAPOLATED).astype(np.int8)
        return Estimate(ns, np.broadcast_to(error, ns.shape), level)

    def _counting(self, operation: Collective) -> list[Mapping[str, ClosedForm]]:
        """Return the forms whose mean counts."""
        return [*self.forms, *(self.boards if operation.gpus > 2 else ())]

    def _on_several_nodes(self, operation: Collective) -> Estimate:
        """Return the time within a node plus the time between nodes.

        It is never below the time of all devices on one node.
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
            self._of({key: form for key, form in forms.items() if "nccl/" in key}, operation)[0]
            for forms in self._counting(operation)
        ]
        return np.exp(np.log(fitted).mean(axis=0))

    def fuses(self, operation: Collective) -> Any:
        """Return whether the kernel of this all-reduce also does the norm behind it."""
        limit = taken_up_to("fused", self.gpu, operation.gpus) if operation.fusible else 0
        return 2.0 * np.asarray(operation.elements) <= limit

    def _of(self, forms: Mapping[str, ClosedForm], operation: Collective) -> tuple[Any, Any]:
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
    """Return the bytes of a message up to which engines take their `custom` or `fused` all-reduce.

    The limit is that of the next larger number of devices that has one, or 0 if none has.
    """
    if kernel == "fused":
        limits = _FUSED if gpu.name in FUSING else {}
    else:
        limits = _CUSTOM.get(gpu.name, _OTHER_NVLINK) if over_nvlink(gpu) else _PCIE
    return next((limits[of] for of in sorted(limits) if of >= gpus), 0)


def over_nvlink(gpu: GpuSpec) -> bool:
    """Return whether the GPUs of a node have their own links, faster than PCIe."""
    return gpu.link_bytes_per_s > gpu.pcie_bytes_per_s


def collectives_of(gpu: GpuSpec) -> Collectives:
    """Return the collectives of `gpu`: measured on it, on GPUs with its kind of link, or through the host's memory."""
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
