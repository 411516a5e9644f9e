"""Prefix chains: hashing, the page-granular cache, eviction."""
