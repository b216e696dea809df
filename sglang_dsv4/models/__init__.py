"""Hosts of the model around the attention layer."""
