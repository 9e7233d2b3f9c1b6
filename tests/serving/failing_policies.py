"""Policies that break their contract, one way each."""

import random
import time

from tests.stand_in import StandIn
from tokentwin.serving.policies.ranked import RankedScheduler
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request, Status


def believing(**limits):
    """Return a policy that believes in its own limits instead of the deployment's."""

    class Believer(VllmScheduler):
        def __init__(self, config, **more):
            super().__init__(config.model_copy(update=limits), **more)

    return Believer


ManyTokens = believing(max_num_batched_tokens=1_000_000)
ManySequences = believing(max_num_seqs=1_000_000)
ManyBlocks = believing(num_blocks=1_000_000)
OtherBlocks = believing(block_size=64)
OneStage = believing(decode_stagger=1)


class NanScore(RankedScheduler):
    def score(self, request):
        return float("nan")


class TextScore(RankedScheduler):
    def score(self, request):
        return "soon"


class Raises(RankedScheduler):
    def score(self, request):
        return {}["weights"]


class Exits(VllmScheduler):
    def step_budget(self):
        raise SystemExit(0)


class ExitsAtCommit(VllmScheduler):
    def commit(self, plan, stopped=()):
        raise SystemExit(0)


class Loops(VllmScheduler):
    def step_budget(self):
        while True:
            pass


class Sleeps(VllmScheduler):
    def victim(self):
        time.sleep(1e6)

    def step_budget(self):
        try:
            time.sleep(1e6)
        except Exception:
            return 1


class PlansNothing(VllmScheduler):
    def fill(self, plan, budget):
        pass


class NoPlan(VllmScheduler):
    def schedule(self):
        return None


class Doubles(VllmScheduler):
    """Lists a row twice, without the knowledge of the scheduler that it is made of."""

    def schedule(self):
        plan = super().schedule()
        plan.listed += plan.listed[:1]
        return plan


class Negative(VllmScheduler):
    def schedule(self):
        plan = super().schedule()
        plan.listed[:1] = [row._replace(tokens=-row.tokens) for row in plan.listed[:1]]
        return plan


class Elsewhere(VllmScheduler):
    """Computes other tokens than the request's next."""

    def schedule(self):
        plan = super().schedule()
        plan.listed[:1] = [row._replace(start=row.start + 1) for row in plan.listed[:1]]
        return plan


class TakesNoBlocks(VllmScheduler):
    def __init__(self, config, **more):
        super().__init__(config, **more)
        self.pool = StandIn(self.pool, extend=lambda request, tokens: None)


class DecodesWithoutBlocks(VllmScheduler):
    def __init__(self, config, **more):
        super().__init__(config, **more)
        nothing = lambda decodes, *more, **lag: None  # noqa: E731
        self._steady._pool = StandIn(self.pool, extend_decodes=nothing, take_for=nothing)


class PromisesNone(VllmScheduler):
    def steady_steps(self):
        return None


class PromisesTooMuch(VllmScheduler):
    def steady_steps(self):
        return super().steady_steps() * 3


class PromisesAlone(VllmScheduler):
    """Admits in every third step, and promises steps as if it did not."""

    def fill(self, plan, budget):
        left = self.serve_running(plan, budget)
        if not self.running or plan.seq % 3 == 0:
            self.admit_waiting(plan, left)

    def steady_steps(self):
        return self.decodes.true_steps_to_exit() - 1 if self.decodes.members and not self.unsteady else 0


class EndsNobody(VllmScheduler):
    def commit(self, plan, stopped=()):
        super().commit(plan, stopped)
        return list(self.running.values())


class Guesses(RankedScheduler):
    """Draws from the random numbers of the whole process."""

    def score(self, request):
        return random.random()


class LooksAtEveryone(VllmScheduler):
    """Breaks nothing, and takes time that grows with the batch."""

    def schedule(self):
        for request in self.running.values():
            hash(request)
        return super().schedule()


class RejectsLong(VllmScheduler):
    """Breaks nothing, and serves few."""

    longest = 100

    def add(self, arrived):
        if arrived.prompt_len <= self.longest:
            return super().add(arrived)
        request = Request(arrived)
        request.status, request.reason = Status.REJECTED, "too long for me"
        return request


class RejectsAll(RejectsLong):
    longest = 0


class Dawdles(VllmScheduler):
    def schedule(self):
        time.sleep(0.01)
        return super().schedule()


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("\x1b[2J")

    __repr__ = __str__


class RaisesUnspeakably(VllmScheduler):
    def step_budget(self):
        raise Unspeakable


class ReturnsUnspeakably(VllmScheduler):
    def steady_steps(self):
        return Unspeakable()


class SteersTheTerminal(VllmScheduler):
    def step_budget(self):
        raise ValueError("\x1b[2J\x07 \u202e")
