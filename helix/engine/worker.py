"""Entry of a rank that `Engine` started from a plain process: ``python -m helix.engine.worker [PARENT_PID]``.

The configuration comes as JSON on standard input. With PARENT_PID the rank dies with that process's spawning thread.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from helix.comm.monitor import die_with_parent
from helix.config import launch_env, make_config
from helix.errors import ConfigError, HelixError


def main(arguments: list[str]) -> int:
    if arguments:
        die_with_parent(int(arguments[0]))
    settings = json.load(sys.stdin)
    env = launch_env()
    if env is None:
        raise ConfigError("helix.engine.worker is started by helix.Engine, which sets RANK and WORLD_SIZE")
    # Imported only now: torch takes seconds, in which a parent that dies would go unnoticed.
    join = import_module("helix.engine.join")
    try:
        join.share_cores(env.local_size)
        config = make_config(None, **settings)
        join.follow(config, join.enter_world(config, env))
    except HelixError as error:
        print(f"helix: rank {env.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
