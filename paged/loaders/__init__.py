"""Weights, tokenizers and chat templates from files."""
