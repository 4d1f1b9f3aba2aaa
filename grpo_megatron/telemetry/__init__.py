"""Metrics, events and samples as files; mirrors and the live screen. Imports no torch."""
