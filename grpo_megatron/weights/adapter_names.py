"""What tensors of adapters are called in a publish that brings those of several domains.

    model.layers.0.self_attn.q_proj.lora_A.weight        all domains have the same adapters
    math/model.layers.0.self_attn.q_proj.lora_A.weight   those of domain `math`

Names of domains may have a `/` in them, PEFT's names of tensors have none."""

_SEPARATOR = "/"


def published_name(domain: str, name: str) -> str:
    """Return what a tensor of a domain's adapters is called in a publish.

    name: PEFT's, without a prefix; domain: "" where all domains have the same adapters."""
    if not domain:
        return name
    return f"{domain}{_SEPARATOR}{name}"


def parts_of_name(published: str) -> tuple[str, str]:
    """Return domain and PEFT's name of what `published_name` gave."""
    domain, _, name = published.rpartition(_SEPARATOR)
    return domain, name
