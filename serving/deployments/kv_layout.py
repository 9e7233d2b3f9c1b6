"""The KV of a request: the bytes of a token, and the blocks in groups of layers that share a block table.

The groups are those of vLLM's hybrid allocator. They have equal numbers of layers, so that one pool of blocks serves
them all. A group of layers with full attention takes a block for every `block_size` tokens. A group with a sliding
window gives back the blocks before its window. A group with a constant state has a single block, or two or three while
states are cached, and blocks are made large enough for that state.
"""

from __future__ import annotations

from typing import Any

from tokentwin.serving.deployments.attention import BLOCK_SIZE, CompressedAttention
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.context_parallel import check_context
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.blocks import blocks_for

# below this ratio of the numbers of layers of two kinds, vLLM pads the rarer kind instead of splitting the other
_NEARLY_EVEN = 1.5

_STATES_CACHED_SINCE = (0, 28)  # first release of vLLM known to cache constant states by default; 0.26 does not
_ONLY_WRITES_DEFER_SINCE = (0, 33)  # see `SchedulerConfig.state_read_defers_hits`
_STATE_SPACES = ("nemotron_h", "nemotron_h_moe", "granite_hybrid")  # families with Mamba 2, in `architectures.py`


def kv_dtype(deployment: Deployment) -> str:
    """Return the data type of keys and values."""
    return deployment.dtype if deployment.kv_cache_dtype == "auto" else deployment.kv_cache_dtype


def kv_bytes_per_token(deployment: Deployment, given: int | None, setting: str) -> int:
    """Return `given` if it is set, otherwise the KV bytes from the shapes of the model and its draft model.

    Raises UserError that names `setting` if the shapes are unknown.
    """
    if given is not None:
        return given
    drafts, dtype_bytes = deployment.scheduler.speculative, int(DTYPE_BYTES[kv_dtype(deployment)])
    return sum(
        _shapes(name, setting).kv_bytes_per_token(dtype_bytes)
        for name in (deployment.model, drafts and drafts.model)
        if name
    )


def _shapes(name: str, setting: str) -> ModelSpec:
    try:
        return find_model(name)
    except UserError:
        remedy = f"has no known shapes, which give the KV bytes of a token; set {setting}"
        raise UserError("model", name, remedy) from None


def layers_of_a_group(model: ModelSpec) -> int:
    """Return the number of layers of each group; the last group is padded to this number."""
    few, many = sorted((model.full_layers, model.sliding_layers + model.linear_layers))
    return many if many < few * _NEARLY_EVEN or not few else few


def page_bytes(model: ModelSpec, deployment: Deployment) -> int:
    """Return the mean bytes of KV of one block in one layer, on one device.

    Latent vectors are shared by all heads, so every device holds all of them. With decode context parallelism, devices
    share the tokens of a block.
    """
    tokens = deployment.scheduler.block_size / deployment.decode_context_parallel_size
    if model.latent is not None:
        kept = model.latent.cache_bytes(DTYPE_BYTES[kv_dtype(deployment)], model.kv_layers)
        return int(kept / model.kv_layers * tokens)
    heads = max(model.num_kv_heads // deployment.tensor_parallel_size, 1)
    return int(2 * heads * model.head_dim * tokens * DTYPE_BYTES[kv_dtype(deployment)])


def state_bytes(model: ModelSpec, deployment: Deployment) -> float:
    """Return the bytes of a request's constant state in one layer, on one device.

    With drafts, vLLM keeps a state after each token of a step, because drafts may be rejected. The window of compressed
    attention is a constant state, too.
    """
    if isinstance(model.latent, CompressedAttention):
        return model.latent.request_bytes(DTYPE_BYTES[kv_dtype(deployment)]) / model.num_layers
    if model.linear is None:
        return 0.0
    linear, drafts = model.linear, deployment.scheduler.speculative
    plain = DTYPE_BYTES[deployment.dtype]
    state = DTYPE_BYTES[linear.mamba_ssm_dtype or deployment.dtype] * linear.state + plain * linear.conv_state
    return state / deployment.tensor_parallel_size * (1 + (drafts.num_speculative_tokens if drafts else 0))


def states_bytes(deployment: Deployment) -> int:
    """Return the bytes of a request's constant states in all layers, on all devices.

    Latent vectors are equal on all devices and count once. The result is 0 for a model of unknown shapes.
    """
    model = _known(deployment)
    if model is None:
        return 0
    layers = model.linear_layers * deployment.tensor_parallel_size if model.linear else model.num_layers
    return round(layers * state_bytes(model, deployment.rescheduled(speculative=None)))


def with_states(model: ModelSpec, deployment: Deployment) -> Deployment:
    """Return `deployment` with the block settings that vLLM uses for a model with constant states, or for an encoder.

    The deployment of any other model is returned unchanged. With constant states, the block size becomes a multiple of
    the stated `block_size`, so large that the KV of a block takes at least the memory of one request's states in a
    layer. Prefix caching is turned off unless states are cached, too. With compressed attention, the block size becomes
    a multiple of 256 tokens instead, and each request holds additional blocks for its constant part. Raises UserError
    if the deployment has KV tiers, or states that it caches prefixes where states cannot be cached.
    """
    check_context(model, deployment)
    config, compressed = deployment.scheduler, isinstance(model.latent, CompressedAttention)
    if model.whole_prompts:
        return _in_one_step(model, deployment)
    if not (model.linear or compressed):
        return deployment
    if config.state_blocks:
        caches = not model.linear or config.caches_states or not config.enable_prefix_caching
        return deployment if caches else deployment.rescheduled(**_state_cache(model, deployment))
    if deployment.kv_tiers:
        raise UserError("kv_tiers", "on", f"cannot be combined with the constant states of {model.name}; leave it out")
    if compressed:
        deployment = deployment.rescheduled(block_size=-(-config.block_size // BLOCK_SIZE) * BLOCK_SIZE)
        blocks = -(-state_bytes(model, deployment) // page_bytes(model, deployment))
        return deployment.rescheduled(state_blocks=int(blocks))
    blocks = max(-(-state_bytes(model, deployment) // page_bytes(model, deployment)), 1)
    return deployment.rescheduled(
        block_size=int(blocks) * config.block_size,
        state_blocks=-(-model.linear_layers // layers_of_a_group(model)),
        **_state_cache(model, deployment),
    )


def _state_cache(model: ModelSpec, deployment: Deployment) -> dict[str, Any]:
    """Return the settings of the cache of constant states: those of vLLM, if it caches prefixes of such a model.

    vLLM does so by default since `_STATES_CACHED_SINCE`, and in earlier releases if asked to. Raises UserError if the
    deployment states that it does, and our pool cannot.
    """
    config, engine = deployment.scheduler, deployment.engine_name
    stated = config.states("enable_prefix_caching")
    if not config.enable_prefix_caching:
        return {}
    lacks = [
        lack
        for lack, given in {
            f"with engine {engine.name}": engine.name != "vllm",
            "with speculative decoding": config.speculative is not None,
            "with pipeline stages": deployment.pipeline_parallel_size > 1,
            "without enable_chunked_prefill": not config.enable_chunked_prefill,
        }.items()
        if given
    ]
    if stated and lacks:
        remedy = f"cannot be simulated {lacks[0]} for {model.name}, which has constant states; set it to false"
        raise UserError("scheduler.enable_prefix_caching", True, remedy)
    if lacks or not (stated or engine.release is None or engine.release >= _STATES_CACHED_SINCE):
        return {"enable_prefix_caching": False}
    return {
        "mamba_cache_mode": "align",
        "num_prefill_checkpoint_blocks": int(model.family in _STATE_SPACES),
        "state_read_defers_hits": engine.release is not None and engine.release < _ONLY_WRITES_DEFER_SINCE,
    }


def _in_one_step(model: ModelSpec, deployment: Deployment) -> Deployment:
    """Return `deployment` for a model that must compute a prompt in one step.

    vLLM splits no prompt and caches no prefix if all tokens attend to one another, or if the result needs hidden states
    of other tokens than the last (`ModelConfig.is_chunked_prefill_supported` of release 0.32). In the former case the
    layers keep no KV. Raises UserError for a setting that does not go with this.
    """
    config = deployment.scheduler
    longest = config.max_model_len
    if longest > model.max_positions:
        if config.states("max_model_len"):
            remedy = f"must be at most {model.max_positions:,}, the positions of {model.name}"
            raise UserError("scheduler.max_model_len", longest, remedy)
        longest = model.max_positions
    if config.max_num_batched_tokens < longest and config.states("max_num_batched_tokens"):
        remedy = f"must be at least max_model_len {longest:,}, because {model.name} reads a prompt in one step"
        raise UserError("scheduler.max_num_batched_tokens", config.max_num_batched_tokens, remedy)
    for name, value in (
        ("kv_tiers", deployment.kv_tiers),
        ("scheduler.speculative", config.speculative),
        ("scheduler.long_prefill_token_threshold", config.long_prefill_token_threshold),
    ):
        if value:
            shown = value if isinstance(value, int) else "on"
            raise UserError(name, shown, f"cannot be combined with {model.name}, which reads a prompt in one step")
    budget = {} if config.max_num_batched_tokens >= longest else {"max_num_batched_tokens": longest}
    return deployment.rescheduled(
        **budget,
        max_model_len=longest,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        kv_reservation="none" if model.bidirectional else config.kv_reservation,
    )


def kv_groups(model: ModelSpec, deployment: Deployment) -> tuple[int, ...]:
    """Return `SchedulerConfig.kv_groups` for `model`; empty if no layer has a sliding window.

    It is also empty with KV tiers, a draft model, `mtp` or pipeline stages: then KV is kept as if no layer had a
    window.
    """
    speculative = deployment.scheduler.speculative
    drafted = speculative is not None and speculative.method in ("draft_model", "mtp")
    if model.sliding_window < 2 or deployment.kv_tiers or drafted or deployment.pipeline_parallel_size > 1:
        return ()
    layers, full = layers_of_a_group(model), model.num_layers - model.sliding_layers
    sliding, whole = (model.sliding_window,) * -(-model.sliding_layers // layers), (0,) * -(-full // layers)
    return whole + sliding if model.sliding_at and model.sliding_at[0] else sliding + whole


def with_kv_groups(deployment: Deployment) -> Deployment:
    """Return `deployment` with the KV groups of its model, if the model is known.

    Raises UserError if the deployment states other groups.
    """
    model = _known(deployment)
    if model is None:
        return deployment
    return stating_kv_groups(with_states(model, deployment), kv_groups(model, deployment))


def with_known_states(deployment: Deployment) -> Deployment:
    """Return the deployment after `with_states` if its model is known, otherwise unchanged."""
    model = _known(deployment)
    return deployment if model is None else with_states(model, deployment)


def _known(deployment: Deployment) -> ModelSpec | None:
    try:
        return find_model(deployment.model)
    except UserError:  # unknown shapes; a user's own cost model may still have times for this model
        return None


def stating_kv_groups(deployment: Deployment, groups: tuple[int, ...]) -> Deployment:
    """Return `deployment` with the KV groups `groups`. Raises UserError if it states other groups."""
    stated = deployment.scheduler.kv_groups
    if stated and stated != groups:
        raise UserError("scheduler.kv_groups", list(stated), f"is {list(groups)} for {deployment.model}; leave it out")
    return deployment.rescheduled(kv_groups=groups) if groups else deployment


def most_sliding_tokens(config: SchedulerConfig) -> int:
    """Return the maximum number of tokens in the blocks that a sliding layer holds for a request.

    They are the past tokens in its window, the tokens in flight (vLLM's `max_admission_blocks_per_request`), and one
    more block, because the window can begin in the middle of a block.
    """
    in_flight = config.max_num_batched_tokens * (2 if config.async_scheduling else 1)
    seen = min(max(config.kv_groups) - 1 + in_flight, config.max_model_len)
    return (blocks_for(seen, config.block_size) + 1) * config.block_size


def most_held(config: SchedulerConfig, tokens: int) -> int:
    """Return the maximum number of blocks that a request holds at once while it computes `tokens` tokens."""
    if config.kv_reservation == "none":
        return 0
    if not config.kv_groups:
        blocks = blocks_for(tokens, config.block_size)
        if not config.state_blocks:
            return blocks
        return blocks + config.state_blocks * max(min(blocks, most_states(config)), 1)
    sliding = min(tokens, most_sliding_tokens(config))
    return sum(blocks_for(sliding if window else tokens, config.block_size) for window in config.kv_groups)


def most_states(config: SchedulerConfig) -> int:
    """Return the maximum number of states that a request holds at once in a group of layers with constant states.

    If states are cached, a step reads one and writes another, and the step in flight before it reads a third. A step
    may write a checkpoint, too.
    """
    if not config.caches_states:
        return 1
    return (3 if config.async_scheduling else 2) + config.num_prefill_checkpoint_blocks


def tables(config: SchedulerConfig) -> int:
    """Return the number of blocks that a pool may cache for each block of tokens, over all groups of layers."""
    return max(len(config.kv_groups), 1) + (config.state_blocks if config.caches_states else 0)


def for_transfers(config: SchedulerConfig) -> SchedulerConfig:
    """Return `config` as transfers of KV need it: no layer has a window, and constant states are not cached."""
    if config.caches_states:
        return config.model_copy(update={"enable_prefix_caching": False})
    return config.model_copy(update={"kv_groups": ()}) if config.kv_groups else config


def kv_tokens(config: SchedulerConfig) -> int:
    """Return the number of tokens that fit into all blocks if every request has the maximum length.

    Without KV it is the number of tokens of all requests that run at once.
    """
    if config.kv_reservation == "none":
        return config.most_running * config.max_model_len
    if not config.kv_groups and not config.state_blocks:
        return (config.num_blocks - 1) * config.block_size
    longest = config.max_model_len
    if config.caches_states:  # vLLM's figure does not count a state for the step in flight
        config = config.model_copy(update={"async_scheduling": False})
    return (config.num_blocks - 1) * longest // most_held(config, longest)
