"""`tokentwin serve`: the real engine or a fleet's twin behind OpenAI's API."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from tokentwin.apiserver.settings import ServeSettings
from tokentwin.options import SectionedCommand, deployment_options, options_of, requested
from tokentwin.serving.data_file import parse_json, read_yaml
from tokentwin.serving.errors import UserError

options = options_of(ServeSettings)

SECTIONS = {
    "Options": ("twin", "gpu", "model", "replicas", "out"),
    "HTTP": ("host", "port", "api_workers", "allowed_hosts", "api_key_file", "tls_cert", "tls_key"),
    "OpenAI's API": (
        *("served_model_name", "lora_modules", "tool_call_parser", "enable_prompt_tokens_details"),
        "enable_sleep_mode",
    ),
    "Limits": ("max_requests", "request_timeout", "client_timeout", "body_limit"),
    "Recordings and traces": ("force", "otlp_endpoint"),
    "The twin": ("calibration", "router", "speed", "tokenizer", "answers", "output_tokens", "seed", "failures"),
    "Behind a gateway": ("ports_per_replica", "kv_events", "role", "kv_links"),
}


@click.command(cls=SectionedCommand, sections=SECTIONS, rest="The engine, or the twin's engines")
@options()
@click.option("--out", "-o", type=click.Path(), help="Directory to write a recording of all served requests to.")
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@deployment_options
def serve(deployment_file: str | None, out: str | None, force: bool, twin: bool, **flags: Any) -> None:
    """Serve OpenAI's API with the real engine or, with --twin, with a simulated fleet.

    The simulated fleet (the twin) sends each token when the real fleet would. The text of its answers is meaningless.

    \b
      tokentwin serve
      tokentwin serve --twin --gpu H100 --model Llama-3.1-8B --replicas 4
      curl http://127.0.0.1:8000/v1/completions --json '{"prompt": "Hello", "max_tokens": 8}'
    """
    for package in ("aiohttp", "msgspec", "zmq"):
        if find_spec(package) is None:
            raise UserError("serve", package, "is not installed; pip install 'tokentwin[server]'")
    from tokentwin.apiserver.supervisor import serve as serve_until_stopped
    from tokentwin.planning.deployments import read_deployment, refuse_engine_flags, served
    from tokentwin.planning.resolution import base_deployment
    from tokentwin.serving.deployments.config import Deployment

    for name in ("output_tokens", "kv_events", "kv_links", "failures"):
        if flags[name] is not None:
            flags[name] = _json(flags[name])
    if isinstance(flags["failures"], str):
        flags["failures"] = read_yaml(flags["failures"], "failures")
    if flags["kv_events"] is not None and "PYTHONHASHSEED" in os.environ:  # vLLM reads it from there
        given = flags["kv_events"] if isinstance(flags["kv_events"], dict) else {"endpoint": flags["kv_events"]}
        flags["kv_events"] = {"hash_seed": os.environ["PYTHONHASHSEED"], **given}
    asked = {name: flags[name] for name in ServeSettings.model_fields if name in flags}
    settings = requested(ServeSettings, {**asked, "twin": twin})
    if twin:
        refuse_engine_flags(flags)
    otherwise = base_deployment(settings.calibration) if twin else None
    if not twin and flags["device"] is None and Path("/dev/nvidiactl").exists():
        otherwise = served().model_copy(update={"model": Deployment().model})  # the GPU of this machine
    deployment = read_deployment(deployment_file, flags, otherwise)
    defaults: tuple[str, ...] = ()
    if twin:
        from tokentwin.apiserver.backends import tokenizer_folder
        from tokentwin.planning.learn.front_door import learnt_front_door
        from tokentwin.planning.resolution import resolved_fleet

        deployment, defaults = resolved_fleet(deployment, settings.calibration, settings.gpu)
        if (door := learnt_front_door(settings.calibration)) is not None:
            left_out = f"the {door.outside_ms:.1f} ms that a request took outside the learnt engine are not added"
            defaults = (f"{left_out}: this API server has its own times", *defaults)
        if not tokenizer_folder(settings.tokenizer, deployment.model):
            about = f"no tokenizer.json of {deployment.model} is here: four characters count as one token"
            defaults = (*defaults, about)
    replicas = settings.replicas or (sum(pool.replicas for pool in deployment.fleet.pools) if deployment.fleet else 1)
    what = f"the twin of {replicas} x" if twin else "the engine with"
    serve_until_stopped(
        settings,
        deployment,
        out,
        force,
        lambda model, urls: click.echo(
            "\n".join((f"{what} {model} answers at {' '.join(f'{url}/v1' for url in urls)}; Ctrl-C ends it", *defaults))
        ),
        lambda line: click.echo(f"tokentwin: {line}", err=True),
    )


def _json(text: str) -> Any:
    """Parse `text` if it is JSON; otherwise return it unchanged."""
    try:
        return parse_json(text)
    except ValueError:
        return text
