"""deepspeed.comm, as far as programs ask it where they are. The engine's own ranks need nothing of this.

torch.distributed answers where it is initialized, else the launcher's environment, as the engine reads it. Ranks that
are threads are in neither: they ask their engine (global_rank, local_rank, world_size).
"""
import logging
import os

import torch

from ..errors import FailedPrecondition, InvalidArgument
from .alternatives import absent

_LAUNCHERS = (  # rank, world size, rank on this machine: in the order of libs/rank_env
    ("STRATA_RANK", "STRATA_WORLD_SIZE", "STRATA_LOCAL_RANK"), ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
_ADVICE = "after init_distributed, torch.distributed has the collectives"

_log = logging.getLogger("strata.deepspeed")


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=None, verbose=True, timeout=None,
                     init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Makes torch.distributed's process group for the program's own use; the engine needs none. Twice is fine.

    A single process has a group of one. Several have one where MASTER_ADDR and MASTER_PORT are set (torchrun does) or
    with init_method; else none is made, which the log says. dist_backend None: nccl beside GPUs, else gloo.
    auto_mpi_discovery, distributed_port, verbose and config change nothing.
    """
    if dist_init_required is False or is_initialized():
        return
    rank, world = (rank, world_size) if world_size > 0 else (_place(0, 0), _place(1, 1))
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    options = {"timeout": timeout} if timeout else {}
    if init_method is None and world > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        _log.warning("init_distributed: MASTER_ADDR and MASTER_PORT are not set, so torch.distributed has no process "
                     "group; training needs none")
        return
    if init_method is None and world == 1:
        options["store"] = torch.distributed.HashStore()
    else:
        options["init_method"] = init_method or "env://"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world, **options)


def is_initialized():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def get_rank():
    return torch.distributed.get_rank() if is_initialized() else _place(0, 0)


def get_world_size():
    return torch.distributed.get_world_size() if is_initialized() else _place(1, 1)


def get_local_rank():
    return _place(2, 0)


def barrier():
    """Waits for all ranks, through torch.distributed."""
    if is_initialized():
        torch.distributed.barrier()
    elif get_world_size() > 1:
        raise FailedPrecondition("deepspeed.comm.barrier: torch.distributed has no process group: start with torchrun, "
                                 "or set MASTER_ADDR and MASTER_PORT, and call init_distributed()")


def _place(which, alone):
    """A number of the launcher's; `alone` without one."""
    for names in _LAUNCHERS:
        if os.environ.get(names[0]) and os.environ.get(names[1]):
            text = os.environ.get(names[which], "")
            if not text.isdecimal():
                raise InvalidArgument(f'{names[which]} = "{text}" is no number; {names[0]} = {os.environ[names[0]]}')
            return int(text)
    return alone


def __getattr__(name):
    raise absent("strata.deepspeed.comm", name, {}, "" if name.startswith("_") else _ADVICE)
