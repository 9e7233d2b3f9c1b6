r"""DynoSim's side of `peers`. It runs in an environment with ai-dynamo and without tokentwin.

    python -m venv V
    V/bin/pip install ai-dynamo-runtime==1.6.1
    V/bin/pip install --no-deps ai-dynamo==1.6.1
    V/bin/python lab/benchmarks/peers/dynosim.py TRACE.jsonl WORKERS BLOCK_SIZE NUM_BLOCKS MAX_NUM_SEQS \
        MAX_BATCHED_TOKENS

TRACE is in Mooncake's format, with a hash for every 512 tokens. The script prints JSON: the replay's CPU seconds, and
the number of requests.
"""

from __future__ import annotations

import json
import sys
import time

from dynamo._core import run_mocker_trace_replay

trace, *numbers = sys.argv[1:]
workers, block_size, num_blocks, max_num_seqs, max_num_batched_tokens = map(int, numbers)
engine = {
    "backend": "vllm",
    "worker_type": "aggregated",
    "num_gpu_blocks": num_blocks,
    "block_size": block_size,
    "max_num_seqs": max_num_seqs,
    "max_num_batched_tokens": max_num_batched_tokens,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}
config = {"engine": engine, "dynamo": {"enable_local_indexer": True}}
began = time.process_time()
report = run_mocker_trace_replay([trace], config, num_workers=workers, router_mode="round_robin", trace_block_size=512)
cpu_s = time.process_time() - began
summary = report.summary() if callable(report.summary) else report.summary
print(json.dumps({"simulation_cpu_s": cpu_s, "requests": summary["completed_requests"]}))
