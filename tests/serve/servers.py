"""A server in a thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from allmlp.serve.app import create_app, load_service
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import RequestLimits
from allmlp.serve.server import Network, Server, listen


@contextmanager
def running(
    *folders: Path,
    batcher: Batcher | None = None,
    limits: RequestLimits = RequestLimits(),
    trusted_proxies: Sequence[Network] = (),
) -> Iterator[int]:
    """Run a server in a thread and yield its port. At the end it does not wait for clients that may come."""
    batcher = batcher or Batcher()
    app = create_app({one.name: load_service(one) for one in folders}, batcher, limits)
    server = Server(app, batcher, trusted_proxies)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("allmlp.serve.server.LINGER_SECONDS", 0.0)
                server.handle_exit(signal.SIGTERM, None)
                thread.join(20)
    assert not thread.is_alive()
