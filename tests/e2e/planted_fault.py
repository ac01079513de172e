"""Plants a fault in one rank of an engine, from outside: a ``sitecustomize`` that the rank's interpreter imports."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def plant(directory: Path, rank: int, fault: str) -> dict[str, str]:
    """Environment in which rank `rank` misbehaves: `fault` is ``load`` or ``step``, ``:``, ``raise|kill|exit0|hang``.

    The moment is written to ``directory / "when"``.
    """
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    return {"PYTHONPATH": f"{directory}:{ROOT}", "PLANTED_FAULT": fault, "PLANTED_RANK": str(rank)}


_SITECUSTOMIZE = """
import os, sys, time

if "PLANTED_FAULT" in os.environ and os.environ.get("RANK") == os.environ["PLANTED_RANK"]:
    where, kind = os.environ["PLANTED_FAULT"].split(":")
    here = os.path.dirname(os.path.abspath(__file__))

    def misbehave():
        with open(os.path.join(here, "when"), "w") as file:
            file.write(str(time.time()))
        if kind == "raise":
            raise RuntimeError("injected")
        if kind == "kill":
            os.kill(os.getpid(), 9)
        if kind == "exit0":
            sys.exit(0)
        time.sleep(1000)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name != "helix.engine.join":
                return None
            sys.meta_path.remove(self)
            import helix.engine.build as build
            import helix.engine.runner as runner

            if where == "load":
                build.load_weights = lambda *args, **kwargs: misbehave()
            else:
                plain, calls = runner.build_batch, []

                def build_batch(*args):
                    calls.append(1)
                    if len(calls) == 12:
                        misbehave()
                    return plain(*args)

                runner.build_batch = build_batch
            return None

    sys.meta_path.insert(0, Finder())
"""
