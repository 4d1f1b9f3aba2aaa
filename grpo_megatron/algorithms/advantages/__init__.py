"""Advantages: from rewards (and sometimes tokens) to what multiplies each token's ratio."""
