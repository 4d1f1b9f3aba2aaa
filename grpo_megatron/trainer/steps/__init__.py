"""From a recorded step to an optimizer step: passes, losses, references, teachers."""
