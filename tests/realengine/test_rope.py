"""The two pairings of RoPE."""

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.realengine.models.layer_ops import Rope  # noqa: E402
from tokentwin.realengine.models.smollm2 import unpermute  # noqa: E402
from tokentwin.realengine.models.weights import RANDOM  # noqa: E402

pytestmark = pytest.mark.engine


def test_both_rope_pairings_are_the_same_rotation() -> None:
    """Interleaved pairs on permuted rows give the scores that halves give: what GGUF and Hugging Face rely on."""
    spec = RANDOM["llama"]
    halves = Rope(spec, 64, torch.device("cpu"))
    pairs = Rope(spec.model_copy(update={"rope_interleaved": True}), 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(spec.num_heads * spec.head_dim, 32, generator=generator)
    x = torch.randn(10, 32, generator=generator)
    cos, sin = halves.cosines_and_sines(torch.arange(10))

    def scores(rope: Rope, weight: torch.Tensor) -> torch.Tensor:
        rotated = rope.rotate((x @ weight.T).view(10, spec.num_heads, spec.head_dim), cos, sin)
        return torch.einsum("qhd,khd->hqk", rotated, rotated)

    torch.testing.assert_close(
        scores(pairs, weight), scores(halves, unpermute(weight, spec.num_heads)), atol=1e-3, rtol=1e-5
    )
