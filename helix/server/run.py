"""`serve`: a server from start to end. The engine runs in the main thread, HTTP in a thread of its own.

The socket opens before the model is loaded, so /health can say "loading", and a port that is taken is known at once.
SIGTERM and SIGINT drain: what was admitted finishes, new requests get 503; a second signal ends at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from helix.config import LaunchEnv, RunConfig, launch_env
from helix.engine.engine import Engine
from helix.engine.join import enter_world, follow, share_cores
from helix.errors import ConfigError
from helix.server.app import Service, make_app
from helix.server.desk import Desk
from helix.server.metrics import Metrics

log = logging.getLogger("helix")

_FLUSH_S = 5
"""How long answers that are complete may take to leave once the last generation is done."""
_KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep an idle connection, so that the server is not the one to close it."""


def serve(config: RunConfig, open_engine: Callable[[RunConfig], Engine]) -> None:
    """Serve `config` until a signal ends it. Under the launcher, ranks other than 0 follow rank 0 and then return.

    Raises
    ------
    ConfigError
        The address cannot be listened on; nothing was loaded.
    RankFailure
        A rank failed; open requests got an error.
    """
    env = launch_env()
    if env is not None and env.rank != 0:
        _follow(config, env)
        return
    metrics = Metrics()
    desk = Desk(config.engine.max_batch, config.server.max_queue, config.server.request_timeout_s, metrics)
    service = Service(config.server, _model_name(config), desk, metrics)
    with _listen(config) as listener:
        http = _Http(service, listener)
        try:
            with open_engine(config) as engine:
                _drain_on_signals(desk)
                engine.warm_up()
                service.engine = engine
                metrics.watch(engine)
                log.info("ready: %s at http://%s:%d/v1", service.model_name, config.server.host, config.server.port)
                try:
                    desk.run(engine)
                finally:
                    http.stop()
        finally:
            http.stop()


def _follow(config: RunConfig, env: LaunchEnv) -> None:
    """The launcher sends signals to every rank, but only rank 0 knows when the last request is done."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    share_cores(env.local_size)
    follow(config, enter_world(config, env))


def _model_name(config: RunConfig) -> str:
    model = config.model
    return config.server.model_name or (Path(model.path).resolve().name if model.path else str(model.card))


def _listen(config: RunConfig) -> socket.socket:
    host, port = config.server.host, config.server.port
    if config.server.api_key is None and host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("server.host=%s is open to other machines and server.api_key is not set", host)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"server.host={host}, server.port={port} cannot be listened on ({error.strerror}); choose another port"
        ) from error


def _drain_on_signals(desk: Desk) -> None:
    def on_signal(number: int, _frame: object) -> None:
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.default_int_handler)
        log.info("%s: running requests finish, new ones are refused", signal.Signals(number).name)
        desk.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


class _Http:
    """uvicorn in a thread, from the constructor to `stop`."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(service),
                access_log=False,
                log_config=None,
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._thread = threading.Thread(target=self._run, args=(service.desk, listener), name="helix-http", daemon=True)
        self._thread.start()

    def _run(self, desk: Desk, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        finally:
            desk.drain()  # without HTTP nobody can be served

    def stop(self) -> None:
        """Let answers leave, then end; safe to call twice."""
        self._server.should_exit = True
        self._thread.join()
