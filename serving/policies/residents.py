"""The requests that a scheduler holds, and the KV blocks that each of them needs, for any kind of pool.

`vllm.py` decides which requests run, and how many tokens they get.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.block_pool import BlockPool, StatePool
from tokentwin.serving.kv.blocks import Hit, KvBlocks, blocks_for
from tokentwin.serving.kv.content import Content, segment_content
from tokentwin.serving.kv.contiguous_pool import ContiguousPool
from tokentwin.serving.kv.external import ExternalKv, KvLoading
from tokentwin.serving.kv.grouped_pool import GroupedPool
from tokentwin.serving.kv.no_pool import NoPool
from tokentwin.serving.kv.state_pool import AlignedStatePool
from tokentwin.serving.policies.drafts import Drafts
from tokentwin.serving.policies.encoding import Encoding
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import FcfsQueue, OrderedQueue, WaitingQueue, by_priority
from tokentwin.serving.workload import WorkloadRequest


@mypyc_attr(allow_interpreted_subclasses=True)
class Residents:
    """The requests that have not ended, running and waiting.

    Attributes:
        drafts: the drafts of speculative decoding; None without it
        aligned: the pool, if it caches the states of prefixes, so that chunks end with blocks; else None
        kv_loading: the loading of KV from outside the engine; None if there is none
        encoding: the encoding of images, videos and audio; None if requests may have none
    """

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None:
        self.config = config
        self.pool = kv_blocks(config, shares_prefixes, content)
        self.requests: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.waiting = self.new_queue()
        self.kv_loading: KvLoading | None = None
        self.drafts: Drafts | None = None
        if config.speculative is not None:
            self.drafts = Drafts(config.speculative, config.max_model_len, config.async_scheduling)
        self.encoding: Encoding | None = None
        if config.max_num_encoder_input_tokens is not None:
            self.encoding = Encoding(config, config.speculative.num_hash_lookahead_tokens if config.speculative else 0)
        self._grouped = self.pool if isinstance(self.pool, GroupedPool) else None
        self.aligned = self.pool if isinstance(self.pool, AlignedStatePool) else None
        self._contiguous = self.pool if isinstance(self.pool, ContiguousPool) else None
        self._block_size = config.block_size
        self._state_blocks = config.state_blocks
        self._cuts = config.cut_at_max_model_len
        self._watermark = int(config.watermark * config.num_blocks)
        self._lookahead = self.drafts.lookahead if self.drafts else 0
        self._hash_lookahead = config.speculative.num_hash_lookahead_tokens if config.speculative else 0
        # True if a request needs other numbers of blocks than tokens / block size
        self._particular = self._lookahead or self._grouped is not None or config.kv_reservation == "none"

    def new_queue(self) -> WaitingQueue:
        """Return a queue in the order in which waiting requests are admitted."""
        return OrderedQueue(by_priority) if self.config.policy == "priority" else FcfsQueue()

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        request = Request(arrived, outputs)
        if self._cuts:
            request.max_len = self.config.full_length(request.prompt_len, arrived.output_limit)
            request.true_len = min(request.true_len, request.max_len)
        request.reason = self._reason_to_reject(request)
        if request.reason:
            request.status = Status.REJECTED
            return request
        if arrived.id in self.requests:
            raise ValueError(f"request {arrived.id} is already here")
        self.requests[arrived.id] = request
        self.waiting.add(request)
        return request

    def _reason_to_reject(self, request: Request) -> str:
        """Return why the request could never finish, or an empty string."""
        if request.prompt_len < 1:
            return "a request needs at least one prompt token"
        if self.config.kv_reservation == "none" and not request.pools:
            return "an encoder keeps no KV, so it gives no output tokens; requests must have 0 of them"
        if request.max_len > self.config.max_model_len:
            return (
                f"{request.prompt_len} prompt + {request.max_len - request.prompt_len} output tokens "
                f"exceed max_model_len {self.config.max_model_len}"
            )
        if (adapter := request.arrived.adapter) and not self.config.max_loras:
            return f"wants adapter {adapter}, and the deployment serves no adapters; set lora in it"
        if request.arrived.items and (reason := self._reason_not_to_encode(request)):
            return reason
        need = self.most_held(request)
        if need > self.pool.total:
            return f"needs {need} KV blocks of {self._block_size} tokens; there are {self.pool.total}"
        return ""

    def _reason_not_to_encode(self, request: Request) -> str:
        most = max(item.tokens for item in request.arrived.items)
        if self.encoding is None:
            return "has images, video or audio, and the deployment reads none; set multimodal in it"
        if most > self.encoding.longest_item:
            return f"has an item of {most} tokens; multimodal.max_item_tokens allows {self.encoding.longest_item}"
        whole = self.config.disable_chunked_mm_input and not self.config.encoder_holds_queue
        if whole and most > (longest := self.config.most_step_tokens):
            return f"has an item of {most} tokens, more than {longest} in a step; leave disable_chunked_mm_input out"
        return ""

    def most_held(self, request: Request) -> int:
        """Return the maximum number of KV blocks that `request` will hold at once."""
        if self._contiguous is not None:
            return self._contiguous.reserved(request)
        tokens = request.max_len - 1  # the last output token is never computed
        if tokens < request.prompt_len:
            tokens = request.prompt_len
        if self.drafts is not None:
            tokens = self.drafts.slots(min(tokens + self.drafts.tokens, self.config.max_model_len - 1))
        return most_held(self.config, tokens)

    def lacking_blocks(self, request: Request, tokens: int) -> int:
        """Return how many more blocks `request` needs for `tokens` more tokens; negative if it holds too many."""
        end = request.computed + tokens
        if self._particular:
            if self._lookahead:
                end = self.drafts.slots(end)  # type: ignore[union-attr]
            if self._grouped is not None:
                return self._grouped.lacking(request, end)
            if self._contiguous is not None:
                return 0
        return -(-end // self._block_size) - request.block_count

    def _fits(self, request: Request, tokens: int, hit: Hit | None, now: int, reserved: int = 0) -> bool:
        """Return whether there are blocks for the first `tokens` tokens of the request, with `reserved` blocks left.

        The step computes the tokens up to `now`. The blocks of `hit` need no allocation; without a hit, the blocks that
        the request already holds need none.
        """
        if self._contiguous is not None:
            need = self._contiguous.reserved(request)
            if need > self._contiguous.longest:
                return False
        elif hit is None:
            need = blocks_for(tokens, self._block_size) - request.block_count
        elif self._grouped is not None:
            need = self._grouped.to_admit(request, tokens, hit, now)
        else:
            need = blocks_for(tokens, self._block_size) + self._state_blocks - hit.blocks + hit.idle
        return need + (self._watermark if self.running else 0) + reserved <= self.pool.free

    # KV from outside the engine: see `serving/kv/external.py`

    def connect(self, external: ExternalKv) -> None:
        if self._contiguous is not None:
            remedy = "cannot be combined with KV from outside; set it to paged"
            raise UserError("scheduler.kv_reservation", self.config.kv_reservation, remedy)
        if self.aligned is not None:
            remedy = "cannot be combined with KV from outside, because the model has constant states; set it to false"
            raise UserError("scheduler.enable_prefix_caching", True, remedy)
        if self.config.max_loras:
            remedy = "cannot be combined with KV from outside; leave lora out"
            raise UserError("max_loras", self.config.max_loras, remedy)
        if self._grouped is not None:
            remedy = "cannot be combined with KV from outside; leave it empty"
            raise UserError("scheduler.kv_groups", list(self.config.kv_groups), remedy)
        if self._hash_lookahead:
            assert isinstance(self.pool, BlockPool)
            self.pool.drop_last_found()
            self._hash_lookahead = 0
        ordered = type(self).new_queue is Residents.new_queue
        self.kv_loading = KvLoading(external, self.pool, self.config, self.new_queue() if ordered else FcfsQueue())

    def loaded(self, request: Request) -> None:
        assert self.kv_loading is not None
        self.kv_loading.loaded(request)

    def load_failed(self, request: Request) -> None:
        assert self.kv_loading is not None
        self.kv_loading.load_failed(request)

    def release(self, request: Request) -> None:
        self.pool.release(request)


def kv_blocks(config: SchedulerConfig, shares_prefixes: bool, content: Content | None) -> KvBlocks:
    """Return the KV pool of an engine. If the engine passes its own `content`, the blocks have identities."""
    if config.kv_reservation == "none":
        return NoPool(config)
    if config.kv_reservation != "paged":
        if config.kv_groups or config.state_blocks:
            remedy = "needs a model with full attention in all layers; set it to paged"
            raise UserError("scheduler.kv_reservation", config.kv_reservation, remedy)
        return ContiguousPool(config, names=content is not None)
    if config.kv_groups:
        return GroupedPool(config, content or segment_content(config))
    if config.caches_states:
        return AlignedStatePool(config, content or segment_content(config))
    if content is not None and not config.state_blocks:
        return BlockPool(config, content, named=True)
    shares = shares_prefixes and config.enable_prefix_caching
    pool = StatePool if config.state_blocks else BlockPool
    return pool(config, (content or segment_content(config)) if shares else None)
