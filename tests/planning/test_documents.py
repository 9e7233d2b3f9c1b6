"""Saved answers: whatever is shown of one is made of the document alone, and nothing that can be read breaks it."""

import io
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

pytest.importorskip("streamlit")

from tests.budget import examples
from tests.dashboard.bundled_samples import comparison_request, recordings_request
from tests.dashboard.samples import plan_example
from tokentwin.calibration.validation.report import REPORT, ValidationReport
from tokentwin.dashboard.bundled import DEMO, bundled_answer, sample_diagnosis
from tokentwin.dashboard.html_reports.report import report_of
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.serving.answers.document import Document
from tokentwin.serving.answers.markdown import markdown
from tokentwin.serving.answers.terminal import print_report
from tokentwin.serving.errors import UserError

BUNDLED: dict[str, tuple[type[Document], Callable[[], Any]]] = {
    "plan": (PlanDocument, lambda: plan_example()["answer"]),
    "simulated comparison": (ComparisonDocument, lambda: bundled_answer(comparison_request().as_json())),
    "recorded comparison": (ComparisonDocument, lambda: bundled_answer(recordings_request().as_json())),
    "diagnosis": (DiagnosisDocument, lambda: bundled_answer(sample_diagnosis().as_json())),
    "validation": (ValidationReport, lambda: json.loads((DEMO / "validation" / REPORT).read_text())),
}


def shown(document: Document) -> list[Any]:
    """What is made of it, its report left out: what a terminal shows, its Markdown, and its tables."""
    out = io.StringIO()
    print_report(document.report(), Console(file=out, width=100))
    return [out.getvalue(), markdown(document.report()), *map(document.to_arrow, document.tables)]


def damaged(content: Any, seed: int) -> Any:
    """The JSON with up to three of its values gone, or something else."""
    rng, content = random.Random(seed), json.loads(json.dumps(content))
    for _ in range(rng.randrange(4)):
        at = content
        while True:
            key = rng.choice(sorted(at) if isinstance(at, dict) else range(len(at)))
            if not (isinstance(at[key], dict | list) and at[key]) or not rng.randrange(5):
                break
            at = at[key]
        at[key] = rng.choice((None, "", "ünknown <b>", -1, 0, 0.5, 1e300, 10**20, True, [], {}, float("nan")))
    return content


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_answers_open_and_keep_every_figure(name: str) -> None:
    kind, content = BUNDLED[name]
    document = kind.read(content())

    def kept(mine: Any, theirs: Any) -> bool:
        if isinstance(theirs, dict):
            return all(name in mine and kept(mine[name], value) for name, value in theirs.items())
        if isinstance(theirs, list):
            return len(mine) == len(theirs) and all(map(kept, mine, theirs))
        return bool(mine == theirs)

    assert kept(json.loads(document.dumps()), content())


def test_an_answer_that_0_2_saved_is_read() -> None:
    kind, content = BUNDLED["plan"]
    saved = json.dumps(content()).replace('"trust":', '"standing":').replace('"level":', '"mark":')
    assert '"standing":' in saved and kind.read(json.loads(saved)) == kind.read(content())


@pytest.mark.parametrize("name", BUNDLED)
def test_one_that_was_saved_is_shown_as_one_that_was_just_made(name: str) -> None:
    kind, content = BUNDLED[name]

    @given(st.integers(0, 2**32))
    @examples(0.3)
    def holds(seed: int) -> None:
        try:
            document = kind.read(damaged(content(), seed))
        except UserError as error:
            assert "\n" not in str(error) and str(error).startswith(kind.where)
            return
        again = kind.model_validate_json(document.model_dump_json())
        assert again == document == kind.read(json.loads(document.dumps()))
        assert shown(again) == shown(document)

    holds()


@pytest.mark.parametrize("name", [name for name in BUNDLED if name != "validation"])  # which lies in a directory
def test_a_report_is_made_of_what_was_saved(name: str) -> None:
    kind, content = BUNDLED[name]

    @given(st.integers(0, 2**32))
    @examples(0.05)
    def holds(seed: int) -> None:
        try:
            document = kind.read(damaged(content(), seed))
        except UserError:
            document = kind.read(content())
        again = kind.model_validate_json(document.model_dump_json())
        assert list(report_of(again)[1]) == list(report_of(document)[1])

    holds()


@pytest.mark.parametrize("name", BUNDLED)
def test_a_notebook_and_pandas_show_its_main_table(name: str) -> None:
    kind, content = BUNDLED[name]
    document = kind.read(content())
    frame, table = document.to_pandas(), document.to_arrow()
    assert list(frame.columns) == table.column_names and len(frame) == table.num_rows > 0
    assert all(field.metadata[b"definition"] for field in table.schema)
    assert document._repr_html_().startswith("<pre>")
    with pytest.raises(UserError, match="table: 'nonsense': does not exist here"):
        document.to_arrow("nonsense")


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in BUNDLED.values()), ids=lambda kind: kind.where)
def test_every_field_says_what_it_is_and_a_later_format_is_refused(kind: type[Document]) -> None:
    schema = kind.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        assert all(field.get("description") for field in part["properties"].values()), part["title"]
    content = next(content() for of, content in BUNDLED.values() if of is kind)
    with pytest.raises(UserError, match=r"schema_version: 2: "):
        kind.read(content | {"schema_version": 2})
