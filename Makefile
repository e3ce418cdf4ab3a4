# make demo     sets everything up and runs the main job on embedded data
# make test     sets everything up and runs the tests
# make check    formatter, linter, type checker and tests: what a change must pass
# make wheel    builds an sdist and a wheel, installs the wheel in an empty environment, and runs the demo there
# make wheels   builds wheels with compiled kernels for Linux and macOS, and runs the one for this machine without a compiler
# make lowest   runs the tests with the oldest versions of all packages that pyproject.toml allows
# make hosts    sets up an environment with timm, transformers, Lightning and others, prunes their models, and runs their trainers
# make arm      installs a cross-compiler and an emulator for ARM if it can, and runs the ARM kernels in it
# make executorch  runs the example for ExecuTorch in an environment of its own
# make docs     builds the documentation site into build/site; python3 -m http.server -d build/site shows it, with search
# make coverage  line and branch coverage of every package (about twice as long as the tests)
#
# JOBS is how many processes run the tests. TORCH picks the PyTorch to install (make demo TORCH='torch==2.11.0'); leave it empty to use the one your Python already has.

PYTHON ?= python3
VENV   ?= .venv
HOSTS  ?= .venv-hosts
EXECUTORCH ?= .venv-executorch
TORCH  ?= torch==2.13.0
JOBS   ?= 2
BIN    := $(VENV)/bin
RUN    := OMP_NUM_THREADS=1 $(BIN)/python -m

.PHONY: demo test check lint lowest hosts arm executorch docs coverage wheel wheels clean

demo: $(VENV)/.demo
	$(BIN)/smartprune train

test: $(VENV)/.ready
	$(RUN) pytest -n $(JOBS) --dist loadfile

check: lint test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests bench examples records .ci docs/*.py
	$(BIN)/ruff check src tests bench examples records .ci docs/*.py
	$(BIN)/mypy

hosts: $(HOSTS)/.ready
	OMP_NUM_THREADS=1 $(HOSTS)/bin/python -m pytest tests/hosts tests/integrations -n $(JOBS) --dist loadgroup

arm: $(VENV)/.ready
	.ci/arm_tools
	$(RUN) pytest tests/runtime/cpu/test_arm.py -rs

executorch: $(EXECUTORCH)/.ready
	OMP_NUM_THREADS=1 $(EXECUTORCH)/bin/python examples/to_executorch.py

lowest: $(VENV)/.lowest
	OMP_NUM_THREADS=1 $(VENV)/lowest/bin/python -m pytest -n $(JOBS) --dist loadfile

coverage: $(VENV)/.dev
	$(RUN) pytest -n $(JOBS) --dist loadfile --cov --cov-report=json:$(VENV)/coverage.json --cov-report=
	$(BIN)/python .ci/coverage.py $(VENV)/coverage.json

docs: $(VENV)/docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet

wheel: $(VENV)/.dev
	rm -rf dist $(VENV)/wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip install --disable-pip-version-check $(if $(TORCH),'$(TORCH)') "$$(ls dist/*.whl)[demo]"
	cd $(VENV)/wheel && bin/smartprune train --out demo

wheels: $(VENV)/.dev
	rm -rf dist $(VENV)/wheel
	.ci/arm_tools
	$(BIN)/python -m pip install --disable-pip-version-check ziglang==0.17.0
	$(BIN)/python -m build
	$(BIN)/python .ci/wheels.py dist/*-none-any.whl
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip install --disable-pip-version-check $(if $(TORCH),'$(TORCH)') --find-links dist --only-binary smartprune "$$(ls dist/*linux*_$$(uname -m).whl)"
	env -i HOME="$(abspath $(VENV)/wheel)" PATH="$(abspath $(VENV)/wheel/bin)" $(VENV)/wheel/bin/python .ci/without_compiler.py

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH),'$(TORCH)') -e '.[demo]'
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH),'$(TORCH)') -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.lowest: pyproject.toml .ci/lowest.py
	$(PYTHON) -m venv $(VENV)/lowest
	$(PYTHON) .ci/lowest.py > $(VENV)/lowest/constraints.txt
	$(VENV)/lowest/bin/python -m pip install --disable-pip-version-check $(if $(TORCH),'$(TORCH)') -c $(VENV)/lowest/constraints.txt -e '.[test]'
	touch $@

# The version of PyTorch is a constraint, so that no package replaces it. ultralytics is under the AGPL-3.0: it is installed in this
# environment only, and smartprune does not depend on it. Its dependencies would add much that building a model does not need.
$(HOSTS)/.ready: pyproject.toml tests/hosts/requirements.txt
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(HOSTS)
	$(if $(TORCH),$(HOSTS)/bin/python -m pip install --disable-pip-version-check '$(TORCH)' numpy)
	$(HOSTS)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(HOSTS)/torch.txt
	$(HOSTS)/bin/python -m pip install --disable-pip-version-check -c $(HOSTS)/torch.txt -e . -r tests/hosts/requirements.txt
	$(HOSTS)/bin/python -m pip install --disable-pip-version-check --no-deps ultralytics==8.4.190
	$(HOSTS)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" | diff $(HOSTS)/torch.txt -
	touch $@

# Its own environment, because executorch installs much that smartprune does not need. The version of PyTorch is a constraint, as above.
$(EXECUTORCH)/.ready: pyproject.toml
	$(PYTHON) -m venv $(EXECUTORCH)
	$(if $(TORCH),$(EXECUTORCH)/bin/python -m pip install --disable-pip-version-check '$(TORCH)' numpy)
	$(EXECUTORCH)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(EXECUTORCH)/torch.txt
	$(EXECUTORCH)/bin/python -m pip install --disable-pip-version-check -c $(EXECUTORCH)/torch.txt -e '.[digits]' executorch==1.5.1
	touch $@

$(VENV)/docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --disable-pip-version-check -r docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(HOSTS) $(EXECUTORCH) build dist
