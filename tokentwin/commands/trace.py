"""`tokentwin trace`: inspect a workload, convert it, or generate one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.serving.answers.figures import shown_number, shown_share
from tokentwin.serving.data_file import parse_yaml
from tokentwin.serving.errors import UserError
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from tokentwin.serving.workload import Workload, WorkloadRequest
    from tokentwin.traces.formats.sessions import Assumed
    from tokentwin.traces.summary import WorkloadSummary

_ADVANCE_EVERY = 10_000  # unit: requests
_TRACE = click.Path(path_type=Path)
_FORMAT = click.option("--format", "format_", type=click.Choice(["table", "json"]), default="table", help="Format.")
_TO = click.option(
    "--to",
    type=click.Choice(["parquet", "mooncake"]),
    help="Format to write; by default it follows from the name of OUT.",
)
_FORCE = click.option("--force", is_flag=True, help="Replace OUT if it exists.")
_SPREAD = click.option(
    "--spread-ticks", is_flag=True, help="Spread arrivals with equal timestamps evenly until the next timestamp."
)
_COLUMNS = click.option(
    "--columns",
    metavar="FIELD=COLUMN,...",
    default="",
    help="Columns of CSV or JSON lines with other names, such as timestamp=when,prompt_tokens=in,output_tokens=out; "
    "other columns are left out. Usual names, such as input_tokens, need no option.",
)


@click.group()
def trace() -> None:
    """Inspect, convert or generate a trace of requests.

    The format is recognised from the content: Azure CSV, Mooncake JSON lines (with sessions, too), OpenTelemetry GenAI
    spans, Dynamo's traces, inputs and records of AIPerf, ShareGPT conversations, tokentwin's Parquet, simple CSV or
    simple JSON lines. Text may be gzipped. In place of a trace you can give a recording; its requests are then used.
    """


@trace.command()
@click.argument("path", metavar="TRACE", type=_TRACE)
@click.option("--block-size", type=click.IntRange(min=1), default=16, help="Tokens in a KV block.")
@_SPREAD
@_COLUMNS
@_FORMAT
def inspect(path: Path, block_size: int, spread_ticks: bool, columns: str, format_: str) -> None:
    """Show arrival rates, burstiness, lengths, and the prefix-hit rate of a cache of infinite size."""
    from tokentwin.traces.summary import summarise

    _print(summarise(_read(path, spread_ticks, columns), block_size), format_)


@trace.command()
@click.argument("path", metavar="TRACE", type=_TRACE)
@click.argument("out", type=_TRACE)
@_TO
@_SPREAD
@_COLUMNS
@click.option(
    "--arrivals",
    metavar="A",
    help="For conversations without times: arrivals of conversations, such as poisson:rate=2, in the forms of `synth`.",
)
@click.option(
    "--think-ms",
    metavar="L",
    help="For conversations without times: milliseconds from an answer to the next turn, such as 5000, or in the forms "
    "of `synth --output`; by default exponential:mean=20000.",
)
@click.option("--output", metavar="L", help="For inputs that state no length of answers: this length.")
@click.option("--seed", metavar="N", help="Seed of these random draws.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="For conversations as text: folder with a model's tokenizer.json. Without it, four characters are a token.",
)
@_FORCE
def convert(
    path: Path,
    out: Path,
    to: str | None,
    spread_ticks: bool,
    columns: str,
    force: bool,
    tokenizer: Path | None,
    **assumed: Any,
) -> None:
    """Write TRACE to OUT as Parquet (exact) or Mooncake JSON lines (512-token blocks).

    Mooncake stores arrival times in milliseconds, lengths, and shared prefixes of complete blocks. It cannot store ids,
    priorities, tenants, SLO classes, sessions or a closed loop (clients that wait for answers).
    """
    from tokentwin.traces.formats.trace_file import write_workload

    stated = [name for name, value in {**assumed, "tokenizer": tokenizer}.items() if value is not None]
    if columns and stated:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
        raise UserError("--columns", columns, f"is for requests, and {given} for conversations; leave one of them out")
    read = _read(path, spread_ticks, columns, _assumed(tokenizer, assumed))
    write_workload(read, out, to, overwrite=force)
    click.echo(f"wrote {out}", err=True)


@trace.command()
@click.argument("out", type=_TRACE)
@click.option("--spec", "spec_path", type=_TRACE, help="YAML file of the specification; options override it.")
@click.option("--requests", metavar="N", help="Number of requests.")
@click.option("--duration-s", metavar="S", help="Seconds during which requests arrive, instead of --requests.")
@click.option("--seed", metavar="N", help="Seed of all random draws.")
@click.option(
    "--arrivals",
    metavar="A",
    help="poisson:rate=9 | gamma:rate=9,cv=3 | constant:rate=9 | "
    "ramp:start_rate=1,end_rate=9,over_s=600 | closed:concurrency=32 | users:users=50",
)
@click.option(
    "--prompt",
    metavar="L",
    help="Length of the user's part of a prompt: 512 | uniform:low=1,high=99 | "
    "lognormal:mean=950,p99=7000,max=8000 | exponential:mean=200 | empirical:path=trace.csv",
)
@click.option("--output", metavar="L", help="Length of the output, in the forms of --prompt.")
@click.option("--system-prompts", metavar="P", help="For example count=10,tokens=400,choice=zipf,exponent=1,share=0.9")
@click.option("--sessions", metavar="S", help="For example turns=4,think_ms=20000,max_prompt_tokens=8000")
@click.option(
    "--adapters",
    metavar="A",
    help="LoRA adapters of the requests: a number, or for example count=100,exponent=1.2,share=0.9 "
    "(the k-th is chosen in proportion to k^-exponent).",
)
@click.option(
    "--images",
    metavar="I",
    help="Images of the requests: tokens of one image, or for example "
    "count=2,tokens=1024,share=0.5,distinct=100 or kind=video,frames=16,tokens=4096.",
)
@click.option(
    "--structured",
    metavar="P",
    help="Fraction of requests with structured output (answers that follow a grammar), such as 0.3.",
)
@click.option(
    "--grammar-compile-ms", metavar="MS", help="Time that each structured request waits until its grammar is compiled."
)
@click.option(
    "--changes-logits",
    metavar="P",
    help="Fraction of requests with penalties or a bias, which take time at each token.",
)
@click.option("--scores-prompt", metavar="P", help="Fraction of requests that want log-probabilities of their prompts.")
@_TO
@_FORCE
@_FORMAT
def synth(out: Path, spec_path: Path | None, to: str | None, force: bool, format_: str, **options: str | None) -> None:
    """Generate a synthetic workload and write it to OUT.

    The same specification and seed give the same file. For random lengths of system prompts and sessions, use a YAML
    file (--spec).
    """
    from tokentwin.planning.progress import counting
    from tokentwin.serving.data_file import read_mapping
    from tokentwin.traces.formats.trace_file import read_workload, write_workload
    from tokentwin.traces.summary import summarise
    from tokentwin.traces.synth import parse_spec, synthesise

    data = read_mapping(spec_path, "spec", "docs/traces.md") if spec_path else {}
    for name, value in options.items():
        if value is not None:
            data[name] = _parsed(name, value)
            other = {"requests": "duration_s", "duration_s": "requests"}.get(name)
            if other and options[other] is None:
                data.pop(other, None)
    spec = parse_spec(data, where=str(spec_path) if spec_path else "spec")
    workload = synthesise(spec)
    with counting("writing", round(spec.expected_requests)) as advance:
        counted = replace(workload, requests=_Counted(workload.requests, advance))
        write_workload(counted, out, to, overwrite=force)
    click.echo(f"wrote {out}", err=True)
    _print(summarise(read_workload(out)), format_)


class _Counted:
    """An iterable of requests that calls `advance` now and then with the number of requests read."""

    def __init__(self, requests: Iterable[WorkloadRequest], advance: Callable[[int], None]) -> None:
        self._requests, self._advance = requests, advance

    def __iter__(self) -> Iterator[WorkloadRequest]:
        for number, request in enumerate(self._requests):
            if number % _ADVANCE_EVERY == 0:
                self._advance(number)
            yield request


def _read(path: Path, spread: bool, columns: str, assumed: Assumed | None = None) -> Workload:
    from tokentwin.traces.formats.trace_file import read_workload
    from tokentwin.traces.reshape import spread_ticks

    workload = read_workload(path, assumed, _by_field(columns))
    return spread_ticks(workload) if spread else workload


def _by_field(columns: str) -> dict[str, str]:
    """Return the column of each field in `FIELD=COLUMN,...`. Raises UserError for another form."""
    by_field: dict[str, str] = {}
    for part in columns.split(",") if columns else ():
        field, equals, column = (text.strip() for text in part.partition("="))
        if not (field and equals and column):
            raise UserError("columns", part, "must be FIELD=COLUMN, such as prompt_tokens=in")
        if field in by_field:
            raise UserError("columns", part, f"gives {field} twice; leave one of them out")
        by_field[field] = column
    return by_field


def _assumed(tokenizer: Path | None, given: dict[str, str | None]) -> Assumed | None:
    """Return what the options state about a file of conversations; None if they state nothing."""
    from tokentwin.serving.deployments.config import parse
    from tokentwin.traces.formats.sessions import Assumed

    stated = {name: _parsed(name, text) for name, text in given.items() if text is not None}
    if not stated and tokenizer is None:
        return None
    assumed = parse(Assumed, stated, where="convert")
    if tokenizer is None:
        return assumed
    from tokentwin.realengine.tokenizer import Tokenizer

    return assumed.model_copy(update={"tokenizer": Tokenizer(tokenizer).encode})


def _parsed(name: str, text: str) -> Any:
    """Return the value of an option: `kind:key=value,...`, or `key=value,...`, or a plain value."""
    if name in ("system_prompts", "sessions") or (name in ("adapters", "images") and "=" in text):
        kind, rest = "", text
    elif name == "arrivals" or (name in ("prompt", "output", "think_ms") and not text.lstrip("-").isdigit()):
        kind, _, rest = text.partition(":")
    else:
        return _value(name, text)
    fields: dict[str, Any] = {"kind": kind} if kind else {}
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--{name.replace('_', '-')}", text, f"{item!r} must be key=value")
        if key.strip() in fields:
            raise UserError(f"--{name.replace('_', '-')}", text, f"gives {key.strip()} twice; leave one of them out")
        fields[key.strip()] = value.strip() if key.strip() == "path" else _value(name, value)
    return fields


def _value(name: str, text: str) -> Any:
    """Return a plain value as YAML reads it: a number, or a word."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--{name.replace('_', '-')}", text, str(error)) from None


def _loop(summary: WorkloadSummary) -> str:
    if summary.concurrency:
        return f"closed, {summary.concurrency} outstanding"
    if not summary.waiting:
        return "open"
    if summary.until_s is not None:
        return f"closed, {summary.sessions:,} users for {shown_number(summary.until_s)} s"
    return f"sessions arrive, {summary.waiting:,} turns wait for answers"


def _print(summary: WorkloadSummary, format_: str) -> None:
    if format_ == "json":
        click.echo(json.dumps(summary.as_dict(), indent=2))
        return
    rows = [("requests", f"{summary.requests:,}"), ("loop", _loop(summary))]
    if summary.sessions and summary.until_s is None:
        turns = shown_number(summary.requests / summary.sessions)
        rows.append(("sessions", f"{summary.sessions:,}, {turns} turns on average"))
    if summary.waiting:
        rows.append(("think time", f"{shown_number(summary.think_s)} s on average"))
    at_once = " if answers took no time" if summary.waiting else ""
    rows += [
        (f"span{at_once}", f"{shown_number(summary.span_s)} s"),
        ("request rate", f"{shown_number(summary.request_rate)}/s"),
        ("input tokens", f"{shown_number(summary.input_token_rate)}/s"),
        ("output tokens", f"{shown_number(summary.output_token_rate)}/s"),
        ("CV of gaps between arrivals", shown_number(summary.interarrival_cv)),
        ("busiest minute", f"{summary.peak_minute:,} requests"),
        ("busiest minute / mean", f"{shown_number(summary.peak_minute_ratio)}x"),
        ("prefix hits, infinite cache", f"{shown_share(summary.prefix_hit_rate, 1)} of prompt tokens"),
        (f"  in blocks of {summary.block_size}", f"{shown_share(summary.prefix_block_hit_rate, 1)} of blocks"),
    ]
    for label, counts in (("tenants", summary.tenants), ("SLO classes", summary.slo_classes)):
        if set(counts) != {""}:
            rows.append((label, ", ".join(f"{key or '(none)'} {n:,}" for key, n in sorted(counts.items())[:8])))
    if summary.adapters:
        most = sorted(summary.adapters.items(), key=lambda one: (-one[1], one[0]))[:8]
        shares = ", ".join(f"{name or '(none)'} {shown_share(n / summary.requests, 1)}" for name, n in most)
        rows.append((f"adapters ({len(summary.adapters.keys() - {''}):,})", shares))
    if summary.items:
        shown = f"{summary.items:,} with {summary.item_tokens:,} tokens, {summary.repeated_items:,} seen before"
        rows.append(("images, videos, audio", shown))
    print_table(("trace", summary.name), rows)
    columns = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")
    lengths = (
        (label, *(f"{getattr(length, column):,.0f}" for column in columns))
        for label, length in (("prompt", summary.prompt), ("output", summary.output))
    )
    print_table(("tokens", *columns), lengths, "lengths", right=columns)
    if summary.tied_share is not None and summary.tied_share > 0.5 and not summary.concurrency:
        tied = shown_share(summary.tied_share)
        print(f"{tied} of the gaps between arrivals are zero. If timestamps were rounded, use --spread-ticks.")
