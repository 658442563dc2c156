"""Ranks as threads of one process: for tests, and for trying out a world size on one machine.

    def work(thread_rank):
        with strata.Engine("train.toml", thread_rank=thread_rank) as engine: ...
    strata.run_threads(2, work)
"""
import collections
import itertools
import os
import threading

from .errors import Cancelled

ThreadRank = collections.namedtuple("ThreadRank", "job rank world")
_serial = itertools.count()


def run_threads(world, fn):
    """Runs fn(ThreadRank) on `world` threads and returns their results in rank order.

    When ranks fail, the first error is raised that no other rank's brought about, with the rank noted.
    """
    job = f"threads-{os.getpid()}-{next(_serial)}"
    results = [None] * world
    failures = []

    def run(rank):
        try:
            results[rank] = fn(ThreadRank(job, rank, world))
        except BaseException as e:
            e.add_note(f"(on rank {rank} of {world})")
            failures.append(e)

    threads = [threading.Thread(target=run, args=(rank,), name=f"strata-rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((e for e in failures if not isinstance(e, Cancelled)), failures[0])
    return results
