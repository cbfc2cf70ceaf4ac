"""Processes that are started once and then run one function after another, the same on all of them."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

# A fork of a server that has imported torch starts in a fraction of the time that importing it takes.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "gradrein"])


class RankProcesses:
    """`run` calls a function on every rank of a gloo group and returns what each returned, in order."""

    def __init__(self, size, timeout=15.0):
        self.size = size
        self.timeout = timeout
        self._start()

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = _CONTEXT.Pipe()
            arguments = (rank, self.size, os.path.join(self._folder.name, "store"), self.timeout, theirs)
            process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args):
        answers = self.outcomes(function, *args)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:  # some may still wait for others: nobody can be relied on
            self.close()
            self._start()
        _skip_if_all_lack(answers)
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def outcomes(self, function, *args):
        """For each rank (True, result), or (False, what was raised); (False, "gone") for one that ended.

        (None, the name of a feature) for one whose torch lacks it.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank):
        try:
            if self._pipes[rank].poll(3 * self.timeout + 20):
                return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return False, "gone"
        return False, "no answer"

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(0.2)
            process.kill()
        self._folder.cleanup()


def alone(function, *args):
    """Call a function in a process without a process group."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    ok, answer = ours.recv()
    process.join()
    _skip_if_all_lack([(ok, answer)])
    assert ok, answer
    return answer


class LackingError(Exception):
    """This torch lacks a feature, by its name in `FEATURES`."""


def has(feature):
    """Return whether this torch has a feature."""
    sys.path.append(str(Path(__file__).parents[1]))  # as pytest does; random faults are run without it
    from features import FEATURES

    return FEATURES[feature]()


def need(feature):
    """Stop here where this torch lacks a feature: the test is skipped if all ranks do."""
    if not has(feature):
        raise LackingError(feature)


def fully_shard(*args, **kwargs):
    """Call that of torch, where it has one for the CPU."""
    need("fully_shard on the CPU")
    return fsdp.fully_shard(*args, **kwargs)


def _skip_if_all_lack(answers):
    """Skip a test if every rank, and so none for a fault of another, has stopped for want of a feature of torch."""
    if all(ok is None for ok, _ in answers):
        pytest.skip(f"torch {torch.__version__} has no {answers[0][1]}")


def _outcome(function, args):
    try:
        return True, function(*args)
    except LackingError as lacking:
        return None, str(lacking)
    except BaseException as error:  # whatever it is, the test is to see it
        return False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _answer(pipe, function, args):
    torch.set_num_threads(1)
    pipe.send(_outcome(function, args))


def _work(rank, size, store, timeout, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable()  # one that dies in C says where
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    while (job := pipe.recv()) is not None:
        function, args = job
        pipe.send(_outcome(function, args))
    os._exit(0)  # a peer may be gone: nothing to say goodbye to
