"""Where the weights are: units and params of a model, and what fetching and releasing them means for torch.

A unit holds at most one fetch of the engine. While a module of it computes, its params are *attached*: ordinary
parameters whose data is the engine's memory. Afterwards they are released (released.py), and the fetch is given back as
soon as nothing reads that memory: no tensor over it is alive, and no saved tensor of a running backward will ask again.

Attached params are read-only: a write into one would be lost, or stay on this rank alone. Their torch versions tell
when they are released, and from then on this rank goes no further than to a load.

Ranks must fetch in the same order, and what the engine prefetches depends on when units were released. So a fetch is
given back at points that every rank passes alike: when the module ends, before the next fetch, at the end of backward.
"""
import ctypes
import gc
import itertools
import math

import torch
from torch import nn

from .. import _abi
from ..errors import FailedPrecondition, StrataError
from . import memory
from .released import released_class


PLACES = 16  # of one param, whose tensors are kept


class Entry:
    """One Parameter of the model. Several names, and several units, may share it; the first unit owns its storage."""

    def __init__(self, name, unit, param, dtype):
        self.name, self.unit, self.param = name, unit, param
        self.trainable = param.requires_grad
        self.shape, self.numel, self.dtype = param.shape, param.numel(), dtype
        self.units = []        # all that use it
        self.core = None       # the engine's Param
        self.address = 0       # while attached
        self._attached = 0
        self._version = 0      # torch's, when it was attached
        self.struct = None     # the engine fills in where the weight lies (Unit.look)
        self._places = {}      # by address
        self._class = released_class(name, unit.name, lambda: unit.revive(unit))
        self._nan = None

    def place(self, device):
        """Releases the param for the first time: its values are the engine's now."""
        self._nan = torch.full((), math.nan, dtype=self.dtype, device=device).expand(self.shape)
        if self.param.is_meta:
            torch.utils.swap_tensors(self.param, nn.Parameter(self._nan, self.trainable))
        self.release()

    @property
    def attached(self):
        return self._attached > 0

    @property
    def is_read(self):
        """A tensor over the weight is alive, other than the attached param."""
        place = self._places.get(self.struct.data)
        return place is not None and place.is_read(self.address != 0)

    def _place(self):
        """Where the fetched weight lies."""
        place = self._places.get(self.struct.data)
        if place is None:
            if len(self._places) == PLACES:
                self._places.clear()
            place = self._places[self.struct.data] = memory.Place(self.struct, self.shape, self.dtype)
        return place

    def forget(self):
        """The engine closes."""
        self._places.clear()

    def view(self, dtype, size, stride, offset):
        """A new tensor over a part of the fetched weight."""
        if self.numel == 0:
            return torch.empty(0, dtype=dtype, device=self._nan.device).as_strided(size, stride, offset)
        return self._place().view(dtype, size, stride, offset)

    def attach(self):
        """Makes the param an ordinary one again. Nests."""
        self._attached += 1
        if self._attached > 1:
            return
        self.param.__class__ = nn.Parameter
        if self.numel == 0:
            self.param.data = torch.empty(self.shape, dtype=self.dtype, device=self._nan.device)
        else:
            self.param.data = self._place().tensor
            self.address = self.struct.data
        self._version = self.param._version

    def detach(self):
        """Returns whether the param was written meanwhile: in place, itself or a view of it."""
        self._attached -= 1
        if self._attached > 0:
            return False
        was_written = self.param._version != self._version
        self.release()
        return was_written

    def unwind(self):
        """Whatever was attached, or was about to be."""
        self._attached = 0
        self.release()

    def release(self):
        """Takes the values away. A tensor saved outside our hooks, which shares the param's version, will now raise."""
        self.param.__class__ = nn.Parameter
        self.param.data = self._nan
        torch.autograd.graph.increment_version(self.param)
        self.param.__class__ = self._class
        self.address = 0


class Unit:
    """Params that are fetched together, with the module whose forward needs them."""

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.core = None       # the engine's Unit
        self.entries = {}      # as an ordered set: of all params it uses, those that another unit owns included
        self.trainable = 0     # of them
        self.autocast = {}     # what torch.autocast copies, by dtype (autocast.py)
        self.fetched = False   # it holds a fetch
        self.depth = 0         # forwards of its module that are running
        self.waiting = set()   # Calls whose backward is not over
        self.kept = False      # its params stay attached until then
        self.recomputed = None    # the Call that is computed again, in backward
        self.final_gradients = 0  # params with their last gradient, in this backward
        self.revive = lambda unit: False  # attaches its params for an access that comes without its module

    def place(self):
        """Once all its params are registered: where they lie is asked in one call."""
        views = (_abi.strata_tensor * len(self.entries))()
        for view in views:
            view.struct_size = ctypes.sizeof(view)
        self._look = self.core.engine._bound("strata_unit_views", self.core.number, views, len(views),
                                             ctypes.byref(ctypes.c_uint64()))
        self._tied = []        # (entry, view) of params that another unit owns
        for entry, view in zip(self.entries, views):
            if entry.unit is self:
                entry.struct = view
            else:
                self._tied.append((entry, view))

    def look(self):
        """After a fetch: where the weights of its params are now."""
        self._look()
        for entry, view in self._tied:
            ctypes.pointer(entry.struct)[0] = view

    def look_whether_fetched(self):
        """As the engine has it: an interrupt may have come between its call and our note of it."""
        try:
            self.look()
        except StrataError:
            return False
        return True

    def owned(self):
        return [entry for entry in self.entries if entry.unit is self]

    def has_all_gradients(self):
        return self.final_gradients == self.trainable

    def reader(self):
        """An entry whose memory a tensor still reads and no other unit keeps; None: the fetch can be given back."""
        for entry in self.entries:
            if entry.is_read and not any(other.fetched for other in entry.units if other is not self):
                return entry
        return None

    def is_used(self):
        return self.depth > 0 or not all(call.is_over() for call in self.waiting)


class Weights:
    """Fetches and releases the units of one model."""

    def __init__(self, core, units, device):
        self.units, self.device = units, device
        for unit in units:
            unit.place()
        self.stream = memory.stream_source(device)
        self._engine_fetch, self._engine_release = core._bound("strata_fetch"), core._bound("strata_release")
        self._fetched = {}      # units, in order of their fetches
        self._called = None     # the unit of a fetch or a release that is not noted yet
        self._by_address = {}   # attached entries
        self.gathered = []      # lists of units, of each `with engine.gathered()`
        self.is_torn = False    # an interrupt came in the middle of a change, perhaps
        self._written = None    # what check_unwritten says
        self._undoes_writes = core.setting("check_weights") == "true"  # the engine, on all ranks alike

    def begin_use(self, unit):
        """Attaches the unit's params, fetching it first if need be. Nests."""
        self.fetch(unit)
        unit.depth += 1
        if unit.depth == 1:
            self._attach(unit)

    def end_use(self, unit):
        """Releases the params; the fetch stays until sweep() finds it not needed."""
        unit.depth -= 1
        if unit.depth == 0:
            self._detach(unit)

    def keep(self, unit):
        """Attaches the unit's params until sweep() finds it not needed."""
        self.fetch(unit)
        if not unit.kept:
            unit.kept = True
            self._attach(unit)

    def _attach(self, unit):
        for entry in unit.entries:
            entry.attach()
            if entry.numel:
                self._by_address[entry.address] = entry

    def _detach(self, unit):
        for entry in unit.entries:
            address = entry.address
            if entry.detach() and not (self._written or self._undoes_writes):
                self._written = f'param "{entry.name}" of unit "{unit.name}" was written while it was fetched'
            if not entry.attached:
                self._by_address.pop(address, None)

    def entry_at(self, tensor):
        """The attached entry in whose memory a tensor lies, or None."""
        if tensor.layout is not torch.strided:
            return None
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def fetch(self, unit):
        """Makes the unit's memory valid until sweep() finds it not needed."""
        if unit.fetched:
            return
        self.sweep()
        self.check_unwritten("fetch")
        self._called = unit
        self._engine_fetch(unit.core.number, self.stream())
        unit.look()
        unit.fetched = True
        self._fetched[unit] = None
        self._called = None

    def sweep(self):
        """Gives back what is not needed any more."""
        self.is_torn = True
        for unit in list(self._fetched):
            if unit.is_used():
                continue
            unit.waiting.clear()
            unit.recomputed = None
            if unit.kept:
                unit.kept = False
                self._detach(unit)
            if unit.reader():
                continue
            self._called = unit
            del self._fetched[unit]
            unit.fetched = False
            self._engine_release(unit.core.number, self.stream())
            self._called = None
        self.is_torn = False

    def end_backward(self):
        """Every backward is over, even if its graph was retained."""
        for unit in self._fetched:
            unit.waiting.clear()
        self.sweep()

    def unwind(self):
        """Nothing computes any more, and wherever it was interrupted: only what is gathered stays."""
        for unit in self.units:
            unit.depth, unit.kept, unit.recomputed = 0, False, None
            unit.waiting.clear()
            for entry in unit.owned():
                entry.unwind()
        self._by_address.clear()
        unit, self._called = self._called, None
        if unit:
            unit.fetched = False
            self._fetched.pop(unit, None)
        for used in itertools.chain(*self.gathered):
            self.begin_use(used)
        self.sweep()
        if unit and not unit.fetched and unit.look_whether_fetched():
            unit.fetched = True
            self._fetched[unit] = None
            self.sweep()

    def forget(self):
        """The engine closes: its memory goes, so params must not point into it."""
        for unit in self.units:
            if unit.depth or unit.kept:
                unit.depth, unit.kept = 0, False
                self._detach(unit)
            for entry in unit.owned():
                entry.forget()
        self._fetched.clear()

    def check_unwritten(self, what):
        """Weights that were written are not what the optimizer has, nor what other ranks have: nothing may follow."""
        if self._written:
            raise FailedPrecondition(
                f"{what}: {self._written}, where it is read-only; engine.write(param, value, root=rank) sets one on "
                f"all ranks. What its values are now is not known: load a checkpoint, or close the engine and begin "
                f"anew")

    def note_load(self):
        """All weights are the checkpoint's."""
        self._written = None

    def check_given_back(self, what):
        """Before anything that changes or rereads weights: no tensor may still see the old ones."""
        if any(unit.depth for unit in self.units):
            names = ", ".join(f'"{unit.name}"' for unit in self.units if unit.depth)
            raise FailedPrecondition(f"{what}: called while the forward of unit {names} is running")
        self.sweep()
        if self._fetched:
            gc.collect()
            self.sweep()
        for unit in self._fetched:
            entry = unit.reader()
            if entry:
                raise FailedPrecondition(
                    f'{what}: a tensor still shares the memory of param "{entry.name}" of unit "{unit.name}" (a view '
                    f"or a detached alias kept after its module's forward): keep a clone() instead")
