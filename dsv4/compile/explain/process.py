"""A process of our own that answers in lines of JSON and whose end, whatever it is, can be told: done, crash or hang."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]  # where the package dsv4 lies


class Child:
    """A running process. `output` is what it prints, on both streams."""

    def __init__(self, pid: int, answers: int, output: Any):
        self.pid = pid
        self._answers, self._rest = answers, b""
        self._output = output
        self._status: int | None = None

    @classmethod
    def spawn(cls, module: str, job: dict) -> "Child":
        """A new Python that runs a module, with a job on its stdin that gets the descriptor to answer on."""
        read, write = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(write)
        with process.stdin:
            process.stdin.write(json.dumps({**job, "answer": write}).encode())
        process.returncode = 0  # it is waited for here, by its id
        return cls(process.pid, read, output)

    @classmethod
    def fork(cls, function: Callable[[Any], None]) -> "Child":
        """A copy of this process that calls function(file to answer on) and ends."""
        read, write = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other threads are not copied; the child uses none of theirs
            pid = os.fork()
        if pid:
            os.close(write)
            return cls(pid, read, output)
        try:
            os.close(read)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(output.fileno(), descriptor)
                stream = os.fdopen(descriptor, "w", closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            with os.fdopen(write, "w") as answer:
                function(answer)
            sys.stdout.flush()
        finally:
            os._exit(0)

    def answer(self, seconds: float) -> dict | None:
        """The next answer, None when the process has ended. Raises TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self._answers, 1 << 20)
            if not part:
                return None
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def ended(self) -> str:
        """How the process ended: waits for it."""
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(self._status)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def stack(self) -> None:
        """Have the process print the stack it is in (faulthandler registered SIGUSR1), and give it time to."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def output(self) -> str:
        """What the process has printed, at most the last 64 KiB."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")

    def close(self) -> None:
        """End the process, and all that it started, if it has not ended."""
        if self._status is None:
            os.killpg(self.pid, signal.SIGKILL)  # its group is its own: it began a session
            self.ended()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
            self._output.close()
