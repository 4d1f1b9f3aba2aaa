"""Training-Free GRPO (arXiv:2510.08191): the policy's weights stay, what it is told is learned.

`library` keeps lessons, `writer` has a model compare the answers of a group, `learner` takes the
steps."""
