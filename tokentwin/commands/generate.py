"""`tokentwin generate`: answer a prompt with the real engine."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import click

from tokentwin.options import Finite, deployment_options
from tokentwin.planning.deployments import read_deployment


@click.command()
@click.argument("prompt")
@click.option("--max-tokens", default=128, type=click.IntRange(min=1), help="Maximum number of tokens to generate.")
@click.option("--temperature", default=0.0, type=Finite(min=0), help="Sampling temperature; 0 is greedy.")
@click.option("--top-k", default=0, help="Sample only from the k most likely tokens; 0: from all tokens.")
@click.option(
    "--top-p",
    default=1.0,
    type=Finite(0, 1, min_open=True),
    help="Sample only from the most likely tokens whose probabilities add up to p.",
)
@click.option("--seed", default=0, help="Random seed of sampling; the same seed gives the same answer.")
@click.option("--stop", multiple=True, help="End the answer before this text; can be repeated.")
@click.option("--system", help="System message.")
@click.option(
    "--json-schema", type=click.Path(), help="Force the answer to be JSON that follows the schema in this file."
)
@click.option("--regex", help="Force the answer to match this regular expression.")
@deployment_options
def generate(
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    system: str | None,
    json_schema: str | None,
    regex: str | None,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Answer PROMPT with the real engine. If the model has a chat template, PROMPT is a chat message.

    Without --deployment the model is SmolLM2. Prompt and answer have at most 2048 tokens (--max-model-len).
    """
    from tokentwin.planning.home import home
    from tokentwin.planning.measure.real_engine import load_engine, need_torch
    from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
    from tokentwin.serving.errors import UserError

    grammar = _grammar(json_schema, regex)
    longest = max(flags.get("max_model_len") or 2048, 2)
    room = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "max_model_len": longest, "num_blocks": longest // 16 + 2}
    scheduler = parse(SchedulerConfig, room, "deployment.scheduler")
    deployment = read_deployment(deployment_file, flags, Deployment(scheduler=scheduler))
    if deployment.model.startswith("random:"):
        raise UserError(
            "model", deployment.model, "has random weights, so it cannot answer a prompt; use smollm2 or a model folder"
        )
    need_torch()
    from tokentwin.realengine.generate import stream
    from tokentwin.realengine.models.weights import model_folder
    from tokentwin.realengine.sampling import SamplingParams
    from tokentwin.realengine.tokenizer import Tokenizer

    sampling = SamplingParams(temperature, top_k, top_p, seed)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    folder, room_tokens = model_folder(deployment.model, home()), deployment.scheduler.max_model_len
    tokens = len(Tokenizer(folder).chat(messages)) if folder else 0
    if deployment.scheduler.full_length(tokens, max_tokens) > room_tokens:
        remedy = (
            f"and {tokens} tokens of the prompt exceed max_model_len {room_tokens}; lower it, or raise max_model_len"
        )
        raise UserError("max-tokens", max_tokens, remedy)
    with closing(load_engine(deployment, partial(click.echo, err=True), warm=False)) as engine:
        for text in stream(engine, messages, max_tokens, sampling, stop, grammar):
            click.echo(text, nl=False)
    click.echo()


def _grammar(json_schema: str | None, regex: str | None) -> str:
    from tokentwin.realengine.grammar import json_grammar, regex_grammar
    from tokentwin.serving.data_file import read_json_file
    from tokentwin.serving.errors import UserError

    if json_schema is not None and regex is not None:
        raise UserError("--regex", regex, "cannot be combined with --json-schema; leave one out")
    if regex is not None:
        return regex_grammar(regex)
    if json_schema is None:
        return ""
    schema = read_json_file("/dev/stdin" if json_schema == "-" else json_schema, "--json-schema")
    if not isinstance(schema, dict):
        raise UserError("--json-schema", json_schema, "must contain a JSON object")
    return json_grammar(schema)
