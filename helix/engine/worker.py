"""Entry of a rank that `Engine` started from a plain process: ``python -m helix.engine.worker`` with JSON on stdin."""

from __future__ import annotations

import json
import sys

from helix.comm.monitor import die_with_parent
from helix.config import launch_env, make_config
from helix.engine.join import enter_world, follow, share_cores
from helix.errors import ConfigError, HelixError


def main() -> int:
    die_with_parent()
    settings = json.load(sys.stdin)
    env = launch_env()
    if env is None:
        raise ConfigError("helix.engine.worker is started by helix.Engine, which sets RANK and WORLD_SIZE")
    try:
        share_cores(env.local_size)
        config = make_config(None, **settings)
        follow(config, enter_world(config, env))
    except HelixError as error:
        print(f"helix: rank {env.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
