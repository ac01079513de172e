"""Cost: what a model weighs and what a step of it moves, as numbers computed from `ModelSpec` alone. No torch."""
