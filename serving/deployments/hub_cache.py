"""The local cache of the Hugging Face hub: the `config.json` of models that were downloaded before.

Nothing is downloaded. The cache is where `huggingface_hub` keeps it: `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else
`~/.cache/huggingface/hub`.
"""

from __future__ import annotations

import os
from pathlib import Path


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of the model `name` (with or without its organisation) in the cache; None if absent.

    If there are several snapshots, the one of the branch `main` is taken, else the newest.
    """
    wanted = name.lower().split("/")
    if not 1 <= len(wanted) <= 2 or not all(wanted):
        return None
    for folder in _models():
        known = folder.name.lower().split("--")[1:]
        if "--".join(known[-len(wanted) :]) == "--".join(wanted) and len(known) >= len(wanted):
            configs = list(folder.glob("snapshots/*/config.json"))
            if configs:
                return _latest(folder, configs)
    return None


def _models() -> list[Path]:
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    try:
        return sorted(hub.glob("models--*"))
    except OSError:
        return []


def _latest(folder: Path, configs: list[Path]) -> Path:
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    of_main = [config for config in configs if config.parent.name == main]
    return (of_main or sorted(configs, key=lambda config: config.stat().st_mtime))[-1]
