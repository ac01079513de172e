"""Planner: which layout to use, why, and what it will give; beside it what other engines could do. No torch."""
