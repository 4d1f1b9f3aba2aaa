"""Verifiable rewards: plain functions, run in a process pool with a hard time limit."""
