"""engine.param_groups: what the steps to come take, said as a torch optimizer's param groups say it."""
import collections.abc

from ..errors import InvalidArgument
from ..model import SETTINGS, group_args


class ParamGroup(collections.abc.MutableMapping):
    """Settings of one group: lr, betas, eps and weight_decay, as in a dict. Every step takes what is there then.

    None is what the group was prepared with, else the manifest's; without an lr of its own it follows group 0's.
    Another key, or a NaN, is refused when it is set. `core` is the strata.Group, None for group 0.
    """

    def __init__(self, number, core, settings):
        self.core, self._name = core, f"param_groups[{number}]"
        self._settings = dict.fromkeys(SETTINGS)
        self.update(settings)

    def __getitem__(self, key):
        return self._settings[key]

    def __setitem__(self, key, value):
        group_args({key: value}, self._name)
        self._settings[key] = value

    def __delitem__(self, key):
        raise InvalidArgument(f"{self._name}: its settings stay; None is what the group was prepared with")

    def __iter__(self):
        return iter(self._settings)

    def __len__(self):
        return len(self._settings)

    def __repr__(self):
        return repr(self._settings)


def of_a_step(groups):
    """What Engine.step takes as groups. The lr of group 0 is a step's own argument: other groups follow it."""
    return {group.core: {name: value for name, value in group.items() if name != "lr" or group.core is not None}
            for group in groups}
