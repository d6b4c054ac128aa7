# make demo: set up and generate text from the shipped checkpoint.   make test: set up and pass the tests.
PYTHON ?= python3
# A CPU build of PyTorch is enough for both; on a GPU machine set TORCH to the build you want, or use your own
# environment: everything also runs uninstalled, as PYTHONPATH=. python3 -m dsv4 ...
TORCH ?= torch==2.13.0
VENV := .venv

.PHONY: demo test lint clean

# One thread: the model is so small that threads mostly wait for each other, above all on a busy machine.
demo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/dsv4 generate --model examples/tiny --max-new-tokens 96 --temperature 0.7 --seed 7 \
		--prompt "The purpose of this function is to"

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Torch first and by itself: a range would pull a newer build with gigabytes of CUDA libraries.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
