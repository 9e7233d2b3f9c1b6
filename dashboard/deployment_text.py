"""Deployments that users paste or upload: read as data, and kept under their hash.

Nothing in them is executed or used as a path. The file of a deployment may name a user's own policy or router
(`package.module:Class`), a calibration, or a folder with a model; a pasted deployment may name only bundled ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tokentwin.dashboard.uploads import keep_document, kept_document
from tokentwin.serving.data_file import parse_yaml
from tokentwin.serving.deployments.config import Deployment, parse, pool_deployment
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.sim.router import ROUTERS

MOST_KB = 64
MOST_REPLICAS = 1000
WHERE = "deployment"
_OWN_MODEL = "smollm2"  # the model of our own engine
_DEEPEST = 20
_OPENS = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSES = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_KEPT = "deployment-*.json"


def read_text(text: str) -> Deployment:
    """Return the deployment in the text. Raises UserError if it is invalid, or names something that is not bundled."""
    deployment = parse(Deployment, parse_text(text, WHERE), where=WHERE)
    check_bundled(deployment)
    return deployment


def parse_text(text: str, where: str) -> dict[str, Any]:
    """Return the mapping in a YAML text of users; `where` is its name in errors. Raises UserError if it is none."""
    if len(text.encode()) > MOST_KB * 1000:
        raise UserError(where, f"{len(text.encode()) / 1000:.0f} kB", f"is too large; at most {MOST_KB} kB are allowed")
    try:
        _check_shape(text, where)
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(where, "the text", f"is not YAML: {error}") from None
    except ValueError as error:
        raise UserError(where, "the text", str(error)) from None
    if not isinstance(data, dict):
        raise UserError(where, "the text", "must be a mapping of settings, such as `policy: fair`")
    return data


def _check_shape(text: str, where: str) -> None:
    """Raise UserError for text that would take a parser much time, or much more memory than the text itself."""
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise UserError(where, "an alias (*name)", "can expand without limit; write the value instead of the alias")
        depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
        if depth > _DEEPEST:
            raise UserError(where, "the text", f"is nested too deeply; use at most {_DEEPEST} levels")


def check_bundled(deployment: Deployment) -> None:
    """Raise UserError for a name that is not bundled, and for more replicas than a page simulates."""
    for field, name, known, remedy in _names(deployment):
        if name not in known:
            raise UserError(f"{WHERE}.{field}", name, remedy)
    fleet = deployment.fleet
    if fleet is None:
        return
    most = {fleet.pool_number(scaler.pool): scaler.max_replicas for scaler in fleet.autoscaler or ()}
    replicas = sum(max(pool.replicas, most.get(number, 0)) for number, pool in enumerate(fleet.pools))
    if replicas > MOST_REPLICAS:
        raise UserError(
            f"{WHERE}.fleet", f"{replicas} replicas", f"is more than this page allows; use at most {MOST_REPLICAS}"
        )


def _names(deployment: Deployment) -> Iterator[tuple[str, str, Collection[str], str]]:
    """Yield every setting that names something: the field, the name, the bundled names, and the remedy for others."""
    yield from _names_of_engine("", deployment)
    fleet = deployment.fleet
    if fleet is None:
        return
    for field in ("router", "decode_router", "encode_router"):
        if (router := getattr(fleet, field)) is not None:
            yield f"fleet.{field}", router.name, ROUTERS, f"must be one of {', '.join(ROUTERS)} on this page"
    for process in fleet.processes:
        yield "fleet.processes", process, (), "is code of your own, which this page does not run; leave it out"
    for number, pool in enumerate(fleet.pools):
        where = f"fleet.pools.{number}."
        yield from _names_of_engine(f"{where}deployment.", pool_deployment(deployment, pool))
        if pool.gpu is not None:
            yield f"{where}gpu", pool.gpu, gpus(), f"must be one of {', '.join(gpus())}"
        if pool.calibration is not None:
            yield (
                f"{where}calibration",
                pool.calibration,
                (),
                "is a path, which this page does not allow; choose a calibration on the page",
            )


def _names_of_engine(where: str, engine: Deployment) -> Iterator[tuple[str, str, Collection[str], str]]:
    remedy = f"must be one of {', '.join(POLICIES)} on this page"
    yield f"{where}policy", engine.policy, POLICIES, remedy
    remedy = "must be a model of the catalogue on this page; `tokentwin model list` lists them"
    yield f"{where}model", engine.model, {*models(), _OWN_MODEL}, remedy
    drafting = engine.scheduler.speculative
    if drafting is not None and drafting.model is not None:
        yield f"{where}scheduler.speculative.model", drafting.model, models(), remedy


def keep_deployment(runs: Path, text: str) -> str:
    """Keep the deployment, and return its digest. Raises UserError as `read_text` does."""
    return keep_document(runs, _KEPT, read_text(text).as_stated())


def kept_deployment(runs: Path, digest: str) -> dict[str, Any] | None:
    """Return the settings of a kept deployment; None for a digest that is invalid or unknown."""
    settings: dict[str, Any] | None = kept_document(runs, _KEPT, digest)
    return settings
