"""Rotary position embedding, in both pairings, with Llama 3's frequency scaling."""

from __future__ import annotations

import math

import torch

from serving.deployments.model_spec import ModelSpec


class Rope:
    """Cosines and sines `[max_positions, head_dim / 2]` in float32, and the layout of pairs in a head.

    `rope_interleaved` pairs dimension 2i with 2i+1; otherwise i is paired with i + head_dim/2.
    """

    def __init__(self, spec: ModelSpec, positions: int, device: torch.device) -> None:
        frequencies = _frequencies(spec).to(device)
        angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self.interleaved = spec.rope_interleaved

    def cosines_and_sines(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for `positions` `[T]`, each `[T, 1, head_dim / 2]`."""
        return self.cos[positions, None], self.sin[positions, None]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x` `[T, heads, head_dim]`."""
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return inverse frequencies `[head_dim / 2]`; Llama 3.1's scaling stretches long wavelengths by `factor`."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponent
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    wavelength = 2 * math.pi / frequencies
    long = scaling.original_max_positions / scaling.low_freq_factor
    short = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelength > long, frequencies / scaling.factor, frequencies)
    return torch.where((wavelength <= long) & (wavelength >= short), blended, scaled)
