"""Who is told what each request is given: how a policy keeps accounts without taking part in the rules."""

from __future__ import annotations

from typing import Protocol

from serving.request import Request


class ServiceMeter(Protocol):
    """Told at the moment it happens; the decode set's `MembershipListener` is told the rest."""

    def admitted(self, request: Request) -> None:
        """`request` runs for the first time: its whole prompt will be computed, or was found."""

    def sampled(self, request: Request, tokens: int) -> None:
        """`request` gets `tokens` output tokens outside the decode set; negative if they are taken back."""
