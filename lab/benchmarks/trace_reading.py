"""CPU seconds and peak memory of a process that reads a text trace of a million requests.

`python -m lab.benchmarks.trace_reading [requests]` writes a trace of each format into a temporary folder, and reads
each in two new processes: one has the reader's workload, the other also passes over its requests once. `import` is a
process that reads nothing. The targets for reading are 3 s and 400 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_READ = "from tokentwin.traces.formats.trace_file import read_workload; requests = read_workload({!r}).requests"
# Not ru_maxrss: it begins with the memory of the process that started this one.
_TELL = "; import re, time; status = open('/proc/self/status').read(); "
_TELL += "print(time.process_time(), re.search(r'VmHWM:\\s+(\\d+)', status)[1])"
_PASS = "; sum(request.prompt_len for request in requests)"


def _lines(requests: int) -> dict[str, Callable[[], Iterator[str]]]:
    rng = np.random.default_rng(0)
    at_ms = np.cumsum(rng.exponential(10.0, requests)).astype(np.int64).tolist()
    prompts = np.clip(rng.lognormal(8.4, 0.8, requests), 1, 120_000).astype(np.int64).tolist()
    outputs = np.clip(rng.lognormal(5.0, 0.8, requests), 1, 4_000).astype(np.int64).tolist()
    rows = list(zip(at_ms, prompts, outputs, strict=True))

    def simple() -> Iterator[str]:
        yield "arrival_s,prompt_tokens,output_tokens,tenant\n"
        yield from (f"{at / 1e3},{prompt},{output},t{at % 7}\n" for at, prompt, output in rows)

    def azure() -> Iterator[str]:
        yield "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        seconds = np.datetime64("2023-11-16T18:15:46", "ms") + np.array(at_ms)
        for when, (_, prompt, output) in zip(np.datetime_as_string(seconds), rows, strict=True):
            yield f"{when.replace('T', ' ')}0000,{prompt},{output}\r\n"

    def mooncake() -> Iterator[str]:
        following = 0
        for at, prompt, output in rows:
            blocks = -(-prompt // 512)
            ids = [0, *range(following, following + blocks - 1)]
            following += blocks - 1
            yield f'{{"timestamp": {at}, "input_length": {prompt}, "output_length": {output}, "hash_ids": {ids}}}\n'

    return {"simple.csv": simple, "azure.csv": azure, "mooncake.jsonl": mooncake}


def _cost(code: str) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in MB of a process that runs `code`, which Linux tells it."""
    done = subprocess.run([sys.executable, "-c", code + _TELL], check=True, capture_output=True, text=True)
    cpu_s, memory_kb = done.stdout.split()
    return float(cpu_s), int(memory_kb) / 1024


def main(requests: int) -> None:
    print(f"{'trace':16}{'file MB':>9}{'read s':>9}{'MB':>7}{'and pass s':>12}{'MB':>7}")
    cpu_s, memory = _cost("import tokentwin.traces.formats.trace_file")
    print(f"{'import':16}{'':9}{cpu_s:9.2f}{memory:7.0f}")
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in _lines(requests).items():
            path = Path(folder, name)
            with path.open("w", newline="") as file:
                file.writelines(lines())
            read, passed = _cost(_READ.format(str(path))), _cost(_READ.format(str(path)) + _PASS)
            size = path.stat().st_size / 1e6
            print(f"{name:16}{size:9.0f}{read[0]:9.2f}{read[1]:7.0f}{passed[0]:12.2f}{passed[1]:7.0f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
