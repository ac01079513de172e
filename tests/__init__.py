"""The suite: unit (no ranks), kernels, parallel (gloo ranks), e2e."""
