"""Failures of a served twin: failures of its replicas, refused requests, and answers that break off."""

from __future__ import annotations

from random import Random
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tokentwin.serving.deployments.fleet import FailuresConfig


class _Accident(BaseModel):
    """A period in which a share of the arriving requests fails.

    Times are simulated times from the twin's start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    at_s: float = Field(0.0, ge=0, le=1e9, description="time at which the failures begin, in seconds")
    for_s: float | None = Field(
        None, gt=0, le=1e9, description="duration of the failures in seconds; null: until the twin ends"
    )
    share: float = Field(1.0, gt=0, le=1, description="fraction of the requests that fail")
    replica: int | None = Field(
        None, ge=0, description="with ports_per_replica: index of the replica whose requests fail; null: all replicas"
    )


class RefusedRequests(_Accident):
    """A period in which requests are refused."""

    status: int = Field(503, ge=400, le=599, description="HTTP status of the answer")


class CutAnswers(_Accident):
    """A period in which the connections of answers break."""

    after_tokens: int = Field(
        1, ge=1, le=10**9, description="number of tokens that are sent before the connection breaks"
    )


class RequestFailures(BaseModel):
    """Failures of single requests."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    refusals: tuple[RefusedRequests, ...] = Field((), description="requests that are refused")
    cuts: tuple[CutAnswers, ...] = Field((), description="answers that break off")
    seed: int = Field(0, description="seed of the choice of the requests that fail")

    @property
    def of_one_replica(self) -> bool:
        """True if a failure names a replica."""
        return any(accident.replica is not None for accident in (*self.refusals, *self.cuts))


class ServedFailures(FailuresConfig, RequestFailures):
    """All failures of a twin: of its replicas (a deployment's `fleet.failures`), and of single requests."""

    @property
    def of_replicas(self) -> dict[str, Any]:
        """The failures of replicas, in the form of a deployment's `fleet.failures`."""
        return self.model_dump(exclude={"refusals", "cuts"})


_Kind = TypeVar("_Kind", RefusedRequests, CutAnswers)


class Accidents:
    """The choice of the requests that fail; it depends on the seed and on the order in which requests arrive.

    The times of `failures` count from `begin_s`.
    """

    def __init__(self, failures: RequestFailures, begin_s: float = 0.0) -> None:
        self.failures = failures
        self._begin_s = begin_s

    def refusal(self, id: int, place: int | None, now_s: float) -> RefusedRequests | None:
        """Return the failure that refuses request `id` to the replica at `place` at `now_s`; None without one."""
        return self._first(self.failures.refusals, id, place, now_s)

    def cut(self, id: int, place: int | None, now_s: float) -> CutAnswers | None:
        """Return the failure that breaks off the answer to request `id`, which arrives at `now_s`; None without one."""
        return self._first(self.failures.cuts, id, place, now_s)

    def _first(self, accidents: tuple[_Kind, ...], id: int, place: int | None, now_s: float) -> _Kind | None:
        now_s -= self._begin_s
        for number, accident in enumerate(accidents):
            active = accident.at_s <= now_s and (accident.for_s is None or now_s < accident.at_s + accident.for_s)
            if active and accident.replica in (None, place):
                drawn_for = f"{self.failures.seed}:{type(accident).__name__}:{number}:{id}"
                if Random(drawn_for).random() < accident.share:
                    return accident
        return None
