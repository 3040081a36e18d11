# `make` lists the targets. Everything runs in .venv, which `make setup` builds from .ci/constraints.txt.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RECIPES := recipes/g2p.toml recipes/wiki.toml
NATIVE := moert/kernels/_native.so
# Which of the tests that take minutes `make test-slow` runs.
SLOW ?= slow
# The tests of a file stay together: what they share is made once.
AT_ONCE := -n 2 --dist loadfile
# The program that tests the native kernels: with the library, or as one program with its sources.
DRIVER := build/native/driver
DRIVER_FLAGS := -std=gnu11 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wextra -Imoert/kernels/csrc
DRIVER_SOURCES := tests/native/*.c moert/kernels/csrc/*.c -lm -pthread
# The kernels with sanitizers, where nothing else looks for them; and how many damaged packs run on them.
SANITIZE := -O1 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
SANITIZED := build/native/sanitized
SANITIZED_OBJECTS := $(patsubst moert/kernels/csrc/%.c,$(SANITIZED)/%.o,$(wildcard moert/kernels/csrc/*.c))
DAMAGED := 200
# What guides the fuzzer by coverage; there is none for some systems, and then hypothesis does it.
FUZZER := $(PY) -m pip install --quiet --disable-pip-version-check --only-binary=:all: -c .ci/constraints.txt atheris || true
FUZZ_S ?= 600
# Where programs of others are that the server is tried with, and where real JSON schemas come from.
CLIENTS := build/clients
SOAK_S ?= 7200
SCHEMAS ?= https://github.com/guidance-ai/jsonschemabench
ARM_CC := aarch64-linux-gnu-gcc
FOREIGN := aarch64-macos x86_64-macos x86_64-windows-gnu aarch64-windows-gnu
ARM_PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user

# Compiled files are kept, whatever is set outside: all that is tested would else be compiled anew in each process.
export PYTHONDONTWRITEBYTECODE :=

include recipes/bench/peers.mk

.DEFAULT_GOAL := help
.PHONY: help setup native demo talk upcycle test test-slow unchanged test-clients soak test-cuda check-gpu test-anywhere test-native test-sanitize test-sanitize-python test-arm test-compile fuzz-few fuzz lint data recipes recipes-ci report bench-sweep bench-gradients bench-plans bench-answers bench-quant bench-mixed bench-hash bench-beforehand bench-sida bench-flash bench-promise bench-kernels bench-peers bench-rounding bench-stream bench-ahead bench-fill bench-edgemoe bench-drafts bench-methods bench-less bench-size bench-workers bench-large bench-many bench-serve bench-outlook bench-devices bench-fiddler peers-there peers bench-smoke keep-results tables golden-old readme wheel test-wheel sbom clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1 \2/' | \
	    while read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: $(STAMP) $(NATIVE)  ## make .venv and install everything into it (a second run installs nothing)

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; say which: make PYTHON=/path/to/python3")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[convert,report,cluster,serve,dev]'
	@touch $@

native: $(NATIVE)  ## compile the native kernels anew where their source has changed

$(NATIVE): $(wildcard moert/kernels/csrc/*) moert/kernels/build.py | $(STAMP)
	$(PY) moert/kernels/build.py

demo: setup  ## convert the g2p and wiki models at 5% loss, run them in little memory, print the table
	$(PY) -m recipes.demo

talk: setup  ## fetch a small published model, convert it at a 5% loss, and chat with it
	$(PY) calib_data/wiki.py
	$(PY) -m recipes.talk

upcycle: setup  ## make a mixture of 8 experts a layer of the model of `make talk`, in build/train/models (40 minutes, 10 GB)
	$(PY) calib_data/wiki.py --splits train calibration heldout
	$(PY) -m recipes.train.upcycle

test: lint  ## lint, types and all tests that take seconds
	$(PY) -m pytest -m "not slow" --durations=30 $(AT_ONCE)

test-slow: setup  ## the tests that take minutes, some of them only as root (it is said which; SLOW="slow and not product": some)
	$(PY) -m pytest -m "$(SLOW)" --durations=30 $(AT_ONCE)

unchanged: setup  ## record in build/unchanged what a change of structure must leave alone: answers, packs, messages
	$(PY) -m tests.unchanged record build/unchanged/$$(git rev-parse --short HEAD).json packs messages

test-clients: $(CLIENTS)/.installed  ## the server with programs of others, real schemas, and requests made up from its description (15 minutes)
	$(CLIENTS)/bin/python -m pytest -p no:randomly tests/serve/test_client_programs.py
	PYTHONPATH=.:tests $(CLIENTS)/bin/python tests/serve/schemas.py $(CLIENTS)/schemas $(SCHEMAS)

soak: setup  ## the server with 16 clients that leave, and send nonsense, for two hours (SOAK_S=7200 seconds)
	SOAK_S=$(SOAK_S) $(PY) -m pytest -s -n 0 tests/serve/test_server_soak.py

# An environment on top of .venv, so that nothing that these programs need changes what all other tests run with.
$(CLIENTS)/.installed: tests/serve/clients.txt tests/serve/clients.json | setup
	rm -rf $(CLIENTS)
	$(PY) -m venv $(CLIENTS)
	$(PY) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	    "$$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/serve/clients.txt
	cp tests/serve/clients.json $(CLIENTS)/package.json
	! command -v npm >/dev/null || npm install --prefix $(CLIENTS) --silent --no-audit --no-fund
	@touch $@

test-cuda: setup  ## the tests that need a GPU with CUDA; without one they are skipped, and say so
	$(PY) -m pytest -m cuda

check-gpu: setup  ## on a GPU, 8 minutes: test-cuda, a pack there beside the processor, and measured what bench-devices simulates
	$(PY) -m recipes.bench.card

test-anywhere: setup  ## the tests in three orders, as an ordinary user, holding 2 GB, on one core, beside others (90 minutes; PROOFS=core: one)
	$(PY) -m tests.anywhere $(PROOFS)

test-native: $(NATIVE)  ## the native library beside plain arithmetic, on each instruction set that runs here
	@mkdir -p $(dir $(DRIVER))
	$(CC) -O3 $(DRIVER_FLAGS) -o $(DRIVER) tests/native/*.c $(NATIVE) -lm -pthread
	$(DRIVER)

test-sanitize: $(SANITIZED)/_native.so  ## the same with sanitizers: addresses, undefined behaviour, threads
	$(CC) $(SANITIZE) $(DRIVER_FLAGS) -o $(DRIVER)-sanitize tests/native/*.c $(SANITIZED_OBJECTS) -lm -pthread
	$(DRIVER)-sanitize some
	$(CC) -O1 -g -fsanitize=thread $(DRIVER_FLAGS) -o $(DRIVER)-threads $(DRIVER_SOURCES)
	$(DRIVER)-threads some

test-sanitize-python: setup $(SANITIZED)/_native.so  ## sanitizers on the kernels as Python drives them: random packs, and damaged ones
	$(PY) -m tests.sanitized $(CC) $(SANITIZED)/_native.so $(DAMAGED)

$(SANITIZED)/_native.so: $(wildcard moert/kernels/csrc/*)
	$(MAKE) --no-print-directory -j 2 $(SANITIZED_OBJECTS)
	$(CC) $(SANITIZE) -shared -o $@ $(SANITIZED_OBJECTS) -lm -pthread

$(SANITIZED)/%.o: moert/kernels/csrc/%.c $(wildcard moert/kernels/csrc/*.h moert/kernels/csrc/*.inc)
	@mkdir -p $(SANITIZED)
	$(CC) $(SANITIZE) $(DRIVER_FLAGS) -fPIC -fvisibility=hidden -c -o $@ $<

test-arm:  ## the same for 64-bit ARM in an emulator, with and without dot products
	@command -v $(ARM_CC) >/dev/null && command -v qemu-aarch64 >/dev/null || \
	    { echo 'make test-arm needs $(ARM_CC) and qemu-aarch64: apt-get install $(ARM_PACKAGES)'; exit 1; }
	@mkdir -p $(dir $(DRIVER))
	$(ARM_CC) -static -O3 $(DRIVER_FLAGS) -o $(DRIVER)-arm $(DRIVER_SOURCES)
	qemu-aarch64 -cpu max $(DRIVER)-arm some
	qemu-aarch64 -cpu cortex-a72 $(DRIVER)-arm some

test-compile: setup  ## compile the kernels for macOS and Windows as far as they go; nothing of it is run
	@mkdir -p build/native/foreign
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt ziglang
	for target in $(FOREIGN); do for source in moert/kernels/csrc/*.c; do \
	    $(PY) -m ziglang cc -target $$target -std=gnu11 -O1 -fvisibility=hidden -Wall -Wextra -Werror -c $$source \
	        -o build/native/foreign/object.o || exit 1; done; done

fuzz-few: setup  ## readers of files from strangers on the same few inputs that were changed at random (two minutes)
	$(FUZZER)
	$(PY) -m tests.fuzz.run

fuzz: setup  ## the same with other inputs each time, for as long as one likes (FUZZ_S=600 seconds in all, FUZZ=manifest)
	$(FUZZER)
	$(PY) -m tests.fuzz.run --seconds $(FUZZ_S) $(FUZZ)

lint: setup  ## ruff (rules and format) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

data: setup  ## build the calibration sets from their public sources, where they are not there
	$(PY) calib_data/g2p.py
	$(PY) calib_data/wiki.py
	$(PY) calib_data/marks.py

recipes: data  ## convert every recipe and check what must come out
	$(VENV)/bin/moeconv recipe run $(RECIPES) recipes/marks.toml recipes/wikids.toml --allow-code

recipes-ci: data  ## the same for the recipes that continuous integration runs
	$(VENV)/bin/moeconv recipe run $(RECIPES)

report: setup  ## baselines and routing of the reference models, and a demo of those that `make demo` leaves out
	$(PY) calib_data/g2p.py --splits train calibration heldout
	$(PY) calib_data/wiki.py --splits train calibration heldout
	$(PY) calib_data/marks.py --splits train calibration heldout
	$(PY) -m recipes.train.baselines g2p
	$(PY) -m recipes.train.baselines wiki
	$(PY) -m recipes.train.baselines marks
	$(PY) -m recipes.train.baselines wikids
	$(PY) -m recipes.train.routing g2p
	$(PY) -m recipes.train.routing wiki
	$(PY) -m recipes.train.routing marks
	$(PY) -m recipes.train.routing wikids
	$(PY) -m recipes.train.activity g2p
	$(PY) -m recipes.train.activity marks
	$(PY) -m recipes.train.activity marks_sparse
	$(PY) -m recipes.train.activity opt
	$(PY) -m recipes.train.report
	$(PY) -m recipes.demo marks wikids --name references

bench-sweep: data  ## the exact sweep beside full evaluations: the same result, at what share of the cost
	$(PY) -m recipes.bench.sweep

bench-gradients: data  ## the sweep by gradients beside the exact one, and the plans that come of both
	$(PY) -m recipes.bench.gradients

bench-plans: data  ## plans by the sweep beside plans by usage, at random and by MC-MoE, of as many bytes (10 minutes)
	$(PY) -m recipes.bench.plans

bench-answers: data  ## what models write with all experts at 1 to 3 bits, by the quantizer (10 minutes)
	$(PY) -m recipes.bench.answers

bench-quant: data $(PEERS_DIR)/.built  ## our quantizers beside HQQ, llama.cpp's and AutoRound at equal effective bits (two hours)
	$(PY) -m recipes.bench.quant
	$(PY) -m recipes.bench.quant smollm2

bench-mixed: data  ## attention, or all outside the experts, at some bits by experts at others: size and perplexity
	$(PY) -m recipes.bench.mixed

bench-hash: data build/demo/summary.json build/references/summary.json  ## knowing the experts beforehand: hits, recall, eviction, speed on imitated drives (half an hour)
	$(PY) -m recipes.bench.hashed

bench-beforehand: data build/demo/summary.json  ## working on the next batch while one runs, beside not doing so (10 minutes, and 10 of training)
	$(PY) -m recipes.bench.beforehand

bench-sida: data build/demo/summary.json build/references/summary.json  ## SiDA's set-up as a whole and its observations, Mixtral-offloading's ablation at real size (12 minutes, and as many of training and packs)
	$(PY) -m recipes.bench.sida

bench-flash: data build/demo/summary.json  ## single neurons in place of whole experts: bytes, speed on imitated drives, curves (40 minutes, 4 GB)
	$(PY) -m recipes.bench.flash

bench-promise: data  ## whole conversions over 20 random splits: how often the held-out loss met the target
	$(PY) -m recipes.bench.promise

bench-kernels: setup $(PEERS_DIR)/kernels/.built  ## the native kernels beside the bandwidth of memory, torch and onnxruntime
	$(PY) -m recipes.bench.kernels

bench-peers: setup $(PEERS_DIR)/llama/.built build/demo/summary.json  ## the runtime beside llama.cpp and transformers
	$(PY) -m recipes.bench.speed

bench-rounding: data build/demo/summary.json  ## what the runtime's 8-bit activations add to a pack's loss
	$(PY) -m recipes.bench.rounding

bench-stream: setup $(PEERS_DIR)/llama/.built build/demo/summary.json  ## small devices, imitated: the runtime beside the paper's baselines and llama.cpp
	$(PY) -m recipes.bench.stream

bench-ahead: setup build/demo/summary.json  ## reading ahead beside not doing so, and LRU over two bits, on imitated drives (5 minutes)
	$(PY) -m recipes.bench.ahead

bench-fill: data build/demo/summary.json  ## the expert cache filled before the first request beside an empty one, on imitated drives (4 minutes)
	$(PY) -m recipes.bench.fill

bench-methods: setup build/demo/summary.json  ## methods of the five papers beside each other, one model and one imitated drive (6 minutes)
	$(PY) -m recipes.bench.methods

bench-edgemoe: data build/demo/summary.json  ## EdgeMoE's own algorithm, baselines, targets and reading ahead, beside ours (15 minutes)
	$(PY) -m recipes.bench.edgemoe

bench-drafts: setup build/demo/summary.json  ## drafts of answers, on text that repeats itself and on text that does not
	$(PY) -m recipes.bench.drafts

bench-less: data $(PEERS_DIR)/llama/.built build/demo/summary.json build/references/summary.json  ## routing that prefers what was used lately, beside exact routing
	$(PY) -m recipes.bench.less

bench-size: data  ## conversions of models of published sizes in little memory, beside what disk and cores allow (an hour, 40 GB)
	$(PY) -m recipes.bench.size

bench-workers: data  ## a conversion with two Ray workers beside one (half an hour, 2 GB)
	$(PY) -m recipes.bench.workers

bench-large: setup $(PEERS_DIR)/llama/.built build/demo/summary.json  ## whole models of published sizes in little memory, beside llama.cpp (an hour, 30 GB)
	$(PY) -m recipes.bench.large

bench-many: setup  ## packs of thousands of experts until the first token
	$(PY) -m recipes.bench.many

bench-serve: setup build/demo/summary.json  ## the server beside the engine itself: speed, many clients, long conversations, memory
	$(PY) -m recipes.bench.serve

bench-outlook: setup  ## what `moeconv plan` expects of a model's speed, beside what was measured
	$(PY) -m recipes.bench.outlook

bench-devices: data build/demo/summary.json  ## experts on a simulated card, in memory and on a drive, beside one of them alone
	$(PY) -m recipes.bench.cards

bench-fiddler: data build/demo/summary.json  ## figures of Fiddler's paper on the same cards, and its latency model beside this processor (3 minutes)
	$(PY) -m recipes.bench.fiddler

peers-there: setup  ## are there cmake, a compiler and a package index, which what benches compare with is made with?
	command -v cmake
	command -v c++
	$(PY) -m pip download --quiet --no-deps --no-cache-dir --dest $(PEERS_DIR) termcolor

# What smoke runs compare with; none: `make bench-smoke PEERS=`.
PEERS ?= $(PEERS_DIR)/.built $(PEERS_DIR)/kernels/.built $(PEERS_DIR)/llama/.environment

peers: setup $(PEERS)  ## make what benches compare with (of llama.cpp the environment)

bench-smoke: data $(PEERS)  ## every bench on very little, to see that it runs with its peers (llama.cpp if it is built)
	$(PY) -m recipes.bench.smoke $(SMOKE)

keep-results: setup  ## keep build/bench/*.json of a clean commit in docs/results, where tables come from
	$(PY) -m recipes.bench.kept

tables: setup  ## write the tables of README.md and docs/, and the picture, anew from docs/results
	$(PY) -m recipes.bench.blocks

golden-old: setup  ## run tiny models in transformers 4.57.6, in a place of its own, and keep what it gives in tests/golden
	$(PY) -m pip install --quiet --disable-pip-version-check --target build/transformers-4.57.6 transformers==4.57.6
	$(PY) tests/golden/transformers_4_57.py checkpoints build/transformers-4.57.6.checkpoints
	PYTHONPATH=build/transformers-4.57.6 $(PY) tests/golden/transformers_4_57.py outputs build/transformers-4.57.6.checkpoints

readme: setup  ## write docs/python.md, help of docs/commands.md, families of docs/models.md, keys of docs/recipes.md, docs/tune.md, docs/troubleshooting.md anew
	$(PY) tests/rules/readme_help.py --write
	$(PY) tests/rules/architecture_text.py --write
	$(PY) tests/rules/models_text.py --write
	$(PY) tests/rules/python_text.py --write
	$(PY) tests/rules/recipes_text.py --write
	$(PY) tests/rules/tune_text.py --write
	$(PY) tests/rules/troubleshooting_text.py --write

wheel: setup  ## the sdist and a wheel for x86-64 and one for 64-bit ARM, each with all instruction sets inside, in dist/
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt build ziglang
	CC="$(CURDIR)/$(PY) -m ziglang cc -target x86_64-linux-gnu.2.17" \
	    $(PY) -m build --outdir dist -C--build-option=--plat-name=manylinux2014_x86_64
	CC="$(CURDIR)/$(PY) -m ziglang cc -target aarch64-linux-gnu.2.17" \
	    $(PY) -m build --outdir dist -C--build-option=--plat-name=manylinux2014_aarch64

test-wheel: wheel  ## install each wheel into a clean environment and run a pack there without a compiler (ARM in an emulator)
	$(PY) -m tests.wheels dist

sbom: wheel  ## beside each wheel what it needs to run, with versions and hashes, as CycloneDX
	$(PY) -m tests.sbom dist

clean:  ## remove build outputs and caches (not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)
