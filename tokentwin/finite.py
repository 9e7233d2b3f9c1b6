"""Numbers on the command line that are numbers: click's own ranges let NaN and infinity pass."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
