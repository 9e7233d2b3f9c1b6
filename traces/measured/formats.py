"""The formats of measured runs, by their names in case files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.deployments.config import parse
from serving.errors import UserError
from serving.user_code.plugins import find
from traces.measured.run import MeasuredFormat

FORMATS = {
    "aiperf": "traces.measured.aiperf:AiPerf",
    "bench-serve": "traces.measured.bench_serve:BenchServe",
    "csv": "traces.measured.csv_rows:CsvRows",
    "guidellm": "traces.measured.guidellm:GuideLlm",
    "guidellm-spans": "traces.measured.guidellm_spans:GuideLlmSpans",
    "inference-perf": "traces.measured.inference_perf:InferencePerf",
    "prometheus": "traces.measured.prometheus:Prometheus",
    "recording": "traces.measured.recorded_client:RecordedClient",
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
