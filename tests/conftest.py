"""Fresh random inputs in every run, and the number that repeats a failing one.

A test that draws random inputs takes the `draw` fixture. Its seed is made from one seed of the whole run and the test's
own name, so tests stay reproducible one by one. The run's seed is new each time and is printed in the header and beside
every failure; `DSV4_SEED=<number> pytest ...` runs the same inputs again.
"""

import os
import secrets
import zlib

import pytest
import torch

from tests.ops.cases import Draw

RUN_SEED = int(os.environ.setdefault("DSV4_SEED", str(secrets.randbelow(2**31))))


def pytest_report_header(config):
    return f"random inputs: DSV4_SEED={RUN_SEED}"


def pytest_configure(config):
    torch.set_grad_enabled(False)  # inference only
    # Tensors are small: on a busy machine waiting for a second thread costs ten times the work.
    torch.set_num_threads(1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed and "draw" in getattr(item, "fixturenames", ()):
        report.sections.append(("random inputs", f"repeat with DSV4_SEED={RUN_SEED}"))


@pytest.fixture
def draw(request):
    """A source of random inputs for this test alone."""
    return Draw(zlib.crc32(f"{RUN_SEED}:{request.node.nodeid}".encode()))
