"""The public test harness: pools of bytes, a fake CUDA device, an in-memory control network, pairs of nodes."""
