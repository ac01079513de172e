"""The engine: requests, the scheduler, the step's batch, the runner and the sampler."""
