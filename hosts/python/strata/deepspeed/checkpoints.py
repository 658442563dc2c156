"""What DeepSpeed's checkpoints carry beside weights and optimizer state, as values that travel with an engine's."""
import base64
import io
import json
import os
import pathlib
import re

import torch

from ..errors import InvalidArgument

CLIENT_STATE, SAMPLES, SCHEDULE = "deepspeed.client_state", "deepspeed.global_samples", "deepspeed.lr_scheduler"
_OWN_FILE = re.compile(r"\.?(index|rank\d+|weights)\.h5")
_ADVICE = {"Tensor": "tensor.tolist() or .item()", "Parameter": "tensor.tolist() or .item()",
           "ndarray": "array.tolist()", "tuple": "a list", "set": "a list", "Namespace": "vars(args)"}


def text_of(client_state):
    """JSON that comes back equal. InvalidArgument names what would not."""
    if client_state is not None and type(client_state) is not dict:
        raise InvalidArgument(f"save_checkpoint: client_state is a {type(client_state).__name__}, a dict is needed")
    _check(client_state or {}, "client_state")
    return json.dumps(client_state or {})


def _check(value, at):
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise InvalidArgument(f"save_checkpoint: {at} has the key {key!r}, a {type(key).__name__}: keys are "
                                      f"texts in JSON; use {str(key)!r}")
            _check(inner, f"{at}[{key!r}]")
    elif type(value) is list:
        for place, inner in enumerate(value):
            _check(inner, f"{at}[{place}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise InvalidArgument(f"save_checkpoint: {at} is a {type(value).__name__}, which does not come back equal "
                              f"from JSON: use {_advice(value)}")


def _advice(value):
    plain = next((kind for kind in (int, float, str, list, dict) if isinstance(value, kind)), None)
    if type(value).__name__ in _ADVICE:
        return _ADVICE[type(value).__name__]
    if plain:
        return f"{plain.__name__}(value)"
    return "value.item()" if hasattr(value, "item") else (
        "numbers, texts, lists and dicts, or a file of your own beside the checkpoint")


def schedule_text(scheduler, optimizer):
    """The state of a scheduler and the settings it has made so far; "" without one."""
    if scheduler is None:
        return ""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    out = io.BytesIO()
    try:
        torch.save({"scheduler": scheduler.state_dict(), "groups": groups}, out)
        torch.load(io.BytesIO(out.getvalue()), weights_only=True)
    except Exception as error:
        raise InvalidArgument(f"save_checkpoint: the state_dict of the lr_scheduler {type(scheduler).__name__} has "
                              f"more than plain values: {str(error).splitlines()[0]}") from error
    return base64.b64encode(out.getvalue()).decode()


def set_schedule(text, scheduler, optimizer):
    saved = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise InvalidArgument(f"load_checkpoint: the lr_scheduler was saved with {len(saved['groups'])} param groups, "
                              f"{len(optimizer.param_groups)} are here; load_lr_scheduler_states=False leaves it")
    scheduler.load_state_dict(saved["scheduler"])
    for group, settings in zip(optimizer.param_groups, saved["groups"]):
        group.update(settings)


def is_empty(root):
    """No checkpoint is in `root`, and no part of one: nothing that names one, and no directory with a file of one."""
    root = pathlib.Path(root)
    if any((root / name).exists() for name in ("latest", ".latest.next")):
        return False
    deep = ("*/*.h5", "*/*/*.h5", "*/*/*/*.h5")  # under model parallelism a checkpoint has folders
    return not any(_OWN_FILE.fullmatch(path.name) for files in deep for path in root.glob(files))


def directory(root, tag):
    """Where the checkpoint lies that was loaded: <root>/<tag>, None the latest."""
    if tag is None:
        names = (pathlib.Path(root, name) for name in (".latest.next", "latest"))  # as a load looks for it
        tags = (name.read_text().split("\n")[0] for name in names if name.is_file())
        tag = next(tag for tag in tags if os.path.isdir(os.path.join(root, tag)))
    return os.path.join(root, tag)
