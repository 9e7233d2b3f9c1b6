"""Answers of two servers, brought into one form and compared.

Ids, times and the wording of messages are left out; a field that is null counts as one that is not there; numbers
agree within the number format of the model; chunks of a stream are joined, because a server may send several tokens
at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

from tests.vllm.door_cases import Case

_OWN = {"id", "created", "system_fingerprint", "root", "owned_by", "permission", "kv_transfer_params"}
_TOLERANCE = 0.02  # of a log-probability


def answer(address: tuple[str, int], case: Case) -> dict[str, Any]:
    """Send the request of `case`; return status and answer, joined and without values that are a server's own."""
    connection = HTTPConnection(*address, timeout=120)
    data = case.body if isinstance(case.body, bytes | None) else json.dumps(case.body).encode()
    try:
        connection.request(case.method, case.path, data, dict(case.headers))
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    kind = (response.headers.get("Content-Type") or "").split(";")[0]
    if kind == "text/event-stream":
        return {"status": response.status, "kind": kind, "stream": _joined(body.decode())}
    try:
        document = json.loads(body) if body else None
    except ValueError:
        document = body.decode(errors="replace")
    return {"status": response.status, "kind": kind if body else "", "document": _public(document)}


def _public(value: Any) -> Any:
    """Return `value` without ids, times, wording and null."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in _OWN and one is not None}
        if isinstance(kept.get("message"), str):  # of an error
            del kept["message"]
        return {name: _public(one) for name, one in kept.items()}
    return [_public(one) for one in value] if isinstance(value, list) else value


def _joined(text: str) -> dict[str, Any]:
    """Return the order of a stream's events by kind, and by choice all text, tokens and log-probabilities."""
    order: list[str] = []
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for block in text.split("\n\n"):
        if not block:
            continue
        data = block.removeprefix("data: ")
        kind = "done" if data == "[DONE]" else ""
        if not kind:
            event = json.loads(data)
            kind = _kind(event)
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                _add(choices.setdefault(choice["index"], {}), _public(choice))
        if not order or order[-1] != kind:
            order.append(kind)
    return {"order": order, "choices": {str(index): choices[index] for index in sorted(choices)}, "usage": usage}


def _kind(event: dict[str, Any]) -> str:
    if "error" in event:
        return "error"
    if not event.get("choices"):
        return "usage"
    choice = event["choices"][0]
    if choice.get("delta", {}).get("role"):
        return "role"
    return "text"


def _add(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append the text, lists and objects of `piece` to `whole`."""
    for name, value in piece.items():
        if name == "index":
            continue
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif name in whole and isinstance(value, str | list) and name not in ("role", "finish_reason", "object"):
            whole[name] = whole[name] + value
        else:
            whole[name] = value


def differences(norm: Any, ours: Any, where: str = "") -> Iterator[str]:
    """Return the differences of `ours` from `norm`, one line each."""
    if isinstance(norm, dict) and isinstance(ours, dict):
        for name in sorted({*norm, *ours}):
            yield from differences(norm.get(name), ours.get(name), f"{where}.{name}" if where else name)
    elif isinstance(norm, list) and isinstance(ours, list) and len(norm) == len(ours):
        for at, (one, other) in enumerate(zip(norm, ours, strict=True)):
            yield from differences(one, other, f"{where}[{at}]")
    elif not _alike(norm, ours):
        yield f"{where}: {json.dumps(norm)[:160]} | {json.dumps(ours)[:160]}"


def _alike(norm: Any, ours: Any) -> bool:
    numbers = isinstance(norm, float) or isinstance(ours, float)
    if numbers and isinstance(norm, int | float) and isinstance(ours, int | float):
        return abs(norm - ours) <= _TOLERANCE
    return bool(norm == ours) or (not norm and not ours and norm is not False and ours is not False)


def families(exposition: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the type and the label names of each of vLLM's metrics in Prometheus' text format."""
    types = dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)", exposition, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in types}
    for sample, pairs in re.findall(r"^(vllm:\w+)\{(.*)\} \S+$", exposition, re.MULTILINE):
        name = next(one for one in (sample, re.sub("_(bucket|sum|count)$", "", sample)) if one in types)
        labels[name] |= set(re.findall(r'(\w+)="', pairs))
    return {name: (types[name], tuple(sorted(labels[name]))) for name in types if not name.endswith("_created")}
