"""Layers: what one rank computes between two collectives, built from its shard sizes and the groups passed to it.

A layer never looks up where it stands: slices, groups and devices are constructor arguments, batch and cache are call
arguments.
"""
