"""The formats of measured runs, by their names in case files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.plugins import find
from tokentwin.traces.measured.run import MeasuredFormat

FORMATS = {
    "aiperf": "tokentwin.traces.measured.aiperf:AiPerf",
    "bench-serve": "tokentwin.traces.measured.bench_serve:BenchServe",
    "csv": "tokentwin.traces.measured.csv_rows:CsvRows",
    "guidellm": "tokentwin.traces.measured.guidellm:GuideLlm",
    "guidellm-spans": "tokentwin.traces.measured.guidellm_spans:GuideLlmSpans",
    "inference-perf": "tokentwin.traces.measured.inference_perf:InferencePerf",
    "prometheus": "tokentwin.traces.measured.prometheus:Prometheus",
    "recording": "tokentwin.traces.measured.recorded_client:RecordedClient",
}


def measured_format(settings: Mapping[str, Any], where: str) -> MeasuredFormat:
    """Return the format named in `settings`, with the other settings as its fields; `module:Class` is a user's own.

    Raises UserError for an unknown name or field; its message begins with `where`.
    """
    name = settings.get("format")
    if not isinstance(name, str):
        raise UserError(f"{where}.format", name, f"must be one of {', '.join(FORMATS)}")
    kind = find(f"{where}.format", name, FORMATS, ("read", "model_validate"))
    return parse(kind, dict(settings), where=where)
