"""vLLM's own scheduler with a recorder of its decisions.

Use it with `--scheduler-cls tokentwin.vllmside.recording_scheduler.RecordingScheduler`, in the plain or the overlapped
loop. The recorder decides nothing, and its errors do not reach the engine: the recording ends with one line in the log.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tokentwin.vllmside.engine_recorder import EngineRecorder, open_recorder, rows_recorder
from tokentwin.vllmside.record_settings import RecordSettings, record_settings
from tokentwin.vllmside.recorded_run import RecordedRows
from tokentwin.vllmside.vllm_interface import check_interface

_SCHEDULER = (
    "schedule", "update_from_output", "add_request", "finish_requests", "_preempt_request", "update_draft_token_ids",
    "get_request_counts", "reset_prefix_cache", "shutdown",
)  # fmt: skip
_OUTPUT = (
    "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "scheduled_spec_decode_tokens",
    "has_structured_output_requests",
)  # fmt: skip


_Before: Any = Scheduler if TYPE_CHECKING else object


class Recording(_Before):
    """A mixin that adds a recorder to a vLLM scheduler; it comes before the scheduler among the base classes."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = record_settings(vllm_config.additional_config, os.environ)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self._recorder: EngineRecorder = open_recorder(self, settings, vllm.__version__)

    @property
    def recorder(self) -> EngineRecorder:
        """The recorder of the current recording."""
        return self._recorder

    def record(self, settings: RecordSettings) -> None:
        """End the current recording, and begin another one."""
        self._recorder.close()
        self._recorder = open_recorder(self, settings, vllm.__version__)

    def record_rows(self, rows: RecordedRows, started_ns: int) -> EngineRecorder:
        """End the recording, and pass rows to `rows` from now on; `started_ns` (perf_counter_ns) is time 0."""
        self._recorder.close()
        self._recorder = rows_recorder(self, rows, started_ns, vllm.__version__)
        return self._recorder

    def add_request(self, request: Any) -> None:
        self._recorder.arriving(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plan_ns = self._recorder.now()
        output = super().schedule(*args, **kwargs)
        self._recorder.planned(self, output, plan_ns)
        return output

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._recorder.preempting(request)
        super()._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        flight = self._recorder.returning(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._recorder.returned(flight, outputs)
        return outputs

    def update_draft_token_ids(self, *args: Any, **kwargs: Any) -> None:
        super().update_draft_token_ids(*args, **kwargs)
        self._recorder.proposing()

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        leaving = self._recorder.leaving(request_ids)
        left = super().finish_requests(request_ids, *args, **kwargs)
        self._recorder.left(leaving)
        return left

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._recorder.cache_resets += 1
        return super().reset_prefix_cache(*args, **kwargs)

    def shutdown(self) -> None:
        self._recorder.close()
        super().shutdown()


class RecordingScheduler(Recording, Scheduler):
    """vLLM's scheduler of the configured loop (plain or overlapped), with a recorder."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> RecordingScheduler:
        check_interface(vllm.__version__, ((Scheduler, _SCHEDULER), (SchedulerOutput, _OUTPUT)))
        overlapped = bool(vllm_config.scheduler_config.async_scheduling)
        return object.__new__(_Overlapped if overlapped and cls is RecordingScheduler else cls)


class _Overlapped(RecordingScheduler, AsyncScheduler):
    """The recording scheduler of the overlapped loop."""
