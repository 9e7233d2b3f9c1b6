"""KV blocks of models with constant states beside full attention, with a cache of prefixes.

The pool follows vLLM 0.32 and 0.33 with `mamba_cache_mode: align`. A state is valid after one token only, so a step
writes the state after its last token, into the block of that token; the blocks before it have no state. A full block
keeps its state as a cached prefix. A hit needs the blocks of full attention, and the state at its end. A state is freed
when all steps that start from it have returned. State spaces (Mamba 2) can also write the state at the last end of a
block in a step, besides the last state (`num_prefill_checkpoint_blocks`).

States come before full attention in the order of the groups, as in models whose first layer has a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.block_runs import BlockTable, Node, Run
from tokentwin.serving.kv.blocks import Hit, blocks_for
from tokentwin.serving.kv.content import Content
from tokentwin.serving.kv.grouped_pool import GroupedPool
from tokentwin.serving.kv.prefix_tree import PrefixTree
from tokentwin.serving.request import Request

# A state depends on no token before the last one that it includes, which is how a window of two tokens keeps blocks.
_WINDOW = 2


class StateTable(BlockTable):
    """The states that a request holds in one group of layers, in runs of one block each."""

    __slots__ = ()

    def held_runs(self) -> list[Run]:
        return list(self.runs)


class AlignedStatePool(GroupedPool):
    """A pool for `config.state_blocks` groups of layers with a state, and one group with full attention."""

    def __init__(self, config: SchedulerConfig, content: Content) -> None:
        super().__init__(config, content, windows=(_WINDOW,) * config.state_blocks + (0,))
        # States that this step writes and registers: node, which is of the first group, and block. No request that is
        # admitted in this step may start from them.
        self._written: set[tuple[Node | None, int]] = set()
        self._read_defers = config.state_read_defers_hits
        self._checkpoints = config.num_prefill_checkpoint_blocks > 0
        self._densely = config.prefix_cache_retention_interval != 0  # True if not only ends of prompts are kept

    def new_step(self) -> None:
        """Begin a step: states that the previous step wrote can be used from now on."""
        if self._written:
            self._written.clear()
            self.version += 1

    def junction(self, request: Request) -> int:
        """Return the number of tokens of the prefix that full attention has cached, if states have less; else 0."""
        return self._junction.get(request.id, 0) * self.block_size

    def tables(self, request: Request) -> list[list[int]]:
        return [
            [0] * request.block_count if isinstance(table, StateTable) else table.blocks
            for table in self._tables[request.id]
        ]

    # Numbers of blocks

    def to_admit(self, request: Request, tokens: int, hit: Hit, now: int) -> int:
        return max(self._needed(request, hit, now), self._needed(request, hit, tokens))

    def _needed(self, request: Request, hit: Hit, tokens: int) -> int:
        more = max(blocks_for(tokens, self.block_size) - hit.blocks, 0)
        return more + self._states(request, hit.blocks * self.block_size, tokens, more) + hit.idle

    def lacking(self, request: Request, tokens: int) -> int:
        more = blocks_for(tokens, self.block_size) - request.block_count
        states = self._states(request, request.computed, tokens, more)
        return more + states - self._leaving([(request, self._before_window(request))])

    def _states(self, request: Request, start: int, end: int, more: int) -> int:
        """Return how many states a step from token `start` to `end` writes that begins `more` blocks."""
        return len(self._sliding) * (min(more, 1) + self._writes_checkpoint(request, start, end))

    def _writes_checkpoint(self, request: Request, start: int, end: int) -> bool:
        """Return whether a step from token `start` to `end` also writes the state at the last end of a block before.

        It does so for the last chunk of known tokens, and for each chunk if not only ends of prompts are cached.
        """
        if not self._checkpoints or not (self._densely or end >= max(request.prompt_len, request.known - 1)):
            return False
        return self.can_write_within(start, end, end)

    def can_write_within(self, start: int, end: int, before: int) -> bool:
        """Return whether a step from token `start` to `end` can write the state at the last block end below `before`.

        This is `is_mamba_prefill_checkpoint_valid` of vLLM.
        """
        size = self.block_size
        within = (before - 1) // size * size
        enough = blocks_for(end, size) - 2 > (start - 1) // size and start + size <= within < end
        return self._checkpoints and start % size == 0 and enough

    def _leaving(self, ends: Iterable[tuple[Request, int]]) -> int:
        dropped: Counter[Run] = Counter()
        for request, last in ends:
            dropped.update(self._runs_before(last, request))
        return sum(count == run.references for run, count in dropped.items())

    def net_blocks_by_tick(self, decodes: DecodeSet, steps: int) -> list[int]:
        totals = [0, *(self.net_blocks(decodes, ticks) for ticks in range(1, steps + 1))]
        return [total - before for before, total in pairwise(totals)]

    # Lookup and admission

    def lookup(self, request: Request) -> Hit:
        hit = super().lookup(request)
        if hit.blocks and self._written:
            run, _ = self._trees[0].find(request, hit.blocks, gaps=True)[-1]
            if (run.node, hit.blocks - 1) in self._written:
                return Hit(hit.blocks, self.total + 1)  # more than there are, so that the request waits
        return hit

    def _new_tables(self, request: Request) -> list[BlockTable]:
        tables: list[BlockTable] = [StateTable() for _ in self._sliding]
        return [*tables, request]

    # Running requests

    def _pass(self, table: BlockTable, tree: PrefixTree, first: int, last: int) -> None:
        passed = [run for run in table.runs if run.first < last]
        del table.runs[: len(passed)]
        self._drop(passed)

    def _extend(self, request: Request, tokens: int) -> None:
        need = blocks_for(tokens, self.block_size) - request.block_count
        if need > 0:
            request.block_count += need
            last = request.block_count - 1
            first = last - (need > 1 and self._writes_checkpoint(request, request.computed, tokens))
            for table in self._tables[request.id]:
                if isinstance(table, StateTable):
                    ids = self._take(last + 1 - first)
                    table.runs += [
                        Run(None, at, at + 1, ids[at - first : at - first + 1]) for at in range(first, last + 1)
                    ]
                else:
                    table.blocks += self._take(need)
            self.version += 1

    def register(self, request: Request, tokens: int) -> None:
        first, full = request.hashed, tokens // self.block_size
        if not self.caches:
            return
        if full > first:
            kept = self._kept(request, first, full)
            for group, (tree, table) in enumerate(zip(self._trees, self._tables[request.id], strict=True)):
                if not isinstance(table, StateTable):
                    tree.register(request, table, full)
                    continue
                for place, run in enumerate(table.runs):
                    if run.node is None and any(begin <= run.first < end for begin, end in kept):
                        table.runs[place] = new = _registered(request, tree, run)
                        if not group:
                            self._written.add((new.node, new.first))
            request.hashed = full
            self.version += 1
        if self._read_defers:
            self._read_prompt(request, full)

    def _read_prompt(self, request: Request, full: int) -> None:
        """Count the state at the end of the prompt as written, if it is the last of the `full` blocks, and still held.

        vLLM up to 0.32 does so, although the state is only read (`_cache_partial_tail_block`).
        """
        if full and full == (request.prompt_len - 1) // self.block_size:
            for run in self._tables[request.id][0].runs:
                if run.first == full - 1 and run.node is not None:
                    self._written.add((run.node, run.first))

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        joined = [request for id, request in self._unsettled.items() if id in decodes.members]
        super().extend_decodes(decodes, lag)
        for request in joined if self._read_defers else ():
            self._read_prompt(request, (request.computed + 1 - lag) // self.block_size)

    def _give_back(self, request: Request, table: BlockTable) -> None:
        if isinstance(table, StateTable):
            self._drop(table.runs)
        else:
            super()._give_back(request, table)

    def check(self, requests: Iterable[Request]) -> None:
        references: Counter[Run] = Counter()
        used = 0
        for request in requests:
            for table in self._tables.get(request.id, ()):
                if not isinstance(table, StateTable):
                    used += self._check_table(table, 0, request.block_count, references)
                    continue
                blocks = [run.first for run in table.runs]
                assert blocks == sorted(set(blocks)) and all(run.last == run.first + 1 for run in table.runs)
                assert blocks[-1] == request.block_count - 1 and blocks[0] >= self._slid[request.id]
                references.update(table.runs)
        self._check_free(used, references)


def _registered(request: Request, tree: PrefixTree, run: Run) -> Run:
    """Register `run`, which is one block of `request`, in `tree`; return the run that replaces it."""
    table = BlockTable()
    table.registered = run.first
    table.blocks = [0] * run.first + run.ids
    tree.register(request, table, run.last)
    return table.runs[0]
