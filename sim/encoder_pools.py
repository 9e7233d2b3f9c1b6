"""Encoders on GPUs of their own (E/P/D), coupled to the other replicas as by vLLM's proxy and its EC connector.

Each image, video or clip of a request becomes a job of an encoder replica, which vLLM's scheduler plans, with an
encoder cache of its own. When all of them are encoded, the request is routed to a replica that prefills it. The
embeddings are sent there, except those in its encoder cache, and the request runs when all have arrived. Embeddings
that were sent are kept for their request, also if it is preempted. Those that are finished are sent even if their
encoder replica has crashed since: as if they were stored outside of it. Requests without images pass the encoders by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.multimodal import find_tower
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES
from tokentwin.serving.encoder_cache import EncoderCache
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import PRIVATE, WorkloadRequest
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.links import Flow, Links
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog

if TYPE_CHECKING:
    from tokentwin.sim.fleet import Fleet, Life, PricedPool


class ApartUse(NamedTuple):
    """What encoder replicas did for `requests` requests with items.

    Attributes:
        replicas: number of encoder replicas that were started
        ready_ns: sum of the times for which they were ready
        busy_ns: sum of the times for which they encoded
        items: items of the requests; those in an encoder cache were not encoded again
        waiting_ns: sum over requests of the time until all items were encoded
        sending_ns: sum over requests of the time from then until all embeddings had arrived
    """

    replicas: int
    ready_ns: int
    busy_ns: int
    requests: int
    items: int
    waiting_ns: int
    sending_ns: int


class EncodingOnly:
    """The cost model of an encoder replica, whose steps take only the time of encoding."""

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        return 0

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [0] * steps


class _Nowhere:
    """The sink of rows about jobs, which are no requests."""

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None: ...
    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None: ...


class _Job:
    """One item of a request. `replica` and `live` are None while no encoder replica has it.

    Attributes:
        owner: id of the request
        number: index of the item in its request
        request: what the encoder replica gets
        source: index of the replica that has encoded it; -1 before
    """

    __slots__ = ("live", "number", "owner", "replica", "request", "source")

    def __init__(self, owner: int, number: int, request: WorkloadRequest) -> None:
        self.owner = owner
        self.number = number
        self.request = request
        self.replica: Replica | None = None
        self.live: Request | None = None
        self.source = -1


class _Stay:
    """A request whose items are encoded and sent. `left` counts the jobs, and then the transfers, not yet ended."""

    __slots__ = ("flows", "jobs", "left", "since_ns")

    def __init__(self, jobs: list[_Job], since_ns: int) -> None:
        self.jobs = jobs
        self.left = 0
        self.since_ns = since_ns
        self.flows: list[Flow] = []


class EncoderPools:
    """The jobs of the encoder replicas of a fleet, and the transfers of embeddings over `links`.

    Attributes:
        links: links that carry embeddings, and the KV of the fleet
        log: log of the encoder replicas, which writes nothing
        waiting: number of requests whose items are not all encoded

    Args:
        embedding_bytes: bytes of the embeddings of one token
        on_encoded: function that is called with the id of each request whose items are all encoded
        on_refused: function that is called with the id of a request that cannot be encoded, and the reason
    """

    def __init__(
        self,
        clock: VirtualClock,
        links: Links,
        embedding_bytes: int,
        on_encoded: Callable[[int], None],
        on_refused: Callable[[int, str], None],
    ) -> None:
        self.links = links
        self.log = RunLog(_Nowhere(), steps=False)
        self.waiting = 0
        self._clock = clock
        self._embedding_bytes = embedding_bytes
        self._on_encoded = on_encoded
        self._on_refused = on_refused
        self._stays: dict[int, _Stay] = {}  # by request id
        self._jobs: dict[int, _Job] = {}  # by the id of the job
        self._ids = count()
        self._unplaced: list[_Job] = []  # jobs for which no encoder replica is ready
        self._requests = self._items = self._waiting_ns = self._sending_ns = 0

    def open(self, fleet: Fleet) -> None:
        """Send jobs to `fleet` from now on, which calls `ended` and `lost`."""
        self._fleet = fleet
        fleet.on_ready.append(lambda _: self._place_again())

    # Called by the gateway

    def must_encode(self, request: WorkloadRequest) -> bool:
        """Return whether `request` has items, and none of them was given to `begin`."""
        return bool(request.items) and request.id not in self._stays

    def begin(self, request: WorkloadRequest) -> None:
        """Encode the items of `request`."""
        now = self._clock.now_ns
        stay = self._stays[request.id] = _Stay([], now)
        for number, item in enumerate(request.items):
            alone = replace(
                request,
                id=next(self._ids),
                arrival_ns=now,
                prompt=((PRIVATE, item.tokens),),
                output_len=0,
                max_tokens=None,
                structured=False,
                changes_logits=False,
                scores_prompt=False,
                grammar_compile_ns=0,
                adapter="",
                items=(item._replace(offset=0),),
            )
            stay.jobs.append(_Job(request.id, number, alone))
        stay.left = len(stay.jobs)
        self.waiting += 1
        self._requests += 1
        self._items += len(stay.jobs)
        for job in stay.jobs:
            self._jobs[job.request.id] = job
            self._place(job)
            if self._stays.get(request.id) is not stay:
                return  # it cannot be encoded

    def has_begun(self, id: int) -> bool:
        """Return whether an encoder replica has begun an item of request `id`."""
        stay = self._stays.get(id)
        return stay is not None and any(
            job.source >= 0 or (job.live is not None and job.live.admitted >= 0) for job in stay.jobs
        )

    def send(self, request: Request, replica: Replica) -> None:
        """Send the embeddings of `request` to `replica`, where it runs when they have arrived."""
        stay = self._stays[request.id]
        stay.since_ns, stay.left = self._clock.now_ns, 0
        cache: EncoderCache = cast(Any, replica.scheduler).encoding.cache  # the fleet has checked that there is one
        for job in stay.jobs:
            if cache.has(request, job.number):
                continue
            size = request.arrived.items[job.number].tokens * self._embedding_bytes
            arrived = partial(self._arrived, stay, request, replica)
            stay.flows.append(self.links.start(job.source, replica.index, size, arrived))
            stay.left += 1
        if stay.left:
            replica.hold(request)

    def _arrived(self, stay: _Stay, request: Request, replica: Replica) -> None:
        stay.left -= 1
        if not stay.left:
            self._sending_ns += self._clock.now_ns - stay.since_ns
            replica.let_go(request)

    def drop(self, id: int) -> None:
        """Stop the jobs and the transfers of request `id`, which leaves or begins again."""
        stay = self._stays.pop(id, None)
        if stay is None:
            return
        self.waiting -= any(job.source < 0 for job in stay.jobs)
        for flow in stay.flows:
            self.links.cancel(flow)
        for job in stay.jobs:
            if self._jobs.pop(job.request.id, None) is None:
                continue
            if job.replica is not None and job.live is not None:
                job.replica.withdraw(job.live)
                self.log.withdrawn(job.live, self._clock.now_ns)
            elif job in self._unplaced:
                self._unplaced.remove(job)

    # Called by the fleet

    def ended(self, live: Request) -> None:
        """Record that a job has ended: its item is encoded, or can never be."""
        job = self._jobs.pop(live.id)
        if live.status is Status.REJECTED:
            self._on_refused(job.owner, live.reason)
            return
        assert job.replica is not None
        job.source = job.replica.index
        stay = self._stays[job.owner]
        stay.left -= 1
        if not stay.left:
            self.waiting -= 1
            self._waiting_ns += self._clock.now_ns - stay.since_ns
            self._on_encoded(job.owner)

    def lost(self, lives: Sequence[Request]) -> None:
        """Send the jobs of an encoder replica that has crashed to other replicas."""
        jobs = [self._jobs[live.id] for live in lives]
        for job, live in zip(jobs, lives, strict=True):
            self.log.withdrawn(live, self._clock.now_ns)
            job.replica = job.live = None
        self._place_all(jobs)

    def _place_again(self) -> None:
        unplaced, self._unplaced = self._unplaced, []
        self._place_all(unplaced)

    def _place_all(self, jobs: Sequence[_Job]) -> None:
        """Place jobs; one that cannot be placed ends its request, and with it the request's other jobs."""
        for job in jobs:
            if job.request.id in self._jobs:
                self._place(job)

    def _place(self, job: _Job) -> None:
        fleet = self._fleet
        replica = fleet.route_encode(job.request)
        if replica is not None:
            job.replica = replica
            job.live = replica.offer(job.request, self._clock.now_ns)
        elif fleet.awaits_encode(job.request):
            self._unplaced.append(job)
        else:
            del self._jobs[job.request.id]
            self._on_refused(job.owner, "no encoder replica is left")

    def use(self, lives: Iterable[Life], end_ns: int) -> ApartUse:
        """Return what was done up to `end_ns`; `lives` are those of the encoder replicas."""
        lives = list(lives)
        ready = [life.ready_ns for life in lives]
        ends = [end_ns if life.ended_ns is None else life.ended_ns for life in lives]
        ready_ns = sum(end - since for since, end in zip(ready, ends, strict=True) if since is not None)
        busy_ns = sum(life.replica.encoder.use.encoding_ns for life in lives if life.replica.encoder is not None)
        sums = self._requests, self._items, self._waiting_ns, self._sending_ns
        return ApartUse(len(lives), ready_ns, busy_ns, *sums)


def encoder_scheduler(deployment: Deployment) -> SchedulerConfig:
    """Return the settings of the scheduler of an encoder replica, which keeps no KV and samples nothing."""
    settings = deployment.staged_settings
    assert settings.max_num_encoder_input_tokens is not None
    return settings.model_copy(
        update={
            "max_model_len": max(settings.max_model_len, settings.max_num_encoder_input_tokens),
            "kv_reservation": "none",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "disable_chunked_mm_input": False,
            "long_prefill_token_threshold": 0,
            "prefill_schedule_interval": 1,
            "async_scheduling": False,
            "speculative": None,
            "kv_groups": (),
            "state_blocks": 0,
            "max_loras": None,
        }
    )


def embedding_bytes(pools: Sequence[PricedPool]) -> int:
    """Return the bytes of the embeddings of one token that an encoder sends.

    Raises UserError if the engines of a fleet with encoder replicas read no images, or have different models.
    """
    first = pools[0].deployment
    for pool in pools:
        own, where = pool.deployment, f"fleet.pools.{pool.config.name}.deployment"
        if own.multimodal is None:
            remedy = (
                "is missing, and the fleet has a pool of role encode; set it (docs/multimodal.md), or drop the pool"
            )
            raise UserError(f"{where}.multimodal", None, remedy)
        if own.model != first.model:
            remedy = f"must be {first.model}, because encoder replicas send embeddings to all other pools"
            raise UserError(f"{where}.model", own.model, remedy)
    assert first.multimodal is not None
    tower = find_tower(first.model, first.multimodal)
    width = tower.width if tower is not None else 1
    return int(DTYPE_BYTES[first.dtype] * find_model(first.model).hidden_size * width)
