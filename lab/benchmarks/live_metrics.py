"""The cost of a running server's metrics for its engine process, as CPU time of one core.

    python -m lab.benchmarks.live_metrics [--replicas 4] [--streams 1000] [--tokens-per-s 20] [--seconds 10]

Each stream gets its tokens from steps of its replica; its request ends after 200 tokens, and another begins. The last
line has the figures as JSON: percent of a core for counting, microseconds a token, milliseconds a scrape.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter_ns, process_time_ns

from tokentwin.apiserver.engine_messages import Admitted, StepEnd
from tokentwin.apiserver.live_metrics import LiveMetrics, ReplicaNow
from tokentwin.apiserver.messages import Add
from tokentwin.serving.deployments.config import Deployment

_OUTPUT = 200
_SCRAPES = 20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--replicas", type=int, default=4)
    options.add_argument("--streams", type=int, default=1000)
    options.add_argument("--tokens-per-s", type=int, default=20)
    options.add_argument("--seconds", type=int, default=10)
    asked = options.parse_args()
    metrics = LiveMetrics("a-model", 131_072)
    batches = [
        [Stream(metrics, at, 0) for at in range(r, asked.streams, asked.replicas)] for r in range(asked.replicas)
    ]
    next_id, gap_ns, spent_ns = asked.streams, 10**9 // asked.tokens_per_s, 0
    for step in range(1, asked.seconds * asked.tokens_per_s + 1):
        for replica, batch in enumerate(batches):
            now_ns = step * gap_ns + replica
            admitted = [Admitted(one.id, 1000, 160, 0) for one in batch if one.left == one.all]
            began_ns = process_time_ns()
            ids = [one.id for one in batch]
            metrics.step(StepEnd(replica, now_ns, len(batch), 0, 0, 0.5, len(batch), len(batch), ids, admitted, ()))
            spent_ns += process_time_ns() - began_ns
            for at, one in enumerate(batch):
                one.left -= 1
                if not one.left:
                    began_ns = process_time_ns()
                    one.end(metrics, replica, now_ns)
                    batch[at] = Stream(metrics, next_id, now_ns)
                    spent_ns += process_time_ns() - began_ns
                    next_id += 1
    replicas = [ReplicaNow(number, True, 4095, Deployment()) for number in range(asked.replicas)]
    began_ns = perf_counter_ns()
    for _ in range(_SCRAPES):
        text = metrics.text(replicas, records=True)
    scrape_ms = (perf_counter_ns() - began_ns) / 1e6 / _SCRAPES
    tokens = asked.streams * asked.tokens_per_s * asked.seconds
    figures = {
        "percent_of_a_core": round(spent_ns / asked.seconds / 1e7, 2),
        "us_per_token": round(spent_ns / 1e3 / tokens, 3),
        "scrape_ms": round(scrape_ms, 2),
        "scrape_lines": text.count(b"\n"),
    }
    print(json.dumps(figures))


class Stream:
    """A request under way; the first ones end at different times."""

    def __init__(self, metrics: LiveMetrics, id: int, now_ns: int) -> None:
        self.id = id
        self.now_ns = now_ns
        self.all = self.left = _OUTPUT if now_ns else 1 + id % _OUTPUT
        metrics.expects(id, now_ns)

    def end(self, metrics: LiveMetrics, replica: int, now_ns: int) -> None:
        """End the request, after its last token."""
        row = {
            "request_id": self.id,
            "replica": replica,
            "status": "finished",
            "reason": "",
            "prompt_tokens": 1000,
            "output_tokens": self.all,
            "prefix_hit_tokens": 160,
            "arrival_ns": self.now_ns,
            "scheduled_ns": self.now_ns,
            "first_token_ns": self.now_ns,
            "finish_ns": now_ns,
            "preemptions": 0,
        }
        metrics.request(row, Add(self.id, [], self.all, self.now_ns))


if __name__ == "__main__":
    main()
