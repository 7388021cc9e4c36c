# The project's two commands. Both make `.venv` themselves; neither needs anything but Python 3.11, make and a network.
#   make run     train PPO on the built-in models
#   make test    run the tests

VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP     = $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: run test clean
.DELETE_ON_ERROR:

run: $(VENV)/installed
	$(VENV)/bin/rlflowc run programs/ppo.rlflow

test: $(VENV)/installed-test
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

clean:
	rm -rf $(VENV) build *.egg-info
