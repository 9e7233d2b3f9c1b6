"""The main loop of the engine process, which passes messages between the API processes and a backend."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, sleep

import zmq

from tokentwin.apiserver.backend import Backend
from tokentwin.apiserver.exchange import Exchange
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import (
    Abort,
    Add,
    Alive,
    Asked,
    Delivered,
    Drain,
    Follow,
    Hello,
    Late,
    Message,
    Plant,
    Pulse,
    Reply,
    Rest,
    Scrape,
    Show,
)
from tokentwin.apiserver.sleep import Done, Sleep

_DELIVERED_S = 2.0  # time to wait at the end for reports that the last answers were delivered


class EngineProcess:
    """A loop that serves until `stop` is called and every request has ended; a second `stop` ends it at once.

    `most` is the maximum number of requests under way; further requests are refused. `poller` also wakes when a message
    comes on the socket `woken`.
    """

    def __init__(
        self,
        backend: Backend,
        exchange: Exchange,
        ledger: Ledger,
        metrics: LiveMetrics,
        most: int,
    ) -> None:
        self._backend = backend
        self._exchange = exchange
        self._ledger = ledger
        self._metrics = metrics
        self._most = most
        self._stops = 0
        self._sleep = Sleep(backend, self._add)

    def stop(self) -> None:
        self._stops += 1

    def run(self, poller: zmq.Poller, woken: zmq.Socket[bytes]) -> None:
        while not self._stops:
            self._turn(poller, woken)
        for peer in self._exchange.peers:
            self._exchange.send(peer, Drain())
        for id in self._sleep.waiting:
            self._exchange.end(id, "refused", "the server is about to end")
        self._sleep.waiting.clear()
        self._exchange.flush(0)
        while self._stops == 1 and self._ledger.under_way:
            self._turn(poller, woken)
        self._backend.close()
        until = monotonic() + _DELIVERED_S
        while self._ledger.undelivered and monotonic() < until:
            poller.poll(100)
            self._receive()
        self._ledger.close()

    def _turn(self, poller: zmq.Poller, woken: zmq.Socket[bytes]) -> None:
        wait_s = self._backend.turn()
        if self._sleep.level is not None:
            until_s = self._sleep.turn(self._ledger.under_way)
            self._metrics.sleeps(self._sleep.level)
            if until_s is not None:
                wait_s = until_s if wait_s is None else min(wait_s, until_s)
        if wait_s is None:
            poller.poll()
        else:
            until = monotonic() + wait_s
            if not poller.poll(int(wait_s * 1e3)):
                sleep(max(until - monotonic(), 0))  # the rest of the wait: ZeroMQ counts whole milliseconds
        with suppress(zmq.Again):
            while True:
                woken.recv(zmq.NOBLOCK)
        self._receive()

    def _receive(self) -> None:
        for peer, message in self._exchange.received():
            self._take(peer, message)

    def _take(self, peer: bytes, message: Message) -> None:
        exchange = self._exchange
        match message:
            case Hello():
                for id in exchange.open_ids(peer):  # a new API process knows nothing of the old one's requests
                    self._abort(id, "its API process has ended")
                exchange.send(peer, self._backend.about)
            case Add():
                id = exchange.open(peer, message.id)
                if (refusal := self._backend.refusal(id, message)) is not None:
                    status, why = refusal
                    exchange.end(id, "refused", why, status)
                    exchange.flush(0)
                elif self._stops or self._ledger.under_way + len(self._sleep.waiting) >= self._most:
                    why = "the server is about to end" if self._stops else f"{self._most} requests are under way"
                    self._metrics.refused()
                    exchange.end(id, "refused", why)
                    exchange.flush(0)
                elif self._sleep.level is not None:
                    self._sleep.waiting[id] = message
                else:
                    self._add(id, message)
            case Abort() if (known := exchange.known(peer, message.id)) is not None:
                if message.why == "stop":
                    self._backend.abort(known, "stop")
                else:
                    self._abort(known, message.why)
            case Delivered() if (known := exchange.known(peer, message.id)) is not None:
                self._ledger.delivered(known, message)
                exchange.forget(known)
            case Late():
                self._metrics.late(message)
            case Asked():
                self._metrics.asked(message)
            case Pulse():
                exchange.send(peer, Alive(self._backend.well()))
            case Scrape():
                text = self._metrics.text(self._backend.replicas(), self._ledger.records, message.replica)
                exchange.send(peer, Reply(message.id, text))
            case Follow():
                exchange.send(peer, Reply(message.id, self._ledger.journey(message.name)))
            case Plant():
                exchange.send(peer, Reply(message.id, self._backend.plant(message.failures).encode()))
            case Show():
                exchange.send(peer, Reply(message.id, self._metrics.show(message.metrics, self._backend.replicas())))
            case Rest():
                self._rest(message, lambda: exchange.send(peer, Reply(message.id, self._state())))

    def _rest(self, order: Rest, done: Done) -> None:
        if order.asks:
            done()
        elif order.level is None:
            self._sleep.end(done)
        else:
            self._sleep.begin(order.level, done)
            if order.aborts:
                for id in self._exchange.ids:
                    if id not in self._sleep.waiting:
                        self._backend.abort(id, "the server goes to sleep")
        self._sleep.turn(self._ledger.under_way)
        self._metrics.sleeps(self._sleep.level)

    def _state(self) -> bytes:
        return b"false" if self._sleep.level is None else b"true"

    def _add(self, id: int, asked: Add) -> None:
        self._ledger.expects(id, asked)
        self._backend.add(id, asked)

    def _abort(self, id: int, why: str) -> None:
        """Abort request `id`, whose client or API process is gone."""
        if self._sleep.waiting.pop(id, None) is not None:
            self._exchange.forget(id)
            return
        self._backend.abort(id, why)
        self._ledger.delivered(id, None)
        self._exchange.forget(id)
