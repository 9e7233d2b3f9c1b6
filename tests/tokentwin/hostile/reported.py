"""Mistakes that people found: each row once gave a traceback, a hang, or no error at all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from tests.tokentwin.hostile.case import PLAN, SIMULATE, TRAFFIC, Case
from tests.tokentwin.hostile.recordings import DEEP

POLICY = f"{SIMULATE} --policy m.py:Mine"
COMPARE = "compare --trace t.yaml --gpu H100 --model Llama-3.1-8B"
_DERIVED = "from tokentwin.serving.policies.vllm import VllmScheduler\nclass Mine(VllmScheduler):\n"


# What is added to a command that is right, and what the line must name.
PLANS = """
--gpu H100,,                                  -> gpu
--gpu H1000                                   -> gpu
--tp 1,                                       -> tp
--tp 0                                        -> tp|tensor
--tp 3                                        -> tp|tensor
--split 0:1                                   -> split
--split 1:1:1                                 -> split
--split x                                     -> split
--vary max_num_seqs=-1,5                      -> max_num_seqs
--vary max_num_seqs=                          -> vary|max_num_seqs
--vary nosuch=1                               -> nosuch
--vary max_num_seqs                           -> vary
--price H100=nan                              -> price
--price H100=-1                               -> price
--price nosuch=1                              -> price
--price 3                                     -> price
--router nosuch                               -> router
--policy nosuch                               -> policy
--policy no.py:Mine                           -> no.py
--risk 1.5                                    -> risk
--spares -1                                   -> spares
--window-s 0                                  -> window_s
--limit 0                                     -> limit
--rate-scale 0                                -> rate_scale
--max-replicas 0                              -> max_replicas
--jobs 0                                      -> jobs
--save no/such.json                           -> no/such.json
--save t.yaml                                 -> t.yaml
-c nothing                                    -> calibration
-d nothing.yaml                               -> deployment|nothing.yaml
--format xml                                  -> format
"""
COMPARISONS = """
--b nosuch=1                                  -> nosuch
--b policy                                    -> policy
--b policy=                                   -> policy
--b =x                                        -> b
--a max_num_seqs=-1                           -> max_num_seqs
--b replicas=0                                -> replicas
--b router=nosuch                             -> router
--seeds 0                                     -> seeds
--slo ttft                                    -> slo
--slo ttft:-1                                 -> slo
--slo 'ttft:5 ttft:6'                         -> slo
--warm-up -1                                  -> warm_up
--threshold nan                               -> threshold
--save no/x.json                              -> no/x.json
"""


def _rows(table: str) -> Iterator[tuple[str, str]]:
    for row in table.strip().splitlines():
        arguments, _, says = row.rpartition(" -> ")
        yield arguments.strip(), says


def _policy(body: str) -> dict[str, str]:
    return {"m.py": _DERIVED + "".join(f"    {line}\n" for line in body.splitlines())}


def cases() -> Iterator[Case]:
    yield from _files()
    yield from _arguments()
    yield from _own_code()


def _files() -> Iterator[Case]:
    for name in ("generate hi --json-schema d", "conformance d", "calibrate --from-case d -o out", "explain --model d"):
        words = name if not name.startswith("explain") else f"{name} --gpu H100"
        yield Case(words.replace(" d", " d.json", 1), {"d.json": DEEP}, ("nested too deeply|recursion|is not yaml",))
    yield Case("calibrate --from-iterations d.json --gpu H100 -o out", {"d.json": DEEP}, ("iteration log",))
    yield Case("conformance d.json.gz", {"d.json.gz": gzip.compress(DEEP.encode())}, ("nested too deeply",))
    yield Case("conformance d.json.gz", {"d.json.gz": gzip.compress(b"\0" * (1 << 28), 1)}, ("unpacks",))
    yield Case("conformance d.json", {"d.json": '{"config": 1, "config": 2}'}, ("config", "given twice"))
    nested = '{"architectures": ["KimiK25ForConditionalGeneration"], "text_config": ' * 300 + "1" + "}" * 300
    yield Case("model inspect config.json", {"config.json": nested}, ("vocab_size|text_config",))
    yield Case("model inspect config.json", {"config.json": DEEP}, ("nested too deeply",))
    for architecture in (3, [], ["Unknown" * 50], [3], {"a": 1}):
        text = json.dumps({"architectures": architecture})
        yield Case("model inspect config.json", {"config.json": text}, ("architectures",))
    for model in ("Llama-99B", "zzz", "x" * 5000, "a/b/c", "\x1b[2J"):
        yield Case(f"explain --gpu H100 --model '{model}'", {}, ("model", "tokentwin model list"))
        yield Case(f"{SIMULATE} --model '{model}'", {}, ("model", "tokentwin model list"))
    for failures in ("{mtbf_s: 0}", "{mtbf_s: -1}", "{mtbf_s: .nan}", "{recovery_s: -1}", "3", "[1]"):
        deployment = f"fleet: {{failures: {failures}}}"
        yield Case(f"{SIMULATE} -d d.yaml", {"d.yaml": deployment}, ("failures",), failures)
    both = "{gpu_memory_utilization: 0.9, scheduler: {num_blocks: 99}}"
    yield Case(f"{SIMULATE} -d d.yaml --num-blocks 9 --gpu-memory-utilization 0.9", {"d.yaml": both}, ("num_blocks",))
    for requests in ("99999999999999999999", "1000000000000", '"5"', "0", "-5", "5.5", ".inf", "[]", "true"):
        text = TRAFFIC.replace("requests: 5", f"requests: {requests}")
        for command in ("trace synth o.parquet --spec t.yaml", SIMULATE, PLAN):
            yield Case(command, {"t.yaml": text}, ("requests",), f"requests: {requests}")
    aliases = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text, says in (
        (aliases, "aliases"),
        ("requests: 5\nrequests: 6\n", "twice"),
        ("a: [", "yaml"),
        ("", "mapping|must be an object"),
    ):
        yield Case(SIMULATE, {"t.yaml": text}, (says,), text[:20])
        yield Case(f"{SIMULATE} -d d.yaml", {"d.yaml": text}, (says,), text[:20])


def _arguments() -> Iterator[Case]:
    for slo in ("ttft_ms p99<=1e-6", "tpot_ms p50<=0.0001", "ttft_ms p99<=0", "ttft_ms p101<=5", "ttft_ms p99<=5%",
                "attainment>=1.5", "attainment>=0", "speed p99<=5", "ttft_ms>=5", "ttft_ms p99<=nan"):  # fmt: skip
        yield Case(PLAN.replace("ttft_ms p99<=900", slo), {}, ("slo",), slo)
    for arguments, says in _rows(PLANS):
        yield Case(f"{PLAN} {arguments}", {}, (says,))
    for arguments, says in _rows(COMPARISONS):
        yield Case(f"{COMPARE} {arguments}", {}, (says,))
    yield Case("sweep s.yaml -o out --retry-failed", {"s.yaml": "{}"}, ("retry_failed", "resume"))
    yield Case("sweep s.yaml -o out --resume", {"s.yaml": "{}"}, ("base|out|resume",))
    for path in ("no/such/out", "t.yaml"):
        yield Case(f"trace convert t.yaml {path}", {}, ("output|trace",))
    yield Case("nosuch", {}, ("nosuch",))
    yield Case("trace nosuch", {}, ("nosuch",))


def _own_code() -> Iterator[Case]:
    broken = "def add(self, *a, **k):\n    class E(Exception):\n        def __str__(self): raise ValueError\n"
    broken += "        __repr__ = __str__\n    raise E"
    for body, says in (
        (broken, "cannot be read"),
        ("def add(self, *a, **k): raise ValueError('\\x1b[2J\\x07' + 'x' * 90)", "valueerror"),
        ("def add(self, *a, **k): raise SystemExit(0)", "systemexit"),
        ("def add(self, *a, **k): return None", "add"),
        ("def add(self, *a, **k):\n    r = super().add(*a, **k)\n    r.max_len = 3\n    return r", "max_len"),
        ("def add(self, *a, **k):\n    r = super().add(*a, **k)\n    r.prompt_len = 3\n    return r", "prompt_len"),
        ("def schedule(self): return 3", "attributeerror"),
        ("def schedule(self): 1 / 0", "zerodivisionerror"),
        ("def __init__(self, *a, **k): pass", "lacks|made"),
        ("def steady_steps(self): return -1", "steady_steps"),
    ):
        yield Case(POLICY, _policy(body), ("m.py:mine", says), body[:40])
    for text, says in (
        ("raise ValueError", "imported"), ("import nosuch", "imported"), ("x = 1", "mine"),
        ("class Mine: pass", "mine"),
        ("def f(:", "imported|syntax"), ("Mine = 3", "mine"), ("raise SystemExit(0)", "imported"),
    ):  # fmt: skip
        for command in (POLICY, f"{SIMULATE} --router m.py:Mine", "simulate t.yaml -c m.py:Mine -o out",
                        "policy check m.py:Mine", "router check m.py:Mine"):  # fmt: skip
            yield Case(command, {"m.py": text}, ("m.py", says), text)
    for text, says in (
        ("def Mine(plan): return 'x'", "returned"), ("def Mine(plan): return -1", "returned"),
        ("def Mine(plan): return float('nan')", "returned"), ("def Mine(plan): return 10**30", "returned"),
        ("def Mine(plan): 1 / 0", "zerodivisionerror"), ("def Mine(): return 1", "mine"),
    ):  # fmt: skip
        yield Case("simulate t.yaml -c m.py:Mine -o out", {"m.py": text}, ("m.py:mine", says), text)
