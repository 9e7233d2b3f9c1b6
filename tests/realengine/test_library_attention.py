"""Libraries' attention: stand-ins with the libraries' signatures compute from the definition what they are handed.

No library runs here: their kernels need a GPU. So a stand-in checks shapes and types as the library does, and its
results show that rows, block tables and lengths are right. Torch's own function is called on meta tensors.
"""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("triton", reason="triton is not installed (Linux on x86_64 only)")

from torch.nn.attention import varlen  # noqa: E402

from lab.gpu_suite.attention_operations import attention  # noqa: E402
from lab.gpu_suite.operations import On  # noqa: E402
from lab.gpu_suite.ragged_batch import Numbers, backend_for, batch_of, layer_spec, random_cache  # noqa: E402
from lab.gpu_suite.references import attended, relative_error  # noqa: E402
from tests.realengine.test_engine_loop import engine_for, plain, run  # noqa: E402, F401
from tokentwin.realengine.attention import LIBRARIES, flash_attention, flashinfer_attention  # noqa: E402
from tokentwin.realengine.kernels.launches import Shape  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
RAGGED = [(70, 1), (1, 1), (300, 1), (20, 20), (40, 7), (259, 2)]
DECODES = [(70, 1), (1, 1), (300, 1), (257, 1)]


def definition(q: Any, keys: list[Any], values: list[Any], starts: Any, scale: float, left: int, right: int) -> Any:
    """Attention of each row; the last query sees the last key and `right` more, if `right` is not -1."""
    out = torch.empty_like(q)
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        mine = slice(int(starts[row]), int(starts[row + 1]))
        count, context = mine.stop - mine.start, len(key)
        group = q.shape[1] // key.shape[1]
        key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("thd,chd->htc", q[mine].float(), key) * scale
        ahead = torch.arange(context) - torch.arange(context - count, context)[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if right >= 0:
            hidden |= ahead > right
        if left >= 0:
            hidden |= -ahead > left
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("htc,chd->thd", weights, value).to(q.dtype)
    return out


def in_pages(cache: Any, table: Any, context: Any) -> list[Any]:
    """Return each row's `[context, KV heads, D]` of a cache `[pages, page, KV heads, D]`."""
    assert cache.stride(-1) == 1 and table.dtype == context.dtype == torch.int32
    return [cache[pages.long()].flatten(0, 1)[:size] for pages, size in zip(table, context.tolist(), strict=True)]


def checked(starts: Any, most: int) -> None:
    assert starts.dtype == torch.int32 and most >= int(starts.diff().max())


def varlen_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """As torch 2.11 has it: no block tables."""
    checked(cu_q, max_q)
    checked(cu_k, max_k)
    rows = [slice(*ends) for ends in zip(cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)]
    return definition(q, [k[row] for row in rows], [v[row] for row in rows], cu_q, scale, *window_size)


def varlen_2_13(
    q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert enable_gqa
    if block_table is None:
        return varlen_2_11(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)
    checked(cu_q, max_q)
    assert k.shape[1] % 256 == 0 and max_k >= int(seqused_k.max()) and torch.equal(cu_k.diff(), seqused_k)
    pages = (in_pages(cache, block_table, seqused_k) for cache in (k, v))
    return definition(q, *pages, cu_q, scale, *window_size)


def flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), block_table=None,
):  # fmt: skip
    checked(cu_seqlens_q, max_seqlen_q)
    checked(cu_seqlens_k, max_seqlen_k)
    assert causal and k.shape[1] % 256 == 0
    pages = (in_pages(cache, block_table, cu_seqlens_k.diff()) for cache in (k, v))
    return definition(q, *pages, cu_seqlens_q, softmax_scale, window_size[0], 0)


def flash_3(
    q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), num_splits=0,
):  # fmt: skip
    checked(cu_seqlens_q, max_seqlen_q)
    assert causal
    pages = (in_pages(cache, page_table, cache_seqlens) for cache in (k_cache, v_cache))
    return definition(q, *pages, cu_seqlens_q, softmax_scale, window_size[0], 0)


class Wrapper:
    """FlashInfer's: in a graph it reads the buffers that it was made with, and their sizes are fixed."""

    def __init__(
        self, workspace, layout, use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
    ):  # fmt: skip
        assert layout == "HND" and workspace.dtype == torch.uint8
        self.fixed = use_cuda_graph
        self.kept = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        causal=False, sm_scale=None, q_data_type=None, kv_data_type=None,
    ):  # fmt: skip
        given = [qo_indptr, kv_indptr, kv_indices, last_page_len]
        assert causal and all(part.dtype == torch.int32 and part.device == CPU for part in given)
        assert int(last_page_len.min()) >= 1 and int(last_page_len.max()) <= page_size
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        if self.fixed:
            for buffer, part, index in zip(self.kept, given, range(4), strict=True):
                assert index == 2 or len(buffer) == len(part)
                buffer[: len(part)] = part
        else:
            self.kept = given
        self.about = (num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale)

    def run(self, q, cache, k_scale=1.0, v_scale=1.0):
        starts, kv_starts, indices, last = self.kept
        heads, kv_heads, dim, page, scale = self.about
        assert q.is_contiguous() and q.shape[1:] == (heads, dim)
        assert all(part.shape[1:] == (kv_heads, page, dim) for part in cache)
        ends = zip(kv_starts[:-1].tolist(), kv_starts[1:].tolist(), last.tolist(), strict=True)
        rows = [(indices[first:end].long(), (end - first - 1) * page + rest) for first, end, rest in ends]
        keys, values = ([part[at].transpose(1, 2).flatten(0, 1)[:n] for at, n in rows] for part in cache)
        return definition(q, keys, values, starts, scale, -1, 0)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install stand-ins; the dict maps modules to them, and a test may remove some."""
    modules: dict[str, Any] = {
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=flash_2),
        "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=flash_3),
        "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
    }
    for module in (flash_attention, flashinfer_attention):
        monkeypatch.setattr(module, "installed", modules.get)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_2_13)
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE", 1)
    return modules


KINDS = [
    ("varlen", 16, varlen_2_11), ("varlen", 16, varlen_2_13), ("varlen", 256, varlen_2_13), ("flash-attn", 16, None),
    ("flash-attn", 256, "flash_attn_interface"), ("flashinfer", 16, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "page", "changed"), KINDS)
@pytest.mark.parametrize("rows", [RAGGED, DECODES])
def test_a_library_gets_what_gives_the_result_of_float64(
    name: str, page: int, changed: Any, rows: list[tuple[int, int]], libraries: dict[str, Any], monkeypatch: Any
) -> None:
    if isinstance(changed, str):
        del libraries[changed]
    elif changed is not None:
        monkeypatch.setattr(varlen, "varlen_attn", changed)
    for window in (0, 33) if name != "flashinfer" else (0,):
        shape = Shape("tiny", 6, 2, 16, torch.bfloat16, torch.bfloat16, page, window)
        case = attention(On(CPU, name), shape, rows, 512, checked=True)
        make, call, error = case.prepare()
        assert error is not None and error(make(3), call(*make(3))) < case.limit


@pytest.mark.parametrize(("name", "page", "changed"), KINDS)
def test_decode_steps_can_be_captured_where_nothing_is_read_on_the_host(
    name: str, page: int, changed: Any, libraries: dict[str, Any], monkeypatch: Any
) -> None:
    """A plan without the host's copy, as in a graph, reads a later step from the same buffers."""
    if isinstance(changed, str):
        del libraries[changed]
    elif changed is not None:
        monkeypatch.setattr(varlen, "varlen_attn", changed)
    shape = Shape("tiny", 6, 2, 16, torch.bfloat16, torch.bfloat16, page)
    backend = backend_for(name, layer_spec(shape), page, CPU, 512).attention
    copies = name == "varlen" and (page == 16)
    assert backend.capturable == ("never" if copies else "decode")
    if copies:
        return
    batch = batch_of(DECODES, page, backend, CPU)
    backend.prepare(batch, True)
    plan = backend.plan(batch._replace(host=None))
    numbers = Numbers(CPU, 5)
    cache = random_cache(shape, 100, numbers)
    queries = numbers(batch.layout.tokens, shape.heads, shape.dim)
    out = backend.attend(queries, plan, cache)
    assert relative_error(out, attended(queries, cache, batch, page)) < 1e-2


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_engine_gives_the_same_tokens(
    name: str,
    libraries: dict[str, Any],
    plain: list[list[int]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (flash_attention, flashinfer_attention):
        monkeypatch.setattr(module, "check_library", lambda *about: None)  # it refuses the CPU and float32
    engine = engine_for(attention=name, scheduler={"async_scheduling": True})
    outputs, steps = run(engine, drawn=True)
    engine.close()
    assert outputs == plain
    assert any(step.graph for step in steps)


def test_torchs_own_function_takes_these_arguments() -> None:
    """On meta tensors its schema and shapes are checked, with block tables and without."""
    meta = torch.device("meta")
    for page in (16, 256):
        shape = Shape("tiny", 6, 2, 64, torch.bfloat16, torch.bfloat16, page)
        backend = backend_for("varlen", layer_spec(shape), page, meta, 512).attention
        batch = batch_of(RAGGED, page, backend, CPU)
        batch = batch._replace(**{name: part.to(meta) for name, part in batch._asdict().items() if hasattr(part, "to")})
        cache = random_cache(shape, 100, Numbers(meta))
        queries = torch.empty(batch.layout.tokens, 6, 64, dtype=torch.bfloat16, device=meta)
        out = backend.attend(queries, backend.plan(batch), cache)
        assert out.shape == queries.shape


@pytest.mark.parametrize(
    ("name", "missing", "settings", "says"),
    [
        ("flash-attn", ("flash_attn", "flash_attn_interface"), {}, "attention: 'flash-attn': is not installed"),
        ("flash-attn", ("flash_attn_interface",), {}, r"scheduler\.block_size: 16: must be a multiple of 256"),
        ("flashinfer", ("flashinfer",), {}, "attention: 'flashinfer': is not installed"),
        ("varlen", (), {"device": "cpu"}, "attention: 'varlen': needs device cuda"),
        ("flashinfer", (), {"dtype": "float32"}, "dtype: 'float32': does not work with attention flashinfer"),
        ("varlen", (), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: 'fp8': does not work with attention varlen"),
    ],
)
def test_what_a_library_cannot_do_is_one_line(
    name: str, missing: tuple[str, ...], settings: dict[str, Any], says: str, libraries: dict[str, Any]
) -> None:
    for module in missing:
        del libraries[module]
    spec = layer_spec(Shape("tiny", 6, 2, 16, torch.bfloat16, torch.bfloat16, 16))
    made = {"varlen": flash_attention.VarlenAttention, "flash-attn": flash_attention.FlashAttention}
    backend = made.get(name, flashinfer_attention.FlashInferAttention)
    with pytest.raises(UserError, match=says):
        backend(spec, Deployment(**{"device": "cuda", "scheduler": SchedulerConfig(), **settings}), None)
