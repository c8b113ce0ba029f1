"""A face of Perseus against the facts about Horovod's that test/data has."""

from __future__ import annotations

import inspect
import json
import pickle
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_facts(file: str) -> dict[str, Any]:
    """The facts in test/data/`file`: each on a line, parameters as Horovod's source has them."""
    path = Path(__file__).parent / "data" / file
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


class Signatures:
    """Parameters of one module against Horovod's.

    extra: parameters of functions beyond Horovod's; optional, and after its own.
    compressing: whose `compression` is by default what the settings say, so that Compression.none,
    when given, means exact: the one default that differs.
    other_defaults: (function, parameter) -> the default here.
    """

    def __init__(
        self,
        hvd: Any,
        extra: Mapping[str, Sequence[str]],
        compressing: Collection[str],
        other_defaults: Mapping[tuple[str, str], Any] | None = None,
    ) -> None:
        self._hvd = hvd
        self._extra = extra
        self._compressing = compressing
        self._other_defaults = other_defaults or {}

    def expect_parameters(self, name: str, function: Any, expected: str) -> None:
        """The same ones in the same order, of the same kinds, with the same defaults."""
        horovods = self._parameters(expected)
        actual = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        assert len(actual) >= len(horovods), f"misses {horovods[len(actual) :]}"
        for theirs, ours in zip(horovods, actual, strict=False):
            assert (ours.name, ours.kind) == (theirs.name, theirs.kind)
            if ours.name == "compression" and name in self._compressing:
                settings = self._hvd.Compression.settings
                assert ours.default is settings
                assert issubclass(settings, theirs.default)
            else:
                default = self._other_defaults.get((name, ours.name), theirs.default)
                assert ours.default == default, ours.name
        beyond = actual[len(horovods) :]
        assert [parameter.name for parameter in beyond] == list(self._extra.get(name, []))
        assert all(parameter.default is not inspect.Parameter.empty for parameter in beyond)

    def _parameters(self, text: str) -> list[inspect.Parameter]:
        """From their source text, whose defaults are names of the module."""
        scope = {**vars(self._hvd)}
        exec(f"from __future__ import annotations\ndef described({text}): ...", scope)
        return list(inspect.signature(scope["described"]).parameters.values())


class Face(Signatures):
    """A whole module: its `names` and `compression` are in test/data/`file`."""

    def __init__(
        self,
        hvd: Any,
        file: str,
        extra: Mapping[str, Sequence[str]],
        compressing: Collection[str],
    ) -> None:
        super().__init__(hvd, extra, compressing)
        self.facts = read_facts(file)
        self.names: dict[str, Any] = self.facts["names"]
        self.functions = sorted(n for n, fact in self.names.items() if fact["kind"] == "function")

    def expect_names(self) -> None:
        """None is missing; all are exported, and everything that is exported exists."""
        assert [name for name in self.names if not hasattr(self._hvd, name)] == []
        assert [name for name in self._hvd.__all__ if not hasattr(self._hvd, name)] == []
        assert set(self._hvd.__all__) >= set(self.names)

    def expect_same_names(self, other: Any) -> None:
        """Another module is the same face: all of its names, and nothing else behind them."""
        assert set(other.__all__) == set(self._hvd.__all__)
        assert set(other.__all__) <= set(dir(other))
        for name in other.__all__:
            assert getattr(other, name) is getattr(self._hvd, name), name

    def expect_function(self, name: str) -> None:
        """Horovod's parameters, and words about what it does."""
        function = getattr(self._hvd, name)
        assert (inspect.getdoc(function) or "").strip()
        self.expect_parameters(name, function, self.names[name]["params"])

    def expect_constants_and_modules(self) -> None:
        """Numbers are Horovod's."""
        for name, facts in self.names.items():
            found = getattr(self._hvd, name)
            if facts["kind"] == "constant":
                assert found == int(facts["value"])
                assert found == int(found)  # an int, whose name its repr() shows
                assert pickle.loads(pickle.dumps(found)) is found
                assert f"{found} {found!r}" == f"{int(found)} <ReduceOp.{name}: {int(found)}>"
            elif facts["kind"] == "module":
                assert isinstance(found, types.ModuleType)
        assert self._hvd.global_process_set.process_set_id == 0

    def expect_methods(self, class_name: str) -> None:
        """With Horovod's parameters."""
        found = getattr(self._hvd, class_name)
        for name, parameters in self.names[class_name]["methods"].items():
            self.expect_parameters(name, getattr(found, name), parameters)

    def expect_compressors(self) -> None:
        """Static methods, as users' own classes have them."""
        compression = self._hvd.compression
        for class_name, methods in self.facts["compression"].items():
            compressor = getattr(compression, class_name)
            for name, parameters in methods.items():
                assert isinstance(inspect.getattr_static(compressor, name), staticmethod)
                self.expect_parameters(name, getattr(compressor, name), parameters)
        assert self._hvd.Compression.none is compression.NoneCompressor
        assert self._hvd.Compression.fp16 is compression.FP16Compressor
        assert self._hvd.Compression.topk(0.25) is self._hvd.Compression.topk(0.25)
