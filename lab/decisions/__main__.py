"""The command: `python -m lab.decisions --data DIR`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lab.decisions.configurations import configurations
from lab.decisions.own_rows import OwnRows
from lab.decisions.page import RULE_HEADER, as_dict, markdown, rule_rows
from lab.decisions.questions import groups
from lab.decisions.scoring import decided
from tokentwin.calibration.steps.evidence import bundled_evidence
from tokentwin.cli import main
from tokentwin.commands.validate_external import chosen_cases, write_results, write_text
from tokentwin.planning.progress import telling
from tokentwin.serving.errors import UserError
from tokentwin.tables import print_table


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--data", default="../shared/data", type=click.Path(), help="Folder of measurements.")
@click.option("--cases", type=click.Path(), help="Folder of your own case files, instead of the published runs.")
@click.option("--case", "names", multiple=True, help="Use only the case with this name; can be repeated.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@click.option("--write", "page", type=click.Path(), help="Also write the report to this Markdown page.")
@click.option("--out", "-o", type=click.Path(), help="Also write decisions.json here, for the dashboard's Trust page.")
def decisions(
    data: str, cases: str | None, names: tuple[str, ...], style: str, page: str | None, out: str | None
) -> None:
    """Let the simulator choose among configurations that others have measured, and score its choices (rung 7).

    The predictions do not use these measurements. Each question has bounds on the mean TTFT and TPOT. The simulator
    chooses the configuration with the highest predicted throughput (output tokens per second per GPU) within the
    bounds. The utility of a choice is its measured throughput, divided by the best measured throughput within the
    bounds. It is 0 if the choice breaks a bound.

    The configurations are rows of AIConfigurator's tables, which a case file describes.
    """
    wrong: dict[str, UserError] = {}
    chosen = chosen_cases(data, cases, names, wrong)
    if wrong:
        raise next(iter(wrong.values()))
    with telling() as tell:
        measured, left_out = configurations(chosen, Path(data), tell)
    asked = groups(measured)
    try:
        result = decided(asked, OwnRows(bundled_evidence()))
    except ValueError:
        remedy = (
            "has no group of at least four measured configurations between which bounds can decide; choose other cases"
        )
        raise UserError("data", data, remedy) from None
    if page:
        write_text("write", Path(page), markdown(result, left_out))
    results = as_dict(result, left_out)
    if out:
        write_results(Path(out) / "decisions.json", results)
    if style == "json":
        click.echo(json.dumps(results))
    else:
        some = next(iter(result.rules.values()))
        print_table(RULE_HEADER, rule_rows(result), f"{some.questions:,} questions about {some.groups} groups")


if __name__ == "__main__":
    main(decisions)
