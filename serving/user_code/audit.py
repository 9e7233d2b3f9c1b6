"""The audit of a user's own policy: an account of every request, made from the plans alone.

The audit compares the policy's requests and sums with these accounts. A plan's sums must be the sums of its rows, a
request's rows must add up to its tokens, and its lengths must not change after its arrival. Requests in steady decode
are accounted for together, so the audit of a steady step takes O(1) time. The KV blocks of requests are recounted at
intervals; the mean is a few recounted requests per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn
from zlib import crc32

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import blocks_for
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Scheduler
from tokentwin.serving.step_plan import StepAmounts, StepPlan, amounts_of
from tokentwin.serving.workload import PRIVATE, REQUEST_FIELDS, WorkloadRequest, as_it_is, what_changed

_COUNTED = 4  # mean number of requests per step whose KV is recounted
_BITS = 1 << 20
_LAST = 1 << 60  # no plan has this number

_PROMPT_LEN, _OUTPUT_LEN, _MAX_TOKENS, _PRIORITY = map(
    REQUEST_FIELDS.index, ("prompt_len", "output_len", "max_tokens", "priority")
)

Breach = Callable[..., NoReturn]
_Fields = tuple[tuple[Any, ...], tuple[Any, ...]]


class _Account:
    """The account of one request.

    Attributes:
        came: values of the fields of `truth`, such as the lengths, and of `arrived`, when the request came
        start: number of tokens that were cached or loaded at the last admission
        computed: number of tokens with KV; for a member of the decode set, at the tick `joined`
        most: largest value that `computed` has had
        sampled: number of output tokens that steps were planned for; for a member, at the tick `joined`
        admitted: True if it has had a row since it last waited
        last: number of the last plan that has a row of it; not updated for a member
    """

    __slots__ = (
        "admitted", "arrived", "came", "computed", "joined", "last", "max_len", "most", "output_len", "prompt_len",
        "request", "sampled", "start", "truth",
    )  # fmt: skip

    def __init__(self, request: Request, came: _Fields, outputs: int, limits: SchedulerConfig) -> None:
        self.request, self.arrived, self.truth, self.came = request, request.arrived, request.truth, came
        truth = came[0]
        self.prompt_len = prompt_len = truth[_PROMPT_LEN]
        self.max_len = limits.full_length(prompt_len, max(truth[_MAX_TOKENS] or 0, truth[_OUTPUT_LEN]))
        self.output_len = limits.full_length(prompt_len, truth[_OUTPUT_LEN]) - prompt_len
        self.start = self.computed = self.most = 0
        self.sampled = outputs
        self.joined = 0
        self.admitted = False
        self.last = -1

    def advance(self, tokens: int) -> None:
        self.computed += tokens
        self.most = max(self.most, self.computed)


class Audit:
    """The accounts of the requests of `scheduler`. It calls `breach` with a rule, what is wrong and the request.

    `by_segments` is True if requests share tokens only by equal segments; otherwise the audit cannot tell what they
    share.

    Attributes:
        external: True if KV may come from outside the engine, so that the audit cannot know how many tokens are cached
    """

    def __init__(self, scheduler: Scheduler, limits: SchedulerConfig, breach: Breach, by_segments: bool) -> None:
        self.external = False
        self._scheduler, self._limits, self._breach = scheduler, limits, breach
        self._drafts = limits.speculative is not None  # rejected drafts are computed again; plans do not name them
        self._accounts: dict[int, _Account] = {}
        self._members: dict[int, _Account] = {}  # accounts of the decode set
        self._ticks = self._context = self._squares = 0  # ticks and sums of the decode set
        self._to_count = 0  # number of members whose KV may be recounted by now
        self._prefixes = _Prefixes(limits) if by_segments else None

    # Requests come and go

    def added(
        self,
        request: Request,
        arrived: WorkloadRequest,
        view: WorkloadRequest,
        came: _Fields,
        outputs: int = 0,
    ) -> None:
        """Open the account of `request`, which was made from `view`, the part of `arrived` that a server knows.

        `came` has the values of the fields of both when it arrived.
        """
        if request.arrived is not view or request.id != arrived.id:
            self._breach("requests", f"add() returned a request made of another than request {arrived.id}", request)
        account = _Account(request, came, outputs, self._limits)
        self._check_lengths(account)
        if request.status is Status.REJECTED:
            return
        if account.max_len > self._limits.max_model_len:
            what = f"is accepted with {account.max_len} tokens; the deployment's max_model_len is"
            self._breach("budget", f"{what} {self._limits.max_model_len}", request)
        if request.computed or request.known != account.prompt_len + outputs:
            what = f"begins with {request.computed} tokens computed and {request.known} known"
            self._breach("requests", f"{what}; it has {account.prompt_len + outputs}", request)
        self._accounts[request.id] = account
        if self._prefixes is not None:
            self._prefixes.add(arrived)

    def ended(self, plan: int, stopped: Collection[int], requests: list[Request]) -> None:
        """Close the accounts of `requests`, which finished when plan number `plan` ended.

        Requests with an id in `stopped` may have ended before their last token.
        """
        for request in requests:
            account = self._accounts.get(request.id)
            if account is None or account.request is not request:
                self._breach("requests", "finishes, and has not come or has ended before", request)
            if request.status is not Status.FINISHED:
                self._breach("requests", f"finishes with status {request.status.value}", request)
            self._check_lengths(account)
            self._leave(account)
            outputs, owed = request.outputs, account.output_len
            if request.id in stopped:
                owed = min(outputs, owed)
            given = outputs if self._drafts else min(outputs, account.sampled)
            if outputs != owed or given != owed:
                self._breach("requests", f"finishes with {given} output tokens; it has to get {owed}", request)
            unforeseen = self._drafts or request.id in stopped or request.true_len < request.max_len
            if account.last > plan and not unforeseen:
                self._breach("requests", f"finishes before step {account.last} has ended, which computes it", request)
            # `most`: `most` and not `computed`, because a preempted request loses computed tokens
            if account.most < request.known - 1:
                what = f"finishes with {account.most} tokens computed or found of the {request.known - 1}"
                self._breach("requests", f"{what} before its last", request)
            del self._accounts[request.id]

    def aborted(self, id: int) -> None:
        account = self._accounts.pop(id, None)
        if account is not None:
            self._check_lengths(account)
            self._leave(account)

    def _check_lengths(self, account: _Account) -> None:
        """Check that the request still has the lengths, the priority and the fields that it had when it came."""
        request = account.request
        for name, is_now, was in (
            ("prompt_len", request.prompt_len, account.prompt_len),
            ("max_len", request.max_len, account.max_len),
            ("true_len", request.true_len, account.prompt_len + account.output_len),
            ("priority", request.priority, account.came[0][_PRIORITY]),
        ):
            if is_now != was:
                self._breach("requests", f"has {name} {is_now}; it came with {was}", request)
        if request.arrived is not account.arrived or request.truth is not account.truth:
            self._breach("requests", "has become another: `arrived` was replaced", request)
        for came, now in zip(account.came, (account.truth, account.arrived), strict=True):
            if as_it_is(now) != came:
                self._breach("requests", what_changed(came, now), request)

    # Plans

    def planned(self, plan: StepPlan) -> None:
        """Check `plan`, which was just made, and add its rows to the accounts."""
        if type(plan) is not StepPlan:
            self._breach("calls", f"schedule() returned a {type(plan).__name__}, which is no StepPlan")
        for request in plan.preempted:
            if (account := self._accounts.get(request.id)) is not None:
                self._leave(account)
                account.computed = account.start = 0
                account.admitted = False
        listed = StepPlan(plan.seq, plan.decodes, plan.lag)
        for row in plan.listed:
            self._check_row(plan, row.request, row.start, row.tokens, row.samples)
            listed.add(row)
        for padding in plan.padding:
            if padding.rows < 1 or padding.start < 0 or not 0 <= padding.drafts < padding.tokens:
                self._breach("rows", f"is padded with {padding}; rows and tokens of it must be 1 or more")
            listed.pad(padding)
        self._tick(plan, plan.decode_rows - listed.decode_rows, listed)
        if (stated := amounts_of(plan)) != (counted := amounts_of(listed)):
            index = next(index for index, one in enumerate(stated) if one != counted[index])
            self._breach("sums", f"its {StepAmounts._fields[index]} is {stated[index]}; its rows have {counted[index]}")
        for row in plan.listed:
            if row.request.decodes is not None:
                self._join(self._accounts[row.request.id])
        self.check_decodes()
        self._recount_kv()

    def _check_row(self, plan: StepPlan, request: Request, start: int, tokens: int, samples: bool) -> None:
        account = self._accounts.get(request.id)
        if account is None or account.request is not request:
            self._breach("rows", "is planned, and has not come or has ended", request)
        self._leave(account)
        if not account.admitted:
            self._check_cached(account, start)
            account.admitted = True
            account.start = account.computed = start
        elif start != account.computed and not (self._drafts and start < account.computed):
            what = f"goes on after {start} tokens; {account.computed} were computed or found"
            self._breach("rows", what, request)
        account.computed = start
        account.advance(tokens)
        account.last = plan.seq
        prompt_len = account.prompt_len
        if request.max_len != account.max_len or request.prompt_len != prompt_len:
            self._check_lengths(account)
        if self._drafts:
            return
        if samples != (account.computed >= prompt_len + account.sampled):
            does = "samples" if samples else "samples nothing"
            what = f"{does} after {account.computed} of {prompt_len + account.sampled} known tokens"
            self._breach("rows", what, request)
        account.sampled += samples

    def _check_cached(self, account: _Account, cached: int) -> None:
        """Check that the prefix cache can hold the first `cached` tokens of the request."""
        if not cached or self.external:
            return
        most = account.most if self._limits.enable_prefix_caching else 0
        if self._limits.enable_prefix_caching and not self._scheduler.pool.counts_only:
            most = (
                account.request.known if self._prefixes is None else max(most, self._prefixes.shared(account.arrived))
            )
        if cached > most:
            what = f"starts after {cached} tokens; the prefix cache can hold {most} of them"
            self._breach("rows", what, account.request)

    # The decode set. Every member gets a token in each step that contains the set.

    def _tick(self, plan: StepPlan, rows: int, listed: StepPlan) -> None:
        """Check the `rows` rows of the decode set in `plan`, and add their sums to `listed`."""
        if rows != len(self._members):
            for account in list(self._members.values()):  # the set was dissolved
                if account.request.decodes is None and not _departs(plan, account.request):
                    self._leave(account)
        if not rows:
            return
        members = len(self._members)
        if rows != members:
            what = f"its decode_rows is {plan.decode_rows}; its rows have {listed.decode_rows + members}"
            self._breach("sums", what)
        listed.add_decodes(members, self._context, self._squares)
        self._advance(1)
        for row in plan.departed:
            if row.request.id in self._members:
                leaver = self._members[row.request.id]
                self._leave(leaver)
                leaver.last = plan.seq

    def skipped(self, steps: int, finished: list[Request]) -> None:
        """Record `steps` steps in which every member got a token; the requests `finished` ended with the last one."""
        self._advance(steps)
        self.ended(_LAST, (), finished)
        self.check_decodes()

    def _advance(self, steps: int) -> None:
        members = len(self._members)
        self._squares += steps * (2 * self._context + steps * members)
        self._context += steps * members
        self._ticks += steps
        self._to_count += _COUNTED * steps

    def _join(self, account: _Account) -> None:
        account.joined = self._ticks
        self._members[account.request.id] = account
        self._context += account.computed
        self._squares += account.computed**2

    def _leave(self, account: _Account) -> None:
        if self._members.pop(account.request.id, None) is None:
            return
        ticks = self._ticks - account.joined
        account.advance(ticks)
        account.sampled += ticks
        self._context -= account.computed
        self._squares -= account.computed**2

    def check_decodes(self) -> None:
        """Check the sums of the decode set, from which a cost model prices many steps at once."""
        decodes = self._scheduler.decodes
        sums = ("rows", "context", "squares")
        theirs = len(decodes.members), decodes.context, decodes.squares
        mine = len(self._members), self._context, self._squares
        if theirs == mine:
            return
        for account in list(self._members.values()):  # a request was dropped
            if account.request.decodes is None:
                self._leave(account)
        mine = len(self._members), self._context, self._squares
        for name, stated, counted in zip(sums, theirs, mine, strict=True):
            if stated != counted:
                self._breach("sums", f"the {name} of its decode set is {stated}; its members have {counted}")

    # KV

    def _recount_kv(self) -> None:
        """Check that running requests hold blocks for all tokens that were computed for them."""
        running = self._scheduler.running
        self._to_count += _COUNTED
        if self._to_count < len(running) or self._limits.kv_groups:  # sliding windows free blocks behind them
            return
        self._to_count = 0
        size, pool, needed = self._limits.block_size, self._scheduler.pool, 0
        for id, request in running.items():
            account = self._accounts.get(id)
            if account is None or not account.admitted:
                continue
            computed = account.computed
            if id in self._members:
                computed += self._ticks - account.joined
            elif request.block_count * size < computed and not self._drafts:
                what = f"has {computed} tokens computed and holds {request.block_count} KV blocks of {size}"
                self._breach("KV", what, request)
            needed += blocks_for(computed, size) - account.start // size
        if needed > (taken := pool.total - pool.free) and not self._drafts:
            self._breach("KV", f"holds {taken} KV blocks; what was computed of those that run takes {needed}")


class _Prefixes:
    """The hashes of prompt prefixes that two or more requests have had, and that may therefore be in a cache.

    The class keeps two bits for each hash, so its size is constant. If hashes collide, it also counts prefixes that no
    two requests share.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._once, self._again = bytearray(_BITS // 8), bytearray(_BITS // 8)

    def add(self, request: WorkloadRequest) -> None:
        """Record that the prompt and the output of `request` may be in the cache from now on."""
        for place, _ in _chain((*request.prompt, (f"out:{request.id}", request.output_len))):
            byte, bit = place // 8, 1 << place % 8
            self._again[byte] |= self._once[byte] & bit
            self._once[byte] |= bit

    def shared(self, request: WorkloadRequest) -> int:
        """Return the maximum length of the prefix, in tokens, that `request` may share with another request."""
        tokens = 0
        for place, length in _chain(request.prompt):
            if not self._again[place // 8] & 1 << place % 8:
                break
            tokens += length
        return tokens


def _chain(prompt: tuple[tuple[str, int], ...]) -> list[tuple[int, int]]:
    """Return, for each segment before the first private one, a hash of the names up to it, and its number of tokens."""
    places: list[tuple[int, int]] = []
    key = 0
    for name, tokens in prompt:
        if name == PRIVATE:
            break
        key = crc32(name.encode(errors="surrogatepass"), key)
        places.append((key % _BITS, tokens))
    return places


def _departs(plan: StepPlan, request: Request) -> bool:
    return any(row.request is request for row in plan.departed)
