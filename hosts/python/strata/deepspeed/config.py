"""A DeepSpeed configuration as a manifest: read(config) says for every key what becomes of it.

    honoured        the same setting here, under the same name or one of DeepSpeed's own aliases of it
    mapped          another setting here; `note` says which
    without effect  accepted; `note` says why nothing changes
    refused         Refused is raised, with every such key and its reason: nothing is dropped behind the user's back

keys.py has the rule of every key. Errors name the file, and keys by their path in it. "auto" takes the value that
`auto` has for the path, what Hugging Face derives from the model's hidden size, DeepSpeed's default where it changes
nothing, or is refused. fill() is for programs whose own arguments say the same.
"""
import collections
import contextlib
import copy
import json
import logging
import math
import os
import pathlib
import re

from ..errors import InvalidArgument, StrataError
from . import keys as rules
from .keys import HONOURED, MAPPED, NO_EFFECT, NO_FP16, ZERO

__all__ = ["HONOURED", "MAPPED", "NO_EFFECT", "Configuration", "Key", "Manifest", "Refused", "fill", "hidden_size",
           "in_order", "line", "load", "loads", "log_report", "name_of", "read"]
Key = collections.namedtuple("Key", "path value status note")


class Refused(InvalidArgument):
    """Keys of a configuration (`of`) that cannot be had here; `keys` are those, with reasons as notes."""

    def __init__(self, keys, of):
        self.keys, self.of = keys, of
        by_reason = {}
        for key in keys:
            by_reason.setdefault(key.note, []).append(f"{key.path} = {json.dumps(key.value)}")
        super().__init__(f"{of}: " + "; ".join(f"{', '.join(paths)}: {note}" for note, paths in by_reason.items()))


class Configuration(dict):
    """A configuration that knows which file it is from."""

    path = folder = None  # the file as it was named, and the absolute path of where it lies

    def __init__(self, content=(), path=None):
        super().__init__(content)
        if path:
            self.path, self.folder = str(path), pathlib.Path(path).absolute().parent


def name_of(config):
    path = getattr(config, "path", None)
    return "DeepSpeed configuration" + (f" {path}" if path else "")


class Manifest:
    """`text` of the manifest, and `keys`: a Key for every key of the configuration."""

    def __init__(self, values, keys, paths, of):
        self._values, self._of = values, of
        note = "beside a GPU; on the CPU without effect"
        self.keys = [key._replace(note=note) if self._pins_beside_nvme(key) else key for key in keys]
        self._lines = [(key, paths.get(key, key)) for key in sorted(values)]  # with the configuration's path
        self.text = "".join(f"{key} = {_toml(value)}\n" for key, value in sorted(values.items()))

    @contextlib.contextmanager
    def named(self):
        """What the engine says of a line of `text` names the configuration and its key."""
        def name(at):
            key, path = self._lines[int(at[1]) - 1]
            return f"{self._of}: `{path}`" + ("" if at[2] == f"`{key}`" else f": {at[2]}")

        def origin(at):
            key, path = self._lines[int(at[1]) - 1]
            return "" if path == key else f" (`{path}`)"

        try:
            yield
        except StrataError as error:
            if "manifest text:" not in str(error):
                raise
            text = re.sub(r"manifest text:(\d+):\d+: (\S+)", name, str(error))
            text = re.sub(r" \(manifest text:(\d+):\d+\)", origin, text)
            raise type(error)(text if self._of in text else f"{self._of}: {text}") from error

    def get(self, path, default=None):
        return self._values.get(path, default)

    def on_gpus(self, ranks):
        """Overrides that choose the plugins for a GPU per rank."""
        plugins = {"device": "device_cuda"}
        if ranks > 1:
            plugins["collective"] = "comm_nccl"
        if self.get("zero_optimization.offload_optimizer.device", "none") == "none":
            plugins["optimizer"] = "optim_adamw_cuda"
        return [f'plugins.{role}="{name}"' for role, name in plugins.items()]

    def keys_on(self, device_type):
        """The same as `keys`, where it is known what params lie on: "cuda", "cpu", ...; None: it is not."""
        if device_type != "cpu":
            return self.keys
        return [key._replace(status=NO_EFFECT, note="beside nvme only a GPU needs it, and params are on the CPU")
                if self._pins_beside_nvme(key) else key for key in self.keys]

    def _pins_beside_nvme(self, key):
        part, _, name = key.path.rpartition(".")
        return name == "pin_memory" and key.value is True and self.get(part + ".device") == "nvme"

    def report(self, device_type=None):
        """One line per key, those that are not simply honoured first."""
        return [line(key) for key in in_order(self.keys_on(device_type))]


def line(key):
    """A Key as a line of a report."""
    return f"{key.path} = {json.dumps(key.value)}: {key.status}" + (f": {key.note}" if key.note else "")


def in_order(keys):
    """By path, those that are not simply honoured first."""
    return sorted(keys, key=lambda key: (key.status == HONOURED, key.path))


def log_report(keys, log):
    """Every Key as a line of the log; what is not simply honoured is a warning."""
    for key in in_order(keys):
        log.log(logging.INFO if key.status == HONOURED else logging.WARNING, "%s", line(key))


_BY_HIDDEN_SIZE = {"reduce_bucket_size": lambda n: n * n, "stage3_prefetch_bucket_size": lambda n: int(0.9 * n * n),
                   "stage3_param_persistence_threshold": lambda n: 10 * n}
_ADAM_W_MODE = "optimizer.params.adam_w_mode"
_NOT_ONLY_BLOCKS = ("datastates_ckpt", "zero_optimization")  # true and false are words for some of them


def load(config):
    """The configuration as a dict: a dict itself, or the path of a JSON file."""
    if isinstance(config, (str, os.PathLike)):
        return loads(pathlib.Path(config).read_text(), config)
    _check_blocks(config, "", name_of(config))
    return _in_blocks(config)


def _in_blocks(config):
    """The same without blocks that are null, DeepSpeed's word for the default, and with a stage for a bare ZeRO."""
    found = {name: value for name, value in config.items() if value is not None or name not in rules.BLOCKS}
    if isinstance(found.get("zero_optimization"), bool):
        found["zero_optimization"] = {"stage": int(found["zero_optimization"])}
    if found == dict(config):
        return config
    changed = Configuration(found, getattr(config, "path", None))
    changed.folder = getattr(config, "folder", None)
    return changed


def loads(text, path=None):
    """The same of a text; `path` is where it is from."""
    found = Configuration(path=path)
    try:
        content = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        at = f"{path}:" if path else "line "
        at += f"{error.lineno}:{error.colno}"
        raise InvalidArgument(f"DeepSpeed configuration {at}: no JSON: {error.msg}") from None
    _check_blocks(content, "", name_of(found))
    found.update(content)
    return _in_blocks(found)


class _Pairs(dict):
    """An object of a JSON text, with the names that it has twice."""

    def __init__(self, pairs):
        super().__init__(pairs)
        counts = collections.Counter(name for name, _ in pairs)
        self.twice = [name for name, count in counts.items() if count > 1]


def _check_blocks(block, path, of):
    """What the rules take for granted."""
    if not isinstance(block, dict):
        raise InvalidArgument(f"{of}: {path or 'all of it'} = {json.dumps(block)}: an object of settings, "
                              f'{{"name": value, ...}}, is needed here')
    twice = [path + "." * bool(path) + name for name in getattr(block, "twice", ())]
    if twice:
        raise InvalidArgument(f"{of}: {', '.join(twice)} is there twice")
    for name, value in block.items():
        inner = path + "." * bool(path) + name
        is_word = value is None or (isinstance(value, bool) and inner in _NOT_ONLY_BLOCKS)
        if isinstance(value, dict) or (inner in rules.BLOCKS and not rules.is_known(inner) and not is_word):
            _check_blocks(value, inner, of)


def fill(config, arguments, optional=()):
    """(config, auto) for read: what a program's own arguments {path: (value, name)} say beside the configuration.

    A path that is "auto" or missing takes the argument; those in `optional` are not added. Another value is Refused:
    one of the two would have to be ignored. So is, with it, what read() would refuse.
    """
    config, wrong, auto = copy.deepcopy(load(config)), [], {}
    for path, (value, name) in arguments.items():
        *outer, last = path.split(".")
        block = config
        for part in outer:
            inner = block.get(part) or {}
            if path not in optional:
                block[part] = inner
            block = inner
        given = block.get(last)
        if given is None and path not in optional:
            block[last] = "auto"
        elif given not in (None, "auto") and _same_word(path, given) != value:
            why = f'{name} is {json.dumps(value)}; "auto" takes it from there'
            wrong.append(Key(path, given, None, NO_FP16 if path == "fp16.enabled" and given is True else why))
        auto[path] = value
    if wrong:
        known = {key.path for key in wrong}
        raise Refused(wrong + [key for key in _never(config, auto) if key.path not in known], name_of(config))
    return config, auto


def _same_word(path, value):
    return rules.optimizer_type(value) if path == "optimizer.type" else value


def _never(config, auto):
    """Keys that read() refuses, whatever "auto" stands for."""
    on_nvme = _uses_nvme(config, auto)
    for path, value in _leaves(config, ""):
        rule = rules.rule_of(path, config, on_nvme)
        if value == "auto" and not hasattr(rule, "auto"):
            continue
        status, _, _, why = rule(rule.auto if value == "auto" else value)
        if status is None:
            yield Key(path, value, None, why)


def hidden_size(model):
    """What Hugging Face takes "auto" sizes from: the largest hidden size that model.config names, or None."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if sizes:
            return sizes
    return None


def read(config, auto=None, hidden_size=None, advice=lambda path: "write it, or pass auto={path: value}"):
    """A Manifest of a DeepSpeed configuration: a dict, or the path of a JSON file. Refused names what cannot be.

    advice(path) ends the message about an "auto" that nobody knows.
    """
    config, auto = load(config), auto or {}
    values, keys, wrong, paths, targets = {"no_effect_keys": "warn"}, [], [], {}, {}
    on_nvme = _uses_nvme(config, auto)
    for path, value in _leaves(config, ""):
        rule, note, setting = rules.rule_of(path, config, on_nvme), "", rules.plain(path, value)
        if value == "auto" and path not in auto and hasattr(rule, "auto"):
            setting = rule.auto
        elif value == "auto":
            setting, note = _resolve(path, auto, hidden_size, advice)
            if setting is None:
                wrong.append(Key(path, value, None, note))
                continue
            value = setting
        status, target, setting, why = rule(setting)
        if status is not None and isinstance(setting, float) and not math.isfinite(setting):
            status, why = None, "a finite number is needed"
        if status is None:
            wrong.append(Key(path, value, None, why))
            continue
        keys.append(Key(path, value, status, why or note))
        if target is None:
            continue
        targets[path] = target if isinstance(target, tuple) else (target or path,)
        if path.endswith(".nvme_path") and (beside := _beside_file(config, setting)):
            keys[-1] = keys[-1]._replace(note=f"relative to the file: {beside}")
            setting = beside
        for key in targets[path]:
            if key in values and values[key] != setting:
                why = f"contradicts another key for {key}, which is {json.dumps(values[key])}"
                wrong.append(Key(path, value, None, why))
            values[key] = setting
            paths[key] = path
    if wrong:
        raise Refused(wrong, name_of(config))
    keys = _without_idle(values, keys + _defaults(values, auto), targets, paths)
    return Manifest(values, keys, paths, name_of(config))


def _without_idle(values, keys, targets, paths):
    """The keys, where those that change nothing beside the others say so. targets: {path: keys of the manifest}."""
    idle, found = rules.without_effect(values), []
    for key in keys:
        meant = targets.get(key.path, ())
        is_idle = meant and all(target in idle for target in meant)
        found.append(key._replace(status=NO_EFFECT, note=idle[meant[0]]) if is_idle else key)
    for key in rules.PINNED:  # an alias is for both parts, and says nothing of one that stays
        if key in idle and paths[key] not in rules.PINNED:
            del values[key]
    return found


def _defaults(values, auto):
    """Sets, and returns, defaults of DeepSpeed that would change the result where Strata's are others."""
    found = []
    if "gradient_clipping" not in values:
        found.append(("gradient_clipping", 1.0))
    if values.get("optimizer.type") == "Adam" and "optimizer.type" not in auto and _ADAM_W_MODE not in values:
        found.append((_ADAM_W_MODE, True))
    values.update(found)
    return [Key(path, value, HONOURED, "DeepSpeed's default") for path, value in found]


def _beside_file(config, directories):
    """Directories, with commas between, where the configuration's file says so, as a manifest's are; None: as they are.

    A configuration that is of no file is the program's own word: there they are of the working directory.
    """
    folder = getattr(config, "folder", None)
    if not folder or not isinstance(directories, str):
        return None
    names = [name.strip() for name in directories.split(",") if name.strip()]
    if all(map(os.path.isabs, names)):
        return None
    return ", ".join(str(folder / name) for name in names)


def _leaves(config, prefix):
    for name, value in config.items():
        path = prefix + name
        if isinstance(value, dict) and (value or (path in rules.BLOCKS and not rules.is_known(path))):
            yield from _leaves(value, path + ".")
        elif value is not None or not (rules.is_known(path) or path in rules.BLOCKS):  # null: DeepSpeed's default
            yield path, value


def _uses_nvme(config, auto):
    def device(part):
        given = (zero.get(part) or {}).get("device")
        return auto.get(f"{ZERO}{part}.device") if given == "auto" else given

    zero = config.get("zero_optimization", {})
    has_params = rules.plain(ZERO + "stage", zero.get("stage")) not in (None, 0, 1, 2)
    return "nvme" in (device("offload_optimizer"), device("offload_param") if has_params else None)


def _resolve(path, auto, hidden_size, advice):
    """(value, note) of an "auto"; (None, reason) when nobody knows."""
    if path in auto:
        return auto[path], "auto, as given"
    name = path.removeprefix(ZERO)
    if name in _BY_HIDDEN_SIZE and hidden_size:
        return _BY_HIDDEN_SIZE[name](hidden_size), f"auto, from the model's hidden size {hidden_size}"
    if name in _BY_HIDDEN_SIZE:
        return None, f'"auto" has no value here: the model has no config.hidden_size to take it from; {advice(path)}'
    return None, f'"auto" has no value here: {advice(path)}'


def _toml(value):
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e4:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
