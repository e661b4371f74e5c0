"""The repository agrees with itself: modules with notebooks, notebooks with the cleaner, README with its notebook."""
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
bin_dir = Path(sys.executable).parent
notebooks = sorted(p for p in (root/"nbs").rglob("*.ipynb") if not any(q.startswith((".", "_")) for q in p.relative_to(root).parts))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The project in a folder of its own, exported and cleaned once more"
    out = tmp_path_factory.mktemp("copy")/"freerep"
    shutil.copytree(root, out, symlinks=True, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "demo", "_docs", "_proc"))
    env = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    for command in ("nbdev_export", "nbdev_clean"): subprocess.run([bin_dir/command], cwd=out, env=env, check=True)
    subprocess.run(["make", "readme", f"BIN={bin_dir}"], cwd=out, env=env, check=True)
    return out


def test_modules_equal_notebooks(copy):
    "Exporting again changes nothing, and no module is without a notebook"
    for path in sorted((root/"freerep").glob("*.py")):
        assert path.read_text() == (copy/"freerep"/path.name).read_text(), f"{path.name} is not what its notebook exports: run `make notebooks`"
    assert {p.name for p in (root/"freerep").glob("*.py")} == {p.name for p in (copy/"freerep").glob("*.py")}


@pytest.mark.parametrize("path", notebooks, ids=lambda p: p.stem)
def test_notebook_is_clean(copy, path):
    "Cleaning again changes nothing"
    assert json.loads(path.read_text()) == json.loads((copy/path.relative_to(root)).read_text()), f"run `make notebooks` to clean {path.name}"


def test_readme_equals_its_notebook(copy):
    assert (root/"README.md").read_text() == (copy/"README.md").read_text(), "run `make readme`"


@pytest.mark.parametrize("path", notebooks, ids=lambda p: p.stem)
def test_notebook_is_stored_with_outputs(path):
    "No stored error, and most cells that a reader sees show something"
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert not [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    seen = [c for c in cells if not re.search(r"^#\|\s*(export|hide|default_exp|cuda)", "".join(c["source"]), re.M)]
    assert sum(bool(c["outputs"]) for c in seen) >= .5*len(seen)


def test_data_flows_one_way():
    "A notebook imports only from lower numbers"
    number = {}
    for path in notebooks:
        source = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        exp = next((m[1] for s in source if (m := re.search(r"#\|\s*default_exp\s+(\w+)", s))), None)
        if exp and re.match(r"\d\d_", path.name): number[exp] = (int(path.name[:2]), source)
    for name, (n, source) in number.items():
        used = {m for s in source for m in re.findall(r"^\s*(?:from|import) freerep\.(\w+)", s, re.M)}
        assert all(u == name or number[u][0] < n for u in used), f"{name} imports from a higher number: {used}"


def test_one_quarto_file():
    "The documentation build uses the top-level _quarto.yml: the one in nbs is a link to it"
    assert (root/"nbs/_quarto.yml").is_symlink() and (root/"nbs/_quarto.yml").resolve() == root/"_quarto.yml"


def test_version_stands_in_one_place():
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(root/"settings.ini")
    import freerep
    assert freerep.__version__ == ini["DEFAULT"]["version"]
    command = subprocess.run([bin_dir/"freerep", "--version"], capture_output=True, text=True, check=True)
    assert command.stdout.strip().endswith(freerep.__version__)


def test_star_import_gives_every_public_name():
    code = "from freerep import *; open_source, make_tracklets, PretrainConfig, pretrain, embed, evaluate, RetrievalExplorer"
    subprocess.run([sys.executable, "-c", code + "; assert all(map(callable, (open_source, pretrain, embed, evaluate)))"], check=True)


def test_documentation_is_processed(copy):
    "nbdev's processing step works on every notebook (the site itself needs Quarto)"
    code = ("from nbdev.quarto import refresh_quarto_yml, nbdev_sidebar; from nbdev.serve import proc_nbs; refresh_quarto_yml(); "
            "nbdev_sidebar.__wrapped__(); print(proc_nbs(n_workers=0))")
    out = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert (Path(out)/"_quarto.yml").read_text() == (root/"_quarto.yml").read_text()
    assert {p.stem for p in Path(out).rglob("*.ipynb")} >= {p.stem for p in notebooks}
