"""A model's forward and backward seen from its modules and from autograd: when units are fetched, and for how long.

Forward: a unit is fetched by a hook before its module's forward and released by one after it. Weights that autograd
saves are packed as (param, dtype, size, strides, offset), without their memory, by saved-tensor hooks that are pushed
once around the model's forward and once around engine.backward. Never per module: inside torch's checkpoint such hooks
would replace checkpoint's own and switch recomputation off in silence.

Backward: the hook that unpacks a saved weight fetches its unit, and the unit stays until everything it packed was used
and freed. A recomputed forward fetches as the first one did and stays for its backward. All ranks must fetch alike
though a rank may have used other parts of a unit than its peers (experts), so units are caught up with: before a unit
is fetched, those whose forward came later and that were not fetched yet are fetched, in reverse order. Those of a
checkpoint stay until the backward has come to what was before it: they are about to be computed again.
"""
import contextlib
import inspect
import math
import sys
import threading

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..errors import FailedPrecondition
from . import autocast
from .compiled import is_tracing, outside_graphs, refuse_cuda_graphs
from .outermost import Outermost

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_pushed = threading.local()  # .of: the Passes whose saved-tensor hooks are pushed in this thread

_WITH_MEMORY = (torch.Tensor, nn.Parameter)


class ModuleHook:
    """A hook on a module: call(unit). A copied or pickled model would have hooks on an engine it does not have."""

    def __init__(self, call, *args, takes_inputs=False):
        self._call, self._args, self._takes_inputs = call, args, takes_inputs

    @outside_graphs
    def __call__(self, module, *inputs):
        self._call(*self._args, *(inputs[:2] if self._takes_inputs else ()))

    def __reduce_ex__(self, protocol):
        raise FailedPrecondition("a prepared model cannot be copied or pickled, its params are with the engine: use "
                                 "engine.state_dict() or engine.save()")


class Pass:
    """One forward of the whole model."""

    def __init__(self, step, records):
        self.step, self.records = step, records  # optimizer steps before it; whether autograd was on
        self.calls = []
        self.clock = 0
        self.reached = math.inf  # the earliest end of a call that the backward has come to
        self._checkpoint = self._frame = None

    def tick(self):
        self.clock += 1
        return self.clock

    def checkpoint(self):
        """When the checkpoint began that runs now, the outermost one; None: none does."""
        frame = _running_checkpoint()
        if frame is not self._frame:
            self._frame, self._checkpoint = frame, frame and self.clock
        return self._checkpoint

    def end(self):
        self._frame = None  # it has tensors

    def rewind(self):
        """Another backward of the same graph is to fetch what this one did."""
        self.reached = math.inf
        for call in self.calls:
            call.rewind()


class Call:
    """One forward of a unit's module."""

    def __init__(self, unit, of, is_recomputed=False, origin=None):
        self.unit, self.of = unit, of
        self._is_recomputed, self.origin = is_recomputed, origin  # origin: the Call that is computed again, if known
        self._checkpoint = of.checkpoint() if of.records else None  # that it is in
        self.begin, self.end = of.tick(), None
        self.token = object()       # that every Packed of it refers to
        self._uses = sys.getrefcount(self.token)
        self.was_fetched = False     # by the backward
        self.was_recomputed = False
        self._inputs = 0          # whose gradient the backward computes
        self._without = 0         # of those, without one yet

    @property
    def saved(self):
        """Autograd still holds packed weights of it. Python's own count tells: a __del__ may lose an interrupt."""
        return sys.getrefcount(self.token) > self._uses

    def watch(self, inputs):
        """The end of the backward of a call is seen by the gradients of its inputs."""
        for tensor in _tensors(inputs):
            if tensor.requires_grad:
                self._inputs += 1
                tensor.register_hook(self._note_gradient)
        self._without = self._inputs

    def rewind(self):
        self.was_fetched, self.was_recomputed, self._without = False, False, self._inputs

    def come_to(self):
        """The backward fetches for it."""
        self.was_fetched = True
        self.of.reached = min(self.of.reached, self.end or self.of.clock)

    @property
    def in_checkpoint(self):
        """It is in a checkpoint whose backward is not over."""
        return self._checkpoint is not None and self.of.reached > self._checkpoint

    def may_be_recomputed(self):
        return not self.was_recomputed and (not self.was_fetched or self.in_checkpoint)

    def _note_gradient(self, _):
        self._without -= 1

    def _has_input_gradients(self):
        """Those of the forward, or of a recomputed one, whichever is in the graph that the backward goes through."""
        if self._inputs and self._without <= 0:
            return True
        return self.origin is not None and self.origin._has_input_gradients()

    def is_over(self):
        """Whether its backward, if it has begun, reads no weight any more.

        What checkpoint(use_reentrant=False) saves in a recomputed forward it keeps for itself. There the gradients
        tell: of all params, if none is frozen (a frozen one is read for the gradient of the input), or of all inputs.
        """
        if self.saved or not self._is_recomputed:
            return not self.saved and not self.in_checkpoint
        if self.origin is None:
            return False  # at the end of backward
        if self._has_input_gradients():
            return True
        return self.unit.has_all_gradients() and self.unit.trainable == len(self.unit.entries)


class Packed:
    """A saved tensor that is a weight, without its memory."""

    __slots__ = ("entry", "call", "token", "dtype", "size", "stride", "offset")

    def __init__(self, entry, call, tensor):
        self.entry, self.call, self.token, self.dtype = entry, call, call.token, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self):
        return self.entry.view(self.dtype, self.size, self.stride, self.offset)


class Passes:
    """The hooks of one model. `weights` does what they decide."""

    def __init__(self, model, weights):
        self._model, self._weights = model, weights
        self._running = []     # Calls whose forward is running, innermost last
        self._pass = None      # the forward that is running
        self._recorded = []    # forwards since the last step that a backward may follow
        self._backwarded = None  # of those, the one that the backward is in
        self._hooks = None
        self._depth = 0        # of the model's forward: it may call itself
        self._outermost = Outermost()
        self.in_backward = False
        self.steps = 0
        model.register_forward_pre_hook(ModuleHook(self._begin_forward, True), prepend=True)
        for unit in weights.units:
            unit.revive = self._revive
            begin = ModuleHook(self._begin_call, unit, takes_inputs=True)
            unit.module.register_forward_pre_hook(begin, with_kwargs=True)
            unit.module.register_forward_hook(ModuleHook(self._end_call, unit), always_call=True)
        model.register_forward_hook(ModuleHook(self._end_forward), always_call=True)

    # ---- forward ----

    @contextlib.contextmanager
    def forward(self):
        """A forward that is not one call of the model: its parts, called one by one."""
        self._begin_forward(False)
        try:
            yield
        finally:
            self._end_forward()
            self.settle()

    def _begin_forward(self, is_call):
        self.settle()
        if self._depth == 0:
            if getattr(_pushed, "of", None):
                _pushed.of.settle()
            refuse_cuda_graphs(self._model)
            if _has_active_hooks():
                raise FailedPrecondition("the model's forward is called with saved-tensor hooks active (checkpoint or "
                                         "save_on_cpu around the whole model): Strata's would replace them; use them "
                                         "around parts of the model")
            begun = Pass(self.steps, torch.is_grad_enabled())
            if is_call:
                self._outermost.begin(begun)
            self._pass = begun
            if self._pass.records:
                self._recorded.append(self._pass)
            self._push_hooks()
        self._depth += 1

    def _end_forward(self):
        if self._depth == 0:  # the begin was refused
            return
        self._depth -= 1
        if self._depth == 0:
            self._pop_hooks()
            self._pass.end()
            done, self._pass = self._pass, None
            if self._running:  # an interrupt that ended them was caught inside the forward
                self._running.clear()
                self._weights.unwind()
            self._weights.sweep()
            self._outermost.end(done)

    def _push_hooks(self):
        self._hooks, _pushed.of = saved_tensors_hooks(self._pack, self._unpack), self
        self._hooks.__enter__()

    def _pop_hooks(self):
        self._hooks.__exit__(None, None, None)
        self._hooks = _pushed.of = None

    def settle(self):
        """Before anything else: ends what an interrupt left begun."""
        if self._outermost.was_left() or (self._weights.is_torn and self._outermost.is_none):
            self._unwind()

    def _unwind(self):
        if getattr(_pushed, "of", None) is self:  # else they went with their thread
            with torch.inference_mode(False):
                are_pushed = _has_active_hooks()
            if are_pushed:
                self._pop_hooks()
            _pushed.of = None
        if self._pass:
            self._pass.end()
        left = [self._pass, *self._in_backward()]
        self._recorded = [p for p in self._recorded if p not in left]
        self._hooks = self._pass = self._backwarded = None
        self._depth, self.in_backward = 0, False
        self._running.clear()
        self._weights.unwind()
        self._outermost.forget()  # only now: what interrupts this is done anew

    def _begin_call(self, unit, *inputs):
        self.settle()
        if self._pass is None and not self.in_backward and torch.is_grad_enabled():
            raise FailedPrecondition(f'unit "{unit.name}" is called outside the forward of the prepared model while '
                                     f"gradients are recorded: call the model, or use `with engine.forward():`")
        autocast.check_call(unit, self._weights.device.type)
        if self.in_backward:
            self._begin_recomputed(unit, inputs)
            return
        call = Call(unit, self._pass or Pass(self.steps, False))
        self._outermost.begin(call)
        self._weights.begin_use(unit)
        self._running.append(call)
        call.of.calls.append(call)
        if call.of.records:
            call.watch(inputs)

    def _end_call(self, unit):
        if self.in_backward or not self._running or self._running[-1].unit is not unit:  # its begin failed
            return
        call = self._running.pop()
        call.end = call.of.tick()
        self._weights.end_use(unit)
        self._weights.sweep()
        self._outermost.end(call)
        self._weights.check_unwritten("forward")

    def _begin_recomputed(self, unit, inputs=()):
        """The forward of a unit, or of a part of it, is computed again; its params stay attached for its backward."""
        origin = self._origin(unit)
        if origin:
            origin.was_recomputed = True
        self._fetch_in_backward(unit, origin)
        if origin is unit.recomputed:
            unit.waiting.discard(origin)  # the one that begins now has the backward
        unit.recomputed = Call(unit, Pass(self.steps, False), True, origin)
        unit.recomputed.watch(inputs)
        unit.waiting.add(unit.recomputed)
        self._weights.keep(unit)

    @outside_graphs
    def _revive(self, unit):
        """For a released param that is read: is this a part of its unit's forward that is computed again?

        Where checkpoint is inside a module's forward, as in transformers, no hook of the module tells.
        """
        if not self.in_backward or not torch.is_grad_enabled() or unit.kept:
            return False
        self._begin_recomputed(unit)
        return True

    # ---- saved tensors ----

    @outside_graphs
    def _pack(self, tensor):
        if type(tensor) not in _WITH_MEMORY and is_tracing():
            return tensor
        entry = self._weights.entry_at(tensor)
        if entry is None:
            autocast.check_saved(tensor, self._weights)
            return tensor
        for call in reversed(self._running):
            if entry in call.unit.entries:
                return Packed(entry, call, tensor)
        for unit in entry.units:
            if unit.recomputed:
                return Packed(entry, unit.recomputed, tensor)
        return tensor

    def _unpack(self, packed):
        if not isinstance(packed, Packed):
            return packed
        call = packed.call
        if not self.in_backward:
            raise _refuse_backward(call, _why_not_fetched())
        if call.of.step != self.steps:
            raise _refuse_backward(call, "engine.step() has changed the weights since this forward")
        if call.of in self._recorded:
            self._backwarded = call.of
        self._fetch_in_backward(call.unit, call)
        call.unit.waiting.add(call)
        return packed.tensor()

    # ---- backward ----

    @contextlib.contextmanager
    def backward(self, retain_graph):
        """Around autograd's backward, which runs inside."""
        self._outermost.begin(self)
        self.in_backward = True
        try:
            self._push_hooks()
            try:
                yield
            finally:
                self._pop_hooks()
            for done in self._in_backward():
                self._catch_up(done, 0)
        except Exception:
            self._end_backward(retain_graph)
            raise
        except BaseException:  # it may have come anywhere: settle() ends what has begun
            self.in_backward = False
            raise
        self._end_backward(retain_graph)
        self._outermost.end(self)

    def _end_backward(self, retain_graph):
        for done in self._in_backward():
            if retain_graph:
                done.rewind()
            else:
                self._recorded.remove(done)
        self.in_backward = False
        self._backwarded = None
        self._running.clear()
        self._weights.end_backward()

    def refuse_inside(self, what):
        self.settle()
        if self.in_backward or self._pass:
            raise FailedPrecondition(f"{what} inside a forward or a backward of the same model")

    def _in_backward(self):
        """The forwards that the backward has come to, the last one first."""
        return [p for p in reversed(self._recorded) if any(call.was_fetched for call in p.calls)]

    def end_step(self):
        self.steps += 1
        self._recorded.clear()

    def calls_of(self, unit):
        """How often a unit's module was called in the forwards that wait for their backward."""
        return sum(call.unit is unit for recorded in self._recorded for call in recorded.calls)

    def _origin(self, unit):
        """The forward of the unit that is computed again, or None: the last one that this may be."""
        passes = [self._backwarded] if self._backwarded else []
        for recorded in passes + self._recorded[::-1]:
            for call in reversed(recorded.calls):
                if call.unit is unit and call.may_be_recomputed():
                    return call
        return unit.recomputed  # once more, in nested checkpoints

    def _fetch_in_backward(self, unit, call):
        if call is not None and not call.was_fetched:
            self._catch_up(call.of, call.end or call.of.clock)
            call.come_to()
        self._weights.fetch(unit)

    def _catch_up(self, recorded, after):
        """Fetches the units of calls that began after a time and that the backward has not come to."""
        if not recorded.records:
            return
        for call in reversed(recorded.calls):
            if call.begin > after and not call.was_fetched and _has_backward(call.unit):
                call.come_to()
                self._weights.fetch(call.unit)
                call.unit.waiting.add(call)


def _running_checkpoint():
    """The frame of the outermost torch.utils.checkpoint.checkpoint that runs, or None."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            found = frame
        frame = frame.f_back
    return found


def _has_active_hooks():
    """Whether saved-tensor hooks are active: what autograd saves then has hooks, and takes no others."""
    if torch.is_inference_mode_enabled():
        return False
    with torch.enable_grad():
        probe = torch.zeros((), requires_grad=True).exp()
    try:
        probe.grad_fn._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return True
    return False


def _tensors(value):
    """The tensors in arguments of a module."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _has_backward(unit):
    """Whether its backward reads weights, on some rank at least: an embedding's does not."""
    return unit.trainable > 0 and not isinstance(unit.module, nn.Embedding)


def _why_not_fetched():
    other = getattr(_pushed, "of", None)
    if other and other.in_backward:
        return ("this is the backward of another engine, and a backward fetches the weights of one: detach() what one "
                "model gives to the other, or prepare both as one module")
    return ("weights are fetched for it inside engine.backward(loss) only; loss.backward() and torch.autograd.grad do "
            "not know how")


def _refuse_backward(call, why):
    return FailedPrecondition(f'backward of unit "{call.unit.name}": {why}')
