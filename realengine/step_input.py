"""The input of one step, packed into a single int32 buffer.

With one buffer there is one copy to the device. Decode rows come first. Their number is padded to a bucket, so that the
step time does not change with every batch size and a CUDA graph can be replayed. Then come the prefill rows, with their
tokens one after another. A padding row is an ordinary row of the dummy request, which has token 0 at position 0 of the
null block. Block ids come last. So the offsets of all other fields depend only on the `Layout`, and a graph may contain
them as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tokentwin.realengine.logit_rules import LogitChanges, StepChanges, step_changes
from tokentwin.serving.cost_model import padded

Ints = NDArray[np.int32]
HostAdapter = Sequence[
    torch.Tensor
]  # a LoRA adapter in host memory, as `tokentwin.realengine.models.lora_slots` copies it

_ALIGN = 4  # 16 bytes: kernels are compiled for aligned pointers


class Layout(NamedTuple):
    """The sizes of a step, including padding.

    Attributes:
        decode_rows: number of leading rows, padded to a bucket, that include all rows with one token; the token of such
            a row has the row's index
        rows: number of rows
        tokens: number of tokens
        samples: number of tokens whose logits are computed: one for each decode row, including padding, and one or more
            for each prefill row that samples
        tiles: number of tiles in a prefill kernel's work list
        groups: number of groups of layers; each group has its own block tables
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
        """Return the slice of each field of `Batch` in the buffer; the slice of `blocks` reaches to the end."""
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


class Segment(NamedTuple):
    """The tokens `first` to `end - 1` of a step, whose LoRA adapter is in `slot`."""

    slot: int
    first: int
    end: int


class ScoredTokens(NamedTuple):
    """Tokens of a prompt whose logprobs are wanted.

    Attributes:
        row: index of the row, as the step was given its rows
        first: index in the step of the token before the first of them
        start: position of that token in the prompt
        targets: the tokens
        top: number of alternatives
    """

    row: int
    first: int
    start: int
    targets: tuple[int, ...]
    top: int


class Batch(NamedTuple):
    """The fields of a step on the device; they are int32 unless another type is stated.

    `slots` and `table_start` belong to one group of layers, initially the first; `for_group` returns the batch of
    another group.

    Attributes:
        tokens: [T] token ids; -1 - s is a placeholder for the last token sampled at seat s, which the host has not seen
            yet
        positions: [T] position of each token in its request
        slots: [T] slot for each token's keys and values: block * block_size + offset
        context: [R] number of KV tokens of each row after this step's writes
        query_start: [R] index of the first token of each row
        query_len: [R] number of tokens of each row; 0 for an unused row
        table_start: [R] index in `blocks` of each row's first block id
        sampled: [S] indices of the tokens whose logits are computed
        seats: [S] seat for each sampled token
        temperature, top_p, uniform: [S] float32 settings and uniform numbers of draws; temperature 0 is greedy
        top_k: [S] 0 keeps all tokens
        tile_row, tile_first: work list of a prefill kernel: row of each tile and index of its first query token; row -1
            means no tile
        blocks: block ids of all rows, group by group
        host: content of the buffer on the host, for backends that need lengths to launch; None in a graph
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
    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # `slots` and `table_start` of each group

    def first(self, samples: int) -> Batch:
        """Return the same step with only the first `samples` of its samples."""
        names = ("sampled", "seats", "temperature", "top_p", "uniform", "top_k")
        return self._replace(**{name: getattr(self, name)[:samples] for name in names})

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, layout: Layout, host: Ints | None = None) -> Batch:
        """Return a batch of views into `buffer`, an int32 tensor that contains a step of `layout`."""
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
        """Return a field as a list; if `host` is None, this waits for the device."""
        if self.host is not None:
            name = _group_field(name, self.group) if name in ("slots", "table_start") else name
            numbers: list[int] = self.host[self.layout.places()[name]].tolist()
            return numbers
        return list(getattr(self, name).tolist())


class TokenMasks(NamedTuple):
    """The allowed tokens of those samples of a step that have masks.

    Bit t % 32 of `bits[i, t // 32]` is 1 if sample `samples[i]` may be token t.
    """

    samples: Ints  # [M]
    bits: Ints  # [M, ceil(vocab / 32)]


class StepInput(NamedTuple):
    """The input of a step, the same for every rank: `packed` is the buffer's content; `greedy` is True if no row draws.

    `logprobs` is the maximum number of alternatives that a request wants with each token's logprob; None if no request
    wants logprobs. `masks` is None if no sample has a mask. `changes` is None if no logits are changed. `pooled` are
    the samples of pooling requests, whose hidden states are the result; if `generates` is False, no other sample
    belongs to a request. `segments` are the tokens of each LoRA adapter, and `copies` the adapters to copy into slots
    before the step.
    """

    layout: Layout
    packed: Ints
    greedy: bool
    logprobs: int | None
    masks: TokenMasks | None = None
    changes: StepChanges | None = None
    pooled: tuple[int, ...] = ()
    generates: bool = True
    segments: tuple[Segment, ...] = ()
    copies: tuple[tuple[int, HostAdapter], ...] = ()
    scored: tuple[ScoredTokens, ...] = ()


class RowInput(NamedTuple):
    """One row of a step.

    `tokens` are as in `Batch`. `blocks` are the block ids of the row's context for the first group of layers, and
    `other_blocks` those for the other groups. The row samples after each of its last tokens, as many as there are
    `draws`. A draw is temperature, top-k, top-p and a uniform number, or None for greedy. `logprobs` is the number of
    alternatives wanted with each logprob; None if no logprobs are wanted. `masks`, as rows of `TokenMasks.bits`, belong
    to the first of these samples; there are none if any token is allowed. `changes` belong to all of these samples;
    there are none if their logits do not change. With `pools`, the hidden state of the last token is the result, and
    nothing is sampled. `scored` are the tokens of the prompt that follow the row's first tokens, if their logprobs are
    wanted, with `score_top` alternatives each. `slot` is the slot of the row's LoRA adapter; None for the base model.
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
    pools: bool = False
    slot: int | None = None
    scored: tuple[int, ...] = ()
    score_top: int = 0


Tiles = Callable[[Sequence[tuple[int, int, int]]], tuple[Ints, Ints]]


class Packed(NamedTuple):
    """The input of a step, and for each sample the index of the given row that it belongs to (None for padding)."""

    step: StepInput
    sample_rows: list[int | None]


class PlainRows(NamedTuple):
    """Rows of one token that sample once, with no mask, logit change, logprob or adapter, as columns `[P]`.

    Nearly all rows of a decoding engine are plain, and columns are packed faster than rows.

    Attributes:
        numbers: index of each row among all rows of the step
        tokens, starts, seats: as in `RowInput`
        draws: by field of `Batch`, the settings of the rows' draws; floats are viewed as int32
        greedy: True if no row draws
        needs: number of blocks of each row
        blocks: for each group of layers the block ids of all rows, one row after the other
    """

    numbers: list[int]
    tokens: list[int]
    starts: Ints
    seats: Ints
    draws: dict[str, Ints]
    greedy: bool
    needs: Ints
    blocks: tuple[Ints, ...]


def pack(
    rows: Sequence[RowInput],
    block_size: int,
    null_seat: int,
    tiles: Tiles,
    plain: PlainRows | None = None,
    numbers: Sequence[int] | None = None,
) -> Packed:
    """Pack the step of `plain` and `rows`, of which one may be empty.

    Args:
        tiles: makes a kernel's work list from `(row, query tokens, context)` of the prefill rows
        numbers: index of each of `rows` among all rows of the step; by default 0, 1, ...
    """
    adapted = any(row.slot is not None for row in rows)
    first = 0 if plain is None else len(plain.numbers)
    groups = len(plain.blocks) if plain is not None else 1 + len(rows[0].other_blocks)
    ordered, places, decode_rows = _in_order(rows, null_seat, adapted, first, groups)
    lens = np.array([1] * first + [len(row.tokens) for row in ordered], dtype=np.int32)
    starts = np.array([row.start for row in ordered], dtype=np.int32)
    if plain is not None:
        starts = np.concatenate((plain.starts, starts))
    context = lens + starts
    query_start = np.cumsum(lens, dtype=np.int32) - lens
    work = [(row, int(lens[row]), int(context[row])) for row in range(decode_rows, len(lens))]
    tile_row, tile_first = tiles(work)
    samples = _samples(ordered, first, decode_rows)
    layout = Layout(decode_rows, len(lens), int(lens.sum()), first + len(samples), len(tile_row), groups)

    row_of = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(layout.tokens) - query_start[row_of] + starts[row_of]
    blocks, table_starts = _block_tables(plain, ordered, -(-context // block_size), groups)
    tokens = [token for row in ordered for token in row.tokens]
    sampled = [query_start[sample.row] + lens[sample.row] - sample.before_end for sample in samples]
    of_samples = [ordered[sample.row - first] for sample in samples]
    seats = [row.seat if row.draws else null_seat for row in of_samples]
    draws = _draws([sample.draw for sample in samples])
    if plain is not None:
        tokens, sampled = plain.tokens + tokens, [*range(first), *sampled]
        seats = [*plain.seats.tolist(), *seats]
        draws = {name: np.concatenate((plain.draws[name], columns)) for name, columns in draws.items()}
    fields: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "context": context,
        "query_start": query_start,
        "query_len": lens,
        "sampled": sampled,
        "seats": seats,
        **draws,
        "tile_row": tile_row,
        "tile_first": tile_first,
        "blocks": blocks,
    }
    for group, start in enumerate(table_starts):
        block = blocks[start[row_of] + positions // block_size]
        fields[_group_field("slots", group)] = block * block_size + positions % block_size
        fields[_group_field("table_start", group)] = start
    within = layout.places()
    packed = np.zeros(within["blocks"].start + len(blocks), dtype=np.int32)
    for name, values in fields.items():
        packed[within[name]] = values

    step = StepInput(
        layout,
        packed,
        greedy=(plain is None or plain.greedy) and all(sample.draw is None for sample in samples),
        logprobs=max((row.logprobs for row in rows if row.logprobs is not None), default=None),
        masks=_masks([sample.mask for sample in samples], first),
        changes=step_changes([sample.changes for sample in samples], first),
        pooled=tuple(first + number for number, row in enumerate(of_samples) if row.pools),
        generates=first > 0 or any(row.draws and not row.pools for row in rows) or not any(row.pools for row in rows),
        segments=_segments(ordered, query_start) if adapted else (),
        scored=tuple(
            ScoredTokens(
                place if numbers is None else numbers[place], int(query_start[at]), row.start, row.scored, row.score_top
            )
            for at, (row, place) in enumerate(zip(ordered, places, strict=True), first)
            if row.scored and place is not None
        ),
    )
    sample_rows = [
        places[sample.row - first] if row.draws else None for sample, row in zip(samples, of_samples, strict=True)
    ]
    if numbers is not None:
        sample_rows = [None if place is None else numbers[place] for place in sample_rows]
    return Packed(step, sample_rows if plain is None else [*plain.numbers, *sample_rows])


def _in_order(
    rows: Sequence[RowInput], null_seat: int, adapted: bool, plain: int, groups: int
) -> tuple[list[RowInput], list[int | None], int]:
    """Return the rows that follow `plain` rows, in order: decode rows, dummy rows up to a bucket, prefill rows.

    If any row is `adapted`, decode rows of one LoRA adapter are neighbours, and so are its prefill rows.

    The second result is the index of each row in `rows` (None for a dummy), and the third is the number of rows before
    the prefill rows, plain rows included.
    """
    decodes = [number for number, row in enumerate(rows) if len(row.tokens) == 1]
    prompts = [number for number, row in enumerate(rows) if len(row.tokens) > 1]
    if adapted:
        for kind in (decodes, prompts):
            kind.sort(key=lambda number: -1 if (slot := rows[number].slot) is None else slot)
    null = np.zeros(1, dtype=np.int32)
    dummy = RowInput((0,), 0, null, null_seat, (), other_blocks=(null,) * (groups - 1))
    dummies = padded(plain + len(decodes)) - plain - len(decodes)
    numbers: list[int | None] = [*decodes, *[None] * dummies, *prompts]
    ordered = [dummy if number is None else rows[number] for number in numbers]
    return ordered, numbers, plain + len(decodes) + dummies


def _segments(ordered: Sequence[RowInput], query_start: Ints) -> tuple[Segment, ...]:
    """Return the tokens of each LoRA adapter; neighbouring rows with one adapter are one segment."""
    segments: list[Segment] = []
    for row, start in zip(ordered, query_start.tolist(), strict=True):
        if row.slot is None:
            continue
        joins = segments and (segments[-1].slot, segments[-1].end) == (row.slot, start)
        first = segments.pop().first if joins else start
        segments.append(Segment(row.slot, first, start + len(row.tokens)))
    return tuple(segments)


class _Sample(NamedTuple):
    """A token to sample: its row, and the token that it follows, counted from the row's end (1 is the last one)."""

    row: int
    before_end: int
    draw: tuple[float, int, float, float] | None
    mask: Ints | None
    changes: LogitChanges | None


def _samples(ordered: Sequence[RowInput], first: int, decode_rows: int) -> list[_Sample]:
    """Return the tokens that the rows from `first` on sample; dummy rows do, too, so that a bucket has one shape."""
    samples = []
    for row, given in enumerate(ordered, first):
        draws = given.draws or ((None,) if row < decode_rows else ())
        for place, (draw, mask, changes) in enumerate(zip_longest(draws, given.masks, given.changes)):
            samples.append(_Sample(row, len(draws) - place, draw, mask, changes))
    return samples


def _draws(draws: Sequence[tuple[float, int, float, float] | None]) -> dict[str, Ints]:
    """Return the settings of draws by field; greedy is temperature 0, and floats are viewed as int32."""
    hows = [draw or (0.0, 0, 1.0, 0.0) for draw in draws]
    temperature, top_k, top_p, uniform = zip(*hows, strict=True) if hows else ((), (), (), ())
    floats = {"temperature": temperature, "top_p": top_p, "uniform": uniform}
    bits = {name: np.array(numbers, dtype=np.float32).view(np.int32) for name, numbers in floats.items()}
    return {"top_k": np.array(top_k, dtype=np.int32), **bits}


def _block_tables(
    plain: PlainRows | None, ordered: Sequence[RowInput], needs: NDArray[Any], groups: int
) -> tuple[Ints, list[Ints]]:
    """Return the block ids of all rows, group by group, and for each group the index of each row's first id.

    `needs` is the number of blocks of each row, plain rows first.
    """
    tables = [(row.blocks, *row.other_blocks) for row in ordered]
    first = len(needs) - len(ordered)
    parts: list[Ints] = []
    for group in range(groups):
        if plain is not None:
            parts.append(plain.blocks[group])
        parts += [table[group][:need] for table, need in zip(tables, needs[first:].tolist(), strict=True)]
    start = np.cumsum(needs, dtype=np.int32) - needs
    return np.concatenate(parts), [start + group * needs.sum(dtype=np.int32) for group in range(groups)]


def _masks(by_sample: Sequence[Ints | None], first: int) -> TokenMasks | None:
    masked = [(sample, mask) for sample, mask in enumerate(by_sample, first) if mask is not None]
    if not masked:
        return None
    numbers, bits = zip(*masked, strict=True)
    return TokenMasks(np.array(numbers, dtype=np.int32), np.stack(bits))
