"""torch.compile around, inside and instead of a prepared model's modules.

What fetches and releases runs between compiled graphs, never in them: everything that torch calls back is marked
`outside_graphs`. So a graph ends where a unit begins or ends, the weights it reads are ordinary inputs of it, and what
it saves for backward goes through the saved-tensor hooks like everything else.
"""
import sys

import torch
from torch._guards import TracingContext

from ..errors import FailedPrecondition

outside_graphs = torch.compiler.disable  # with all that it calls


def is_tracing():
    """Whether the compiler runs the model on tensors without memory: torch 2.4's does so with saved-tensor hooks on."""
    return TracingContext.try_get() is not None


def refuse_cuda_graphs(model):
    """FailedPrecondition when code that torch.compile made CUDA graphs of is in the model or calls it now."""
    for module in model.modules():
        own = module.__dict__
        if module._compiled_call_impl is None and "forward" not in own and "get_compiler_config" not in own:
            continue
        for compiled in (module._compiled_call_impl, own.get("forward"), module):
            if _has_cuda_graphs(getattr(compiled, "get_compiler_config", None)):
                name = next(name for name, found in model.named_modules() if found is module)
                raise _refusal(f'module "{name}"' if name else "the model")
    frame = sys._getframe(1)
    while frame is not None:  # a torch.compile around the model is seen only by who calls us
        if frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:
            compiler = getattr(frame.f_locals.get("self"), "compiler_config", None)
            if _has_cuda_graphs(lambda config=compiler: config):
                raise _refusal("a function around the model")
        frame = frame.f_back


def _has_cuda_graphs(get_compiler_config):
    config = get_compiler_config() if callable(get_compiler_config) else None
    return bool(config) and bool(config.get("triton.cudagraphs"))


def _refusal(what):
    return FailedPrecondition(
        f'{what} is compiled with CUDA graphs (torch.compile with mode "reduce-overhead" or "max-autotune"): a graph '
        f"replays the addresses it was captured with, and where a unit's weights are fetched to may change; use the "
        f'default mode, or "max-autotune-no-cudagraphs"')
