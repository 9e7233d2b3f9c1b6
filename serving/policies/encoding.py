"""The items of requests that a step encodes, as vLLM 0.33 chooses them (`_try_schedule_encoder_inputs`).

A step may compute placeholder tokens only if their item's encoder output is in the encoder cache or is made in this
step. What a step encodes has a budget of its own. Where an item does not fit, the tokens of its request end before it.
"""

from __future__ import annotations

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.encoder_cache import Content, EncoderCache, content_of
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan


class Encoding:
    """The encoder cache of one scheduler, and the encoding of the step being planned.

    Attributes:
        cache: the encoder outputs that the engine keeps
        passed_over: ids of waiting requests that this step cannot encode, so that others pass them
        holds_queue: False if others pass such requests
        longest_item: number of embeddings of the largest item that a step can encode
    """

    def __init__(self, config: SchedulerConfig, lookahead: int) -> None:
        assert config.max_num_encoder_input_tokens is not None
        self._budget = config.max_num_encoder_input_tokens
        self.cache = EncoderCache(config.encoder_cache_size or self._budget)
        self.longest_item = min(self._budget, self.cache.capacity)
        self.holds_queue = self._as_0_32 = config.encoder_holds_queue
        self.passed_over: set[int] = set()
        self._whole = config.disable_chunked_mm_input
        self._lookahead = lookahead  # tokens after a chunk that a drafting head reads
        self._apart = config.encoder_apart
        self._left = 0  # rest of the budget of this step
        # Of the request that `limit` looked at last: items to encode, repeats of them, and the budget left after them.
        self._inputs: list[int] = []
        self._repeats: list[int] = []
        self._left_after = 0

    def new_step(self) -> None:
        self._left = self._budget
        self._inputs = []
        self.passed_over.clear()

    @staticmethod
    def is_before_item(request: Request) -> bool:
        """Return whether `request` has an item that is not wholly computed."""
        items = request.arrived.items
        return bool(items) and items[-1].end > request.computed

    def limit(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of the `tokens` tokens from token `start` on the step can compute."""
        self._inputs, self._repeats, self._left_after = [], [], self._left
        if not tokens:
            return 0
        planned: set[Content] = set()
        end, room = start + tokens + self._lookahead, 0
        for index, item in enumerate(request.arrived.items):
            if item.end <= start:
                continue
            if item.offset >= end:
                break
            before = max(item.offset - start - self._lookahead, 0)
            at_item = start == item.offset and not self._as_0_32
            if self._whole and (start < item.offset or at_item) and start + tokens < item.end:
                return before
            content = content_of(request, index)
            if content in planned:
                self._repeats.append(index)
            elif not self.cache.hit(request, index):
                if item.tokens > self._left_after or not self.cache.make_room(room + item.tokens):
                    return before if self._as_0_32 else min(tokens, max(item.offset - start, 0))
                room += item.tokens
                if not self._apart:
                    self._left_after -= item.tokens
                planned.add(content)
                self._inputs.append(index)
        return tokens

    def encode(self, plan: StepPlan, request: Request) -> None:
        """Let `plan` encode the items that `limit` chose for `request`, which gets its tokens."""
        if not self._inputs:
            return
        self._left = self._left_after
        for index in self._inputs:
            self.cache.store(request, index)
        for index in self._repeats:
            self.cache.hit(request, index)
        plan.encode(request, self._inputs)
        self._inputs = []

    def passed(self, request: Request, computed: int) -> None:
        """End the references of `request`, whose step has returned, to items before token `computed`."""
        self.cache.release(request, computed - (self._lookahead if self._as_0_32 else 0))

    def withdraw(self, plan: StepPlan, request: Request) -> None:
        """Give back the budget of a preempted `request`. As in vLLM, the cache counts its outputs as made."""
        self._left += sum(request.arrived.items[index].tokens for index in plan.not_encoded(request))
        self.cache.release(request)
