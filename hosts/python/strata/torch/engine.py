"""Engine: what the training loop talks to. prepare() makes one; the model is used as before.

    for batch in batches:
        loss = model(batch)
        engine.backward(loss)
        engine.step()

Collective calls are made by all ranks in the same order: forward and backward of the model at stage 3, and everything
here that says so.
"""
import contextlib

import torch

from ..errors import FailedPrecondition, InvalidArgument, NotFound
from . import memory, state
from .compiled import outside_graphs
from .grad_norm import GradNorm
from .gradients import Gradients
from .groups import of_a_step
from .passes import Passes
from .weights import Weights


def _refuse_load_state_dict(*_):
    """Once, where torch would say it of every param."""
    raise FailedPrecondition("model.load_state_dict: params are the engine's since prepare: "
                             "engine.load_state_dict(values) sets them on all ranks")


class Engine:
    """Made by prepare(). `core` is the strata.Engine below: counters(), info(), plan(), setting(), meta, wait().

    `param_groups` are what the steps to come take: lr, betas, eps and weight_decay of group 0, of the params in no
    group, and of those that prepare was given. `backwards` counts the micro-batches since the last step.
    """

    dropped_by = "engine.zero_grad()"  # what messages call it

    def __init__(self, model, core, units, entries, groups, device):
        self.model, self.core = model, core
        self.rank, self.world, self.device = core.rank, core.world, device
        self.param_groups = groups
        self._entries = {id(entry.param): entry for entry in entries}
        self._places = [(module, key, param) for module in model.modules()
                        for key, param in module.named_parameters(recurse=False) if id(param) in self._entries]
        for module in model.modules():
            if next(module.parameters(), None) is not None:
                module._register_load_state_dict_pre_hook(_refuse_load_state_dict)
        self._weights = Weights(core, units, device)
        self._passes = Passes(model, self._weights)
        self._gradients = Gradients(core, self._weights, self._passes)
        self._max_norm = None  # of the next step
        self.backwards = 0
        self._has_begun = False  # a backward, since the last step
        self._broken = None      # the error that the last backward ended in, with gradients given
        self._micro_batches = int(core.setting("gradient_accumulation_steps"))
        self._prints = int(core.setting("steps_per_print")) if self.rank == 0 else 0
        self._steps_before, self._loss = 0, None  # steps of the run that was loaded; sum over micro-batches

    def __enter__(self):
        return self

    def __exit__(self, _kind, error, _traceback):
        self.close(error)

    def close(self, error=None):
        """Joins a running update and frees everything; the model's params stay released. Twice is fine. `error`: an
        Exception because of which this rank goes no further, for the other ranks to hear (strata.Engine.close)."""
        try:
            if not self.core.closed:
                self._passes.settle()
        finally:
            self._weights.forget()
            self.core.close(error)

    # ---- the loop ----

    def forward(self):
        """`with engine.forward():` around parts of the model that are called one by one instead of the model."""
        return self._passes.forward()

    @outside_graphs
    def backward(self, loss, retain_graph=False, create_graph=False):
        """loss.backward(), and the end of one micro-batch. Collective.

        `loss` is the mean over this rank's micro-batch: the engine divides by ranks and micro-batches. After
        gradient_accumulation_steps of them, step(). After a backward that raised, zero_grad().
        """
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise InvalidArgument("engine.backward needs a loss with a gradient: a tensor the model computed, not "
                                  "under torch.no_grad")
        if create_graph:
            raise InvalidArgument("engine.backward(create_graph=True): a backward of the backward is not offered: "
                                  "gradients go to the engine, without their graph")
        self._passes.refuse_inside("engine.backward")
        self.check_whole("engine.backward")
        if self.backwards == self._micro_batches:
            raise FailedPrecondition(f"engine.backward: the {self._micro_batches} micro-batches "
                                     f"(gradient_accumulation_steps) of this step are in: call engine.step()")
        self._has_begun = True
        try:
            self._run_backward(loss, retain_graph)
        except BaseException as error:  # an interrupt, too
            if self._gradients.were_taken:
                self._broken = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._gradients.drop()
            raise
        self.backwards += 1
        if self._prints:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def _run_backward(self, loss, retain_graph):
        with self._passes.backward(retain_graph):
            hook = self._gradients.begin(loss)
            try:
                loss.backward(retain_graph=retain_graph)
            finally:
                hook.remove()
        self._gradients.end()
        self.core.end_backward()

    def skip_micro_batches(self):
        """Ends those that the step is short of without gradients: they count as zeros. Collective."""
        self.check_whole("engine.skip_micro_batches")
        while self.backwards < self._micro_batches:
            self.core.end_backward()
            self.backwards += 1
        self._has_begun = True

    @property
    def is_broken(self):
        """Whether the last backward raised with a part of its gradients given: zero_grad() goes on from there."""
        return self._broken is not None

    def check_whole(self, what):
        """Refuses `what` after a write into fetched weights, and while gradients of a backward that raised are a part
        of what a step would take."""
        self._passes.settle()
        self._weights.check_unwritten(what)
        self._check_gradients(what)

    def _check_gradients(self, what):
        if self._broken:
            on = "" if self.world == 1 else f" on all {self.world} ranks"
            raise FailedPrecondition(
                f"{what}: a backward raised ({self._broken}) and a part of its gradients is with the engine: call "
                f"{self.dropped_by}{on}, which drops the gradients since the last step, and begin the step anew")

    @outside_graphs
    def step(self, lr=None, tokens=None):
        """One optimizer step; returns while the update runs. Collective.

        The settings are those of param_groups; `lr`, if given, is that of group 0 and of groups without one.
        tokens, of this rank in this step and given at every step, lets the line that rank 0 logs every steps_per_print
        steps tell speed; the loss in it is rank 0's, read from the device for that line only.
        """
        self.check_whole("engine.step")
        if self.backwards < self._micro_batches and not self.core.closed:
            raise FailedPrecondition(
                f"engine.step: {self.backwards} of {self._micro_batches} micro-batches (gradient_accumulation_steps) "
                f"are in: call engine.backward(loss) for each; where data ends before, engine.skip_micro_batches() on "
                f"all ranks counts those that are missing as zeros")
        self._weights.check_given_back("engine.step")
        self._check_places()
        self.core.step(self.param_groups[0]["lr"] if lr is None else lr, max_norm=self._max_norm,
                       groups=of_a_step(self.param_groups), tokens=tokens, **self._line())
        self._begin_step()
        self._passes.end_step()

    def _check_places(self):
        for module, key, param in self._places:
            if module._parameters.get(key) is not param:
                names = (name for name, other in self.model.named_modules() if other is module)
                name = ".".join(filter(None, (next(names, None), key)))
                raise FailedPrecondition(
                    f'engine.step: param "{name}" is another object than when the model was prepared: this one is not '
                    f"trained. Put the old one back; values are set by engine.write(param, value)")

    def _begin_step(self):
        self.backwards, self._has_begun, self._broken = 0, False, None
        self._max_norm = self._loss = None

    def _line(self):
        """What this step's line in the log will say of PyTorch, if it has one."""
        if not self._prints or (self._steps_before + self._passes.steps + 1) % self._prints:
            return {}
        line = {"loss": None if self._loss is None else float(self._loss) / self._micro_batches}
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            line["note"] = f"torch {peak / 2**30:.2f} GiB allocated at the most"
        return line

    def zero_grad(self, set_to_none=True):
        """Drops the gradients of all backwards since the last step, of one that raised, too; the step begins anew.

        Where there was a backward since the last step it is collective, and costs the reductions that a step has.
        Otherwise it does nothing: on a rank that had none, when others drop theirs, call core.drop_gradients().
        """
        self._passes.refuse_inside("engine.zero_grad")
        if self._has_begun:
            self.core.drop_gradients()
            self._begin_step()

    def clip_grad_norm_(self, max_norm):
        """Lets the next step, only it, clip the gradient norm to max_norm, the same on all ranks; returns the norm.

        The norm is agreed on inside step, where it costs no pass of its own: read it, as a number, after step().
        math.inf does not clip; without this call a step clips to the manifest's gradient_clipping.
        """
        if not float(max_norm) > 0:
            raise InvalidArgument(f"engine.clip_grad_norm_({max_norm}): a norm above 0 is right, math.inf to not clip")
        self._max_norm = float(max_norm)
        return GradNorm(self)

    # ---- whole tensors ----

    @contextlib.contextmanager
    def gathered(self, *modules):
        """`with engine.gathered(module):` its params, and those below it, are whole and readable. Collective.

        Without arguments: the whole model's. Read only: changes go through write().
        """
        wanted = {id(p) for module in modules or (self.model,) for p in module.parameters()}
        units = [unit for unit in self._weights.units if any(id(entry.param) in wanted for entry in unit.owned())]
        self._passes.settle()
        begun, was_interrupted = [], False
        try:
            self._weights.gathered.append(begun)
            for unit in units:
                self._weights.begin_use(unit)
                begun.append(unit)
            yield
        except BaseException as error:
            was_interrupted = not isinstance(error, Exception)
            raise
        finally:
            self._weights.is_torn = True
            self._weights.gathered = [other for other in self._weights.gathered if other is not begun]
            for unit in begun:
                self._weights.end_use(unit)
            self._weights.sweep()
            self._weights.is_torn = was_interrupted
        self._weights.check_unwritten("engine.gathered")

    def read(self, param, array="weight"):
        """A new CPU tensor with a whole array of a param (the object, or its name), on every rank. Collective.

        "weight" in the param's dtype; "master", "exp_avg", "exp_avg_sq" in float32. NotFound when it has no such array.
        """
        self._passes.settle()
        self._weights.check_unwritten("engine.read")
        entry = self._entry(param)
        out = torch.empty(entry.shape, dtype=entry.dtype if array == "weight" else torch.float32)
        described = memory.Description(entry.shape, f'param "{entry.name}"')
        out = described.set(out)
        self.core._call("strata_read_param", entry.core.number, array.encode(), described.pointer)
        return out

    def grad(self, param):
        """The reduced gradient of a param, float32: the mean over ranks and micro-batches so far, before clipping.

        Between backward and the next backward. Collective. None for a frozen param.
        """
        self.check_whole("engine.grad")
        entry = self._entry(param)
        if not entry.trainable:
            return None
        return self.read(param, "grad") / (self.core.ranks.data_parallel_size * self._micro_batches)

    def write(self, param, value, root=0):
        """Sets a param, on all ranks, to rank `root`'s tensor; other ranks may pass None. Collective, between steps.

        A float32 value keeps its full precision in the optimizer's master; moments stay.
        """
        self.check_whole("engine.write")
        self._weights.check_given_back("engine.write")
        state.write(self._entry(param), value, root)

    def state_dict(self, wanted=True):
        """What model.state_dict() would be, as new CPU tensors: params gathered, buffers copied.

        Collective: all ranks call it; one that passes wanted=False gets {} and holds one param at a time. Tied params
        share a tensor. For large models: save() and core.export_weights() gather nothing.
        """
        return state.state_dict(self, wanted)

    def load_state_dict(self, values, strict=True):
        """model.load_state_dict: params take rank 0's values, buffers this rank's. Collective, between steps.

        Returns (missing_keys, unexpected_keys); with strict they are an error before anything is changed.
        """
        self.check_whole("engine.load_state_dict")
        self._weights.check_given_back("engine.load_state_dict")
        return state.load_state_dict(self, values, strict)

    def save(self, root, tag):
        """Saves params, optimizer state and rank 0's persistent buffers to <root>/<tag>, atomically. Collective.

        A checkpoint of that tag is replaced; whatever happens, the old or the new one is whole.
        """
        self.check_whole("engine.save")
        self._weights.check_given_back("engine.save")
        state.save(self, root, tag)

    def load(self, root, tag=None):
        """Loads <root>/<tag> (None: the latest), saved at any world size and stage, and the settings of param_groups as
        they were then. Collective. NotFound where there is none; without a tag only where root has no checkpoint at
        all: otherwise FailedPrecondition. What the checkpoint has beyond this model is a warning of the log."""
        self._check_gradients("engine.load")
        self._weights.check_given_back("engine.load")
        state.load(self, root, tag)
        self._weights.note_load()
        self._steps_before = self.core.info().steps - self._passes.steps

    def to(self, *_, **__):
        """Refused: params lie where the manifest's device plugin puts them."""
        raise FailedPrecondition("engine.to: params lie where the manifest's plugins.device puts them and have the "
                                 "dtype they were prepared with; move buffers and inputs themselves")

    def _entry(self, param):
        if isinstance(param, str):
            found = dict(self.model.named_parameters(remove_duplicate=False)).get(param)
            if found is None:
                raise NotFound(f'the model has no param "{param}"')
            param = found
        entry = self._entries.get(id(param))
        if entry is None:
            raise NotFound("the tensor is no param of the prepared model")
        return entry
