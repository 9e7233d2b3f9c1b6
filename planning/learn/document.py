"""What was learnt of a server, as one document: its settings, its proof, and the pictures of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import pyarrow as pa

from tokentwin.serving.answers.document import Document, Part, fact
from tokentwin.serving.answers.figures import shown_change, shown_percent
from tokentwin.serving.answers.report import CHANGE, COUNT, METRIC, NUMBER, PERCENT, Column, Line, Table
from tokentwin.traces.document_table import table_of

FILE = "learnt.json"
SOURCES = {
    "inferred": "from the answers",
    "stated": "by you",
    "reported": "by the server",
    "at least": "the engine's default; no question reached it",
    "assumed": "the engine's default; no question was asked that reveals it",
    "undecided": "not known; the answers do not exclude others",
}


class LearntSetting(Part):
    """A setting of the server."""

    name: str = fact("name of the setting, as in a deployment file; kv_tokens is the size of the KV cache in tokens")
    value: bool | int | str = fact("the likeliest value")
    source: Literal["inferred", "stated", "reported", "at least", "assumed", "undecided"] = fact("origin of the value")
    at_least: int | None = fact("lower limit of a value that no question reached; null for other values", default=None)
    reported: bool | int | str | None = fact(
        "value that the server reports, if you stated another; else null", default=None
    )
    also: tuple[bool | int | str, ...] = fact("other values that the answers do not tell apart from it", default=())
    least: int | None = fact(
        "least number that cannot be told apart from it; null if none was looked for", default=None
    )
    greatest: int | None = fact("greatest number that cannot be told apart from it; null as `least`", default=None)

    @property
    def others(self) -> str:
        """The values that cannot be told apart from it, in words."""
        if self.least is not None and self.greatest is not None and self.least < self.greatest:
            return f"{self.least:,} to {self.greatest:,} cannot be told apart"
        return ", ".join(map(_shown, self.also))

    @property
    def known_from(self) -> str:
        """How the value is known, in words."""
        limit = "" if self.at_least is None else f", which is at least {self.at_least:,}"
        other = "" if self.reported is None else f"; the server reports {_shown(self.reported)}"
        return SOURCES[self.source] + limit + other


class Alternative(Part):
    """Another value of a setting, which explains the answers as well."""

    name: str = fact("name of the setting")
    value: bool | int | str = fact("the other value")
    question: str = fact("question whose answer depends most on it")
    question_pct: float = fact("largest difference of a mean or median latency in this question", "%")
    traffic_pct: float = fact("largest difference of a mean or median latency in the traffic of the proof", "%")

    def sentence(self) -> str:
        """Return what the value would change, and what would tell."""
        return (
            f"{self.name} could also be {_shown(self.value)}: latencies of the traffic would differ by "
            f"{shown_percent(self.traffic_pct)}; {self.question}, asked again without other load, tells most "
            f"(they differ by {shown_percent(self.question_pct)})"
        )


class ProofFigure(Part):
    """A latency in traffic that taught the twin nothing, as predicted and as measured."""

    traffic: str = fact("name of the traffic")
    metric: str = fact("name of the latency")
    statistic: str = fact("mean, p50 or p99")
    measured: float = fact("measured value", "ms")
    predicted: float = fact("value of the twin", "ms")
    low: float = fact("least value of the twin's 90 % interval", "ms")
    high: float = fact("greatest value of the twin's 90 % interval", "ms")
    floor_pct: float | None = fact("difference between two runs of the same traffic; null if it ran once", "%")

    @property
    def error_pct(self) -> float:
        """The error of the twin in percent of the measured value."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def inside(self) -> bool:
        """True if the measured value lies in the interval."""
        return self.low <= self.measured <= self.high


class AskedQuestion(Part):
    """A question that the server answered."""

    name: str = fact("name of the question, and of the folder with the recording of its answer")
    reveals: str = fact("what the answer reveals")
    requests: int = fact("number of requests")
    seconds: float = fact("time of the answer", "s")


class StepPoint(Part):
    """Decode steps of equal size, as the client saw them and as the twin has them."""

    rows: int = fact("number of decoding requests")
    context: float = fact("mean number of tokens before, of each request", "tokens")
    measured_ms: float = fact("median duration of the steps", "ms")
    twin_ms: float = fact("duration of the twin's steps", "ms")


class PromptPoint(Part):
    """A lone prompt, as the client saw it and as the twin has it."""

    tokens: int = fact("length of the prompt", "tokens")
    measured_ms: float = fact("time to first token", "ms")
    twin_ms: float = fact("time to first token of the twin", "ms")


class LearntServer(Document):
    """A server's twin: what it is, how far it is off, and what was asked."""

    what: ClassVar[str] = "twin of a server"
    where: ClassVar[str] = FILE

    url: str = fact("URL of the server")
    model: str = fact("name of the model")
    gpu: str | None = fact("name of the GPU; null if it is not known")
    created: str = fact("date of the session")
    settings: tuple[LearntSetting, ...] = fact("settings of the server")
    alternatives: tuple[Alternative, ...] = fact("other values that explain the answers as well", default=())
    request_ms: float = fact("time that a lone request takes outside the engine", "ms")
    low_factor: float = fact("fast end of the 90 % interval of step times, as a factor")
    high_factor: float = fact("slow end of the 90 % interval of step times, as a factor")
    proof: tuple[ProofFigure, ...] = fact("predicted and measured latencies of traffic that taught it nothing")
    asked: tuple[AskedQuestion, ...] = fact("questions in order")
    steps: tuple[StepPoint, ...] = fact("decode steps by rows and context")
    prompts: tuple[PromptPoint, ...] = fact("lone prompts by length")
    folder: str = fact("folder of the twin")

    @property
    def tables(self) -> tuple[str, ...]:
        return "proof", "settings", "alternatives", "asked", "steps", "prompts"

    def table(self, name: str) -> pa.Table:
        """Return the rows of one of `tables`."""
        return table_of(_ROWS[name], getattr(self, name))

    @property
    def worst(self) -> ProofFigure | None:
        """The figure with the largest error; None without a proof."""
        return max(self.proof, key=lambda figure: abs(figure.error_pct), default=None)

    def headline(self) -> str:
        """Return the verdict in one sentence, with the largest error."""
        worst = self.worst
        if worst is None:
            return "Not proved: the time was up before the twin was tried on other traffic"
        usual = [abs(figure.error_pct) for figure in self.proof if figure.statistic != "p99"]
        inside = sum(figure.inside for figure in self.proof)
        largest = f"{worst.metric.removesuffix('_ms').upper()} {worst.statistic} of {worst.traffic}"
        return (
            f"On traffic that taught it nothing, means and medians are off by at most {shown_percent(max(usual))}; "
            f"worst figure: {largest}, {shown_change(worst.error_pct)}; "
            f"{inside} of {len(self.proof)} figures lie in their 90 % interval"
        )

    def report(self) -> Iterator[Line | Table]:
        yield Line(self.headline(), "headline")
        yield from self.details()
        yield Line("next:", "note")
        files = f"-c {self.folder} -d {self.folder}/deployment.yaml"
        yield Line(f"tokentwin simulate TRACE {files} -o simulated", "command")
        yield Line(f"tokentwin plan TRACE {files} --slo 'ttft_ms p99<=500'", "command")

    def details(self) -> Iterator[Line | Table]:
        """Yield the proof, the settings and the questions."""
        if self.proof:
            columns = [
                Column("traffic"),
                Column("latency", METRIC),
                Column("statistic"),
                *(Column(name, NUMBER) for name in ("measured", "twin", "least", "greatest")),
                Column("error", CHANGE),
                Column("noise", PERCENT),
            ]
            rows = [
                (p.traffic, p.metric, p.statistic, p.measured, p.predicted, p.low, p.high, p.error_pct, p.floor_pct)
                for p in self.proof
            ]
            marked = {(at, 7) for at, figure in enumerate(self.proof) if not figure.inside}
            yield Table(columns, rows, "predicted and measured", marked)
        settings = [(one.name, _shown(one.value), one.known_from, one.others) for one in self.settings]
        names = [Column("setting"), Column("value"), Column("known"), Column("or", spare=1)]
        yield Table(names, settings, "what the server is")
        for one in self.alternatives:
            yield Line(one.sentence())
        yield Line(f"a request takes {self.request_ms:.1f} ms outside the engine")
        asked = [(one.name, one.reveals, one.requests, one.seconds) for one in self.asked]
        names = [Column("question"), Column("reveals"), Column("requests", COUNT), Column("s", NUMBER)]
        yield Table(names, asked, "what it was asked")


_ROWS: dict[str, type[Part]] = {
    "proof": ProofFigure,
    "settings": LearntSetting,
    "alternatives": Alternative,
    "asked": AskedQuestion,
    "steps": StepPoint,
    "prompts": PromptPoint,
}


def _shown(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value
