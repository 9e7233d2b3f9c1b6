"""The questions about a server's KV cache: how many blocks it has, and how many tokens a block has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokentwin.planning.learn import questions
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.findings import CLOSE, Findings
from tokentwin.planning.learn.questions import Bounds, Question
from tokentwin.planning.learn.server import TimeIsUp
from tokentwin.planning.learn.twin import Twin

_BLOCK_SIZES = (1, 16, 32, 64, 128)
_ASKED = 4  # maximum number of questions about the number of blocks
_MORE = 1.25  # tokens that such a question asks for, in parts of the estimated capacity
_FINE = 0.7  # share of the requests that fit into memory at which its size is known finely
_SMALLER = 8  # divisor of the estimated capacity if no prompt fits
_BETWEEN = 12  # number of values that are tried in a range
_NARROWED = 3  # times that the range is narrowed
_ALIKE = 0.5  # difference of log likelihoods up to which numbers of blocks explain an answer alike

Ask = Callable[[Question], Answer]


def with_memory(twin: Twin, ask: Ask, bounds: Bounds, findings: Findings) -> Twin:
    """Ask for more KV than there is, with smaller prompts until the number of blocks is known well.

    Return the twin with the likeliest number. If the time is up, it is noted as assumed.
    """
    if "num_blocks" in findings.known:
        return twin
    replicas = twin.setting.replicas
    limit = min(bounds.concurrency, replicas * twin.setting.max_num_seqs)
    blocks, asked = twin.setting.num_blocks, set[str]()
    for _ in range(_ASKED):
        tokens = round(_MORE * blocks * twin.setting.block_size * replicas)
        question = questions.full_memory(tokens, limit, twin.setting.max_num_batched_tokens, bounds)
        if question.name in asked:
            break
        asked.add(question.name)
        try:
            answer = ask(question)
        except TimeIsUp:
            findings.assumed.add("num_blocks")
            break
        prompt = next(iter(question.workload.requests)).prompt_len
        if not answer.tokens_ns:  # not even one of the prompts fits
            blocks = blocks // _SMALLER
        elif answer.most_decoding >= limit and not answer.waited:  # all of them fit
            findings.at_least["num_blocks"] = _blocks_of(twin, limit // replicas, prompt)
            blocks = max(2 * blocks, findings.at_least["num_blocks"])
        else:
            findings.at_least.pop("num_blocks", None)
            twin, findings.ranges["num_blocks"] = _likeliest_blocks(twin, answer)
            blocks = twin.setting.num_blocks
            if answer.most_decoding >= _FINE * limit:
                break
    return twin.having(num_blocks=max(twin.setting.num_blocks, findings.at_least.get("num_blocks", 0)))


def with_block_size(twin: Twin, ask: Ask, bounds: Bounds, findings: Findings) -> Twin:
    """Ask for cached prefixes, of which each block size finds another part, and return the twin with its block size.

    A block size counts as inferred only if the answer excludes the other usual ones; otherwise it is undecided, and the
    default of the engine stays if it is not excluded. A block size that no question can reveal is noted as assumed. The
    KV cache keeps its size in tokens.
    """
    setting = twin.setting
    if "block_size" in findings.known:
        return twin
    findings.assumed.add("block_size")
    question = questions.cached_prefixes(setting.max_num_batched_tokens, setting.replicas, bounds)
    if question is None or not setting.enable_prefix_caching:
        return twin
    try:
        answer = ask(question)
    except TimeIsUp:
        return twin
    if answer.unanswered:  # the engine refuses prompts longer than a step
        return twin
    findings.assumed.remove("block_size")
    known = "num_blocks" in findings.known
    sizes = sorted({*_BLOCK_SIZES, setting.block_size})
    tried = {size: twin.having(block_size=size) if known else twin.having_blocks_of(size) for size in sizes}
    scores = {size: one.likelihood_of_pattern(answer, plain=tried[1]) for size, one in tried.items()}
    findings.note("block_size", scores)
    size = findings.tried["block_size"].values[0]
    if others := findings.tried["block_size"].alike_but(size):
        findings.undecided.add("block_size")
        size = setting.block_size if setting.block_size in others else size
    if "num_blocks" in findings.ranges:
        low, high = (twin.having(num_blocks=number) for number in findings.ranges["num_blocks"])
        findings.ranges["num_blocks"] = (
            low.having_blocks_of(size).setting.num_blocks,
            high.having_blocks_of(size).setting.num_blocks,
        )
    return tried[size]


def _likeliest_blocks(twin: Twin, answer: Answer) -> tuple[Twin, tuple[int, int]]:
    """Return the twin with the likeliest number of KV blocks, and the range that cannot be told apart from it.

    The likeliest is the middle of the numbers that explain the answer alike. SGLang reserves whole answers, so under
    `sglang` all numbers between two requests' worth do.
    """
    first = next(iter(answer.question.workload.requests))
    running = answer.most_decoding // twin.setting.replicas
    seen = answer.most_tokens // (twin.setting.replicas * twin.setting.block_size)
    low = max(_blocks_of(twin, max(running // 2, 1), first.prompt_len), seen)
    high = max(_blocks_of(twin, running + 2, first.prompt_len + first.output_len), low)
    if answer.waited and twin.setting.policy != "trtllm":  # for blocks of its prompt; TensorRT-LLM reserves more
        high = min(high, max(low + _blocks_of(twin, 1, first.prompt_len + first.output_len), low))
    scores: dict[int, float] = {}
    for _ in range(_NARROWED):
        values = [int(value) for value in np.unique(np.linspace(low, high, _BETWEEN + 1).round())]
        for value in values:
            if value not in scores:
                scores[value] = twin.having(num_blocks=value).likelihood([answer])
        most = max(map(scores.__getitem__, values))
        alike = [at for at, value in enumerate(values) if scores[value] > most - _ALIKE]
        low, high = values[max(alike[0] - 1, 0)], values[min(alike[-1] + 1, len(values) - 1)]
        twin = twin.having(num_blocks=(values[alike[0]] + values[alike[-1]]) // 2)
    close = [value for value, score in scores.items() if score > most - CLOSE]
    return twin, (min(close), max(close))


def _blocks_of(twin: Twin, requests: int, tokens: int) -> int:
    """Return the KV blocks of `requests` requests with `tokens` tokens each."""
    return requests * -(-tokens // twin.setting.block_size) + 1
