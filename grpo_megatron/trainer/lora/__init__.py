"""LoRA: low-rank adapters beside frozen linear layers (docs/lora.md)."""
