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
from .gradients import Gradients
from .passes import Passes
from .weights import Weights


class Engine:
    """Made by prepare(). `core` is the strata.Engine below: counters(), info(), plan(), setting(), meta, wait()."""

    def __init__(self, model, core, units, entries, groups, device):
        self.model, self.core = model, core
        self.rank, self.world, self.device = core.rank, core.world, device
        self.param_groups = groups
        self._entries = {id(entry.param): entry for entry in entries}
        self._weights = Weights(core, units, device)
        self._passes = Passes(model, self._weights)
        self._gradients = Gradients(core, self._weights, self._passes)
        self._max_norm = None  # of the next step
        self._micro_batches = int(core.setting("gradient_accumulation_steps"))
        self._prints = int(core.setting("steps_per_print")) if self.rank == 0 else 0
        self._steps_before, self._loss = 0, None  # steps of the run that was loaded; sum over micro-batches

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self):
        """Joins a running update and frees everything; the model's params stay released. Twice is fine."""
        self._weights.forget()
        self.core.close()

    # ---- the loop ----

    def forward(self):
        """`with engine.forward():` around parts of the model that are called one by one instead of the model."""
        return self._passes.forward()

    @outside_graphs
    def backward(self, loss, retain_graph=False):
        """loss.backward(), and the end of one micro-batch. Collective.

        `loss` is the mean over this rank's micro-batch: the engine divides by ranks and micro-batches. After
        gradient_accumulation_steps of them, step().
        """
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise InvalidArgument("engine.backward needs a loss with a gradient: a tensor the model computed, not "
                                  "under torch.no_grad")
        with self._passes.backward(retain_graph):
            hook = self._gradients.begin(loss)
            try:
                loss.backward(retain_graph=retain_graph)
            finally:
                hook.remove()
        self._gradients.end()
        self.core.end_backward()
        if self._prints:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    @outside_graphs
    def step(self, lr=None, tokens=None):
        """One optimizer step; returns while the update runs. Collective.

        The learning rates are those of param_groups; `lr`, if given, is that of group 0 and of groups without one.
        tokens, of this rank in this step and given at every step, lets the line that rank 0 logs every steps_per_print
        steps tell speed; the loss in it is rank 0's, read from the device for that line only.
        """
        self._weights.check_given_back("engine.step")
        default, *others = self.param_groups
        rates = {group["group"]: group["lr"] for group in others if group["lr"] is not None}
        max_norm, self._max_norm = self._max_norm, None
        self.core.step(default["lr"] if lr is None else lr, rates, max_norm, tokens=tokens, **self._line())
        self._passes.end_step()

    def _line(self):
        """What this step's line in the log will say of PyTorch, if it has one."""
        total, self._loss = self._loss, None
        if not self._prints or (self._steps_before + self._passes.steps + 1) % self._prints:
            return {}
        line = {"loss": None if total is None else float(total) / self._micro_batches}
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            line["note"] = f"torch {peak / 2**30:.2f} GiB allocated at the most"
        return line

    def zero_grad(self, set_to_none=True):
        """Does nothing: gradients are taken and dropped as they come."""

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
        begun = []
        try:
            for unit in units:
                self._weights.begin_use(unit)
                begun.append(unit)
            yield
        finally:
            for unit in begun:
                self._weights.end_use(unit)
            self._weights.sweep()

    def read(self, param, array="weight"):
        """A new CPU tensor with a whole array of a param (the object, or its name), on every rank. Collective.

        "weight" in the param's dtype; "master", "exp_avg", "exp_avg_sq" in float32. NotFound when it has no such array.
        """
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
        entry = self._entry(param)
        if not entry.trainable:
            return None
        return self.read(param, "grad") / (self.core.ranks.data_parallel_size * self._micro_batches)

    def write(self, param, value, root=0):
        """Sets a param, on all ranks, to rank `root`'s tensor; other ranks may pass None. Collective, between steps.

        A float32 value keeps its full precision in the optimizer's master; moments stay.
        """
        self._weights.check_given_back("engine.write")
        state.write(self._entry(param), value, root)

    def state_dict(self):
        """What model.state_dict() would be, as new CPU tensors on every rank: params gathered, buffers copied.

        Collective. Tied params share a tensor. For large models: save() and core.export_weights() gather nothing.
        """
        return state.state_dict(self)

    def load_state_dict(self, values, strict=True):
        """model.load_state_dict: params take rank 0's values, buffers this rank's. Collective, between steps.

        Returns (missing_keys, unexpected_keys); with strict they are an error before anything is changed.
        """
        self._weights.check_given_back("engine.load_state_dict")
        return state.load_state_dict(self, values, strict)

    def save(self, root, tag):
        """Saves params, optimizer state and rank 0's persistent buffers to <root>/<tag>, atomically. Collective."""
        self._weights.check_given_back("engine.save")
        state.save(self, root, tag)

    def load(self, root, tag=None):
        """Loads <root>/<tag> (None: the latest), saved at any world size and stage. Collective."""
        self._weights.check_given_back("engine.load")
        state.load(self, root, tag)
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


class GradNorm:
    """The norm of a step to come: a number once that step was called."""

    def __init__(self, engine):
        self._engine, self._step = engine, engine._passes.steps

    def __float__(self):
        if self._engine._passes.steps != self._step + 1:
            raise FailedPrecondition("the gradient norm is known between its engine.step() and the next one")
        return self._engine.core.info().grad_norm

    item = __float__
