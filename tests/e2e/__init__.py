"""The engine, the command line and the launcher as a person meets them."""
