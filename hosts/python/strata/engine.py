"""Engine: one rank's engine, from manifest to close. Fetch: a unit's weights while they are readable.

Threads: one thread at a time per engine, any thread. Python's lock is released while a call runs, so ranks can be
threads (ranks.py). Ctrl-C takes effect when the running call returns; every call has the manifest's deadline.
Calls marked collective are made by all ranks in the same order.
"""
import atexit
import collections
import ctypes
import functools
import logging
import os
import sys
import weakref

from . import _abi
from ._library import library
from .errors import FailedPrecondition, InvalidArgument, NotFound, error_of
from .model import Group, Unit, c_text, given, group_args

TIERS = ("device", "cpu", "nvme")
DEVICE_TYPES = {_abi.CPU: "cpu", _abi.CUDA: "cuda"}
PlanItem = collections.namedtuple("PlanItem", "what tier bytes")
_SKIP = ("struct_size", "abi_minor", "reserved")
_open = weakref.WeakSet()  # engines, some closed


def _tuple_class(name, struct, doc):
    cls = collections.namedtuple(name, [field for field, _ in struct._fields_ if field not in _SKIP])
    cls.__doc__ = doc
    return cls


StepInfo = _tuple_class("StepInfo", _abi.strata_step_info,
                        "strata_step_info of strata.h; grad_norm, clip_factor and was_applied are of the last step.")
Counters = _tuple_class("Counters", _abi.strata_counters,
                        "strata_counters of strata.h: exact bytes and calls; tier_* are (device, cpu, nvme).")


Device = _tuple_class("Device", _abi.strata_device_info,
                      "strata_device_info of strata.h; type is \"cpu\", \"cuda\" or a number.")


Ranks = _tuple_class("Ranks", _abi.strata_ranks,
                     "strata_ranks of strata.h: where a rank is in the world, and in the groups of model parallelism.")


def _to_tuple(cls, struct):
    values = (getattr(struct, field) for field in cls._fields)
    return cls(*(tuple(v) if isinstance(v, ctypes.Array) else v for v in values))


class Engine:
    """Opens an engine; use it as a context manager, or call close.

    manifest     path of the TOML file; or
    text         its text (relative paths in it then resolve against the working directory)
    overrides    ["zero_optimization.stage=2", ...]: applied after the file, with the same checks
    plugin_dir   searched last for plugins; None: plugins/ beside libstrata.so
    log          called as log(level, domain, text) with levels of the logging module, from any thread; it must not call
                 the engine. None: lines on stderr
    thread_rank  this rank when ranks are threads (see run_threads); None: the launcher's environment says
                 (STRATA_RANK, STRATA_WORLD_SIZE and STRATA_JOB, torchrun's, Open MPI's or Slurm's), else a single rank

    Collective. InvalidArgument names file, line, column and the nearest key.
    """

    def __init__(self, manifest=None, *, text=None, overrides=(), plugin_dir=None, log=None, thread_rank=None,
                 gradient_memory=None):
        self._lib = library()
        if isinstance(overrides, str):
            raise InvalidArgument(f"overrides must be a list of \"key=value\", not the text {overrides!r}")
        lines = [c_text(line, "an override") for line in overrides]
        args = _abi.strata_engine_args(
            manifest=None if manifest is None else os.fsencode(manifest),
            manifest_text=None if text is None else c_text(text, "the manifest"),
            overrides=(ctypes.c_char_p * len(lines))(*lines), override_count=len(lines),
            plugin_dir=None if plugin_dir is None else os.fsencode(plugin_dir))
        callback = _log_callback(log) if log else None
        if callback:
            args.log = callback
        if thread_rank is not None:
            args.threads, args.rank, args.world = 1, thread_rank.rank, thread_rank.world
            args.job = c_text(thread_rank.job, "the job's name")
        if gradient_memory:
            args.gradient_memory = ctypes.pointer(gradient_memory.struct)
        handle = _abi.Engine()
        self._raise_on(self._lib.strata_open(ctypes.byref(args), ctypes.byref(handle)))
        self._handle = handle
        self._pid = os.getpid()
        # Runs at close, when the engine is forgotten, or at exit; it keeps the log callback alive until then.
        self._close = weakref.finalize(self, _close, self._lib, handle, self._pid, (callback, gradient_memory))
        _open.add(self)
        _watch_the_end()
        self.rank = self._lib.strata_rank(handle)
        self.world = self._lib.strata_world(handle)
        ranks = _abi.strata_ranks()
        self._raise_on(self._lib.strata_get_ranks(handle, ctypes.byref(ranks)))
        self.ranks = _to_tuple(Ranks, ranks)
        self.meta = Meta(weakref.ref(self))
        self._groups = 1
        self._keeps_gradients = self.setting("zero_optimization.contiguous_gradients") == "false"
        self._gradients = []

    def __enter__(self):
        return self

    def __exit__(self, _kind, error, _traceback):
        self.close(error)

    def close(self, error=None):
        """Joins a running update and frees everything; views end. Does not wait for other ranks. Twice is fine.

        `error`: an Exception because of which this rank goes no further: the other ranks' next calls raise Cancelled
        with its text, and not that this rank closed. One that leaves a with-block, or ends the program, is told so."""
        if isinstance(error, Exception) and not self.closed and os.getpid() == self._pid:
            text = f"{type(error).__name__}: {error}".encode(errors="replace")
            self._lib.strata_fail(self._handle, text.replace(b"\0", b""))
        self._close()
        self._gradients.clear()

    @property
    def closed(self):
        return not self._close.alive

    # ---- registering ----

    def group(self, lr=None, betas=None, eps=None, weight_decay=None):
        """A param group; None takes the manifest's value. Before commit."""
        group = Group(self, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._groups += 1
        return group

    def unit(self, name):
        """A unit: params that are fetched together. Before commit. Params are registered through it."""
        return Unit(self, name)

    def commit(self):
        """Ends registration: agrees with the other ranks, plans every byte, allocates. Collective.

        Weights are zero until written. ResourceExhausted with the numbers and the key to change when it cannot fit.
        """
        self._call("strata_commit")

    # ---- the step ----

    def fetch(self, unit):
        """Makes a unit's weights whole and readable: `with engine.fetch(unit): w = param.view()`. Nests.

        Collective at stage 3, and after an update at stages 1 and 2. ResourceExhausted: max_live_parameters.
        """
        if unit.engine is not self:
            raise InvalidArgument(f'unit "{unit.name}" belongs to another engine')
        return Fetch(self, unit)

    def end_backward(self):
        """Ends one micro-batch on this rank: units not yet done are reduced. Collective."""
        self._call("strata_end_backward")
        self._gradients.clear()

    def drop_gradients(self):
        """Throws away every gradient given since the last step: the next one is of the first micro-batch again.

        For a backward that ended in an error, on one rank or on all. Collective.
        """
        self._call("strata_drop_gradients")
        self._gradients.clear()

    def step(self, lr=None, group_lr=None, max_norm=None, *, groups=None, loss=None, tokens=None, note=None):
        """One optimizer step; returns while the update runs. Collective.

        lr is that of group 0 and of groups without one of their own, None the manifest's; group_lr is {Group: lr}.
        groups, {Group: {"lr": ..., "betas": ..., "eps": ..., "weight_decay": ...}}, are settings of this step alone;
        the key None is group 0, what is missing or None is the group's own, and an lr in it goes before group_lr.
        max_norm is what this step clips the norm to, the same on all ranks: None the manifest's gradient_clipping,
        math.inf no clipping. loss and tokens, of this rank in this step, and a note of the host's own are for the line
        that rank 0 logs every steps_per_print steps; tokens, which give speed, at every step.
        Needs gradient_accumulation_steps ended micro-batches, else FailedPrecondition.
        """
        args = _abi.strata_step_args(lr=given(lr, "step: lr"), max_norm=given(max_norm, "step: max_norm"),
                                     loss=loss or 0, tokens=tokens or 0,
                                     note=None if note is None else c_text(note, "the note"), group_count=self._groups)
        if group_lr:
            rates = self._by_group(group_lr, given, "the learning rate")
            args.group_lr = (ctypes.c_double * self._groups)(*rates)
        if groups:
            settings = self._by_group(groups, lambda value, what: group_args(value or {}, what), "settings")
            args.groups = (_abi.strata_group_args * self._groups)(*settings)
        self._call("strata_step", ctypes.byref(args))

    def _by_group(self, values, read, what):
        """[read(value, its name in messages)] of all groups, from {Group: value}; None is group 0, and a value."""
        of = {}
        for group, value in values.items():
            if group is not None and group.engine is not self:
                raise InvalidArgument(f"step: {what} of group {group.number} of another engine")
            of[0 if group is None else group.number] = value
        return [read(of.get(number), f"step: {what} of group {number}") for number in range(self._groups)]

    def wait(self):
        """Waits until no update is running; raises its error if it had one."""
        self._call("strata_wait")

    # ---- what is going on ----

    def info(self):
        """StepInfo; waits for the last step's norm only."""
        struct = _abi.strata_step_info()
        self._call("strata_get_step_info", ctypes.byref(struct))
        return _to_tuple(StepInfo, struct)

    def counters(self, last_step=False):
        """Counters since the start, or of the last step."""
        struct = _abi.strata_counters()
        self._call("strata_get_counters", _abi.COUNT_LAST_STEP if last_step else _abi.COUNT_TOTAL, ctypes.byref(struct))
        return _to_tuple(Counters, struct)

    def plan(self):
        """[PlanItem(what, tier, bytes)] of this rank, after commit."""
        count = ctypes.c_uint64()
        self._call("strata_get_plan", None, 0, ctypes.byref(count))
        items = (_abi.strata_plan_item * count.value)()
        for item in items:
            item.struct_size = ctypes.sizeof(item)
        self._call("strata_get_plan", items, count.value, ctypes.byref(count))
        return [PlanItem(item.what.decode(), TIERS[item.tier], item.bytes) for item in items]

    @property
    def device(self):
        """The Device the weights are on, with what is free now."""
        struct = _abi.strata_device_info()
        self._call("strata_get_device", ctypes.byref(struct))
        return _to_tuple(Device, struct)._replace(type=DEVICE_TYPES.get(struct.type, struct.type))

    def setting(self, key):
        """A setting as text, by manifest key ("zero_optimization.stage"), defaults and derived values included."""
        return self._text("strata_get_setting", key)

    # ---- checkpoints ----

    def save(self, root, tag):
        """Saves to <root>/<tag>, atomically; `latest` names it afterwards. Between steps only. Collective.

        A checkpoint of that tag is replaced; whatever happens, the old or the new one is whole. AlreadyExists on rank 0
        when what is there is no checkpoint, or has other files in it.
        """
        self._call("strata_save", os.fsencode(root), c_text(tag, "the tag"))

    def load(self, root, tag=None):
        """Loads <root>/<tag> (None: the latest), saved at any world size and stage, after commit. Collective. NotFound
        where there is none; without a tag only where root has no checkpoint at all: otherwise FailedPrecondition."""
        self._call("strata_load", os.fsencode(root), None if tag is None else c_text(tag, "the tag"))

    def export_weights(self, path):
        """Writes every param's weight into one file. Collective. A file that is there is AlreadyExists on rank 0."""
        self._call("strata_export_weights", os.fsencode(path))

    # ---- calls ----

    def _call(self, function, *args):
        if self.closed:
            raise FailedPrecondition(f"{function}: the engine is closed")
        self._raise_on(getattr(self._lib, function)(self._handle, *args))

    def _bound(self, function, *args):
        """_call with its function and first arguments looked up once, for calls that a step makes hundreds of."""
        call = functools.partial(getattr(self._lib, function), self._handle, *args)

        def bound(*others):
            if not self._close.alive:
                raise FailedPrecondition(f"{function}: the engine is closed")
            status = call(*others)
            if status:
                self._raise_on(status)

        return bound

    def _raise_on(self, status):
        if status != _abi.STATUS["OK"]:
            raise error_of(status, self._lib.strata_last_error().decode(errors="replace"))

    def _text(self, function, key):
        value = ctypes.c_char_p()
        self._call(function, c_text(key, "the key"), ctypes.byref(value))
        return value.value.decode()

    def _keep_gradient(self, array):
        if self._keeps_gradients:
            self._gradients.append(array)


@functools.cache
def _watch_the_end():
    """After the first finalizer was made, so that this runs before the finalizers close what is open."""
    atexit.register(_tell_of_the_end)


def _tell_of_the_end():
    error = getattr(sys, "last_value", None)  # of the exception that ends the program
    for engine in list(_open) if isinstance(error, Exception) else ():
        engine.close(error)


def _close(lib, handle, pid, callback):
    if os.getpid() == pid:  # a forked child has a copy of the engine, but none of its threads
        lib.strata_close(handle)


def _log_callback(log):
    levels = {_abi.LOG_DEBUG: logging.DEBUG, _abi.LOG_INFO: logging.INFO, _abi.LOG_WARN: logging.WARNING}
    blame = {_abi.LOG_HOST_MISBEHAVING: "(host misbehaving) ", _abi.LOG_PLUGIN_MISBEHAVING: "(plugin misbehaving) "}

    def call(_, level, domain, text):
        log(levels.get(level, logging.ERROR), domain.decode(errors="replace"),
            blame.get(level, "") + text.decode(errors="replace"))

    return _abi.LogFn(call)


class Fetch:
    """A fetched unit. Its end as a context manager, or release(), gives the weights back; views of them end there."""

    def __init__(self, engine, unit):
        engine._call("strata_fetch", unit.number, None)
        self.unit, self._engine, self._released = unit, engine, False
        for home in unit._brings:
            if home._fetched == 0:
                home._fetch_number += 1
            home._fetched += 1

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if not self._engine.closed:
            self.release()

    def release(self):
        """Once per fetch."""
        if self._released:
            raise FailedPrecondition(f'unit "{self.unit.name}": this fetch was released already')
        self._released = True
        for home in self.unit._brings:
            home._fetched -= 1
        self._engine._call("strata_release", self.unit.number, None)


class Meta:
    """engine.meta: texts of the host's own that travel with checkpoints. load replaces them."""

    def __init__(self, engine):
        self._engine = engine

    def __setitem__(self, key, value):
        self._engine()._call("strata_set_meta", c_text(key, "the key"), c_text(value, f"meta value {key!r}"))

    def __getitem__(self, key):
        try:
            return self._engine()._text("strata_get_meta", key)
        except NotFound:
            raise KeyError(key) from None

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __contains__(self, key):
        try:
            self[key]
        except KeyError:
            return False
        return True
