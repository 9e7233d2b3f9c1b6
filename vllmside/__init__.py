"""What runs inside of vLLM, in vLLM's own environment: it imports vLLM, and of ours what needs no tensors."""
