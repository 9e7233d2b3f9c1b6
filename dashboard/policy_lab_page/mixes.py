"""Traffic to try a policy on: several kinds of requests, of several tenants and SLO classes, arriving together."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from dashboard.shapes import shapes
from traces.synth import SynthSpec

_FILE = Path(__file__).with_name("mixes.yaml")
_SEED = 1
_APART = 1000  # seeds of the parts of a mix, so that another seed of one is no other part


class Part(BaseModel):
    """A kind of request, `share` of the arrivals (in proportion to the other parts')."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: str
    share: float = Field(1.0, gt=0)
    cv: float = Field(1.0, gt=0)
    tenant: str = ""
    slo_class: str = ""
    priority: int = 0


class Mix(BaseModel):
    """Parts that arrive together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    about: str
    parts: tuple[Part, ...]

    def traffic(self, rate: float, duration_s: float) -> tuple[SynthSpec, ...]:
        """A specification of each part; together they arrive at `rate` requests a second."""
        whole = sum(part.share for part in self.parts)
        return tuple(
            shapes()[part.shape]
            .traffic(rate * part.share / whole, part.cv)
            .model_copy(
                update={
                    "name": self.title,
                    "seed": _SEED + _APART * number,
                    "requests": None,
                    "duration_s": duration_s,
                    **part.model_dump(include={"tenant", "slo_class", "priority"}),
                }
            )
            for number, part in enumerate(self.parts)
        )


@cache
def mixes() -> dict[str, Mix]:
    """The bundled ones, by name."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: Mix.model_validate(entry) for name, entry in entries.items()}
