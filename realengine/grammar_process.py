"""Processes that compile and keep grammars: `python -m tokentwin.realengine.grammar_process`, with five arguments.

llguidance cannot be interrupted, and an expression of 40 bytes can take it hours. So each grammar has a process, which
the system ends when a call takes too much of the processor's time. The first process only reads the tokenizer; for each
connection that comes over its socket it forks one that compiles the first message, a grammar, and then answers calls of
the methods of `tokentwin.realengine.grammar.Grammar`. Nothing is compiled twice: answers with the same grammar share
its process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tokentwin.realengine.grammar import Grammar, library

_CALL_S = 1.0  # CPU time for a mask or a token
_MOST_BYTES = 4 << 30  # address space


def main() -> None:
    """Fork a process for each connection, until the socket is closed at its other end."""
    _, number, within_s, folder, vocab_size, *eos_ids = sys.argv
    path = str(Path(folder) / "tokenizer.json")
    eos = list(map(int, eos_ids)) or None
    tokens = library().LLTokenizer(path, n_vocab=int(vocab_size), eos_token=eos)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that has ended is not waited for
    with socket.socket(fileno=int(number)) as orders:
        while files := socket.recv_fds(orders, 1, 1)[1]:
            if os.fork() == 0:
                orders.close()
                with Connection(files[0]) as calls:
                    _serve(tokens, calls, float(within_s))
                os._exit(0)
            os.close(files[0])


def _serve(tokens: object, calls: Connection, within_s: float) -> None:
    """Compile a grammar in `within_s` of CPU time, say so, and answer calls for answers, each of which has an id."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, resource.RLIM_INFINITY))
    grammar = calls.recv()
    signal.setitimer(signal.ITIMER_PROF, within_s)
    matcher = library().LLMatcher(tokens, grammar, log_level=0)
    answers: dict[int, Grammar] = {}
    result: object = None
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            calls.send(result)
            id, method, arguments = calls.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, _CALL_S)
        if method == "drop":
            answers.pop(id, None)
            result = None
            continue
        answer = answers.get(id) or answers.setdefault(id, Grammar(matcher.deep_copy()))
        result = getattr(answer, method)(*arguments), answer.failed


if __name__ == "__main__":
    main()
