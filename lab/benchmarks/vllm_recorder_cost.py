"""The cost of recording for vLLM's engine: the recorder's CPU time per step, in the engine's and the writer's thread.

`python -m lab.benchmarks.vllm_recorder_cost` needs no vLLM: it passes the steps of a full batch to the recorder, as a
scheduler would. It prints the mean over the least disturbed of ten parts of the run and, in brackets, over the whole
run. The goal is less than 1 % of a step of 10 ms, which is 100 us.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from tests.vllmside.stand_in import Scheduler, request
from tests.vllmside.test_recorded_run import RUN
from tokentwin.traces.live_recording import LiveRecording
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.vllmside.engine_events import EngineEvents, Event
from tokentwin.vllmside.recorded_run import RecordedRun
from tokentwin.vllmside.writer_thread import WriterThread


class Timed:
    """A run that notes the CPU time of handling each event, in ns."""

    def __init__(self, run: RecordedRun) -> None:
        self.cpu_ns: list[int] = []
        self._run = run

    @property
    def goes_on(self) -> bool:
        return self._run.goes_on

    def take(self, event: Event) -> None:
        began = time.thread_time_ns()
        self._run.take(event)
        self.cpu_ns.append(time.thread_time_ns() - began)


def measure(rows: int, steps: int, out: Path, pause_s: float) -> None:
    run = RecordedRun(LiveRecording(RecordingWriter(out, RUN)), 16, 1 << 16)
    timed = Timed(run)
    thread = WriterThread(timed, 1_000_000)
    events = EngineEvents(
        thread.put, max_model_len=1 << 20, drafts=False, overlapped=False, times_thread=False,
        started_ns=time.perf_counter_ns(), started_s=time.time(),
    )  # fmt: skip
    scheduler = Scheduler()
    names = [f"cmpl-{number:032x}" for number in range(rows)]
    for name in names:
        one = request(name, 500, 1 << 19, [b"%s%d" % (name.encode(), block) for block in range(31)])
        events.arrived(one)
        scheduler.requests[name] = one
    one_each = dict.fromkeys(names, 1)
    in_loop_ns = []
    for step in range(steps):
        new = {} if step else dict.fromkeys(names, 499)
        output, sent = scheduler.plan(one_each, new), scheduler.outputs(one_each)
        began = time.thread_time_ns()
        events.planned(scheduler, output, events.now())
        flight = events.returning(output, None)
        assert flight is not None
        events.returned(flight, sent)
        in_loop_ns.append(time.thread_time_ns() - began)
        time.sleep(pause_s)
    thread.close(lambda: run.close(events.now(), "complete", {}), 600)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size = sum(file.stat().st_size for file in out.iterdir()) / steps
    print(
        f"{rows:>5} rows, CPU us a step: {_calm(in_loop_ns)} in the engine's loop, "
        f"{_calm(timed.cpu_ns[-steps:])} in the writer's thread; {size:.0f} bytes a step; "
        f"{'recorded' if thread.goes_on else 'GAVE UP'}; at most {peak_mb:.0f} MB in all"
    )


def _calm(cpu_ns: list[int]) -> str:
    """Return the mean of the least disturbed of ten parts, and of all parts.

    Other work on a shared core is counted, too.
    """
    part = len(cpu_ns) // 10
    means = sorted(sum(cpu_ns[at : at + part]) / part / 1000 for at in range(0, part * 10, part))
    return f"{means[0]:.0f} ({sum(means) / len(means):.0f})"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=5000)
    arguments.add_argument("--pause-ms", type=float, default=1.0, help="time of a step")
    arguments.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for count in given.rows:
            measure(count, given.steps, Path(folder) / str(count), given.pause_ms / 1000)
