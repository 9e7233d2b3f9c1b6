"""The times of a server's steps, from the tokens that its clients saw.

Tokens that arrive together are one step. If the same requests get tokens in one step and the next, and no prompt waits,
the next step is a decode step of these rows, and the client saw its duration. What prompts a step computes, a client
cannot see. A simulation with the right settings says which tokens such a step samples; its duration is then the time
between these tokens and those of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.iteration_fit import IterationLog
from tokentwin.planning.learn.answers import Answer, Simulated
from tokentwin.serving.step_plan import AGGREGATES

Floats = NDArray[np.float64]
_TOGETHER = 8  # number of equal decode steps that are measured together
_APART = 0.4  # share of the usual time between two tokens of a request from which on two tokens are of two steps
_MANY_ROWS = 8  # minimum number of tokens of a step that tell how long one of them takes to write


def seen_steps(answer: Answer, twin: Simulated) -> IterationLog:
    """Return all steps whose duration the client saw, with their sizes.

    Each engine of the simulation has its own steps; the router is taken to have sent requests as it did there.
    """
    logs = []
    for engine in twin.of_each_engine:
        own = answer.only(engine.tokens_ns)
        logs += [decode_steps(own), prompt_steps(own, engine)]
    return joined(logs)


def decode_steps(answer: Answer) -> IterationLog:
    """Return the steps that only decode. Up to `_TOGETHER` steps of the same rows are measured together."""
    prompts = {request.id: request.prompt_len for request in answer.question.workload.requests}
    groups = _groups(answer)
    sent = np.sort(list(answer.sent_ns.values()))
    first = np.sort([times[0] for times in answer.tokens_ns.values()])
    sizes, durations = [], []
    at = 1
    while at < len(groups):
        last = at - 1
        while last + 1 < len(groups) and last + 1 - at < _TOGETHER and groups[last + 1].keys() == groups[at - 1].keys():
            last += 1
        latest = max((time for time, _ in groups[last].values()), default=0)
        waiting = np.searchsorted(sent, latest, "right") - np.searchsorted(first, latest, "right")
        if last >= at and not waiting:
            before, steps = groups[at - 1], last - at + 1
            context = sum(prompts[id] + index - 1 for id, (_, index) in groups[(at + last) // 2].items())
            sizes.append((len(before), context))
            durations.append(max(float(np.median([groups[last][id][0] - before[id][0] for id in before])), 1.0) / steps)
        at = max(last, at) + 1
    rows_and_context = np.array(sizes, dtype=np.float64).reshape(-1, 2)
    zero, rows = np.zeros(len(sizes)), rows_and_context[:, 0]
    columns = dict.fromkeys(_FIELDS, zero) | {"decode_rows": rows, "sampled_rows": rows}
    return IterationLog(
        StepSizes(**columns | {"decode_context": rows_and_context[:, 1]}), np.array(durations, dtype=np.float64)
    )


def chunk_ns(answers: Sequence[Answer]) -> float:
    """Return the time that a server takes to write one request's token: how far tokens of one step come apart."""
    apart = []
    for answer in answers:
        for group in _groups(answer):
            times = [time for time, _ in group.values()]
            if len(times) >= _MANY_ROWS:
                apart.append((max(times) - min(times)) / (len(times) - 1))
    return float(np.median(apart)) if apart else 0.0


def prompt_steps(answer: Answer, twin: Simulated) -> IterationLog:
    """Return the steps with prompts of a simulation, with the durations that the client saw.

    A step that samples the first token of a request ended when the client saw this token; the steps before it, with
    earlier chunks of its prompt, ended with the tokens before. A step is left out if the client saw another number of
    tokens together than the step samples: then the server's steps had other rows.
    """
    ends = twin.steps["end_ns"].to_numpy().astype(np.int64)
    starts = twin.steps["start_ns"].to_numpy().astype(np.int64)
    order = np.argsort(ends, kind="stable")
    ends, starts = ends[order], starts[order]
    sizes = {name: _column(twin, name)[order] for name in AGGREGATES}
    groups = _groups(answer)
    seen_at = np.array([np.median([time for time, _ in group.values()]) for group in groups])
    sampled = _sampled(answer, twin, ends)
    at = _first_tokens(groups, twin, ends)
    chosen, durations = [], []
    for step in range(len(ends) - 1, 0, -1):
        group = at[step]
        if group < 1 or starts[step] != ends[step - 1] or not sampled[step - 1]:
            continue
        if at[step - 1] < 0 and sizes["prefill_tokens"][step - 1] > 0:
            at[step - 1] = group - 1
        known = at[step - 1] in (-1, group - 1)
        alike = len(groups[group]) == sampled[step] and len(groups[group - 1]) == sampled[step - 1]
        if known and alike and sizes["prefill_tokens"][step] > 0:
            chosen.append(step)
            durations.append(seen_at[group] - seen_at[group - 1])
    steps = np.array(chosen, dtype=np.int64)
    picked = {name: values[steps] for name, values in sizes.items()}
    return IterationLog(StepSizes(**picked, decode_spread=np.zeros(len(steps))), np.array(durations, dtype=np.float64))


def joined(logs: Sequence[IterationLog]) -> IterationLog:
    """Return all steps of several logs as one."""
    fields = {name: np.concatenate([np.asarray(getattr(log.sizes, name)) for log in logs]) for name in _FIELDS}
    return IterationLog(StepSizes(**fields), np.concatenate([log.measured_ns for log in logs]))


_FIELDS = (*AGGREGATES, "decode_spread")


def _column(twin: Simulated, name: str) -> Floats:
    column = twin.steps[name].to_numpy(zero_copy_only=False)
    return np.nan_to_num(column.astype(np.float64))


def _sampled(answer: Answer, twin: Simulated, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many tokens that count each step of the simulation samples."""
    count = np.zeros(len(ends), dtype=np.int64)
    for id in answer.tokens_ns:
        if id in twin.sampled_ns:
            times = twin.sampled_ns[id]
            np.add.at(count, np.searchsorted(ends, times[: _counted(times)]), 1)
    return count


def _first_tokens(
    groups: Sequence[dict[int, tuple[int, int]]], twin: Simulated, ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return, for each step, the group that has the first tokens which the step samples.

    It is -1 for a step that samples no first token, and -2 if its first tokens came apart.
    """
    at = np.full(len(ends), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        for id, (_, index) in group.items():
            if index == 0 and id in twin.sampled_ns:
                step = np.searchsorted(ends, twin.sampled_ns[id][0])
                at[step] = number if at[step] in (-1, number) else -2
    return at


def _counted(seen: NDArray[np.int64]) -> int:
    """Return how many tokens of an answer count: the last of several is often written late, with the answer's end."""
    return max(len(seen) - 1, 1)


def _groups(answer: Answer) -> list[dict[int, tuple[int, int]]]:
    """Return the tokens that came together: the time and the number of the token by request, in order of time."""
    gaps = [np.diff(times) for times in answer.tokens_ns.values() if len(times) > 1]
    apart = _APART * float(np.median(np.concatenate(gaps))) if gaps else 0.0
    tokens = sorted(
        (int(time), id, index)
        for id, times in answer.tokens_ns.items()
        for index, time in enumerate(times[: _counted(times)])
    )
    groups: list[dict[int, tuple[int, int]]] = []
    before = 0
    for time, id, index in tokens:
        if not groups or id in groups[-1] or time - before > apart:
            groups.append({})
        groups[-1][id] = time, index
        before = time
    return groups
