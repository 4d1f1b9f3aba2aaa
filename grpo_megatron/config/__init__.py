"""Recipes: typed schema, TOML loading, `key=value` overrides, provenance. Imports no torch."""
