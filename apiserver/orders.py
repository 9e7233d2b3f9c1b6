"""What a process of a server hears from its supervisor: when to end, and that it is alone.

Signals are for the supervisor. A terminal, or a container that ends, sends them to every process at once, and one that
handles HTTP must not go before the answers under way have ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from time import sleep

_END_S = 5.0  # how long a process that is alone may take to end


def obey(orders: Connection, stop: Callable[[], None]) -> None:
    """Call `stop`, on a thread of its own, at each order; twice, and then end anyway, when there will be no more.

    There will be none when the supervisor has closed its end, or has been killed.
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
