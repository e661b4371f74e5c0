# `make demo` and `make test` do all the set-up themselves; Python 3.10-3.12 and pip are all they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test notebooks readme clean

.venv/installed: settings.ini setup.py
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12) and "freerep needs Python 3.10 to 3.12; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet setuptools wheel --editable .
	SAM2_BUILD_CUDA=0 $(BIN)/pip install --quiet --no-build-isolation --editable ".[segment]"
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev,lite,segment]"
	touch $@

# both papers at work on data made by code, offline
demo: .venv/installed
	$(BIN)/freerep demo --out demo --force

# modules equal notebooks, notebooks clean, README up to date (tests/test_project.py); every notebook runs; the test suite
test: .venv/installed-dev
	$(BIN)/python -m pytest -q tests/test_project.py
	OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nbdev_test --n_workers 2 --timing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests --ignore tests/test_project.py --numprocesses 2 --dist loadfile

# after editing a notebook: export it, clean it, rebuild the README
notebooks: .venv/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" nbdev_export
	PATH="$(CURDIR)/$(BIN):$$PATH" nbdev_clean
	$(MAKE) readme

# README.md is nbs/index.ipynb; its links to notebooks start one folder higher
readme:
	$(BIN)/jupyter nbconvert --log-level ERROR --to markdown --output-dir . --output README nbs/index.ipynb \
	  --TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_input_tags=remove_input
	$(BIN)/python -c 'import pathlib, re; p = pathlib.Path("README.md"); p.write_text(re.sub(r"\]\(([\w/]+\.ipynb)\)", r"](nbs/\1)", p.read_text()))'

clean:
	rm -rf .venv demo _docs _proc
