"""A decoder as a Hugging Face `config.json` describes it, and parts of a decoder as models with fewer layers.

A spec states what a model *is*. Each engine decides what it can run: the simulator predicts times for every spec, and
the real engine refuses a model that it would compute wrongly.

The parts are pipeline stages and the module for multi-token prediction. Code that computes the times or sizes of a
model does so for a part, too. Stages are consecutive layers, divided as in vLLM: the embedding is on the first stage;
the last norm, the head and the sampler are on the last stage. The spec of a stage does not say which stage it is; its
caller must know.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from pydantic import Field, model_validator

from tokentwin.serving.deployments.attention import CompressedAttention, LatentAttention, LinearAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings


class RopeScaling(Settings):
    """The scaling of long RoPE wavelengths in Llama 3.1 (`rope_type: llama3`)."""

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(ge=1)

    @model_validator(mode="after")
    def _bands_are_apart(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")
        return self


class ModelSpec(Settings):
    """The shapes and constants of a decoder. Sizes are in elements, not bytes.

    A layer has attention and an MLP. A dense layer has one MLP of `intermediate_size`. A layer of a mixture-of-experts
    (MoE) model has a router, `num_experts` MLPs of `moe_intermediate_size` and one shared MLP of
    `shared_intermediate_size`. Every MLP has a gate, an up and a down projection.
    """

    name: str
    family: str
    approximated: str = Field(
        "", description="clause about parts of the architecture that are only approximated; empty: there are none"
    )
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: int = Field(ge=1)
    max_positions: int = Field(ge=1)
    rope_theta: float = Field(gt=0)
    rope_scaling: RopeScaling | None = None
    other_rope: str | None = Field(None, description="rope_type of which only the name is kept, such as yarn")
    rope_interleaved: bool = False
    rotary_share: float = Field(1.0, gt=0, le=1, description="share of a head's elements that are rotated")
    activation: str = Field("silu", description="activation of the MLP's gate, as transformers names it")
    qkv_bias: bool = False
    out_bias: bool = Field(False, description="whether attention's output projection has a bias")
    mlp_bias: bool = Field(False, description="whether MLPs, experts and routers have biases")
    qk_norm: bool = False
    tied_embeddings: bool = False
    norm_eps: float = Field(1e-6, gt=0)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    num_experts: int = Field(0, ge=0, description="number of routed experts of a layer; 0: a dense model")
    experts_per_token: int = Field(0, ge=0)
    norm_topk_prob: bool = Field(True, description="whether the weights of a token's experts sum to 1")
    moe_intermediate_size: int = Field(0, ge=0, description="intermediate size of one routed expert")
    shared_intermediate_size: int = Field(
        0, ge=0, description="intermediate size of the shared expert, which every token passes; 0: none"
    )
    expert_groups: int = Field(
        0,
        ge=0,
        description="number of groups of experts; a token first chooses groups, then experts in them; 0: no groups",
    )
    groups_per_token: int = Field(0, ge=0, description="number of groups that a token chooses")
    shared_gate: bool = Field(False, description="whether a gate of the token scales the output of the shared expert")
    router_bias: bool = Field(
        False, description="whether experts are scored by a sigmoid, and chosen by the score plus a bias"
    )
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the weights of a token's experts")
    dense_at: tuple[int, ...] = Field(
        (), description="indices of the dense layers in a mixture-of-experts model, from 0"
    )
    latent: CompressedAttention | LatentAttention | None = Field(
        None, description="multi-head latent attention; null: attention with keys and values"
    )
    residual_streams: int = Field(
        1, ge=1, description="number of hidden states of a token that layers mix (hyper-connections)"
    )
    attention_gate: bool = Field(False, description="whether a gate of the token scales the output of attention")
    linear: LinearAttention | None = Field(
        None, description="attention with a constant state (linear attention); null: no layer has it"
    )
    linear_layers: int = Field(0, ge=0, description="number of layers with linear attention")
    sliding_window: int = Field(
        0, ge=0, description="tokens that a query of a layer with a sliding window sees; 0: no layer has a window"
    )
    sliding_layers: int = Field(0, ge=0, description="number of layers with the sliding window")
    sliding_at: tuple[int, ...] = Field(
        (), description="indices of the layers with the sliding window, from 0; empty: not known"
    )
    pooling: Literal["", "last", "mean", "cls"] = Field(
        "",
        description="hidden states from which a model without an LM head makes its embedding or score: that of the "
        "last token, the mean of all, or that of the first (cls); empty: the model has an LM head",
    )
    bidirectional: bool = Field(
        False, description="whether tokens attend to all tokens of a prompt, so that no KV is kept: an encoder"
    )
    draft_layers: int = Field(
        0, ge=0, description="number of layers for multi-token prediction, not counted in `num_layers`"
    )
    is_draft_module: bool = Field(
        False, description="whether the model joins hidden states of another model with its embeddings"
    )
    checkpoint_quantization: Literal["none", "fp8", "fp8_block", "mxfp4", "nvfp4", "int4", "int8"] = Field(
        "none", description="format of the published weights, with the names of `Deployment.quantization`"
    )
    checkpoint_experts: Literal["", "mxfp4", "nvfp4"] = Field(
        "", description="format of the routed experts' weights, if it differs"
    )
    checkpoint_group_size: int = Field(
        0, ge=0, description="number of inputs that share a scale in int4 and int8; 0: all inputs of an output"
    )
    checkpoint_zero_points: bool = Field(
        False, description="whether each group of int4 or int8 weights has a zero point"
    )
    checkpoint_kept: tuple[tuple[str, tuple[int, ...]], ...] = Field(
        (),
        description="projections that are stored in 16 bits in some layers, with the indices of these layers, from 0",
    )

    @model_validator(mode="after")
    def _parts_agree(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.num_experts and not (1 <= self.experts_per_token <= self.num_experts and self.moe_intermediate_size):
            raise ValueError(f"experts need experts_per_token from 1 to {self.num_experts}, and moe_intermediate_size")
        if self.expert_groups and not (
            self.num_experts % self.expert_groups == 0
            and 1 <= self.groups_per_token <= self.expert_groups
            and self.experts_per_token <= self.num_experts // self.expert_groups * self.groups_per_token
        ):
            raise ValueError(
                f"expert_groups must divide {self.num_experts} experts, and groups_per_token of them must hold "
                f"{self.experts_per_token} experts"
            )
        if self.sliding_layers > self.num_layers or any(not 0 <= at < self.num_layers for at in self.dense_at):
            raise ValueError(f"dense_at and sliding_layers must be layers from 0 to {self.num_layers - 1}")
        if bool(self.linear) != bool(self.linear_layers) or self.linear_layers + self.sliding_layers > self.num_layers:
            raise ValueError(
                "linear and linear_layers must be given together, and linear_layers must be at most num_layers"
            )
        compressed = isinstance(self.latent, CompressedAttention)
        if self.linear and (self.linear_layers == self.num_layers or self.sliding_layers or compressed):
            raise ValueError("linear attention is known only beside layers of full attention")
        if bool(self.sliding_window) != bool(self.sliding_layers):
            raise ValueError("sliding_window and sliding_layers need each other; give both or neither")
        if self.bidirectional and not self.pooling:
            raise ValueError("bidirectional attention gives no tokens, so pooling must say what the model returns")
        if self.sliding_at and len(self.sliding_at) != self.sliding_layers:
            raise ValueError(f"sliding_at must name {self.sliding_layers} layers, as sliding_layers says")
        return self

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt must be computed in one step, because its result needs all hidden states at once."""
        return self.bidirectional or self.pooling in ("cls", "mean")

    @property
    def full_layers(self) -> int:
        """The number of layers with full attention."""
        return self.num_layers - self.sliding_layers - self.linear_layers

    @property
    def kv_layers(self) -> int:
        """The number of layers with a KV cache."""
        return self.num_layers - self.linear_layers

    @property
    def moe_layers(self) -> int:
        """The number of layers with routed experts."""
        return self.num_layers - len(self.dense_at) if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """The number of weights of one layer's attention, with its norms."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = queries + 2 * keys
        return (
            self.hidden_size * (qkv + queries)
            + (qkv if self.qkv_bias else 0)
            + (self.hidden_size if self.out_bias else 0)
            + (2 * self.head_dim if self.qk_norm else 0)
            + (self.hidden_size * queries if self.attention_gate else 0)
        )

    @property
    def linear_parameters(self) -> int:
        """The number of weights of the attention of one layer with a constant state."""
        return self.linear.parameters(self.hidden_size) if self.linear is not None else 0

    @property
    def attention_out_parameters(self) -> int:
        """The number of weights of the output projection of a layer's attention."""
        if self.latent is not None:
            return self.latent.out_parameters(self.hidden_size, self.num_heads)
        return self.num_heads * self.head_dim * self.hidden_size

    @property
    def plain_parameters(self) -> int:
        """The number of weights of all layers that every device holds in 16 bits or more, without norms and routers.

        They are the weights of compressors, and the weights that mix residual streams before attention and MLPs
        (arXiv:2409.19606).
        """
        streams = self.residual_streams
        mixing = 2 * self.num_layers * (2 + streams) * streams**2 * self.hidden_size if streams > 1 else 0
        return mixing + (self.latent.plain_parameters(self.hidden_size) if self.latent is not None else 0)

    @property
    def expert_parameters(self) -> int:
        """The number of weights of one routed expert."""
        return self.mlp_parameters(self.moe_intermediate_size)

    @property
    def router_parameters(self) -> int:
        """The number of weights of a layer's router and of the gate of its shared expert."""
        chosen = self.num_experts * (self.hidden_size + (1 if self.mlp_bias or self.router_bias else 0))
        return chosen + (self.hidden_size if self.shared_gate else 0)

    @property
    def join_parameters(self) -> int:
        """The number of weights that join another model's hidden states with embeddings, with the norms of both."""
        return 2 * self.hidden_size**2 + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The number of weights of the embedding and the head, which are one matrix if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings or self.pooling else 2)

    @property
    def parameters(self) -> int:
        """The number of weights of the whole model.

        It is exact for the families that the real engine runs. For others it omits attention sinks, some norms and the
        like, which are less than 0.01 %.
        """
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses, including the embedding; all weights of a dense model."""
        return self._parameters(self.experts_per_token)

    def mlp_parameters(self, intermediate_size: int) -> int:
        """Return the number of weights of a gated MLP: gate, up and down."""
        biases = 2 * intermediate_size + self.hidden_size if self.mlp_bias else 0
        return 3 * self.hidden_size * intermediate_size + biases

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of the weights if each takes `dtype_bytes`."""
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of one token in the KV cache of all layers.

        The cache holds keys and values, or latent vectors, which every device holds completely.
        """
        if self.bidirectional:
            return 0
        if self.latent is not None:
            return round(self.latent.cache_bytes(dtype_bytes, self.kv_layers))
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def _parameters(self, experts: int) -> int:
        moe = self.moe_layers
        mixture = experts * self.expert_parameters + self.router_parameters
        if self.shared_intermediate_size:
            mixture += self.mlp_parameters(self.shared_intermediate_size)
        return (
            self.kv_layers * self.attention_parameters
            + self.plain_parameters
            + self.linear_layers * self.linear_parameters
            + self.num_layers * 2 * self.hidden_size
            + (self.num_layers - moe) * self.mlp_parameters(self.intermediate_size)
            + moe * mixture
            + self.embedding_parameters
            + self.hidden_size
            + (self.join_parameters if self.is_draft_module else 0)
        )


def check_vocabulary(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise UserError if the two models have vocabularies of different sizes."""
    if draft.vocab_size != target.vocab_size:
        remedy = f"has {draft.vocab_size} tokens, but {target.name} has {target.vocab_size}; choose one of its family"
        raise UserError("scheduler.speculative.model", draft.name, remedy)


def layers_of_stages(num_layers: int, stages: int) -> list[int]:
    """Return the number of layers of each pipeline stage, in order.

    Stages get equal shares. Layers that are left over go one each to the last stage but one and the stages before it,
    as in vLLM's `get_pp_indices`, because the first stage has the embedding and the last stage the head. Raises
    UserError if a stage would have no layers.
    """
    if stages > num_layers:
        remedy = f"must be at most {num_layers}, the number of the model's layers"
        raise UserError("pipeline_parallel_size", stages, remedy)
    share, left = divmod(num_layers, stages)
    return [share + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]


def stage_models(model: ModelSpec, stages: int) -> list[ModelSpec]:
    """Return the layers of each pipeline stage as a model; `[model]` for one stage.

    Layers with a window or a constant state are assumed to be spread evenly over the model. Raises UserError if a stage
    would have no layers.
    """
    bounds = list(accumulate(layers_of_stages(model.num_layers, stages), initial=0))
    return [_layers(model, first, end) for first, end in pairwise(bounds)]


def _layers(model: ModelSpec, first: int, end: int) -> ModelSpec:
    if end - first == model.num_layers:
        return model
    sliding = end * model.sliding_layers // model.num_layers - first * model.sliding_layers // model.num_layers
    linear = end * model.linear_layers // model.num_layers - first * model.linear_layers // model.num_layers
    return model.model_copy(
        update={
            "num_layers": end - first,
            "dense_at": tuple(layer - first for layer in model.dense_at if first <= layer < end),
            "sliding_layers": sliding,
            "sliding_at": (),
            "linear_layers": linear,
            "latent": model.latent and model.latent.of_layers(first, end),
            "linear": model.linear if linear else None,
            "sliding_window": model.sliding_window if sliding else 0,
            "checkpoint_kept": tuple(
                (projection, tuple(layer - first for layer in layers if first <= layer < end))
                for projection, layers in model.checkpoint_kept
            ),
        }
    )


def draft_module(model: ModelSpec) -> ModelSpec:
    """Return the module of `model` for multi-token prediction. Raises UserError if it has none.

    The module (DeepSeek-V3, arXiv:2412.19437, section 2.2) takes the target's last hidden states and the embeddings of
    the following tokens, joins the two by one projection, and has one layer like the target's last layer. It uses the
    target's embedding and head. Editions in NVFP4 keep the module in 16 bits. If a module has several layers, each
    draft token uses the first of them.
    """
    if not model.draft_layers:
        remedy = f"cannot draft for {model.name}, which has no layers for multi-token prediction; use another method"
        raise UserError("scheduler.speculative.method", "mtp", remedy)
    stored = model.checkpoint_quantization
    return model.model_copy(
        update={
            "name": f"{model.name} MTP",
            "num_layers": 1,
            "dense_at": (),
            "sliding_window": 0,
            "sliding_layers": 0,
            "sliding_at": (),
            "latent": model.latent and model.latent.of_layers(model.num_layers, model.num_layers + 1),
            "linear": None,
            "linear_layers": 0,
            "draft_layers": 0,
            "is_draft_module": True,
            "checkpoint_quantization": "none" if stored == "nvfp4" else stored,
            "checkpoint_kept": (),
        }
    )


def module_deployment(deployment: Deployment) -> Deployment:
    """Return the deployment of the draft module of `deployment`: without drafts, and in 16 bits instead of NVFP4."""
    alone = deployment.rescheduled(speculative=None)
    return alone.model_copy(update={"quantization": "none"}) if deployment.quantization == "nvfp4" else alone
