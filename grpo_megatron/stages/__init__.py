"""Graphs of stages: several runs, each of which builds on what others made."""
