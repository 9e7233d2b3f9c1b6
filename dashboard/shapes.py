"""Kinds of traffic to start from, before there is a trace: lengths by name, to which rate and burstiness are added."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from traces.lengths import Lengths
from traces.synth import SynthSpec, SystemPrompts, parse_spec

_FILE = Path(__file__).with_name("shapes.yaml")
LEAST_REQUESTS = 500  # fewer say nothing about a 99th percentile
SEED = 1


class Shape(BaseModel):
    """Lengths of a kind of request, and how many minutes of them are worth simulating."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    about: str
    minutes: float = Field(gt=0, le=1440)
    prompt: Lengths
    output: Lengths
    system_prompts: SystemPrompts | None = None

    def traffic(self, rate: float, cv: float = 1.0) -> SynthSpec:
        """Its requests at `rate` a second; `cv` of the gaps between them is 1 for Poisson, more for bursts."""
        spec: dict[str, Any] = self.model_dump(include={"prompt", "output", "system_prompts"})
        arrivals = {"kind": "poisson", "rate": rate} if cv == 1 else {"kind": "gamma", "rate": rate, "cv": cv}
        requests = max(round(60 * self.minutes * rate), LEAST_REQUESTS)
        return parse_spec({"name": self.title, "seed": SEED, "requests": requests, "arrivals": arrivals, **spec})


@cache
def shapes() -> dict[str, Shape]:
    """The bundled ones, by name."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: Shape.model_validate(entry) for name, entry in entries.items()}
