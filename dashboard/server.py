"""The dashboard's server: Streamlit's, behind a `Door`."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread

from starlette.middleware import Middleware
from streamlit.starlette import App

from tokentwin.dashboard.door import Door
from tokentwin.dashboard.own_policy import FLAG
from tokentwin.dashboard.uploads import MOST_MB

APP = Path(__file__).with_name("app.py")


def serve(runs: Path, host: str, port: int, password: str, names: Sequence[str], own_policies: bool = False) -> None:
    """Serve the pages over `runs` until the process is ended; `names` are further host names to answer to.

    If `own_policies` is set, users may upload policies, which are code that runs here.
    """
    # Plotly uses pandas as soon as any thread has begun to import it, and the first plot would then fail.
    import_module("pandas")
    served = [host, socket.gethostname(), *names]
    app = App(APP, middleware=[Middleware(Door, names=served, password=password)])
    # The imports of the pages begin now, so that the first visitor does not wait for them.
    Thread(target=_import_pages, daemon=True).start()
    # Streamlit finds its themes beside the first, and passes on the rest.
    sys.argv = [str(APP), str(runs.resolve()), *([FLAG] if own_policies else [])]
    app.run(
        config={
            "server.address": host,
            "server.port": port,
            "server.headless": True,
            "server.maxUploadSize": MOST_MB,
            "browser.gatherUsageStats": False,
            "logger.hideWelcomeMessage": True,  # the message needs this machine's address from the internet
        }
    )


def _import_pages() -> None:
    from tokentwin.dashboard.pages import PAGES, import_page

    for name in PAGES:
        import_page(name)
    gc.freeze()  # Streamlit collects garbage after every drawing; this leaves imported modules out
