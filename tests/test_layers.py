"""Modules import strictly downwards, and some need neither torch nor numpy."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "graphcache"

# Top first. A folder is one layer: its files may use each other. "graphcache" is the __init__.
ORDER = [
    "__main__", "cli", "arguments", "demo", "graphcache", "checking", "runtime", "insight",
    "measuring", "serving", "adapting", "ahead", "miss", "store", "timing", "knowledge", "capture",
    "route", "splitting", "explain", "forms", "facts", "probe", "dimtrial", "callplan", "cache",
    "graphs", "preflight", "stilled", "otherweights", "generators", "watch", "compiled",
    "attributes", "holdings", "outside", "hooks", "call", "garbage", "dims", "shadow", "settings",
    "report",
    "tracing", "padding", "hazards", "bounds", "hostreads", "storages", "compare", "modes",
    "signature", "delegate", "plotting", "planreport", "planning", "buckets", "cover", "stats",
    "errors", "frames", "trials", "reasons", "version",
]  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def dotted(path):
    """graphcache.graphs.cuda, of its file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(name):
    """The place in ORDER of a dotted module name."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(path):
    """Every module that a file imports, at any depth of the code, in dotted form."""
    modules = {dotted(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in {path}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def ours(path):
    return {name for name in imports(path) if name.split(".")[0] == "graphcache"}


def needs(path):
    """The outermost packages that a file needs, by itself and through what it imports of ours."""
    found, waiting, seen = set(), [path], set()
    files = {dotted(file): file for file in FILES}
    while waiting:
        file = waiting.pop()
        seen.add(file)
        found |= {name.split(".")[0] for name in imports(file)}
        waiting += [files[name] for name in ours(file) if files[name] not in seen]
    return found


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_a_module_imports_only_from_layers_below_its_own(path):
    """Lazily or not: imports inside functions count as well."""
    mine = layer(dotted(path))
    upwards = [
        name
        for name in ours(path)
        if layer(name) != mine and ORDER.index(layer(name)) < ORDER.index(mine)
    ]
    assert upwards == []


def test_every_module_has_its_place_in_the_order():
    """A new module must be given one."""
    assert {layer(dotted(path)) for path in FILES} <= set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


def test_no_module_of_a_layer_of_one_file_imports_itself():
    """Only folders are layers of several files."""
    for path in FILES:
        name = dotted(path)
        if name.count(".") == 1 and path.name != "__init__.py":
            assert name not in ours(path)


@pytest.mark.parametrize("name", ["buckets", "cover", "stats", "reasons", "errors"])
def test_the_lowest_modules_need_neither_torch_nor_numpy(name):
    """By themselves and through each other."""
    assert needs(PACKAGE / f"{name}.py").isdisjoint({"torch", "numpy"})


@pytest.mark.parametrize("path", sorted((PACKAGE / "planning").glob("*.py")), ids=dotted)
def test_planning_needs_no_torch(path):
    """Plans are made on any machine."""
    assert "torch" not in needs(path)


def names_used(path):
    """Every name and attribute in a file, and the bases of its classes by class."""
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bases = {
        node.name: {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return names, bases


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_only_graphs_captures(path):
    """`capture_begin`, CUDAGraph and dispatch modes are in graphs/ alone, but the Observer."""
    if layer(dotted(path)) == "graphs":
        return
    names, bases = names_used(path)
    assert names.isdisjoint({"capture_begin", "capture_end", "make_graphed_callables", "CUDAGraph"})
    modes = {name for name, of in bases.items() if "TorchDispatchMode" in of}
    assert modes <= ({"Observer"} if dotted(path) == "graphcache.preflight" else set())


def test_graphs_does_capture():
    """The names looked for are those in use, so the test above can fail."""
    cuda, _ = names_used(PACKAGE / "graphs" / "cuda.py")
    _, recorded = names_used(PACKAGE / "graphs" / "recorded.py")
    assert {"capture_begin", "capture_end", "CUDAGraph"} <= cuda
    assert any("TorchDispatchMode" in of for of in recorded.values())
