"""Workers of a plan that share their results, so that no simulation is made twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planning.plan.trial import Question, Trials
from planning.workers import Answer, Task, Workers


class Planners(Workers[Question]):
    """Workers of a plan: each task gets the results of all tasks before it."""

    def run(self, tasks: Sequence[Task[Question, Answer]]) -> list[Answer]:
        """Run the tasks as `Workers` does."""
        known = dict(self.common.runs.known)
        answers = super().run([partial(_with_new_trials, task=task, known=known) for task in tasks])
        for _, trials in answers:
            self.common.runs.add(trials)
        return [answer for answer, _ in answers]


def _with_new_trials(question: Question, task: Task[Question, Answer], known: Trials) -> tuple[Answer, Trials]:
    """Return the answer of a task, and its results that were not `known`."""
    runs = question.runs
    runs.add(known)
    answer = task(question)
    return answer, {key: trial for key, trial in runs.known.items() if known.get(key) is not trial}
