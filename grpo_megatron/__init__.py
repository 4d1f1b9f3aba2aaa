"""GRPO-family reinforcement learning for dense and Mixture-of-Experts models on Megatron-Core."""

__version__ = "0.1.0"
