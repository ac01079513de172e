"""Errors that a person is meant to read: one sentence that names the field, its value and what would be right.

The command line prints the message alone (the traceback only with ``--debug``) and exits with `exit_code`.
"""

from __future__ import annotations


class HelixError(Exception):
    """Base of every error Helix raises on purpose."""

    exit_code = 1


class ConfigError(HelixError):
    """A YAML file or keyword argument is wrong."""

    exit_code = 2


class LayoutError(ConfigError):
    """The layout is not legal for this model or this number of ranks."""


class CheckpointError(HelixError):
    """The checkpoint directory is missing something, or holds something that does not fit the model."""

    exit_code = 3


class RequestError(HelixError, ValueError):
    """One request cannot be served; the engine goes on with the others."""

    exit_code = 4


class RankFailure(HelixError):
    """A rank died, raised or stopped answering; the whole engine ends.

    `rank` is the first rank that failed, `reason` says how.
    """

    exit_code = 70

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason
