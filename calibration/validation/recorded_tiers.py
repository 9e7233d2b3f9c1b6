"""KV tiers whose transfers end when recorded ones did, so that every decision of a real run can be made again."""

from __future__ import annotations

from functools import partial
from typing import Any

from serving.deployments.config import Deployment
from serving.request import Request
from sim.clock import FLEET, TRANSFER_ENDS, Alarm, VirtualClock
from sim.kv_tiers import TieredKv
from sim.replica import Replica
from sim.run_log import RunLog

_NEVER_NS = 10**9  # delay after the last plan; no decision depends on later transfers


class RecordedTiers(TieredKv):
    """The tiers of one engine.

    `steps` are the rows of its steps; they say which transfers had ended before each plan, plans that ran nothing
    included.
    """

    def __init__(
        self, clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment, steps: list[dict[str, Any]]
    ) -> None:
        super().__init__(clock, log, replica, deployment)
        self._last_ns = steps[-1]["plan_ns"]
        self._came_ns: dict[int, list[int]] = {}  # end times of each request's loads, in order
        plans = [plan for step in steps for plan in (*(step["kv_attempts"] or ()), step)]
        self._released = {id for plan in plans for id in plan["released_ids"] or ()}
        self._keeping: dict[int, Request] = {}
        for plan in plans:
            for id in plan["loaded_ids"] or ():
                self._came_ns.setdefault(id, []).append(plan["plan_ns"])
            if plan["released_ids"]:  # the engine releases after loads, too
                Alarm(clock, plan["plan_ns"], FLEET, partial(self._release, plan["released_ids"]))

    def _loads_until(self, request: Request, ends_ns: int) -> None:
        came_ns = self._came_ns.get(request.id) or [self._last_ns + _NEVER_NS]
        at_ns = max(came_ns.pop(0), self._clock.now_ns)
        Alarm(self._clock, at_ns, TRANSFER_ENDS, lambda _: self._replica.loaded(request))

    def _keeps_until(self, request: Request, written_ns: int) -> bool:
        if request.id not in self._released:
            return False
        self._keeping[request.id] = request
        return True

    def _release(self, ids: list[int], alarm: Alarm) -> None:
        for id in ids:
            if (request := self._keeping.pop(id, None)) is not None:
                self._replica.release(request)
