"""From autograd to the engine: each param's gradient is handed over when autograd has accumulated it, then dropped.

A hook per param (register_post_accumulate_grad_hook) takes param.grad and sets it to None. So model.zero_grad finds
nothing to do, and torch.nn.utils.clip_grad_norm_ nothing to clip. What was taken is held until a unit is complete, HELD
bytes are reached, the stream changes or the backward ends: then one call gives all of it to the engine, which folds it
into its own buffers on the stream that was current when it was taken.
"""
import functools

import torch

from .. import _abi
from ..errors import FailedPrecondition
from . import memory


HELD = 4 << 20  # bytes of gradients that wait for others at most: folding as many costs more than a call


class Gradients:
    def __init__(self, core, weights, passes):
        self._core, self._weights, self._passes = core, weights, passes
        self._outer = None     # autograd's number of the backward that engine.backward runs
        self.were_taken = False  # gradients, in the last backward
        self._stream = weights.stream
        self._grads_done = core._bound("strata_grads_done")
        count = sum(entry.trainable for unit in weights.units for entry in unit.owned())
        self._params, self._tensors = (_abi.Param * count)(), (_abi.strata_tensor * count)()
        self._grads = core._bound("strata_grads", self._params, self._tensors)
        self._held, self._held_bytes, self._held_on = [], 0, None
        for unit in weights.units:
            for entry in unit.owned():
                if entry.trainable:
                    entry.param.register_post_accumulate_grad_hook(self._hook(entry))

    def begin(self, loss):
        """Before a backward of `loss`; returns the handle of a hook that the caller removes afterwards."""
        for unit in self._weights.units:
            unit.final_gradients = 0
        self._outer, self.were_taken = None, False
        return loss.register_hook(self._note_backward)

    def end(self):
        """After it."""
        self._hand_over()

    def drop(self):
        """After one that raised: what was not handed over, and what autograd has accumulated and nobody took."""
        self._forget()
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._weights.units:
                for entry in unit.owned():
                    entry.param.grad = None

    def _note_backward(self, _):
        self._outer = torch._C._current_graph_task_id()

    def _hook(self, entry):
        described = memory.Description(entry.shape, f'gradient of param "{entry.name}"')
        return functools.partial(self._take, entry, described)

    def _take(self, entry, described, param):
        with torch._C.DisableTorchFunctionSubclass():
            gradient, param.grad = param.grad, None
        if not self._passes.in_backward:
            raise FailedPrecondition(f'gradient of param "{entry.name}": call engine.backward(loss), not '
                                     f"loss.backward(): its end reduces the gradients of all ranks")
        self.were_taken = True
        gradient = described.set(gradient)
        self._core._keep_gradient(gradient)
        stream = self._stream()
        if stream is not self._held_on or len(self._held) == len(self._params):
            self._hand_over()
            self._held_on = stream
        held = len(self._held)
        self._params[held], self._tensors[held] = entry.core.number, described.struct
        self._held.append(gradient)
        self._held_bytes += gradient.nbytes
        if self._held_bytes >= HELD:
            self._hand_over()
        if self._is_last(entry):
            self._count(entry)

    def _hand_over(self):
        try:
            if self._held:
                self._grads(len(self._held), self._held_on)
        finally:
            self._forget()

    def _forget(self):
        self._held.clear()
        self._held_bytes = 0

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
                self._hand_over()
                self._grads_done(unit.core.number)
