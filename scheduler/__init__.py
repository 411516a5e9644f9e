"""Continuous batching over one pool of pages."""
