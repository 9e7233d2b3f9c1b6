"""The runs of a sweep: each is a full configuration, identified by its hash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokentwin.calibration.steps.external_calibration import LEARNT_FILES
from tokentwin.planning.deployments import found_at, overridden
from tokentwin.planning.learn.front_door import learnt_front_door
from tokentwin.planning.resolution import resolved_fleet
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.settings import SweepSettings, is_seed
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FILE as FRONT_DOOR
from tokentwin.serving.user_code.own_cost import names_own_cost, source_file

SEED = "seed"


@dataclass(frozen=True)
class Point:
    """A run to be made.

    Attributes:
        config: the `Scenario` as JSON values, its deployment resolved, and what was `stated` of the deployment; only
            the stated part if `error` is set
        parameters: value of each path that the sweep varies, and `seed` if the sweep has seeds
        error: the reason why the run cannot be made; otherwise empty
        defaults: a line for each set of settings that the run leaves to its engines, with their values
    """

    config: dict[str, Any]
    parameters: dict[str, Any]
    error: str = ""
    defaults: tuple[str, ...] = ()

    @property
    def scenario(self) -> dict[str, Any]:
        """The fields of the `Scenario` in `config`."""
        return {name: value for name, value in self.config.items() if name != "stated"}

    @property
    def id(self) -> str:
        """Hash of the configuration. It begins with a letter, so that no program reads it as a number.

        A run that cannot be made has no full configuration, and its seed is not filled in, so its hash also covers the
        parameters.
        """
        identity = [self.scenario, self.parameters] if self.error else self.scenario
        return "r" + sha256(canonical(identity).encode()).hexdigest()[:15]


def canonical(value: Any) -> str:
    """Return JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def points(settings: SweepSettings) -> list[Point]:
    """Return the runs of a sweep, in the order of its file.

    An invalid combination becomes a point with an error. Raises UserError if no combination is valid, or if two of them
    are the same run.
    """
    variations = list(settings.variations())
    paths = dict.fromkeys(path for overrides, _ in variations for path in overrides)
    made: dict[str, Point] = {}
    whole: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {}
    first_error: UserError | None = None
    for overrides, seed in variations:
        config, error, defaults = settings.base, "", tuple[str, ...]()
        try:
            config = overridden(settings.base, overrides)
            scenario = parse(Scenario, config, where="base", typed=True)
            key = canonical([config.get("deployment"), scenario.calibration, scenario.gpu, scenario.room])
            if key not in whole:
                whole[key] = _resolved(scenario)
            deployment, defaults = whole[key]
            full = scenario.model_dump(mode="json") | deployment
            for name in ("pue", "grid_gco2_per_kwh"):
                if full[name] is None:
                    del full[name]  # runs without them keep the ids that they had before these settings existed
        except UserError as wrong:
            error, first_error, full = str(wrong), first_error or wrong, config
        parameters = {path: found_at(config, path, found_at(full, path)) for path in paths}
        parameters |= overrides if error else {}
        if seed is not None:
            full, parameters[SEED] = _seeded(full, seed), seed
        point = Point(full, parameters, error, defaults)
        if point.id in made:
            raise UserError("run", canonical(parameters), "is in the sweep twice; leave one of the two out")
        made[point.id] = point
    if first_error and all(point.error for point in made.values()):
        raise first_error
    return list(made.values())


def _resolved(scenario: Scenario) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the resolved deployment with what was stated, as in a point's `config`, and a line for each engine."""
    made, defaults = resolved_fleet(scenario.described(), scenario.calibration, scenario.gpu)
    stated = scenario.deployment.as_stated() if scenario.deployment else {}
    return {"deployment": made.model_dump(mode="json"), "stated": stated}, defaults


def input_digests(runs: list[Point]) -> dict[str, str]:
    """Return the SHA-256 of every file that the runs read, by its path as it was given.

    Raises UserError for a file that cannot be read.
    """
    files = dict.fromkeys(file for point in runs if not point.error for file in _files(point.config))
    return {file: _digest(Path(file)) for file in sorted(files)}


def _files(config: dict[str, Any]) -> Iterator[str]:
    calibrations = [config["calibration"]]
    for pool in (config["deployment"]["fleet"] or {}).get("pools", ()):
        calibrations.append(pool["calibration"])
    for calibration in filter(None, calibrations):
        file = source_file(calibration) if names_own_cost(calibration) else calibration
        if file:
            yield file
    workload = config["workload"]
    if "trace" in workload:
        yield workload["trace"]
    for lengths in (workload.get("prompt"), workload.get("output")):
        if isinstance(lengths, dict) and "path" in lengths:
            yield lengths["path"]


def _digest(path: Path) -> str:
    """Return the hash of a file, or of the files in a recording or calibration that determine a run."""
    files = [path]
    if path.is_dir():
        names = ["calibration.json", *LEARNT_FILES, "workload.parquet"]
        names += [FRONT_DOOR] if learnt_front_door(str(path)) is not None else []
        files = [path / name for name in names if (path / name).is_file()]
    for file in files:
        if file.exists() and not file.is_file():
            raise UserError("input", str(file), "is not a regular file; save it to one first")
    digest = sha256()
    try:
        for file in files:
            with file.open("rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
    except OSError as error:
        raise UserError("input", str(path), f"cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _seeded(node: Any, seed: int) -> Any:
    """Return `node` with `seed` in place of every seed in it."""
    if isinstance(node, dict):
        return {
            name: seed if is_seed(name) and isinstance(value, int) else _seeded(value, seed)
            for name, value in node.items()
        }
    return [_seeded(value, seed) for value in node] if isinstance(node, list) else node
