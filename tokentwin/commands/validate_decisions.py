"""`tokentwin validate decisions`: rung 7, choices among configurations that others have measured."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tokentwin.tables import print_table


@click.command()
@click.option("--data", default="../shared/data", type=click.Path(), help="Folder of measurements.")
@click.option("--cases", type=click.Path(), help="Folder of your own case files, instead of the published runs.")
@click.option("--case", "names", multiple=True, help="Use only the case of this name; can be repeated.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@click.option("--write", "page", type=click.Path(), help="Also write the report to this Markdown page.")
@click.option("--out", "-o", type=click.Path(), help="Also write decisions.json here, for the dashboard's Trust page.")
def decisions(
    data: str, cases: str | None, names: tuple[str, ...], style: str, page: str | None, out: str | None
) -> None:
    """Choose among measured configurations by blind predictions, and say what the choices were worth.

    Each question has bounds on the mean TTFT and TPOT. The answer is the configuration that is predicted to give most
    output tokens per second of a GPU within them. Its utility is its measured throughput over the best that keeps the
    bounds, and 0 if it breaks one.

    The rows are those of AIConfigurator's tables that a case file describes.
    """
    from planning.checkout import need_lab

    need_lab("decisions")
    from lab.decisions.configurations import configurations
    from lab.decisions.page import RULE_HEADER, as_dict, markdown, rule_rows
    from lab.decisions.questions import groups
    from lab.decisions.scoring import decided
    from planning.progress import telling
    from serving.errors import UserError
    from tokentwin.commands.validate_external import chosen_cases, write_results, write_text

    wrong: dict[str, UserError] = {}
    chosen = chosen_cases(data, cases, names, wrong)
    if wrong:
        raise next(iter(wrong.values()))
    with telling() as tell:
        measured, left_out = configurations(chosen, Path(data), tell)
    asked = groups(measured)
    try:
        result = decided(asked)
    except ValueError:
        remedy = "has no group of four measured configurations or more between which bounds decide"
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
