"""`tokentwin dashboard`: the dashboard's server, on loopback unless told otherwise."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import click

from serving.errors import UserError


@click.command()
@click.argument("runs_dir", required=False, type=click.Path(path_type=Path))
@click.option("--port", default=8501, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: every network.")
def dashboard(runs_dir: Path | None, port: int, host: str) -> None:
    """Open the dashboard on the recordings and reports in RUNS_DIR (by default ./runs)."""
    if runs_dir is not None and not runs_dir.is_dir():
        raise UserError("RUNS_DIR", str(runs_dir), "is not a directory; give one that holds recordings")
    for package in ("streamlit", "plotly", "duckdb"):
        if find_spec(package) is None:
            raise UserError("dashboard", package, "is not installed; pip install 'tokentwin[dashboard]'")
    _check_free(host, port)
    from streamlit.web import cli

    cli.main(_arguments(runs_dir or Path("runs"), host, port), standalone_mode=False)


def _arguments(runs_dir: Path, host: str, port: int) -> list[str]:
    """Streamlit's command line. The themes lie beside app.py, where Streamlit finds them itself."""
    from dashboard.uploads import MOST_MB

    app = Path(__file__).parents[2] / "dashboard" / "app.py"
    options = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.maxUploadSize": str(MOST_MB),
        "browser.gatherUsageStats": "false",
    }
    return ["run", str(app), *(f"--{name}={value}" for name, value in options.items()), "--", str(runs_dir.resolve())]


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        raise UserError("host", host, "is not an address of this machine; 127.0.0.1 is the usual one") from None
    except OSError as error:
        raise UserError("port", port, f"is not free at {host} ({error.strerror}); try --port {port + 1}") from None
