"""The requests that get exactly one token in every step, advanced together.

A steady decode step takes O(1) time here, whatever the batch size. The members' counts are offsets from one clock. The
context sum grows by the number of rows. A table of `block_size` phases holds the members by the tick at which they need
a new block. A heap holds the end of each request: the clock at which its last token is scheduled.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from tokentwin.serving.request import Request

if TYPE_CHECKING:
    from tokentwin.serving.policies.fair import ServiceCounters

_NEVER: Final = 1 << 60


class DecodeSet:
    """The requests in steady decode.

    Attributes:
        clock: number of steps planned; every member gets one token at each tick
        committed: clock of the last step that has returned
        lag: number of steps in flight when blocks were last registered: 0 in the plain loop, 1 in the overlapped loop
        context: sum of the members' computed tokens
        squares: sum of the squares of the members' computed tokens, which shows how uneven the members are
        adapters: number of members by LoRA adapter; members without an adapter do not count
        listener: object that is called when a request joins or leaves; None if there is none
        newest: upper bound of the members' admission numbers; meaningless while the set is empty
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[int, Request] = {}
        self.clock = 0
        self.committed = 0
        self.lag = 0
        self.context = self.squares = 0
        self.newest = -1
        self.adapters: dict[str, int] = {}
        self.listener: ServiceCounters | None = None
        self._phases: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._exits: list[tuple[int, int, int]] = []  # heap of (clock of the last token, admission, id)
        self._next_exit = _NEVER  # smallest clock in `_exits`

    def __len__(self) -> int:
        return len(self.members)

    def join(self, request: Request) -> None:
        """Give `request` one token per step from the next tick on, until its last token is scheduled."""
        left = request.true_unscheduled
        if left < 1:
            raise ValueError(f"request {request.id} has no token left to schedule")
        computed = request.computed
        self._phases[(computed - self.clock) % self.block_size][request.id] = request
        self.context += computed
        self.squares += computed * computed
        self.newest = max(self.newest, request.admitted) if self.members else request.admitted
        self.members[request.id] = request
        request.joined = self.clock
        request.true_exit_clock = self.clock + left
        heappush(self._exits, (request.true_exit_clock, request.admitted, request.id))
        self._next_exit = min(self._next_exit, request.true_exit_clock)
        request.decodes = self
        if adapter := request.arrived.adapter:
            self.adapters[adapter] = self.adapters.get(adapter, 0) + 1
        if self.listener is not None:
            self.listener.joined(request)

    def leave(self, request: Request) -> None:
        """Remove `request` from the set, and store its token counts in the request itself."""
        computed = request.computed
        ticks = self.clock - request.joined
        returned = max(self.committed - request.joined, 0)
        del self.members[request.id]
        del self._phases[(computed - self.clock) % self.block_size][request.id]
        if request.true_exit_clock == self._next_exit:  # the request leaves before its last token
            self._await_exit()
        self.context -= computed
        self.squares -= computed * computed
        request.decodes = None
        request.advance(ticks, returned)
        if ticks:
            request.block_count = max(request.block_count, -(-computed // self.block_size))
            hashed = (computed - self.lag) // self.block_size
            if hashed > request.hashed:
                request.hashed = hashed
        if adapter := request.arrived.adapter:
            self.adapters[adapter] -= 1
            if not self.adapters[adapter]:
                del self.adapters[adapter]
        if self.listener is not None:
            self.listener.left(request)

    def tick(self) -> list[Request]:
        """Plan one step for every member. Return the members that it gives their last token, in order of admission."""
        rows = len(self.members)
        self.clock = clock = self.clock + 1
        self.squares += 2 * self.context + rows
        self.context += rows
        if self._next_exit > clock:  # nearly always
            return []
        return [self.members[id] for id in self._pop_exits()]

    def skip(self, steps: int) -> None:
        """Plan and commit `steps` more ticks, none of which gives any member its last token."""
        grown = steps * len(self.members)
        self.clock += steps
        self.committed += steps
        self.squares += steps * (2 * self.context + grown)
        self.context += grown

    def ids(self, members: list[Request]) -> list[int]:
        """Return the ids of `members` in order of admission.

        `members` are all members, or the first ones in order of joining. They usually joined in order of admission.
        """
        last = -1
        for member in members:
            if member.admitted < last:
                members.sort(key=attrgetter("admitted"))
                return [member.id for member in members]
            last = member.admitted
        return list(self.members)[: len(members)]  # reuses the keys, so no new int objects are made

    def at_block_start(self, after: int = 0) -> dict[int, Request]:
        """Return the members whose number of computed tokens will be a multiple of the block size in `after` ticks."""
        return self._phases[-(self.clock + after) % self.block_size]

    def block_starts_by_tick(self) -> list[int]:
        """Return how many members cross into a new block at each of the next `block_size` ticks.

        After `block_size` ticks the counts repeat.
        """
        members = list(map(len, self._phases))
        now = -self.clock % self.block_size  # the index of the current phase falls with each tick
        return [*members[now::-1], *members[:now:-1]]

    def block_starts(self, steps: int) -> int:
        """Return how many times members will cross into a new block in `steps` more ticks, all members together."""
        rounds, rest = divmod(steps, self.block_size)
        last = -(self.clock + rest - 1) % self.block_size  # the index of the current phase falls with each tick
        crossings = rounds * len(self.members) + sum(map(len, self._phases[last : last + rest]))
        over = last + rest - self.block_size
        return crossings + sum(map(len, self._phases[:over])) if over > 0 else crossings

    def true_steps_to_exit(self) -> int:
        """Return the number of ticks up to and including the first that gives a member its last token.

        The set must not be empty.
        """
        return self._next_exit - self.clock

    def _await_exit(self) -> None:
        """Update `_next_exit`. Entries of members that left early stay in the heap until they reach its top."""
        while self._exits and not self._is_live(self._exits[0]):
            heappop(self._exits)
        self._next_exit = self._exits[0][0] if self._exits else _NEVER

    def _pop_exits(self) -> list[int]:
        due: list[int] = []
        while self._exits and self._exits[0][0] <= self.clock:
            entry = heappop(self._exits)
            # A member that left and came back has two equal entries, next to each other.
            if self._is_live(entry) and due[-1:] != [entry[2]]:
                due.append(entry[2])
        self._await_exit()
        return due

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        member = self.members.get(entry[2])
        return member is not None and member.true_exit_clock == entry[0] and member.admitted == entry[1]

    def check(self) -> None:
        """Raise AssertionError unless the running sums equal a recount."""
        assert self.context == sum(m.computed for m in self.members.values())
        assert self.squares == sum(m.computed**2 for m in self.members.values())
        for phase, bucket in enumerate(self._phases):
            for member in bucket.values():
                assert (member.computed - self.clock) % self.block_size == phase
        assert sum(map(len, self._phases)) == len(self.members)
        assert self._next_exit == min((m.true_exit_clock for m in self.members.values()), default=_NEVER)
        for member in self.members.values():
            member.check()
            assert member.known + member.placeholders == member.computed + 1
