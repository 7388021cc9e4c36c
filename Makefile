# The project's commands. Each makes `.venv` itself; none needs anything but Python 3.11, make and a network.
#   make run     train PPO on the built-in models
#   make test    run the tests, those with vLLM too
#   make vllm    install vLLM, for programs with `engine(vllm)`

VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP     = $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: run test vllm clean
.DELETE_ON_ERROR:

run: $(VENV)/installed
	$(VENV)/bin/rlflowc run programs/ppo.rlflow

test: $(VENV)/installed-test $(VENV)/installed-vllm
	$(VENV)/bin/python -P -m pytest

# An interrupted installation leaves no stamp, so the next `make` completes it.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

vllm: $(VENV)/installed-vllm

# Without a GPU the list is whole, so pip need not look further. With one (not yet run) vLLM's own choice comes first, and
# then the transformers that rlflow reads models with, which is newer than vLLM asks for.
$(VENV)/installed-vllm: constraints-vllm.txt $(VENV)/installed
ifeq ($(shell command -v nvidia-smi),)
	$(PIP) install --quiet --no-deps --requirement constraints-vllm.txt
else
	$(PIP) install --quiet vllm==0.32.0
	$(PIP) install --quiet --no-deps --constraint constraints.txt transformers
endif
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
