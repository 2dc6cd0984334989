"""Jobs in persistent worker processes, with limits of time and memory. A crash or a hang is an
answer, too.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

SECONDS, GIGABYTES = 120.0, 6
WORKER = "benchmarks.families.worker"
Job = dict[str, Any]
Answer = dict[str, Any]


def run(
    jobs: Iterable[Job], workers: int, seconds: float = SECONDS, worker: str = WORKER
) -> Iterator[tuple[Job, Answer]]:
    """The answers of the jobs as they arrive; {"error": …} for a job that killed its worker.

    Args: `worker`: the module that answers, by `serve`.
    """
    waiting, done = queue.SimpleQueue[Job](), queue.SimpleQueue[tuple[Job, Answer]]()
    count = 0
    for job in jobs:
        waiting.put(job)
        count += 1
    for _ in range(min(workers, count)):
        threading.Thread(target=_work, args=(waiting, done, seconds, worker), daemon=True).start()
    for _ in range(count):
        yield done.get()


def _work(
    waiting: queue.SimpleQueue[Job],
    done: queue.SimpleQueue[tuple[Job, Answer]],
    seconds: float,
    module: str,
) -> None:
    worker = None
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        worker = worker or _Worker(module)
        answer = worker.ask(job, seconds)
        if worker.dead:
            worker = None
        done.put((job, answer))
    if worker:
        worker.stop()


class _Worker:
    def __init__(self, module: str) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.dead = False

    def ask(self, job: Job, seconds: float) -> Answer:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            try:
                self.process.stdin.write(json.dumps(job).encode() + b"\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                return self._end("the worker did not start")
            if not selector.select(seconds):
                return self._end(f"took longer than {seconds:.0f} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._end("the worker died")

    def stop(self) -> None:
        self.dead = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with its children
        self.process.communicate()

    def _end(self, reason: str) -> Answer:
        self.stop()
        code = self.process.returncode
        return {"error": reason if "longer" in reason else f"{reason} (exit status {code})"}


def serve(answer: Callable[[Job], Answer], fork: bool = False) -> None:
    """A worker's loop: one job a line on stdin, one answer a line on the original stdout; nothing
    else is written there.

    Args: `fork`: each job has a process of its own, a child of this one.
    """
    import resource

    limit = GIGABYTES << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        text = _forked(answer, job) if fork else json.dumps(answer(job))
        print(text, file=out, flush=True)


def _forked(answer: Callable[[Job], Answer], job: Job) -> str:
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(sender, "w") as pipe:
                pipe.write(json.dumps(answer(job)))
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the process died (status {status})"})
