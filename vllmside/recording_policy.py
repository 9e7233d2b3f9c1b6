"""A policy of ours inside vLLM, with a recorder beside it: `PolicyScheduler` and `Recording` in one."""

from __future__ import annotations

from serving.request import Request
from vllmside.policy_scheduler import PolicyScheduler
from vllmside.recording_scheduler import Recording


class RecordingPolicyScheduler(Recording, PolicyScheduler):
    """A recorder of our policy's decisions. Its settings are those of both, in `additional_config.tokentwin`."""

    def _preempted(self, ours: Request) -> str:
        self.recorder.preempting(self._known[ours.id].request)
        return super()._preempted(ours)
