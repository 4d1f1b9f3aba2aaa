"""Megatron-Core on this machine: platform, set-up, layers, the model, upstream fixes."""
