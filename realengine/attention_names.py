"""Attention backends by name, with their places.

This module loads nothing, so that a name can be checked without torch.
"""

ATTENTION = {
    "auto": "",  # triton on CUDA, torch on the CPU
    "torch": "realengine.attention:TorchAttention",
    "unfused": "realengine.attention:UnfusedAttention",  # scores in memory, the baseline of tiled attention
    "triton": "realengine.triton_attention:TritonAttention",
    "hybrid": "realengine.triton_attention:HybridAttention",
}
