"""`grpo-megatron prove`: what works on the GPUs of this machine, part by part, on one page."""
