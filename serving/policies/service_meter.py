"""A meter of the service that each request is given: a policy keeps accounts without taking part in the rules."""

from __future__ import annotations

from typing import Protocol

from serving.request import Request


class ServiceMeter(Protocol):
    """A meter that hears of service at the moment it happens; the decode set's `MembershipListener` hears the rest."""

    def admitted(self, request: Request) -> None:
        """Record that `request` runs for the first time: its whole prompt is cached or will be computed."""

    def sampled(self, request: Request, tokens: int) -> None:
        """Record `tokens` output tokens of `request` outside the decode set; negative if they are taken back."""
