"""What libraries above torch.distributed need, beyond what torch is told, to run on Perseus.

They read torch's variables before they make a process group, or know backends by name. Stateless,
but for their classes, of which methods are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

_REPLACED = "_is_of_perseus"
_LIGHTNING = "plugins.environments.lightning"

Fill = Callable[[], bool]
Follow = Callable[[ModuleType], None]


def followed(fill: Fill, asked_for: Callable[[str], str]) -> dict[str, Follow]:
    """Return what to call with each of their modules, by its name, once it is imported.

    fill: sets torch's variables where that is for Perseus to do, and returns whether they are its.
    asked_for: returns the backend that the script has asked for in the place of this one.
    """
    lightning = partial(_follow_lightning, fill)
    return {
        "accelerate.state": partial(_fill_before, fill, "PartialState"),  # Hugging Face's Trainer
        f"lightning.fabric.{_LIGHTNING}": lightning,
        f"lightning_fabric.{_LIGHTNING}": lightning,
        "ignite.distributed.comp_models.native": partial(_follow_ignite, fill, asked_for),
        "composer.utils.dist": partial(_follow_composer, asked_for),
    }


def _fill_before(fill: Fill, name: str, module: ModuleType) -> None:
    """Fill the environment whenever an object of this class is made, which reads it."""
    made: Any = getattr(module, name, None)
    if made is None or getattr(made.__init__, _REPLACED, False):
        return
    initialize = made.__init__

    @wraps(initialize)
    def initialize_with_environment(self: Any, *args: Any, **kwargs: Any) -> None:
        fill()
        initialize(self, *args, **kwargs)

    setattr(initialize_with_environment, _REPLACED, True)
    made.__init__ = initialize_with_environment


def _follow_lightning(fill: Fill, module: ModuleType) -> None:
    """Let Lightning compare its devices and hosts with the ranks that there are, as with torchrun.

    The environment that it takes otherwise believes that Lightning has started the ranks.
    """
    made: Any = getattr(module, "LightningEnvironment", None)
    if made is None or getattr(made.__new__, _REPLACED, False):
        return

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        if fill() and cls is made:
            package = module.__name__.rpartition(".")[0]
            return import_module(f"{package}.torchelastic").TorchElasticEnvironment()
        return object.__new__(cls)

    setattr(make, _REPLACED, True)
    made.__new__ = make


def _follow_ignite(fill: Fill, asked_for: Callable[[str], str], module: ModuleType) -> None:
    """Let ignite find its ranks, and the backend that it has asked for.

    It wraps models in DistributedDataParallel only where it knows the backend.
    """
    _fill_before(fill, "_NativeDistModel", module)
    made: Any = getattr(module, "_NativeDistModel", None)
    if made is None or getattr(made.backend, _REPLACED, False):
        return
    find = made.backend

    @wraps(find)
    def find_asked(self: Any) -> str:
        return asked_for(find(self))

    setattr(find_asked, _REPLACED, True)
    made.backend = find_asked


def _follow_composer(asked_for: Callable[[str], str], module: ModuleType) -> None:
    """Let Composer take a process group that it knows by another backend's name."""
    initialize: Any = getattr(module, "initialize_dist", None)
    if initialize is None or getattr(initialize, _REPLACED, False):
        return

    @wraps(initialize)
    def initialize_unless_ours(*args: Any, **kwargs: Any) -> None:
        distributed = import_module("torch.distributed")
        if distributed.is_initialized():
            backend = distributed.get_backend()
            if asked_for(backend) != backend:
                return
        initialize(*args, **kwargs)

    setattr(initialize_unless_ours, _REPLACED, True)
    module.initialize_dist = initialize_unless_ours  # type: ignore[attr-defined]
