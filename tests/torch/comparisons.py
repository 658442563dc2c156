"""When two runs are the same, and when a run is as near to plain PyTorch as plain PyTorch is to itself.

The tolerance against plain PyTorch is measured, not chosen: at most twice the largest gap between plain runs that see
the rows of each batch in another order, which changes nothing but the order of additions.
"""
import torch

import small_gpt

ORDERS = ([1, 2, 3, 0], [3, 2, 1, 0], [2, 0, 3, 1])


def bits(losses):
    return [value.hex() for value in losses]


def assert_same_run(a, b, what=""):
    assert bits(a[0]) == bits(b[0]), what
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        assert torch.equal(value, b[1][name]), (what, name)


def gap(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def assert_plain(ours, steps, **options):
    """`ours`: the losses of every rank."""
    world, micro = len(ours), options.get("micro", 1)
    plain, _ = small_gpt.train_plainly(steps, world=world, **options)
    permuted = [small_gpt.train_plainly(steps, world=world, order=order, **options)[0] for order in ORDERS]
    for rank in range(world):
        assert len(ours[rank]) == len(plain[rank]) == steps * micro
        allowed = 2 * max(gap(plain[rank], other[rank]) for other in permuted)
        assert 0 < allowed < 0.2
        assert gap(ours[rank], plain[rank]) <= allowed, rank
        assert ours[rank][-1] < ours[rank][0]
