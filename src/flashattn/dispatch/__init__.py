"""Which kernel runs a problem, and with which tile: pure Python, no tensors, no Triton. Tested on a CPU for GPUs nobody here owns."""
