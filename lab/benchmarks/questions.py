"""Which questions that people put to makers of inference engines can be asked here, and how well they are answered.

`python -m lab.benchmarks.questions [--only THREAD]` puts each question of `questions.yaml` to our commands, as its
asker would, and compares the answers with what the asker measured, where the thread states it. A question is

- answered: the commands answer, and what was measured is as predicted
- partly: something of the question cannot be said (`lacks`), or the answer misses and says itself that it is not sure
- wrong: the answer misses what was measured, and does not say so
- refused: a command refuses the question
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from tokentwin.cli import cli
from tokentwin.serving.deployments.config import merged

_QUESTIONS = Path(__file__).with_name("questions.yaml")
_UNSURE = ("unknown",)  # levels of trust of an answer that warns of itself


@dataclass(frozen=True)
class Miss:
    """An answer that is not what was measured; `warned` if the answer itself says that it is not sure."""

    text: str
    warned: bool


def answered(question: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Put a question; return the verdict, and lines with the figures."""
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, run) in enumerate(question["runs"].items()):
            done = _run(run, question, Path(folder) / str(number))
            if done.exit_code == 2 or (done.exception and not isinstance(done.exception, SystemExit)):
                return "refused", [f"{name}: {done.stderr.strip() or done.exception!r}"]
            answers[name] = json.loads(done.stdout) if "--format json" in run["command"] else done.stdout
    misses = [miss for truth in question.get("measured", ()) if (miss := _miss(truth, answers))]
    lines = [_shown(truth, answers) for truth in question.get("measured", ())] + [miss.text for miss in misses]
    if any(not miss.warned for miss in misses):
        return "wrong", lines
    if lacks := question.get("lacks"):
        return "partly", [*lines, f"lacks {lacks}"]
    return ("partly" if misses else "answered"), lines


def _run(run: Mapping[str, Any], question: Mapping[str, Any], folder: Path) -> Any:
    folder.mkdir()
    files = {}
    for name in ("traffic", "deployment"):
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(merged(question.get(name, {}), run.get(name, {}))), encoding="utf-8")
    command = run["command"].format(**files, out=folder / "out")
    return CliRunner().invoke(cli, shlex.split(command))


def _miss(truth: Mapping[str, Any], answers: Mapping[str, Any]) -> Miss | None:
    """Return how far an answer is from what was measured, if it misses it."""
    warned = any(_warns(answers[name]) for name in _runs(truth))
    predicted = _predicted(truth, answers)
    if "is" in truth:
        right = predicted == truth["is"]
    elif "within_pct" in truth:
        right = abs(predicted / truth["value"] - 1) <= truth["within_pct"] / 100
    elif "at_most" in truth:
        right = predicted <= truth["at_most"]
    else:
        low, high = _at(answers[truth["run"]]["bands"], _band_name(truth["figure"]))
        right = low <= truth["value"] <= high
    return None if right else Miss(f"{truth['figure']} misses", warned)


def _runs(truth: Mapping[str, Any]) -> Sequence[str]:
    """Return the runs that a truth is about: one, or two whose ratio was measured."""
    return [truth["run"]] if isinstance(truth["run"], str) else list(truth["run"])


def _predicted(truth: Mapping[str, Any], answers: Mapping[str, Any]) -> Any:
    values = [_at(answers[name], truth["figure"]) for name in _runs(truth)]
    return values[0] if len(values) == 1 else values[0] / values[1]


def _at(answer: Any, path: str) -> Any:
    """Return the value at `path` of an answer; of a text, the number that the regular expression `path` captures."""
    if isinstance(answer, str):
        match = re.search(path, answer)
        if match is None:
            raise ValueError(f"no {path} in {answer}")
        return float(match[1].replace(",", ""))
    return reduce(lambda part, name: part[int(name) if name.isdigit() else name], path.split("."), answer)


def _band_name(figure: str) -> str:
    return figure.removeprefix("distributions.") if figure.startswith("distributions.") else f"{figure}.value"


def _warns(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("trust", {}).get("level") in _UNSURE


def _shown(truth: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    runs, predicted = " / ".join(_runs(truth)), _predicted(truth, answers)
    said = f"{predicted:,.4g}" if isinstance(predicted, int | float) else str(predicted)
    return f"{runs}: {truth['figure']} {said}, measured {_measured(truth)}"


def _measured(truth: Mapping[str, Any]) -> Any:
    return f"at most {truth['at_most']}" if "at_most" in truth else truth.get("value", truth.get("is"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of the name of a thread")
    given = parser.parse_args()
    verdicts: Counter[str] = Counter()
    for question in yaml.safe_load(_QUESTIONS.read_text(encoding="utf-8")):
        if given.only and given.only not in question["thread"]:
            continue
        verdict, lines = answered(question)
        verdicts[verdict] += 1
        print(f"{verdict}: {question['thread']}: {question['question']}", flush=True)
        for line in lines:
            print(f"    {line}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))


if __name__ == "__main__":
    main()
