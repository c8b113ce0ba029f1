"""docs/config.md says what the core's table says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from perseus import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    script = ROOT / ".ci" / "make_config_doc.py"
    spec = importlib.util.spec_from_file_location("make_config_doc", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_md_is_up_to_date(maker: ModuleType) -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == maker.document(maker.variables()), "docs/config.md is stale: make docs"


def test_every_variable_of_the_table_is_documented_with_its_aliases(maker: ModuleType) -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    table = maker.variables()
    assert {"GLOO_TIMEOUT_SECONDS", "PERSEUS_MASTER_PORT"} <= {entry.name for entry in table}
    for entry in table:
        section = written.split(f"## {entry.name}\n")[1].split("\n## ")[0]
        assert entry.help in section
        assert all(f"`{alias}`" in section for alias in entry.aliases.split(",") if alias)


@pytest.mark.parametrize(
    "name", ["HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_ELASTIC_TIMEOUT", "PERSEUS_SECRET"]
)
def test_variables_outside_of_the_table_are_documented(name: str) -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", written.split("\n## Also read\n")[1])


def test_a_change_of_the_table_changes_the_document(maker: ModuleType) -> None:
    table = maker.variables()
    changed = [table[0]._replace(default="3"), *table[1:]]
    assert maker.document(changed) != maker.document(table)


WORDS = {"1": True, "True": True, "on": True, "YES": True, "": None, None: None}
WORDS |= {"0": False, "false": False, "Off": False, "no": False}


@pytest.mark.parametrize(("word", "says"), WORDS.items(), ids=str)
def test_yes_or_no_variables_of_python_take_the_words_of_config_md(
    word: str | None, says: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert word is None or word.lower() in re.split(r"\W+", written.split("Yes/no variables")[1])
    for name in ("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_ELASTIC"):
        monkeypatch.delenv(name, raising=False)
        if word is not None:
            monkeypatch.setenv(name, word)
    assert config.dynamic_process_sets() == config.elastic() == bool(says)
    for default in (False, True):
        found = config.yes_or_no("HOROVOD_ELASTIC", default)
        assert found == (default if says is None else says)


def test_another_word_of_a_yes_or_no_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "dynamic")
    expected = r"^\[config\] HOROVOD_DYNAMIC_PROCESS_SETS='dynamic': expected 0 or 1$"
    with pytest.raises(ValueError, match=expected):
        config.dynamic_process_sets()
