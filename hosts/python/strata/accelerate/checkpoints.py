"""A saved state's folder: the engine's checkpoint in strata/<name>, in strata.accelerate/<name> what accelerate keeps.

accelerate's part is written first. The engine's is whole all at once, and its meta says which of accelerate's parts is
its own: until then a load finds what the save before this one left, whatever fails or is killed.
"""
import itertools
import pathlib
import re
import shutil

from accelerate.utils import gather_object

from ..errors import FailedPrecondition, InvalidArgument, NotFound

ENGINE, BESIDE = "strata", "strata.accelerate"  # folders
META = "accelerate.state"                # of the engine's checkpoint: its name in BESIDE


def new_name(folder, steps):
    """One that neither part has yet."""
    known = {path.name for part in (ENGINE, BESIDE) if (folder / part).is_dir() for path in (folder / part).iterdir()}
    names = itertools.chain([f"step{steps}"], (f"step{steps}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in known)


def keep_only(folder, name):
    """What saves before this one left, whole or not, goes."""
    for part in (ENGINE, BESIDE):
        for path in (folder / part).iterdir() if (folder / part).is_dir() else ():
            if path.is_dir() and path.name != name:
                shutil.rmtree(path)


def beside(folder, engine):
    """accelerate's part of the state that the engine has just loaded."""
    name = engine.core.meta.get(META)
    if name is None or not (folder / BESIDE / name).is_dir():
        raise missing(folder)
    return folder / BESIDE / name


def missing(folder):
    return NotFound(f"{folder} has no folder {BESIDE} that belongs to its checkpoint: it was not saved by save_state; "
                    f"load_engine loads the weights and the optimizer's state alone")


def of_all_ranks(error, what):
    """Raises on every rank when one has an error: the others are not left waiting for it."""
    errors = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise FailedPrecondition(f"{what}: rank {rank} failed: {text}")


# ---- accelerate's automatic_checkpoint_naming: a folder per save ----


def _numbered(project):
    """Those there are, oldest first."""
    root = pathlib.Path(project) / "checkpoints"
    found = {path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in (root.iterdir() if root.is_dir() else ())}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))


def next_folder(project, iteration):
    folder = pathlib.Path(project) / "checkpoints" / f"checkpoint_{iteration}"
    if folder.exists():
        raise InvalidArgument(f"save_state: {folder} is there already; set project_configuration.iteration to the "
                              f"number to go on with")
    return folder


def newest_folder(project):
    """The last one whose save came to its end."""
    whole = [folder for folder in _numbered(project) if (folder / ENGINE / "latest").is_file()]
    if not whole:
        raise NotFound(f"load_state: {pathlib.Path(project) / 'checkpoints'} has no saved state")
    return whole[-1]


def keep_newest(project, limit):
    for folder in _numbered(project)[:-limit]:
        shutil.rmtree(folder)
