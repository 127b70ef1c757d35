PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0

# One thread per process: tests and demo run two processes side by side, and small matrices gain nothing from more.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all format clean

demo: $(READY)
	$(BIN)/python training/demo.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(READY) $(OLDEST)/ready
	$(BIN)/pip install --quiet --editable ".[test,deepspeed,quantization]"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) outputs build dist *.egg-info

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

# The oldest supported transformers on top of everything else in the first environment.
$(OLDEST)/ready: $(READY)
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		"$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	$(OLDEST)/bin/pip install --quiet "transformers==$(OLDEST_TRANSFORMERS)"
	$(OLDEST)/bin/pip install --quiet --no-deps --editable .
	touch $@
