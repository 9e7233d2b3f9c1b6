"""The two sides of a comparison: what each deviates in from what they have in common, or the runs it consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import UserError
from tokentwin.settings import named_value, with_settings

if TYPE_CHECKING:
    from serving.config import Deployment
    from traces.recording import Recording

_RUN = ("replicas", "router", "gpu", "calibration")


@dataclass(frozen=True)
class Overrides:
    """What one side has of its own: a deployment's file, settings of it by path, and of the run around it.

    settings    `policy`, `scheduler.max_num_seqs`, `fleet.router`, ...; a setting of the scheduler needs no path
    run         `replicas`, `router`, `gpu`, `calibration`
    """

    file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, side: str, file: str | None, pairs: tuple[str, ...]) -> Overrides:
        """From `NAME=VALUE` pairs, values in YAML. Raises UserError for one that is none."""
        settings: dict[str, Any] = {}
        run: dict[str, Any] = {}
        for pair in pairs:
            name, value = named_value(side, pair)
            (run if name in _RUN else settings)[name] = value
        replicas = run.get("replicas")
        if replicas is not None and (type(replicas) is not int or replicas < 1):
            raise UserError(f"{side} replicas", replicas, "must be a number from 1 up")
        for name in ("router", "gpu", "calibration"):
            if not isinstance(run.get(name, ""), str):
                raise UserError(f"{side} {name}", run[name], "must be a name")
        return cls(file, settings, run)

    def settle(self, base: Deployment) -> Deployment:
        """The side's deployment. Raises UserError that names the setting that is wrong."""
        from tokentwin.deployments import completed

        given = completed(self.file, base) if self.file else base
        return with_settings(given, self.settings, self.file or "deployment")

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in (self.settings | self.run).items()]
        return " ".join([*([self.file] if self.file else []), *named]) or "as it is"


def is_recording(path: str) -> bool:
    """Whether a directory is a recording, or holds some."""
    return Path(path).is_dir()


def recordings(side: str, path: str) -> list[Recording]:
    """The recording `path`, or those in it by name. Raises UserError when there is none, or one was cut short."""
    from traces.recording import Recording

    folder = Path(path)
    found = [folder] if (folder / "runs.parquet").exists() else sorted(p.parent for p in folder.glob("*/runs.parquet"))
    if not found:
        raise UserError(side, path, "holds no recording (a directory with runs.parquet)")
    loaded = [Recording.load(place) for place in found]
    for recording in loaded:
        if recording.run["status"] != "complete":
            raise UserError(side, str(recording.path), f"is {recording.run['status']}; record it to its end")
    return loaded
