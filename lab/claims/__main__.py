"""The command: `python -m lab.claims`, common claims about inference put to the test."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from lab.claims.check import check
from lab.claims.claim import load_claims
from lab.claims.on_engine import machine, on_engine
from lab.claims.page import page
from tokentwin.cli import main
from tokentwin.options import listed
from tokentwin.planning.progress import telling
from tokentwin.saved_answer import AnswerOutput, answering
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.whole_file import check_free, write_whole


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--only", multiple=True, help="Test only the claim with this name; can be repeated, or a list with commas."
)
@click.option(
    "--claims", "directory", type=click.Path(), help="Folder of your own claims, instead of the bundled ones."
)
@click.option("--engine", is_flag=True, help="Also test on the real engine of this machine the claims that it can run.")
@click.option(
    "--front-door",
    type=click.Path(),
    help="File of `calibrate --from-served`, with the time that the API server adds to requests.",
)
@click.option("--write", type=click.Path(path_type=Path), help="Also write the answer to this Markdown page.")
@answering
def claims(
    only: tuple[str, ...],
    directory: str | None,
    engine: bool,
    front_door: str | None,
    write: Path | None,
    output: AnswerOutput,
) -> None:
    """Test common claims about LLM inference.

    Each claim is simulated in several cases (models, GPUs or workloads). The answer says whether it holds in all, some
    or none of them. With --engine some claims are also tested on the real engine, with a small model.
    lab/results/claims.md shows the answer and says how to add a claim.
    """
    if write is not None:
        check_free(write, overwrite=True)
    wanted = load_claims(directory, tuple(listed("only", only)))
    door = None if front_door is None else FrontDoor.load(front_door)
    ran_on = machine() if engine else ""
    with telling() as tell:
        answer = check(wanted, tell, on_engine if engine else None, door)
    if engine:
        answer = answer.model_copy(update={"machine": ran_on, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"})
    if write is not None:
        write_whole(write, lambda file: file.write_text(page(answer), encoding="utf-8"), overwrite=True)
    output.finish(answer)


if __name__ == "__main__":
    main(claims)
