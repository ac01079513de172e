"""Measurements: how near each part comes to the ceiling of the device, with correctness asserted in the same run."""
