VENV ?= .venv
# the releases CI runs with; `make TORCH=torch test` takes the newest
TORCH ?= torch==2.14.1 torchvision==0.29.1
PYTHON := $(VENV)/bin/python

.PHONY: demo test test-clients
.NOTPARALLEL:

$(PYTHON):
	python3 -m venv $(VENV)

$(VENV)/.clients $(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml | $(PYTHON)
	$(PYTHON) -m pip install --quiet $(TORCH)
	$(PYTHON) -m pip install --quiet --editable ".[$*]"
	touch $@

demo: $(VENV)/.demo
	$(PYTHON) examples/demo.py

test: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)
	$(PYTHON) -m pytest --numprocesses auto --dist loadfile

test-clients: $(VENV)/.clients
	$(PYTHON) -m pytest --numprocesses auto --dist loadfile tests/clients
