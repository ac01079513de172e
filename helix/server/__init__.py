"""The OpenAI-compatible HTTP server: in through `app`, to the engine at the `desk`, out as `answers`."""
