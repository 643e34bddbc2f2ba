"""The house's own rules, as far as no linter holds them: sizes, state, dependencies, documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxpaged.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxpaged", "pallas_kernels")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "scripts", "docs", ".ci")
MAX_LINES = 400
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")

# Dependencies that no line of ours imports, and why they are there.
INDIRECT = {
    "httptools": "uvicorn's HTTP parser",
    "jinja2": "transformers' chat templates",
    "ml-dtypes": "bfloat16 of NumPy arrays",
    "uvloop": "uvicorn's event loop",
}
# Imported when a flag or Ray Serve asks for it; an extra holds what provides it.
OPTIONAL = {"gguf", "opentelemetry", "ray"}
MUTABLE_MAKERS = {
    *("list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("ContextVar", "local", "Lock", "RLock", "Event", "Queue"),
    *("Gauge", "Histogram", "Summary", "CollectorRegistry"),
}
MUTATORS = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update"),
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def place(path: Path, line: int | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def readme() -> str:
    return (ROOT / "README.md").read_text()


@cache
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def distribution(requirement: str) -> str:
    """`jax[cuda12]>=0.10` -> `jax`, spelled as package indexes do."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


# -- files -------------------------------------------------------------------------------------


def test_files_are_short():
    folders = [folder for folder in FOLDERS if folder != "pallas_kernels"]
    lines = {place(p): len(p.read_text().splitlines()) for p in python_files(*folders)}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_nothing_is_left_unfinished():
    texts = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    texts = [p for p in texts if p.suffix in {".py", ".md", ".sh", ".html", ".js"}]
    texts += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".ci/run")]
    found = [
        place(path, number)
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b({'|'.join(UNFINISHED)})\b", line)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_code_has_its_tests(package: str):
    root = ROOT / package
    folders = {path.parent for path in python_files(package) if path.name != "__init__.py"}
    mirrors = {
        folder: ROOT / "tests" / folder.relative_to(root if package == "jaxpaged" else ROOT)
        for folder in folders
    }
    untested = [
        place(folder) for folder, tests in mirrors.items() if not list(tests.glob("test_*.py"))
    ]
    assert untested == []


# -- code --------------------------------------------------------------------------------------


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, class bodies left out."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from (node for node in ast.walk(statement) if isinstance(node, ast.stmt))


def makes_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in MUTABLE_MAKERS
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literals)


def mutated_name(node: ast.AST) -> str | None:
    """The name whose contents this node changes: `X[..] = `, `del X[..]`, `X.append(..)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return getattr(node.value, "id", None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return getattr(node.func.value, "id", None) if node.func.attr in MUTATORS else None
    return None


def mutable_state(tree: ast.Module) -> list[int]:
    """Lines that make or change state of the module. Tables in CAPITALS are constants."""
    found = []
    for statement in module_level(tree):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [getattr(target, "id", "") for target in targets]
            constants = all(name.isupper() or name == "__all__" for name in names)
            literal = not isinstance(statement.value, ast.Call)
            if makes_mutable(statement.value) and not (constants and literal):
                found.append(statement.lineno)
    for node in ast.walk(tree):
        name = mutated_name(node)
        if name is not None and name.isupper() and len(name) > 1:
            found.append(node.lineno)
    return sorted(found)


def test_modules_hold_no_state():
    found = [place(p, n) for p in python_files(*PACKAGES) for n in mutable_state(parse(p))]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["cache = {}", "SEEN = set()", "AGES = {}\nAGES['a'] = 1", "LOG = []\ndef f(): LOG.append(1)"],
)
def test_the_state_rule_sees(code: str):
    assert mutable_state(ast.parse(code))


def test_step_batch_fields_are_explained():
    path = ROOT / "jaxpaged" / "arrays" / "step_batch.py"
    lines = path.read_text().splitlines()
    batch = next(n for n in parse(path).body if getattr(n, "name", "") == "StepBatch")
    fields = [node for node in batch.body if isinstance(node, ast.AnnAssign)]
    silent = [
        node.target.id
        for node in fields
        if "#" not in lines[node.lineno - 1] and not lines[node.lineno - 2].lstrip().startswith("#")
    ]
    assert fields and silent == []


# -- dependencies ------------------------------------------------------------------------------


def imported_distributions() -> set[str]:
    names = set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    third_party = names - set(sys.stdlib_module_names) - set(PACKAGES) - OPTIONAL
    owners = packages_distributions()
    return {distribution(owners[name][0]) for name in third_party}


def test_dependencies_are_what_the_code_imports():
    declared = {distribution(item) for item in pyproject()["project"]["dependencies"]}
    imported = {"jax" if name == "jaxlib" else name for name in imported_distributions()}
    assert imported - declared == set(), "imported but not declared"
    assert declared - imported - set(INDIRECT) == set(), "declared but not imported"


def test_torch_is_only_a_yardstick():
    project = pyproject()["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    with_torch = [n for n, items in groups.items() if "torch" in map(distribution, items)]
    assert with_torch == ["bench"]


@pytest.mark.parametrize("module", ["jaxpaged", "jaxpaged.cli", "jaxpaged.server.app"])
def test_the_front_end_starts_without_jax(module: str):
    code = f"import sys, {module}; print([m for m in ('jax', 'torch', 'flax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# -- README ------------------------------------------------------------------------------------


@cache
def help_text(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "jaxpaged", *command, "--help"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return done.stdout


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def code_blocks(language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", readme(), re.S))


def test_readme_commands_exist():
    shell = code_blocks("bash")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    made = set(re.findall(r"^make ([a-z]+)", shell, re.M))
    assert {"serve", "test"} <= made <= targets
    modules = re.findall(r"python -m ([\w.]+)", shell)
    assert [name for name in modules if find_spec(name) is None] == []
    scripts = re.findall(r"python ([\w/]+\.py)", shell)
    assert [name for name in scripts if not (ROOT / name).exists()] == []
    for line in re.findall(r"^(?:\.venv/bin/)?jaxpaged .*", shell, re.M):
        command = line.split()[1]
        unknown = flags(line) - flags(help_text(command))
        assert not unknown, f"{line}: no such flag"


def test_readme_flags_are_those_of_serve():
    listed = flags("\n".join(re.findall(r"^\| `.*", readme(), re.M)))
    offered = flags(help_text("serve")) - {"--help"}
    hidden_by = {f"--no-{flag[2:]}" for flag in offered}  # a switch is listed once
    assert listed - offered == set(), "in the README but not in --help"
    assert offered - listed - hidden_by == set(), "in --help but not in the README"


def test_readme_names_every_sampling_parameter():
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| `.*", readme(), re.M))))
    assert set(SamplingParams.__dataclass_fields__) - named == set()


def test_readme_names_every_route():
    endpoints = python_files("jaxpaged/server/endpoints")
    routes = {r for p in endpoints for r in re.findall(r'@router\.\w+\("([^"{]+)', p.read_text())}
    named = set(re.findall(r"(?:GET|POST) (/[\w/]+)", readme()))
    assert {route.rstrip("/") for route in routes} == named - {"/docs"}


def test_readme_tree_is_the_tree():
    """Every entry of the annotated tree exists, and no folder of the packages is missing."""
    block = re.search(r"```text\n(jaxpaged/\n.*?)```", readme(), re.S)
    assert block is not None
    stack: list[str] = []
    listed = set()
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.split("  #")[0].split():
            stack[depth:] = [name]
            listed.add("/".join(part.rstrip("/") for part in stack))
    missing = sorted(entry for entry in listed if not (ROOT / entry).exists())
    assert missing == []
    folders = {place(p.parent) for p in python_files(*PACKAGES)}
    assert folders - listed == set()


DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=place)
def test_files_that_documents_name_exist(path: Path):
    known = ["/" + place(p) for p in python_files(*FOLDERS)] + ["/x.py"]  # x: a file to be
    named = set(re.findall(r"`(?:[\w./]*/)?(\w+\.py)`", path.read_text()))
    assert [n for n in sorted(named) if not any(k.endswith("/" + n) for k in known)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=place)
def test_links_lead_somewhere(path: Path):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [t for t in targets if not (path.parent / t).exists()] == []
