"""Policies that would win by lying about their work, one way each. All plan within the limits."""

from dataclasses import replace

from tests.stand_in import StandIn
from tokentwin.serving.kv.blocks import Hit
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Status
from tokentwin.serving.step_plan import Padding, StepPlan


class Shrinking(VllmScheduler):
    """Makes one sum of a plan, `name`, smaller than its rows say."""

    name = ""

    def schedule(self):
        plan = super().schedule()
        setattr(plan, self.name, getattr(plan, self.name) // 2)
        return plan


def shrinking(sum_of_plan):
    return type(f"Shrinks_{sum_of_plan}", (Shrinking,), {"name": sum_of_plan})


Shrinks_prefill_tokens = shrinking("prefill_tokens")
Shrinks_prefill_rows = shrinking("prefill_rows")
Shrinks_prefill_pairs = shrinking("prefill_pairs")
Shrinks_prefill_context = shrinking("prefill_context")
Shrinks_decode_rows = shrinking("decode_rows")
Shrinks_decode_context = shrinking("decode_context")
Shrinks_decode_squares = shrinking("decode_squares")
Shrinks_sampled_rows = shrinking("sampled_rows")


class ShrinksTheSet(VllmScheduler):
    """Makes the sums of the decode set smaller, by which many steps at once are priced."""

    def steady_steps(self):
        steps = super().steady_steps()
        self.decodes.context //= 2
        return steps


class ShrinksSquares(VllmScheduler):
    def steady_steps(self):
        steps = super().steady_steps()
        self.decodes.squares //= 2
        return steps


class ShrinksForAMoment(VllmScheduler):
    """Makes the decode set smaller while a plan is made, and restores it afterwards."""

    def schedule(self):
        before, self.decodes.context = self.decodes.context, 0
        plan = super().schedule()
        self.decodes.context += before
        return plan


class PadsWithLess(VllmScheduler):
    def schedule(self):
        plan = super().schedule()
        if plan.decode_rows > 1:
            plan.pad(Padding(-1, 1000, 1))
        return plan


class HidesRows(VllmScheduler):
    """Takes prompts out of the plan once they have been counted as computed."""

    def schedule(self):
        plan = super().schedule()
        if plan.prefill_rows > 1:
            plan.withdraw(plan.listed[-1].request)
        return plan


class SaysComputed(VllmScheduler):
    """Counts half of each prompt as found."""

    def give(self, plan, request, tokens):
        if not request.computed:
            request.count_cached(request.prompt_len // 2)
        return super().give(plan, request, min(tokens, request.pending))


class SaysFound(VllmScheduler):
    """Has a cache that knows the first half of every prompt."""

    def __init__(self, config, **more):
        super().__init__(config, **more)
        half = lambda request: Hit(request.prompt_len // 2 // config.block_size, 0)  # noqa: E731
        self.pool = StandIn(self.pool, lookup=half)


class SkipsAhead(VllmScheduler):
    """Counts some tokens of a prompt as computed between two of its chunks."""

    def give(self, plan, request, tokens):
        if 0 < request.computed < request.prompt_len - 70:
            request.count_cached(request.computed + 64)
        return super().give(plan, request, tokens)


class Stops(VllmScheduler):
    """Ends every answer at four tokens."""

    def commit(self, plan, stopped=()):
        short = {request.id for request in self.running.values() if request.outputs >= 4}
        return super().commit(plan, short | set(stopped))


class StopsTheSet(VllmScheduler):
    """Ends every answer at four tokens, where many steps are taken at once."""

    def skip(self, steps):
        finished = super().skip(steps)
        for request in list(self.running.values()):
            if request.outputs >= 4:
                self.end(request, Status.FINISHED)
                finished.append(request)
        return finished


class EndsEarly(VllmScheduler):
    """Says that a request is done when its last step has been planned."""

    def commit(self, plan, stopped=()):
        finished = super().commit(plan, stopped)
        for request in list(self.running.values()):
            if not request.unscheduled and request.placeholders:
                request.returned(request.in_flight, True)
                self.end(request, Status.FINISHED)
                finished.append(request)
        return finished


class SamplesEarly(VllmScheduler):
    """Has a first token after the first chunk of a prompt."""

    def give(self, plan, request, tokens):
        given = super().give(plan, request, tokens)
        row = plan.listed[-1]
        if not row.samples and not request.outputs:
            plan.withdraw(request)
            plan.add(row._replace(samples=True))
        return given


class ShortensAnswers(VllmScheduler):
    def add(self, arrived, outputs=0):
        request = super().add(arrived, outputs)
        request.max_len = request.prompt_len + 1
        return request


class ShortensAnswersLater(VllmScheduler):
    def give(self, plan, request, tokens):
        request.max_len = min(request.max_len, request.prompt_len + 4)
        return super().give(plan, request, tokens)


class ShortensPrompts(VllmScheduler):
    def add(self, arrived, outputs=0):
        request = super().add(arrived, outputs)
        request.prompt_len //= 2
        return request


class ShortensWhatArrives(VllmScheduler):
    def add(self, arrived, outputs=0):
        object.__setattr__(arrived, "output_len", 1)
        return super().add(arrived, outputs)


class TakesAnother(VllmScheduler):
    def add(self, arrived, outputs=0):
        return super().add(replace(arrived, output_len=1), outputs)


class KnowsMore(VllmScheduler):
    """Claims that some of the answer is known before the request begins."""

    def add(self, arrived, outputs=0):
        return super().add(arrived, outputs + 4)


class ArrivesLater(VllmScheduler):
    def schedule(self):
        for request in self.running.values():
            object.__setattr__(request.arrived, "arrival_ns", request.arrived.arrival_ns + 10**9)
        return super().schedule()


class RaisesPriority(VllmScheduler):
    def add(self, arrived, outputs=0):
        request = super().add(arrived, outputs)
        request.priority = -1
        return request


class FreesPrompts(VllmScheduler):
    """Frees the blocks of decoding requests, and goes on with these."""

    def schedule(self):
        for request in self.decodes.members.values():
            self.pool.release(request)
        return super().schedule()


class FreesUnfinishedPrompts(VllmScheduler):
    def schedule(self):
        plan = super().schedule()
        for request in self.running.values():
            if request.pending > 1:
                self.pool.release(request)
        return plan


class DropsRequests(VllmScheduler):
    def commit(self, plan, stopped=()):
        finished = super().commit(plan, stopped)
        for request in list(self.running.values()):
            if request.outputs > 2:
                self.end(request, Status.ABORTED)
                finished.append(request)
        return finished


class AnotherPlan(VllmScheduler):
    def schedule(self):
        plan = super().schedule()
        cheap = StepPlan(plan.seq, plan.decodes, plan.lag)
        cheap.decode_rows = 1
        return cheap
