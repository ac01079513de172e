"""Kernels against independent oracles."""
