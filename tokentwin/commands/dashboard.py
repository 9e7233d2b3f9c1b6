"""`tokentwin dashboard`: the dashboard's server, by default on loopback only."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

import click

from tokentwin.serving.errors import UserError
from tokentwin.serving.host_name import check_host_name


@click.command()
@click.argument("runs_dir", required=False, type=click.Path(path_type=Path))
@click.option("--port", default=8501, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option(
    "--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 accepts connections from every network."
)
@click.option(
    "--password",
    default="",
    envvar="TOKENTWIN_DASHBOARD_PASSWORD",
    help="Password for the dashboard, with any user name. Other users of this machine can read a command line, so "
    "prefer $TOKENTWIN_DASHBOARD_PASSWORD.",
)
@click.option(
    "--served-as",
    multiple=True,
    metavar="NAME",
    help="Host name by which browsers reach this server, such as the name of a reverse proxy; can be repeated. IP "
    "addresses, localhost and the name of this machine are always accepted.",
)
@click.option(
    "--own-policies",
    is_flag=True,
    help="Let users upload policies to the Policy lab. A policy is Python code, which runs on this machine with your "
    "rights. On a network, this needs --password.",
)
def dashboard(
    runs_dir: Path | None, port: int, host: str, password: str, served_as: tuple[str, ...], own_policies: bool
) -> None:
    """Open the dashboard on the recordings and reports in RUNS_DIR (by default ./runs)."""
    if runs_dir is not None and not runs_dir.is_dir():
        raise UserError("RUNS_DIR", str(runs_dir), "is not a directory; give a directory with recordings")
    for name in served_as:
        check_host_name("served-as", name)
    for package in ("streamlit", "plotly", "duckdb"):
        if find_spec(package) is None:
            raise UserError("dashboard", package, "is not installed; pip install 'tokentwin[dashboard]'")
    address = _check_free(host, port)
    if own_policies and not password and not ip_address(address).is_loopback:
        remedy = "lets everyone who can reach this port run code; give --password, or listen on loopback"
        raise UserError("own-policies", host, remedy)
    if not password and not ip_address(address).is_loopback:
        click.echo(
            "Everyone who can reach this port can use the dashboard. Give --password to ask for a password.", err=True
        )
    from tokentwin.dashboard.server import serve

    shown = host
    if ip_address(address).is_unspecified:
        shown = "localhost"
    elif ":" in address:
        shown = f"[{address}]"
    click.echo(f"The dashboard is at http://{shown}:{port}")
    serve(runs_dir or Path("runs"), host, port, password, served_as, own_policies)


def _check_free(host: str, port: int) -> str:
    """Return the address that `host` means. Raises UserError if the dashboard cannot listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        raise UserError("host", host, "is not an address of this machine; 127.0.0.1 is the usual one") from None
    except OSError as error:
        raise UserError("port", port, f"cannot be used at {host} ({error.strerror}); try --port {port + 1}") from None
    return str(address[0])
