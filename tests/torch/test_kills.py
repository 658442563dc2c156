"""Record 61 with PyTorch: kill -9 of one of two ranks in the middle of a step, at moments that are not left to chance.

The other rank ends by itself, long before the deadline, with an error that names the dead rank and what it was doing,
and nothing is left of the run. On GPUs, over NCCL, the same.
"""
import re
import signal

import pytest

from torch_ranks import TorchJob, on_gpus

# What the rank that is left may wait for. A step returns before the reductions are over: they die with the rank, too.
OPERATIONS = {"forward": "gather of unit", "backward": "(gather|reduction) of unit", "reduction": "reduction of unit",
              "step": "agreement on step 4|(gather|reduction) of unit"}


@pytest.mark.parametrize("moment", OPERATIONS)
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=on_gpus(2))], ids=["cpu", "cuda"])
def test_a_killed_rank_is_named_by_the_other(tmp_path, moment, cuda):
    # Without prefetching the dead rank has gathered nothing that the other could go on with.
    with TorchJob(tmp_path, 2, stage=3, steps=1000, cuda=cuda, die=[1, 4, moment],
                  extra=["deadline_seconds=600", "zero_optimization.prefetch_bucket_size=0"]) as job:
        codes = job.wait()
        assert codes == [1, -signal.SIGKILL], job.everything()
        error = job.err(0).strip().splitlines()[-1]
        assert re.match(r"strata\.errors\.\w+: ", error) and re.search(r"rank 1\b", error), job.everything()
        assert re.search(OPERATIONS[moment], error), error
        job.assert_nothing_left()
