"""Which modules are units: a unit is fetched when its module's forward begins and released when it ends.

A param belongs to the innermost unit module around it. Units are, in this order:
  1. blocks: modules that `units` names, by class or by a function; by default the modules of a repeated class in a
     ModuleList, or in a Sequential if they have modules of their own, outermost first
  2. of what is left, the topmost modules without a block inside that have at most `unit_size` elements; larger ones
     are divided, down to single layers
  3. modules with params of their own around those
Modules that are never called (ModuleList, ModuleDict, ParameterList, ParameterDict) are no units: their params belong
to the module around them.
"""
import collections

from torch import nn

from ..errors import InvalidArgument

UNIT_SIZE = 50_000_000
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

UnitModule = collections.namedtuple("UnitModule", "name module params")  # params: {name: Parameter}, own and shared


def choose(model, units=None, unit_size=UNIT_SIZE):
    """[UnitModule] in module order. A param that several units use is in each of them; the first one owns it."""
    if next(model.parameters(), None) is None:
        raise InvalidArgument(f"{type(model).__name__} has no params")
    is_block = _rule(model, units)
    chosen = {}
    _walk(model, is_block, unit_size, chosen)
    found = {id(module): UnitModule(name, module, {}) for name, module in model.named_modules() if module in chosen}
    _assign(model, "", None, found)
    return [unit for unit in found.values() if unit.params]


def _rule(model, units):
    """is_block(module) of prepare's `units`."""
    if units is None:
        blocks = set(_repeated(model))
        return lambda module: module in blocks
    if callable(units) and not isinstance(units, type):
        blocks = {module for name, module in model.named_modules() if units(name, module)}
        found = "the function given as units chose no module"
    else:
        units = [units] if isinstance(units, (str, type)) else list(units)
        blocks, unmatched = set(), []
        for unit in units:
            matches = {module for module in model.modules()
                       if (type(module).__name__ == unit if isinstance(unit, str) else isinstance(module, unit))}
            blocks |= matches
            unmatched += [] if matches else [unit if isinstance(unit, str) else unit.__name__]
        classes = sorted({type(module).__name__ for module in model.modules()})
        found = f"the model has no module of class {', '.join(unmatched)}; its classes: {', '.join(classes)}"
        if unmatched:
            blocks = set()
    if not blocks:
        raise InvalidArgument(f"units: {found}")
    for name, module in model.named_modules():
        if module in blocks and isinstance(module, _NEVER_CALLED):
            raise InvalidArgument(f'units: "{name}" is a {type(module).__name__}, which is never called itself: name '
                                  f"its items, or the module around it")
    return lambda module: module in blocks


def _repeated(module):
    """Modules of a repeated class in lists of the model, outermost first."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        count = collections.Counter(type(child) for child in module.children())
        for child in module.children():
            has_modules = next(child.children(), None) is not None
            repeated = count[type(child)] > 1 and not isinstance(child, _NEVER_CALLED)
            if repeated and (has_modules or isinstance(module, nn.ModuleList)):
                yield child
            else:
                yield from _repeated(child)
    else:
        for child in module.children():
            yield from _repeated(child)


def _size(module):
    return sum(p.numel() for p in module.parameters())


def _walk(module, is_block, unit_size, chosen):
    """Adds the unit modules at and below `module` to `chosen`, a dict used as an ordered set."""
    if is_block(module):
        chosen[module] = None
        for inner in module.modules():  # an expert layer inside a block, say
            if is_block(inner):
                chosen[inner] = None
        return
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    divided = any(map(is_block, module.modules())) or (_size(module) > unit_size and children)
    if not divided and not isinstance(module, _NEVER_CALLED):
        chosen[module] = None
        return
    if any(True for _ in _own_params(module)) and not isinstance(module, _NEVER_CALLED):
        chosen[module] = None
    for child in children:
        if not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            _walk(child, is_block, unit_size, chosen)


def _own_params(module):
    """Params that only the module itself can read: its own, and those of its ParameterLists."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from _own_params(child)


def _assign(module, prefix, unit, found):
    """Gives every param to the innermost unit around it; one used at several places may have several units."""
    unit = found.get(id(module), unit)
    for name, param in module.named_parameters(recurse=False):
        if not any(param is known for known in unit.params.values()):
            unit.params[prefix + name] = param
    for name, child in module.named_children():
        _assign(child, f"{prefix}{name}.", unit, found)
