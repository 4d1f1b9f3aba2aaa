"""Rules between the keys of a recipe, by topic: one named function a rule, with its message.

`rule_set.py` says how a rule is written; `check.py` applies them all. Rules that need to know the
model or the machine are in `plan/`."""
