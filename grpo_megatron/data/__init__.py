"""Prompts: sources, templates, tokenizers, splits and the resumable sampler."""
