"""The case files of published runs: one measured run, or one table of them, each."""

from pathlib import Path

FOLDER = Path(__file__).parent
