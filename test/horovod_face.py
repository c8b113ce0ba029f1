"""A face of Perseus against the facts about Horovod's that test/data has."""

from __future__ import annotations

import inspect
import json
import pickle
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = {
    "positional_only": inspect.Parameter.POSITIONAL_ONLY,
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}


class Face:
    """hvd: the module; its `names` and `compression` are in test/data/`file`.

    extra: parameters of functions beyond Horovod's; optional, and after its own.
    compressing: whose `compression` is by default what the settings say, so that Compression.none,
    when given, means exact: the one default that differs.
    """

    def __init__(
        self,
        hvd: Any,
        file: str,
        extra: Mapping[str, Sequence[str]],
        compressing: Collection[str],
    ) -> None:
        self._hvd = hvd
        self._extra = extra
        self._compressing = compressing
        path = Path(__file__).parent / "data" / file
        self.facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self.names: dict[str, Any] = self.facts["names"]
        self.functions = sorted(n for n, fact in self.names.items() if fact["kind"] == "function")

    def expect_parameters(self, name: str, function: Any, expected: list[dict[str, str]]) -> None:
        """The same ones in the same order, of the same kinds, with the same defaults."""
        actual = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        assert len(actual) >= len(expected), f"misses {expected[len(actual) :]}"
        for fact, parameter in zip(expected, actual, strict=False):
            assert parameter.name == fact["name"]
            assert parameter.kind == KINDS[fact["kind"]]
            if parameter.name == "compression" and name in self._compressing:
                settings = self._hvd.Compression.settings
                assert parameter.default is settings
                assert issubclass(settings, self._value(fact["default"]))
            elif "default" in fact:
                assert parameter.default == self._value(fact["default"]), parameter.name
            else:
                assert parameter.default is inspect.Parameter.empty, parameter.name
        beyond = actual[len(expected) :]
        assert [parameter.name for parameter in beyond] == list(self._extra.get(name, []))
        assert all(parameter.default is not inspect.Parameter.empty for parameter in beyond)

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
        for name, facts in self.names[class_name]["methods"].items():
            self.expect_parameters(name, getattr(found, name), facts["params"])

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

    def _value(self, text: str) -> Any:
        """A default from its source text, in the face's own namespace."""
        return eval(text, {**vars(self._hvd)})
