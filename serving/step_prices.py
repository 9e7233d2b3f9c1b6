"""The times of steps (prices) from tables, in whole picoseconds, for the simulator, which needs one at every step.

Cost models make the tables. The sums are integers, so many decode steps that are simulated at once take exactly as long
as the single steps: a `DecodeRun` sums the durations of steady decode steps, whose price grows linearly, in closed
form. The duration of each step is rounded down to nanoseconds. An algorithm like Euclid's gives the sum of the rounded
durations (Graham, Knuth and Patashnik, "Concrete Mathematics", 2nd edition, section 3.5).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import exp, isqrt, log2, sqrt

from tokentwin.serving.step_plan import StepPlan


class DecodeRun:
    """The durations of `steps` steps (at least one), followed by those of `then`, in nanoseconds.

    Step i takes `(first_ps + i * growth_ps) // 1000` ns. `growth_ps` is not negative.
    """

    __slots__ = ("_first_ps", "_growth_ps", "_here", "_here_ns", "steps", "then")

    def __init__(self, first_ps: int, growth_ps: int, steps: int, then: DecodeRun | None = None) -> None:
        self._first_ps = first_ps
        self._growth_ps = growth_ps
        self._here = steps
        self._here_ns = self._sum(steps)
        self.then = then
        self.steps: int = steps if then is None else steps + then.steps

    def __iter__(self) -> Iterator[int]:
        return iter(self.durations_ns(self.steps))

    def durations_ns(self, steps: int) -> list[int]:
        """Return the nanoseconds of each of the first `steps` steps."""
        first, growth = self._first_ps, self._growth_ps
        durations = [(first + growth * step) // 1000 for step in range(min(steps, self._here))]
        if self.then is not None and steps > self._here:
            durations += self.then.durations_ns(steps - self._here)
        return durations

    def shortest_ns(self) -> int:
        first = self._first_ps // 1000
        return first if self.then is None else min(first, self.then.shortest_ns())

    def longer(self, ns: int) -> DecodeRun:
        """Return a run in which each step takes `ns` longer."""
        then = None if self.then is None else self.then.longer(ns)
        return DecodeRun(self._first_ps + 1000 * ns, self._growth_ps, self._here, then)

    def until(self, steps: int) -> int:
        """Return the nanoseconds of the first `steps` steps."""
        if steps < self._here:
            return self._sum(steps)
        return self._here_ns if self.then is None else self._here_ns + self.then.until(steps - self._here)

    def ended(self, ns: int) -> int:
        """Return how many steps end within `ns`."""
        if ns >= self._here_ns:
            return self._here if self.then is None else self._here + self.then.ended(ns - self._here_ns)
        first, growth = self._first_ps, self._growth_ps
        if not growth:
            return ns // (first // 1000)
        # The root of a quadratic is the number of steps that end without rounding; with rounding, more may end.
        linear = 2 * first - growth
        steps = (isqrt(linear * linear + 8000 * growth * ns) - linear) // (2 * growth)
        while self._sum(steps + 1) <= ns:
            steps += 1
        return steps

    def _sum(self, steps: int) -> int:
        """Return the nanoseconds of the first `steps` steps of this piece."""
        growth, over, divisor = self._growth_ps, self._first_ps, 1000
        total = 0
        while steps > 0:
            total += steps * (steps - 1) // 2 * (growth // divisor) + steps * (over // divisor)
            growth %= divisor
            over = growth * steps + over % divisor
            steps, over = over // divisor, over % divisor
            growth, divisor = divisor, growth
            if not divisor:
                break
        return total


Cell = tuple[float, float, float, float, float, float, float, float]


class DecodeRows:
    """The attention time of `rows` decode rows in picoseconds, piecewise linear in the sum of their context."""

    def __init__(self, rows: int, contexts: list[int], values: list[int], per_spread: float) -> None:
        slopes = [(b - a) // (d - c) for (a, b), (c, d) in zip(pairwise(values), pairwise(contexts), strict=True)]
        self.rows = rows
        self.contexts, self.values = contexts, values
        self.slopes = slopes
        self.bases = [value - slope * context for value, slope, context in zip(values, slopes, contexts, strict=False)]
        self.per_spread = per_spread

    def __reduce__(self) -> tuple[Callable[..., DecodeRows], tuple[int, list[int], list[int], float]]:
        # compiled objects need this method to be pickled
        return DecodeRows, (self.rows, self.contexts, self.values, self.per_spread)

    def ps(self, context: int, squares: int) -> int:
        """Return the time in ps. `context` is the sum of the rows' context tokens, `squares` that of their squares."""
        segment = min(bisect_right(self.contexts, context), len(self.slopes)) - 1
        return self.bases[segment] + self.slopes[segment] * context + self.imbalance(context, squares)

    def run(self, context: int, squares: int, steps: int, more_ps: int) -> DecodeRun:
        """Return the times of `steps` steps in a row, each `more_ps` longer; every row grows by one token per step."""
        rows = self.rows
        fixed = self.imbalance(context, squares) + more_ps
        end = context + rows * steps
        segment = min(bisect_right(self.contexts, end - rows), len(self.slopes)) - 1
        run: DecodeRun | None = None
        while run is None or end > context:  # one segment at a time, from the last to the first
            begin = context
            if context < self.contexts[segment]:  # the first context of this run in the segment
                begin = context - (context - self.contexts[segment]) // rows * rows
            slope = self.slopes[segment]
            if begin < end:
                first_ps = fixed + self.bases[segment] + slope * begin
                run = DecodeRun(first_ps, slope * rows, (end - begin) // rows, run)
            end = begin
            segment -= 1
        return run

    def imbalance(self, context: int, squares: int) -> int:
        """Return the time in ps that uneven rows add. It depends on the variance of their context.

        The variance stays the same while every row grows by one token.
        """
        variance = self.rows * squares - context * context
        return round(sqrt(float(variance)) / self.rows * self.per_spread) if variance > 0 else 0


class PromptCells:
    """The attention time of prompts in ps: its logarithm is trilinear in the logarithms of three amounts.

    The amounts are the number of prompts, their length, and the number of their past tokens (plus one). The prompts of
    a step are priced as equal prompts with the same sums: of tokens, of query-key pairs among their own tokens, and of
    pairs with past tokens. `make(i, j, k)` returns the coefficients of the cell with its lowest corner at these three
    powers of two; they multiply the distances from that corner.
    """

    def __init__(self, make: Callable[[int, int, int], Cell]) -> None:
        self.make = make
        self.cells: dict[tuple[int, int, int], Cell] = {}

    def ps(self, rows: int, tokens: int, past: int, pairs: int) -> int:
        own = min(max(pairs - tokens * past / rows, tokens * (tokens / rows + 1) / 2), tokens * (tokens + 1) / 2)
        length = 2.0 * own / tokens - 1.0
        prompts, longest, behind = log2(tokens / length), log2(length), 0.0
        if pairs > own:
            behind = log2(1.0 + (pairs - own) / tokens)
        i, j, k = int(prompts // 1.0), int(longest // 1.0), int(behind // 1.0)
        u, v, w = prompts % 1.0, longest % 1.0, behind % 1.0
        cell = self.cells.get((i, j, k))
        if cell is None:
            cell = self.cells[i, j, k] = self.make(i, j, k)
        a, au, av, auv, b, bu, bv, buv = cell
        return round(exp(a + u * au + v * (av + u * auv) + w * (b + u * bu + v * (bv + u * buv))))


class StepPrices:
    """The prices of an engine's steps. The price of a step is the sum of these parts.

    Args:
        tokens_ps: price by the number of tokens; larger numbers cost as much as the last entry
        sampled_ps: price by the number of sampled rows; larger numbers cost as much as the last entry
        step_ps: price of every step
        prompt_ps: price of every prompt in a step
        only_ps: price that a step without decode rows adds
        only_token_ps: price that each token of such a step adds
        cpu_ns: CPU time of every step
        cpu_row_ns: CPU time of every request in a step
        rows: function that makes the prices for a number of decode rows
        prompts: prices of the attention of prompts
    """

    def __init__(
        self,
        tokens_ps: list[int],
        sampled_ps: list[int],
        step_ps: int,
        prompt_ps: int,
        only_ps: int,
        only_token_ps: int,
        cpu_ns: float,
        cpu_row_ns: float,
        rows: Callable[[int], DecodeRows],
        prompts: PromptCells,
    ) -> None:
        self.tokens_ps, self.sampled_ps = tokens_ps, sampled_ps
        self.added_ps, self.prompt_ps, self.only_ps, self.only_token_ps = step_ps, prompt_ps, only_ps, only_token_ps
        self.cpu_step_ns, self.cpu_row_ns = cpu_ns, cpu_row_ns
        self.make_rows, self.prompts = rows, prompts
        self.rows: dict[int, DecodeRows] = {}

    def cpu_ns(self, rows: int) -> int:
        return round(self.cpu_step_ns + self.cpu_row_ns * rows)

    def step_ps(self, plan: StepPlan, logits: int) -> int:
        """Return the time in ps of a step that samples from `logits` rows of logits."""
        rows, tokens = plan.decode_rows, plan.prefill_tokens
        total = self.sized_ps(plan.tokens, logits)
        if rows:
            total += self.decode(rows).ps(plan.decode_context, plan.decode_squares)
        if tokens:
            prompts = plan.prefill_rows
            total += self.prompts.ps(prompts, tokens, plan.prefill_context, plan.prefill_pairs)
            total += prompts * self.prompt_ps
            if not rows:
                total += self.only_ps + tokens * self.only_token_ps
        return total

    def run(self, rows: int, context: int, squares: int, steps: int, more_ns: int) -> DecodeRun:
        """Return the durations of `steps` pure decode steps, each `more_ns` longer."""
        return self.decode(rows).run(context, squares, steps, self.sized_ps(rows, rows) + 1000 * more_ns)

    def sized_ps(self, tokens: int, logits: int) -> int:
        """Return the part of a step's price, in ps, that depends only on its numbers of tokens and rows of logits."""
        dense = self.tokens_ps[min(tokens, len(self.tokens_ps) - 1)]
        return dense + self.sampled_ps[min(logits, len(self.sampled_ps) - 1)] + self.added_ps

    def decode(self, rows: int) -> DecodeRows:
        prices = self.rows.get(rows)
        if prices is None:
            prices = self.rows[rows] = self.make_rows(rows)
        return prices
