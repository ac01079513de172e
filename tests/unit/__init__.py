"""No ranks, no models."""
