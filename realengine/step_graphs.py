"""Steps that run as graphs: which steps do, how they are padded, and the captured graphs.

Decode steps run as graphs, padded to a bucket. So do mixed steps of up to 2048 tokens, because launching their kernels
one by one takes longer than a GPU needs to run them. Larger steps run eagerly. A mixed step is padded to one of a few
layouts. No result depends on the padding: the padding is tokens of the null block that are in no row, rows with 0
tokens, tiles without a row, and samples that are not used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.step_input import Layout, StepInput
from tokentwin.serving.cost_model import DECODE_BUCKETS, TOKEN_BUCKETS, padded, padded_tokens

_FEWEST_SAMPLES = 64  # up to this number, reading the head's weights takes as long as computing with them
_FEWEST_TILES = 8
_TOKENS_PER_TILE = 16  # a layout has a tile for each 16 tokens; a step with more tiles gets the next larger layout
_MOST_MIXED = 64  # maximum number of graphs of mixed steps that are kept


class StepGraphs:
    """The graphs of one runner; each is captured when it is first needed.

    `mixed` is True if mixed steps run as graphs. If there are too many mixed graphs, the least recently used is
    removed.
    """

    def __init__(self, device: Device, mixed: bool) -> None:
        self.mixed = mixed
        self._device = device
        self._graphs: dict[Layout, Callable[[], torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def layout_for(self, layout: Layout) -> Layout | None:
        """Return the layout of the graph for a step of `layout`; None if the step runs eagerly."""
        if layout.decodes_only:
            return layout if layout.rows <= DECODE_BUCKETS[-1] else None
        return mixed_layout(layout) if self.mixed and layout.tokens <= TOKEN_BUCKETS[-1] else None

    def get(self, layout: Layout, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return the graph of `layout`; capture `work` if there is none yet. Only submitted work may call this."""
        graph = self._graphs.pop(layout, None)
        self._graphs[layout] = graph = graph or self._device.capture(work)
        mixed = [key for key in self._graphs if not key.decodes_only]
        if len(mixed) > _MOST_MIXED:  # the removed graph is idle, because the capture has waited for its launches
            del self._graphs[mixed[0]]
        return graph

    def memory(self, decode_rows: list[int], mixed_steps: list[list[int]], run: Callable[[list[int]], object]) -> int:
        """Return an estimate of the bytes of all graphs, from captures of the largest two of each kind.

        Args:
            decode_rows: bucket sizes of decode steps in descending order
        mixed_steps: row sizes of mixed steps, the largest step first
            run: function that runs a step with rows of the given sizes
        """
        kinds = [([[1] * rows for rows in decode_rows], len(decode_rows))]
        if self.mixed:
            kinds.append((mixed_steps, _MOST_MIXED))
        taken = 0
        for steps, count in kinds:
            costs = []
            for sizes in steps[:2]:
                before = self._device.used_bytes()
                run(sizes)
                costs.append(max(self._device.used_bytes() - before, 0))
            if costs:
                taken += costs[0] + costs[-1] * (count - 1)
        self.release()
        return taken

    def release(self) -> None:
        self._graphs.clear()
        self._device.release_graphs()


def mixed_layout(layout: Layout) -> Layout:
    """Return the layout to which a mixed step of `layout` is padded.

    The padded layout has as many decode rows as samples. All rows with one token are among them, and kernels find out
    on the device which rows have one token.
    """
    tokens = padded_tokens(layout.tokens)
    samples, tiles = _FEWEST_SAMPLES, _FEWEST_TILES
    while samples < layout.samples:
        samples *= 4
    samples = min(samples, tokens)
    while tiles < tokens // _TOKENS_PER_TILE + _FEWEST_TILES:
        tiles *= 2
    while tiles < layout.tiles:
        tiles *= 4
    rows = max(samples + tiles, layout.rows)
    return Layout(samples, rows, tokens, samples, tiles if layout.tiles else 0, layout.groups)


def pad(step: StepInput, layout: Layout) -> StepInput:
    """Return `step` padded to `layout`; the first entries of each field stay the same."""
    before, after = step.layout.places(), layout.places()
    blocks = step.packed[before["blocks"]]
    packed = np.zeros(after["blocks"].start + len(blocks), dtype=np.int32)
    packed[after["tile_row"]] = -1
    for name, place in before.items():
        first, count = after[name].start, len(step.packed[place])
        packed[first : first + count] = step.packed[place]
    return step._replace(layout=layout, packed=packed)


def largest_layout(max_num_batched_tokens: int, groups: int = 1) -> Layout:
    """Return a layout whose fields are at least those of any padded mixed step of up to the given number of tokens."""
    tokens = TOKEN_BUCKETS[min(bisect_left(TOKEN_BUCKETS, max_num_batched_tokens), len(TOKEN_BUCKETS) - 1)]
    tiles = 4 * tokens + 4 * _FEWEST_TILES
    return Layout(tokens, tokens + tiles, tokens, tokens, tiles, groups)


def mixed_steps(max_num_batched_tokens: int, max_num_seqs: int, prompts: Callable[[int], list[int]]) -> list[list[int]]:
    """Return the row sizes of one step for each padded number of tokens and of samples, the largest step first.

    Args:
        prompts: function that returns the sizes of rows with the given number of prompt tokens in all
    """
    steps = []
    buckets = TOKEN_BUCKETS[: bisect_left(TOKEN_BUCKETS, max_num_batched_tokens) + 1]
    for tokens in (min(bucket, max_num_batched_tokens) for bucket in reversed(buckets)):
        decodes = 0
        while tokens - padded(decodes) >= 2 and decodes < max_num_seqs:
            steps.append(([1] * decodes + prompts(tokens - padded(decodes)))[:max_num_seqs])
            decodes = 4 * decodes or _FEWEST_SAMPLES
    return steps
