PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/ready-for-demo
READY := $(VENV)/ready
OLDEST := .venv-oldest
NEWEST := .venv-newest
PACKAGING := .venv-packaging
FROM_WHEEL := .venv-wheel
# The least that pyproject.toml admits. Triton's interpreter of that time takes arrays of one element for integers, which
# numpy 2.4 refuses.
OLDEST_RELEASES := "torch==2.9.*" "transformers==5.17.*" "peft==0.18.*" "numpy<2.4"

# Environments share the kernels for CPUs: their libraries do not depend on Python.
BUILT_FROM := pyproject.toml setup.py $(wildcard hf_liere/kernels/*.cpp hf_liere/kernels/*.h)

# One thread per process: tests and demo run two processes side by side, and small matrices gain nothing from more.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: check-wheel datasets demo dist docs evidence extras gpu kernels-folder lint test test-all test-slow test-oldest test-newest wheels release-check space format clean

demo: $(DEMO)
	$(BIN)/python training/demo.py

# Warnings are errors: links and anchors that lead nowhere, names that do not exist. No network is used.
docs: $(READY)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build
	@echo "The site is docs/_build/index.html."

# With ON=python3 that Python runs it with the libraries that it has: nothing is installed, and no network is needed.
gpu: $(if $(ON),,$(READY))
	$(or $(ON),$(BIN)/python) training/evidence/gpu_check.py --minutes 10

# Arrows, pointers and poses with fixed splits. Uploading them is their owner's act.
datasets: $(READY)
	rm -rf outputs/datasets
	$(BIN)/python training/evidence/write_datasets.py outputs/datasets

# A Space with the page of training/app.py, started as it would be there. CHECKPOINTS are folders or names on the Hub; without
# them it has the stored models and, if it was run, those of `make demo`.
space: $(READY)
	rm -rf outputs/space
	$(BIN)/python training/app.py $(if $(CHECKPOINTS),--checkpoints $(CHECKPOINTS)) --write_space outputs/space
	$(BIN)/python outputs/space/app.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --durations 25 --durations-min 2

# The laboratory: when it changed, and each night.
evidence: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal training/evidence/tests

extras: WITH_EXTRAS := ".[test,deepspeed,quantization]"
extras: $(READY)
	$(call install,$(VENV),$(WITH_EXTRAS))
	HF_LIERE_BUILD_KERNELS=all $(call compile,$(VENV))

test-slow: extras
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

test-all: lint extras
	$(BIN)/python -m pytest -n 2 --dist worksteal tests training/evidence/tests
	$(MAKE) test-oldest test-newest

test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow or common"

test-newest:
	$(if $(NEWER_PYTHON),$(MAKE) $(NEWEST)/ready,@echo "Skipped: no Python newer than $(PYTHON) to test the newest releases on, looked for: $(NEWER).")
	$(if $(NEWER_PYTHON),$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow or common")

# The source distribution, and the wheel of this machine's system, built from it. The kernels do not depend on Python: one
# wheel serves all versions.
dist: $(PACKAGING)/ready
	rm -rf dist
	$(PACKAGING)/bin/python -m build
	$(PACKAGING)/bin/wheel tags --remove --python-tag py3 --abi-tag none dist/*.whl
	$(if $(filter Linux,$(shell uname)),PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl)
	rm -f dist/*-linux_*.whl
	$(PACKAGING)/bin/twine check --strict dist/*

# The wheel that `make dist` wrote, in an environment with its requirements alone and without a compiler on the path.
check-wheel:
	rm -rf $(FROM_WHEEL)
	$(PYTHON) -m venv $(FROM_WHEEL)
	$(FROM_WHEEL)/bin/pip install --quiet dist/*.whl
	PATH="$(CURDIR)/$(FROM_WHEEL)/bin" $(FROM_WHEEL)/bin/python .ci/check_wheel.py

# As `make dist` and `make check-wheel`, by cibuildwheel: on Linux in a container, whose old system the wheel then needs.
wheels: $(PACKAGING)/ready
	rm -rf dist
	$(PACKAGING)/bin/python -m build --sdist
	$(PACKAGING)/bin/cibuildwheel --output-dir dist
	$(PACKAGING)/bin/twine check --strict dist/*

# For Hugging Face's `kernels`: CONTRIBUTING.md has what its owner publishes, and how.
kernels-folder: $(READY)
	rm -rf outputs/kernels
	HF_LIERE_BUILD_KERNELS=all $(call compile,$(VENV))
	$(BIN)/python .kernels/write.py outputs/kernels

# TAG is the tag of the release, such as v0.1.0.
release-check:
	$(PYTHON) .ci/check_release.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(PACKAGING) $(FROM_WHEEL) docs/_build outputs build dist *.egg-info hf_liere/kernels/*.so

# Pythons of the versions $(1), the first that runs: of the path, where pyenv puts names that run nothing, or of pyenv.
define python_of
$(shell for version in $(1); do for python in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python; do \
	if $$python -c "import ssl, venv" > /dev/null 2>&1; then echo $$python; exit; fi; done; done)
endef
OLD_PYTHON = $(call python_of,3.10)
NEWER = $(shell $(PYTHON) -c "import sys; print(*(f'3.{minor}' for minor in range(14, sys.version_info.minor, -1)))")
NEWER_PYTHON = $(call python_of,$(NEWER))

# Of each library most modules are never imported: Python compiles the others when they are. $(2) names the package and
# extras in the environment $(1).
install = HF_LIERE_BUILD_KERNELS=none $(1)/bin/pip install --quiet --no-compile --editable $(2)

# The kernels that setup.py chooses, by the Python of the environment $(1).
compile = PYTHONPATH=build/setuptools $(1)/bin/python setup.py --quiet build_ext --inplace --build-lib build/kernels \
	--build-temp build/kernels

# The environment in folder $(1), of the Python $(2), for the extra $(3), with the releases $(4) or the newest ones. The
# kernels are compiled while pip installs what the package needs.
define environment
	$(2) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade pip
	$(1)/bin/pip install --quiet --upgrade --target build/setuptools "setuptools>=77"
	@echo "Installing what the package needs takes some minutes."
	$(call compile,$(1)) & compiling=$$!; $(call install,$(1),".[$(3)]" $(4)) && wait $$compiling
	touch $@
endef

$(DEMO): $(BUILT_FROM)
	$(call environment,$(VENV),$(PYTHON),train)

$(READY): $(DEMO)
	$(call install,$(VENV),".[test]")
	touch $@

$(OLDEST)/ready: $(BUILT_FROM)
	$(if $(OLD_PYTHON),,@echo "No Python 3.10 was found: the oldest releases are tested on $(PYTHON).")
	$(call environment,$(OLDEST),$(or $(OLD_PYTHON),$(PYTHON)),test,$(OLDEST_RELEASES))

$(NEWEST)/ready: $(BUILT_FROM)
	$(call environment,$(NEWEST),$(NEWER_PYTHON),test)

$(PACKAGING)/ready: pyproject.toml
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/pip install --quiet --upgrade pip
	$(PACKAGING)/bin/pip install --quiet --group packaging
	touch $@
