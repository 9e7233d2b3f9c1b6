"""The orders of the supervisor to a process of a server: when to end. A process also ends if the supervisor is gone.

Signals are for the supervisor. A terminal, or a container that ends, sends them to every process at once, and a process
that handles HTTP must not go before the answers under way have ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from time import sleep

_END_S = 5.0  # time within which a process without a supervisor must end


def obey(orders: Connection, stop: Callable[[], None]) -> None:
    """Call `stop` on another thread at each order; when no more orders can come, call it twice, then exit by force.

    No more orders can come when the supervisor has closed its end, or has been killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def listen() -> None:
        try:
            while True:
                orders.recv_bytes()
                stop()
        except (EOFError, OSError):
            stop()
            stop()
        sleep(_END_S)
        os._exit(1)

    Thread(target=listen, name="orders", daemon=True).start()
