"""Editions of a model: what the end of a checkpoint's name says about how its weights are stored.

`Qwen3-32B-Instruct-2507-FP8` is Qwen3-32B stored in fp8. Words that change no shapes (Instruct, a date) and words for a
format are left out of the key by which a model is found.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from tokentwin.serving.errors import UserError

_PLAIN = (
    r"instruct|chat|base|it|hf|thinking|reasoning|preview|pt|dynamic|static|block|quantized|qat|dq|mtp|1m|128k|compressed-tensors"
    r"|v2-fp8|fp4-v2|nvfp4a16|nvfp4|fp4|fp8|kv|bf16|fp16|awq|gptq|autoround|int4|int8|4bit|8bit|bnb|w[48]a16|fp8kv|g(?:32|64|128)|\d{4}"
)
_EDITION = re.compile(rf"[-.](?:{_PLAIN})(?=[-.]|$)")


class Stored(NamedTuple):
    """How an edition stores its weights.

    Attributes:
        quantization: the format, with a name of `Deployment.quantization`; none means 16 bits
        group_size: inputs that share a scale in int4 and int8; 0: all
        zero_points: True if groups have zero points
    """

    quantization: str
    group_size: int = 0
    zero_points: bool = False


_FORMATS = (  # the first that matches a name is its format
    (re.compile("nvfp4|-fp4"), Stored("nvfp4")),
    (re.compile("-awq"), Stored("int4", 128, True)),
    (re.compile("w8a16"), Stored("int8")),
    (re.compile("gptq.*(int8|8bit)"), Stored("int8", 128)),
    (re.compile("w4a16|gptq|autoround|-int4|-4bit"), Stored("int4", 128)),
    (re.compile("-int8|-8bit"), Stored("int8")),
    (re.compile("fp8"), Stored("fp8")),
    (re.compile("-(bf16|fp16)"), Stored("none")),
)


def key(name: str) -> str:
    """Return the part of a name that all editions of a model share, in lower case and without the organisation."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    return _EDITION.sub("", plain).removeprefix("meta-").removeprefix("nvidia-")


@cache
def stored_by_name(name: str) -> Stored | None:
    """Return how the checkpoint called `name` stores its weights; None if the name does not say."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    return next((stored for form, stored in _FORMATS if form.search(plain)), None)


def check_edition(name: str, quantization: str) -> None:
    """Raise UserError if a model's name states another format than the deployment's `quantization`."""
    stored = stored_by_name(name)
    if stored is None or quantization in ("none", stored.quantization) or stored.quantization == "none":
        return
    if quantization.startswith("fp8") and stored.quantization == "fp8":
        return
    remedy = f"is not how {name} is stored ({stored.quantization}); leave it out, or name the model in 16 bits"
    raise UserError("quantization", quantization, remedy)
