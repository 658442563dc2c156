"""From autograd to the engine: each param's gradient is handed over when autograd has accumulated it, then dropped.

A hook per param (register_post_accumulate_grad_hook) gives param.grad to the engine, which folds it into its own
buffers, and sets param.grad to None. So zero_grad finds nothing to do, and torch.nn.utils.clip_grad_norm_ nothing to
clip.
"""
import ctypes

import torch

from ..errors import FailedPrecondition
from . import memory


class Gradients:
    def __init__(self, core, weights, passes):
        self._core, self._weights, self._passes = core, weights, passes
        self._outer = None     # autograd's number of the backward that engine.backward runs
        for unit in weights.units:
            for entry in unit.owned():
                if entry.trainable:
                    entry.param.register_post_accumulate_grad_hook(self._hook(entry))

    def begin(self, loss):
        """Before a backward of `loss`; returns the handle of a hook that the caller removes afterwards."""
        for unit in self._weights.units:
            unit.final_gradients = 0
        self._outer = None
        return loss.register_hook(self._note_backward)

    def _note_backward(self, _):
        self._outer = torch._C._current_graph_task_id()

    def _hook(self, entry):
        return lambda param: self._take(entry, param)

    def _take(self, entry, param):
        with torch._C.DisableTorchFunctionSubclass():
            gradient, param.grad = param.grad, None
        if not self._passes.in_backward:
            raise FailedPrecondition(f'gradient of param "{entry.name}": call engine.backward(loss), not '
                                     f"loss.backward(): its end reduces the gradients of all ranks")
        struct, gradient = memory.struct_of(gradient, f'gradient of param "{entry.name}"')
        self._core._call("strata_grad", entry.core.number, ctypes.byref(struct),
                         memory.stream_of(self._weights.device))
        self._core._keep_gradient(gradient)
        if self._is_last(entry):
            self._count(entry)

    def _is_last(self, entry):
        """Autograd adds up a param's gradients before it calls the hook, once per backward.

        Only checkpoint(use_reentrant=True), which runs a backward inside the backward, may call it again: for a module
        used several times. That is left to the end of backward.
        """
        if torch._C._current_graph_task_id() == self._outer:
            return True
        return all(self._passes.calls_of(unit) <= 1 for unit in entry.units) and len(entry.units) == 1

    def _count(self, entry):
        """Tells the engine when a unit has all its gradients: its reduction runs under the rest of the backward."""
        for unit in entry.units:
            unit.final_gradients += 1
            if unit.has_all_gradients():
                self._core._call("strata_grads_done", unit.core.number)
