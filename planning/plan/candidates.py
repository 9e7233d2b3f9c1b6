"""The candidates of a plan, and the combinations that do not fit.

A candidate is a GPU, a number of GPUs that share the model, a policy, settings, and a split. Settings that the
deployment does not state are its engine's defaults on each GPU. A deployment with `gpu_memory_utilization` gets the KV
blocks that the GPU has room for; without it, the deployment has the same number of KV blocks on every GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from tokentwin.planning.deployments import with_settings
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.kv_layout import kv_tokens
from tokentwin.serving.errors import UserError

if TYPE_CHECKING:
    from tokentwin.calibration.steps.external_calibration import Learnt

_SEARCHED = 5  # maximum number of engines of a replica in the search, prefill and decode together
_SIZES = {  # the sizes in an engine's name, with their short names
    "tensor_parallel_size": "TP",
    "prefill_context_parallel_size": "PCP",
    "decode_context_parallel_size": "DCP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
}
_ONE_GPU = dict.fromkeys(_SIZES, 1)  # of an encoder
_NAMED = (*_SIZES, "policy")  # parts of an engine's name


class Split(NamedTuple):
    """A ratio of prefill engines to decode engines, and of encoders with a GPU of their own.

    With `decode` 0, the prefill engines decode, too.
    """

    prefill: int
    decode: int
    encode: int = 0

    @property
    def name(self) -> str:
        """The ratio as a short name, such as `1P2D`, `1E1P2D` or `1E3PD`."""
        rest = f"{self.prefill}P{self.decode}D" if self.decode else f"{self.prefill}PD"
        return f"{self.encode}E{rest}" if self.encode else rest

    @property
    def engines(self) -> int:
        """The number of engines with the language model."""
        return self.prefill + self.decode

    @classmethod
    def parse(cls, text: str) -> Split | None:
        """Parse `PREFILL:DECODE`, `ENCODERSeENGINES`, `ENCODERSePREFILL:DECODE`, or `none`, which gives None.

        Raises UserError for anything else.
        """
        if text == "none":
            return None
        match = re.fullmatch(r"(?:(\d{1,2})e)?(\d{1,2})(?::(\d{1,2}))?", text)
        encode, prefill, decode = match.groups() if match else (None, None, None)
        counts = [int(part) for part in (encode, prefill, decode) if part is not None]
        if len(counts) < 2 or not all(1 <= number <= 64 for number in counts):
            remedy = "must be none, search, or PREFILL:DECODE engines, e.g. 1:2, or with encoders, e.g. 1e3 or 1e1:2"
            raise UserError("split", text, remedy)
        return cls(int(prefill or 0), int(decode or 0), int(encode or 0))

    @classmethod
    def listed(cls, texts: Sequence[str], encoders: bool = False) -> list[Split | None]:
        """Return the splits of all `texts`, each once.

        `search` means no split, and every ratio of up to five engines; with `encoders`, also of encoders to engines.
        Raises UserError for a text that is not a split.
        """
        ratios = [(p, total - p) for total in range(2, _SEARCHED + 1) for p in range(1, total) if gcd(p, total) == 1]
        marks = (":", "e") if encoders else (":",)
        searched = ("none", *(f"{a}{mark}{b}" for mark in marks for a, b in ratios))
        spelt = [one for text in texts for one in (searched if text == "search" else (text,))]
        return list(dict.fromkeys(map(cls.parse, spelt)))


@dataclass(frozen=True)
class Engine:
    """One replica of a candidate fleet.

    Attributes:
        gpu: name of its GPU, as the user gave it
        usd_per_gpu_hour: price of a GPU in dollars an hour
        deployment: deployment of one engine
        varied: texts of the settings in which candidates differ, except those that the name has anyway
        split: number of prefill and decode engines, and of encoders, in a replica; requests of all replicas share them
        defaults: text that lists the settings left to the engine, and their values
        counts_gpus: whether the plan wants few GPUs instead of a low price
    """

    gpu: str
    usd_per_gpu_hour: float
    deployment: Deployment
    varied: tuple[str, ...] = ()
    split: Split | None = None
    defaults: str = ""
    counts_gpus: bool = False

    @property
    def gpu_spec(self) -> GpuSpec | None:
        """The GPU of the catalogue; None for a device of our own engine, which is named `cpu` or `cuda`."""
        try:
            return find_gpu(self.gpu)
        except UserError:
            return None

    @property
    def gpus(self) -> int:
        return self.deployment.gpus * self.split.engines + self.split.encode if self.split else self.deployment.gpus

    @property
    def kv_tokens(self) -> int:
        """Number of tokens for which one engine has KV blocks, without the null block."""
        return kv_tokens(self.deployment.scheduler)

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.usd_per_gpu_hour

    @property
    def weight(self) -> float:
        """What a plan wants little of: dollars an hour, or GPUs."""
        return float(self.gpus) if self.counts_gpus else self.usd_per_hour

    @property
    def name(self) -> str:
        """A short name, unique among the candidates."""
        sizes = {short: getattr(self.deployment, field) for field, short in _SIZES.items()}
        shown = [f"{short}{size}" for short, size in sizes.items() if size > 1 or short == "TP"]
        split = [self.split.name] if self.split else []
        policy = self.deployment.policy.rpartition("/")[2]  # of a user's own without its folder
        others = [policy] if policy != "vllm" else []
        return " ".join([*shown, self.gpu, *split, *others, *self.varied])

    def fleet(self, replicas: int, router: str) -> FleetConfig:
        """Return a fleet of `replicas` replicas behind a router."""
        if self.split is None:
            pools: tuple[PoolConfig, ...] = (PoolConfig(replicas=replicas),)
        else:
            prefill, decode, encode = (replicas * engines for engines in self.split)
            if decode:
                pools = (
                    PoolConfig(name="prefill", role="prefill", replicas=prefill),
                    PoolConfig(name="decode", role="decode", replicas=decode),
                )
            else:
                pools = (PoolConfig(replicas=prefill),)
            if encode:
                pools += (PoolConfig(name="encode", role="encode", replicas=encode, deployment=dict(_ONE_GPU)),)
        return FleetConfig(pools=pools, router=RouterConfig(name=router))


class RuledOut(NamedTuple):
    """A candidate that cannot serve at all, and the reason."""

    name: str
    reason: str


def candidate_engines(
    base: Deployment,
    gpus: Mapping[str, GpuSpec],
    tensor_parallel_sizes: Sequence[int],
    policies: Sequence[str],
    prices: Mapping[str, float],
    variations: Sequence[Mapping[str, Any]] = ({},),
    splits: Sequence[Split | None] = (None,),
    learnt: Learnt | None = None,
) -> tuple[list[Engine], list[RuledOut]]:
    """Return every combination of GPUs, sizes, policies, settings and splits, and the combinations that do not fit.

    Settings that neither the scheduler section of `base` nor a variation states are those of `learnt` that hold for the
    candidate, or else the engine's defaults on that GPU.
    `prices` are dollars per GPU-hour by name of the GPU, and replace the catalogue's. Raises UserError for a price of a
    GPU that no candidate has, and if no combination of settings is valid. Too little memory raises no error: such a
    combination does not fit.
    """
    from tokentwin.planning.resolution import as_learnt, resolved  # loads calibrations

    for name in prices:
        if name not in gpus:
            raise UserError("price", name, f"is not the GPU of any candidate; choose from {', '.join(gpus)}")
    bases, fitting, ruled_out, refused, wrong = [], [], [], [], []
    for settings in variations:
        try:
            others = {path: value for path, value in settings.items() if path not in _NAMED}
            bases.append((with_settings(base, settings), shown_settings(others)))
        except UserError as error:
            wrong.append((settings, error))
            ruled_out.append(RuledOut(" ".join(shown_settings(settings)), str(error)))
    for settings, _ in wrong:
        for path, value in settings.items():
            alike = [other for other in variations if path in other and other[path] == value]
            if all(any(other is one for one, _ in wrong) for other in alike):
                with_settings(base, {path: value})  # raises if the setting is invalid by itself
    if not bases:
        raise wrong[0][1]
    for split in splits:
        if split is not None and split.encode and base.multimodal is None:
            raise UserError("split", split.name, "has encoders, which need multimodal in the deployment; set it")
    combined = product(gpus.items(), tensor_parallel_sizes, policies, bases, splits)
    for (name, gpu), tp, policy, (varied, shown), split in combined:
        stated = as_learnt(varied.model_copy(update={"tensor_parallel_size": tp, "policy": policy}), gpu, learnt)
        engine = Engine(name, prices.get(name, gpu.usd_per_hour), stated, shown, split)
        try:
            stated.check_nodes()
            deployment, defaults = resolved(stated, gpu)
            memory = {"gpu_memory_utilization": stated.gpu_memory_utilization}  # for the engine's command
            fitting.append(replace(engine, deployment=deployment.model_copy(update=memory), defaults=defaults))
        except UserError as error:
            refused.append(error)
            ruled_out.append(RuledOut(engine.name, str(error)))
    if not fitting and all(error.field != "gpu" for error in refused):
        raise refused[0]
    return fitting, ruled_out


def shown_settings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each setting as `name=value`, where the name is the last part of its path."""
    values = ((path.rpartition(".")[2], value) for path, value in settings.items())
    return tuple(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values)
