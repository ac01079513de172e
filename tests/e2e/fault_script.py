"""A person's script that runs an engine, for the fault tests: ``fault_script.py SETTINGS_JSON [long]``.

Prints ``ready`` once the engine serves, then generates; with ``long`` it goes on until it is ended from outside.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from helix import Engine, SamplingParams


def main() -> None:
    # As in a terminal: what a shell starts in the background, the suite as well, has Ctrl-C ignored and hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = json.loads(sys.argv[1])
    endless = "long" in sys.argv[2:]
    with Engine(**settings) as engine:
        print("ready", os.getpid(), *(process.pid for process in engine._ranks.processes.values()), flush=True)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        rounds = 0
        while rounds < 3 or endless:
            engine.generate([[1, 2, 3], [4, 5]], params)
            rounds += 1
    print("done", flush=True)


if __name__ == "__main__":
    main()
