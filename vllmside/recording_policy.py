"""One of our policies in vLLM with a recorder: `PolicyScheduler` and `Recording` in one class."""

from __future__ import annotations

from tokentwin.serving.request import Request
from tokentwin.vllmside.policy_scheduler import PolicyScheduler
from tokentwin.vllmside.recording_scheduler import Recording


class RecordingPolicyScheduler(Recording, PolicyScheduler):
    """Our policy with a recorder of its decisions. The settings of both are in `additional_config.tokentwin`."""

    def _preempted(self, ours: Request) -> str:
        self.recorder.preempting(self._known[ours.id].request)
        return super()._preempted(ours)
