"""How many engines are behind a URL, from the streams that a long prompt delays.

A prompt delays all requests that decode on its engine, and no others. Streams that the same prompts delay share an
engine.
"""

from __future__ import annotations

import numpy as np

from tokentwin.planning.learn.answers import Answer, Times

_DELAYED = 1.5  # a gap between two tokens, in usual gaps, from which on a stream was delayed
_LONG = 512  # minimum length of a prompt that delays a stream visibly
_ALIKE = 0.8  # share of the prompts about which two streams of one engine agree


def engines_of(answer: Answer) -> int:
    """Return the number of engines that answered `questions.prompts_into_decodes`; 1 if the answer does not tell.

    An engine that no prompt reached is counted by the streams that no prompt delayed, if all engines have as many.
    """
    requests = [one for one in answer.question.workload.requests if one.id in answer.tokens_ns]
    prompts = [one.id for one in requests if one.session == "prompts" and one.prompt_len >= _LONG]
    streams = [one.id for one in requests if one.session != "prompts"]
    during = [id for id in prompts if all(_spans(answer.tokens_ns[one], answer, id) for one in streams)]
    if not during or len(streams) < 2:
        return 1
    delayed = np.array([[_delayed(answer.tokens_ns[stream], answer, id) for id in during] for stream in streams])
    groups: list[list[int]] = []
    for stream in np.flatnonzero(delayed.any(axis=1)):
        for group in groups:
            if np.mean(delayed[group[0]] == delayed[stream]) >= _ALIKE:
                group.append(int(stream))
                break
        else:
            groups.append([int(stream)])
    return round(len(streams) / float(np.median([len(group) for group in groups]))) if groups else 1


def _spans(stream: Times, answer: Answer, prompt: int) -> bool:
    """Return whether a stream had tokens before and after a prompt was computed."""
    return bool(stream[0] < answer.sent_ns[prompt] and answer.tokens_ns[prompt][0] < stream[-1])


def _delayed(stream: Times, answer: Answer, prompt: int) -> bool:
    """Return whether a stream waited longer than usual for a token while a prompt was computed."""
    gaps = np.diff(stream)
    meanwhile = (stream[1:] > answer.sent_ns[prompt]) & (stream[:-1] < answer.tokens_ns[prompt][0])
    return bool(meanwhile.any() and gaps[meanwhile].max() > _DELAYED * np.median(gaps))
