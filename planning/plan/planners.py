"""Workers of a plan that share their results, so that no simulation is made twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planning.plan.trial import Found, Question
from planning.workers import Answer, Task, Workers


class Planners(Workers[Question]):
    """Workers of a plan: each task gets the results of all tasks before it."""

    def run(self, tasks: Sequence[Task[Question, Answer]]) -> list[Answer]:
        """Run the tasks as `Workers` does."""
        known = dict(self.common.runs.known)
        answers = super().run([partial(_told, task=task, known=known) for task in tasks])
        for _, found in answers:
            self.common.runs.add(found)
        return [answer for answer, _ in answers]


def _told(question: Question, task: Task[Question, Answer], known: Found) -> tuple[Answer, Found]:
    """Return the answer of a task, and its results that were not `known`."""
    runs = question.runs
    runs.add(known)
    answer = task(question)
    return answer, {key: trial for key, trial in runs.known.items() if known.get(key) is not trial}
