"""Settings of every test: one thread, no network beyond this machine, the same hypothesis examples
each time, gpu tests only with a GPU.
"""

import ipaddress
import os
import signal
import socket

import hypothesis
import pytest

hypothesis.settings.register_profile("venus", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("venus")


def pytest_configure(config):
    # Tiny tensors gain nothing from threads, and the scripts that tests start would fight for the
    # cores. Before torch is imported: OpenMP reads it once. Started processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell starts background jobs with Ctrl-C ignored, and so would be the scripts that tests
    # start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch  # here, not on top: the tests of the stdlib-only modules run without it

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def hermetic(monkeypatch):
    """Refuse connections that leave this machine: a test that needs the network is wrong, and fails
    here rather than time out.
    """
    connect = socket.socket.connect

    def guarded(self, address):
        host = address[0] if isinstance(address, tuple) else None  # unix sockets have no host
        if host is not None and host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            raise AssertionError(f"a test tried to connect to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
