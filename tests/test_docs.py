"""The documents say what is: their code runs, and what they list is complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import graphcache
from graphcache import GraphCache, Reason

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
COMMANDS = ["pip install -e . && graphcache demo", "pip install -e '.[test]' && pytest"]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PACKAGE = ROOT / "graphcache"


def test_readme_has_code():
    """The pattern finds the blocks, so that the next test is not empty."""
    assert len(BLOCKS) == README.count("```python") >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_readme_code_runs(block, tmp_path, monkeypatch):
    """Each block runs by itself on the CPU, and its assertions hold."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_has_the_set_up_commands(command):
    """Each command is in README once, alone on its line, where .ci/run finds it."""
    assert README.count(command) == README.splitlines().count(command) == 1


@pytest.mark.parametrize("name", graphcache.__all__)
def test_public_names_have_docstrings(name):
    """Everything in `__all__` says what it is, itself and not by inheritance."""
    value = getattr(graphcache, name)
    if not isinstance(value, str):
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        assert own


@pytest.mark.parametrize("reason", list(Reason), ids=str)
def test_readme_lists_every_reason(reason):
    """Each reason has a row in README's table, in the words of the code."""
    assert f"| `{reason}` | {reason.phrase} | {reason.remedy} |" in README.splitlines()


@pytest.mark.parametrize("option", list(inspect.signature(GraphCache.__init__).parameters)[1:])
def test_readme_lists_every_option_with_its_default(option):
    """Each option has a row in README's table, and the default written there is the real one."""
    row = re.search(rf"^\| `{option}` \|(.*?)\|", README, re.MULTILINE)
    assert row is not None
    default = inspect.signature(GraphCache.__init__).parameters[option].default
    shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
    assert row[1].replace(chr(34), chr(39)).strip() == shown


@pytest.mark.parametrize("number", range(1, 11))
def test_design_lists_every_invariant(number):
    """The invariants are numbered I1 to I10, a row each."""
    assert re.search(rf"^\| I{number} \|", DESIGN, re.MULTILINE)


@pytest.mark.parametrize(
    "module", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
)
def test_design_names_every_module(module):
    """The module map has each file of the package."""
    assert f"`{module}`" in DESIGN


def test_design_names_no_module_that_is_gone():
    """The module map has no other file."""
    named = set(re.findall(r"^\| `([\w/]+\.py)`", DESIGN, re.MULTILINE))
    assert {name for name in named if not (PACKAGE / name).exists()} == set()


def test_modules_import_only_from_above_in_the_map():
    """The module map goes from the bottom up, so imports at module level lead to earlier rows."""
    rows = re.findall(r"^\| `([\w/]+)\.py`", DESIGN, re.MULTILINE)
    places = {row.replace("/", ".").replace(".__init__", ""): i for i, row in enumerate(rows)}
    places["__init__"] = len(rows)
    wrong = []
    for row in rows:
        importer = row.replace("/", ".").replace(".__init__", "")
        source = (PACKAGE / f"{row}.py").read_text()
        for imported in re.findall(r"^from graphcache\.([\w.]+) import", source, re.MULTILINE):
            if places[imported] >= places[importer]:
                wrong.append(f"{importer} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("document", [README, DESIGN], ids=["README", "design"])
def test_links_lead_somewhere(document):
    """Every relative link of README and of the design document leads to a file."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", document)
    home = ROOT if document is README else ROOT / "docs"
    assert [link for link in links if not (home / link).exists()] == []


GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()


@pytest.mark.parametrize(
    "named", sorted(set(re.findall(r"`(test_\w+\.py(?:::\w+)?)`", GUARANTEES)))
)
def test_every_test_that_a_guarantee_names_exists(named):
    """File and function."""
    file, _, function = named.partition("::")
    source = (ROOT / "tests" / file).read_text()
    assert f"def {function}(" in source or not function


def test_every_line_of_the_guarantees_names_what_shows_it():
    """A promise or a limit without a test is none."""
    rows = [line for line in GUARANTEES.splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(rows) >= 30
    assert all("`test_" in row or "invisible to tests too" in row for row in rows)
