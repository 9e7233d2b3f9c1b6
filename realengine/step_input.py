"""The input of one step, packed into a single int32 buffer.

One buffer means one copy to the device. Decode rows come first, padded to a bucket so that step time does not jump with
every batch size and a CUDA graph can be replayed; then the prefill rows, their tokens end to end. A padding row is an
ordinary row of the dummy request: token 0 at position 0 of the null block. Block ids come last, so that the place of
everything else depends on the `Layout` alone, which a graph may contain as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from realengine.logit_rules import LogitChanges, StepChanges, step_changes
from serving.cost_model import padded

Ints = NDArray[np.int32]

_ALIGN = 4  # 16 bytes: kernels are compiled for aligned pointers


class Layout(NamedTuple):
    """Sizes of a step, padding included.

    Attributes:
        decode_rows: rows that include all rows of one token, each at the token of its own number; padded to a bucket
        samples: tokens whose logits are wanted: those of every decode row, padding too, and those after which prefill
            rows sample
        tiles: tiles of a prefill kernel's work list
        groups: groups of layers, each with its own block tables
    """

    decode_rows: int
    rows: int
    tokens: int
    samples: int
    tiles: int = 0
    groups: int = 1

    @property
    def decodes_only(self) -> bool:
        return self.rows == self.decode_rows

    def places(self) -> dict[str, slice]:
        """Return the place of each field of `Batch` in the buffer; `blocks` reaches to the end."""
        sizes = dict.fromkeys(("tokens", "positions", "slots"), self.tokens)
        sizes |= dict.fromkeys(("context", "query_start", "query_len", "table_start"), self.rows)
        sizes |= dict.fromkeys(("sampled", "seats", "temperature", "top_p", "uniform", "top_k"), self.samples)
        sizes |= dict.fromkeys(("tile_row", "tile_first"), self.tiles)
        for group in range(1, self.groups):
            sizes |= {_group_field("slots", group): self.tokens, _group_field("table_start", group): self.rows}
        places, offset = {}, 0
        for name, size in sizes.items():
            places[name] = slice(offset, offset + size)
            offset += -(-size // _ALIGN) * _ALIGN
        places["blocks"] = slice(offset, None)
        return places


def _group_field(name: str, group: int) -> str:
    return f"{name} {group}" if group else name


class Batch(NamedTuple):
    """The fields of a step on the device, all int32 unless stated.

    `slots` and `table_start` are those of one group of layers, at first of the first; `for_group` gives the others.

    Attributes:
        tokens: [T] token ids; -1 - s stands for the last token sampled at seat s, which the host has not seen yet
        positions: [T]
        slots: [T] place of keys and values: block * block_size + offset
        context: [R] KV tokens of each row after this step's writes
        query_start: [R] first token of each row
        query_len: [R] tokens of each row; 0 for no row
        table_start: [R] begin of each row's block ids in `blocks`
        sampled: [S] tokens whose logits are wanted
        seats: [S] seat for each sampled token
        temperature, top_p, uniform: [S] float32
        top_k: [S]
        tile_row, tile_first: work list of a prefill kernel: row and first query token of each tile; row -1 is no tile
        blocks: block ids of all rows, group by group
        host: the buffer's content on the host, for backends that need lengths to launch; None in a graph
    """

    layout: Layout
    host: Ints | None
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    context: torch.Tensor
    query_start: torch.Tensor
    query_len: torch.Tensor
    table_start: torch.Tensor
    sampled: torch.Tensor
    seats: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    top_k: torch.Tensor
    tile_row: torch.Tensor
    tile_first: torch.Tensor
    blocks: torch.Tensor
    group: int = 0
    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # slots and table_start of each group

    def first(self, samples: int) -> Batch:
        """Return the same step, with the first `samples` of its samples."""
        names = ("sampled", "seats", "temperature", "top_p", "uniform", "top_k")
        return self._replace(**{name: getattr(self, name)[:samples] for name in names})

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, layout: Layout, host: Ints | None = None) -> Batch:
        """Return views into `buffer`, an int32 tensor that contains a step of that layout."""
        fields: dict[str, Any] = {name: buffer[place] for name, place in layout.places().items()}
        for name in ("temperature", "top_p", "uniform"):
            fields[name] = fields[name].view(torch.float32)
        others = [
            (fields.pop(_group_field("slots", group)), fields.pop(_group_field("table_start", group)))
            for group in range(1, layout.groups)
        ]
        tables = ((fields["slots"], fields["table_start"]), *others)
        return cls(layout=layout, host=host, tables=tables, **fields)

    def for_group(self, group: int) -> Batch:
        """Return the same step for the layers of another group."""
        slots, table_start = self.tables[group]
        return self._replace(slots=slots, table_start=table_start, group=group)

    def on_host(self, name: str) -> list[int]:
        """Return a field as a list; without `host` this waits for the device."""
        if self.host is not None:
            name = _group_field(name, self.group) if name in ("slots", "table_start") else name
            numbers: list[int] = self.host[self.layout.places()[name]].tolist()
            return numbers
        return list(getattr(self, name).tolist())


class TokenMasks(NamedTuple):
    """The tokens that some of a step's samples may be.

    Bit t % 32 of `bits[i, t // 32]` says whether sample `samples[i]` may be token t.
    """

    samples: Ints  # [M]
    bits: Ints  # [M, ceil(vocab / 32)]


class StepInput(NamedTuple):
    """A step as the host hands it to every rank: `packed` is the buffer's content, `greedy` if no row draws.

    `logprobs` is the largest number of alternatives that a request wants to each token's logprob; None if no request
    wants logprobs. `masks` is None if all samples may be any token, `changes` if all take the model's logits as they
    are.
    """

    layout: Layout
    packed: Ints
    greedy: bool
    logprobs: int | None
    masks: TokenMasks | None = None
    changes: StepChanges | None = None


class RowInput(NamedTuple):
    """One row of a step.

    `tokens` are as in `Batch`; `blocks` cover its context for the first group of layers, `other_blocks` for the others.
    There is a sample after each of as many of its last tokens as there are `draws`: with temperature, top-k, top-p and
    a uniform number, or None for greedy. `logprobs` is the number of alternatives wanted to their log-probabilities;
    None if these are not wanted. `masks`, as rows of `TokenMasks.bits`, belong to the first of these samples, if they
    may not be any token; `changes` belong to all of them, if their logits change.
    """

    tokens: Sequence[int]
    start: int
    blocks: Ints
    seat: int
    draws: tuple[tuple[float, int, float, float] | None, ...] = (None,)
    logprobs: int | None = None
    masks: tuple[Ints, ...] = ()
    changes: tuple[LogitChanges, ...] = ()
    other_blocks: tuple[Ints, ...] = ()


Tiles = Callable[[Sequence[tuple[int, int, int]]], tuple[Ints, Ints]]


class Packed(NamedTuple):
    """A step's input, and the number of the given row that each sample belongs to (`None` for padding)."""

    step: StepInput
    sample_rows: list[int | None]


def pack(rows: Sequence[RowInput], block_size: int, null_seat: int, tiles: Tiles) -> Packed:
    """Pack `rows`. `tiles` makes a kernel's work list from `(row, query tokens, context)` of the prefill rows."""
    ordered, numbers, decode_rows = _in_order(rows, null_seat)
    lens = np.array([len(row.tokens) for row in ordered], dtype=np.int32)
    context = lens + np.array([row.start for row in ordered], dtype=np.int32)
    query_start = np.cumsum(lens, dtype=np.int32) - lens
    work = [(row, int(lens[row]), int(context[row])) for row in range(decode_rows, len(ordered))]
    tile_row, tile_first = tiles(work)
    samples = _samples(ordered, decode_rows)
    groups = 1 + len(ordered[0].other_blocks)
    layout = Layout(decode_rows, len(ordered), int(lens.sum()), len(samples), len(tile_row), groups)

    row_of = np.repeat(np.arange(len(ordered)), lens)
    positions = np.arange(layout.tokens) - query_start[row_of] + (context - lens)[row_of]
    blocks, table_starts = _block_tables(ordered, -(-context // block_size))
    fields: dict[str, Any] = {
        "tokens": [token for row in ordered for token in row.tokens],
        "positions": positions,
        "context": context,
        "query_start": query_start,
        "query_len": lens,
        "sampled": [query_start[sample.row] + lens[sample.row] - sample.before_end for sample in samples],
        "seats": [ordered[sample.row].seat if ordered[sample.row].draws else null_seat for sample in samples],
        **_draws([sample.draw for sample in samples]),
        "tile_row": tile_row,
        "tile_first": tile_first,
        "blocks": blocks,
    }
    for group, start in enumerate(table_starts):
        block = blocks[start[row_of] + positions // block_size]
        fields[_group_field("slots", group)] = block * block_size + positions % block_size
        fields[_group_field("table_start", group)] = start
    places = layout.places()
    packed = np.zeros(places["blocks"].start + len(blocks), dtype=np.int32)
    for name, values in fields.items():
        packed[places[name]] = values

    step = StepInput(
        layout,
        packed,
        greedy=all(draw is None for row in rows for draw in row.draws),
        logprobs=max((row.logprobs for row in rows if row.logprobs is not None), default=None),
        masks=_masks([sample.mask for sample in samples]),
        changes=step_changes([sample.changes for sample in samples]),
    )
    return Packed(step, [numbers[sample.row] if ordered[sample.row].draws else None for sample in samples])


def _in_order(rows: Sequence[RowInput], null_seat: int) -> tuple[list[RowInput], list[int | None], int]:
    """Return the rows in the step's order: decodes, dummies up to a bucket, prompts.

    The second result is their numbers, the third how many of them come before the prompts.
    """
    decodes = [number for number, row in enumerate(rows) if len(row.tokens) == 1]
    prompts = [number for number, row in enumerate(rows) if len(row.tokens) > 1]
    null = np.zeros(1, dtype=np.int32)
    dummy = RowInput((0,), 0, null, null_seat, (), other_blocks=(null,) * len(rows[0].other_blocks))
    dummies = padded(len(decodes)) - len(decodes)
    numbers: list[int | None] = [*decodes, *[None] * dummies, *prompts]
    ordered = [dummy if number is None else rows[number] for number in numbers]
    return ordered, numbers, len(decodes) + dummies


class _Sample(NamedTuple):
    """A token to sample: its row, and the token that it follows, counted from the row's end (1 is its last)."""

    row: int
    before_end: int
    draw: tuple[float, int, float, float] | None
    mask: Ints | None
    changes: LogitChanges | None


def _samples(ordered: Sequence[RowInput], decode_rows: int) -> list[_Sample]:
    """Return the tokens to sample. Dummies also sample, so that a bucket has one shape."""
    samples = []
    for row, given in enumerate(ordered):
        draws = given.draws or ((None,) if row < decode_rows else ())
        for place, (draw, mask, changes) in enumerate(zip_longest(draws, given.masks, given.changes)):
            samples.append(_Sample(row, len(draws) - place, draw, mask, changes))
    return samples


def _draws(draws: Sequence[tuple[float, int, float, float] | None]) -> dict[str, Any]:
    """Return the settings of draws by field; greedy is a temperature of 0. Floats are viewed as integers."""
    hows = [draw or (0.0, 0, 1.0, 0.0) for draw in draws]
    temperature, top_k, top_p, uniform = zip(*hows, strict=True) if hows else ((), (), (), ())
    floats = {"temperature": temperature, "top_p": top_p, "uniform": uniform}
    bits = {name: np.array(numbers, dtype=np.float32).view(np.int32) for name, numbers in floats.items()}
    return {"top_k": top_k, **bits}


def _block_tables(ordered: Sequence[RowInput], needs: NDArray[Any]) -> tuple[Ints, list[Ints]]:
    """Return the block ids of all rows, group by group, and by group the begin of each row's ids.

    `needs` are the blocks of each row.
    """
    tables = list(zip(*((row.blocks, *row.other_blocks) for row in ordered), strict=True))
    blocks = np.concatenate([table[:need] for group in tables for table, need in zip(group, needs, strict=True)])
    start = np.cumsum(needs, dtype=np.int32) - needs
    return blocks, [start + group * needs.sum(dtype=np.int32) for group in range(len(tables))]


def _masks(by_sample: Sequence[Ints | None]) -> TokenMasks | None:
    masked = [(sample, mask) for sample, mask in enumerate(by_sample) if mask is not None]
    if not masked:
        return None
    numbers, bits = zip(*masked, strict=True)
    return TokenMasks(np.array(numbers, dtype=np.int32), np.stack(bits))
