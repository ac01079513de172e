"""Talking between ranks: groups and meshes over `deepspeed.comm`, and the monitor that ends them together."""
