# Everything a developer does, from a fresh clone: `make help` lists it. What is missing is installed first, and said:
# Debian packages by .ci/system_packages.py, Python packages into .venv/torch. Safe with -j; a second run rebuilds
# only what changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
ifneq ($(shell [[ "$$PWD" == *[[:space:]\(\)\&\;\'\"]* ]] && echo unquoted),)
$(error make needs a path without spaces, parentheses, quotes, & and ;: move this folder, or use pip install)
endif

PYTHON ?= python3
JOBS ?= $(shell nproc)
# Tests wait for each other's ranks and for time limits as often as they compute.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)
VENV := .venv/torch
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(PY) $(PIP_INSTALL)
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -S .
# One build folder per Python version: objects of the core, libperseus.so, the extension and the C++ tests.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BUILD := build/cp$(subst .,,$(VERSION))
ifneq ($(wildcard $(VENV)/lib),)
ifeq ($(wildcard $(VENV)/lib/python$(VERSION)),)
$(error $(VENV) has another Python than $(PYTHON) ($(VERSION)): remove .venv and build, or use a clone of its own for each version)
endif
endif
# The longest first, so that none is left for the end.
TEST_DIRS := $(wildcard test/parallel test/faults test/hosts test/python test/gpu)
CXX_FILES := find common frameworks test benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu'
# What one run of `make test` does with the newest PyTorch instead of the oldest.
NEWEST_ALONE := test/gpu/test_torch_gpu.py test/python/test_rendezvous_torch.py test/parallel/test_ddp_examples.py
# By pytest's marks, which pyproject.toml explains.
SELECTED := $(if $(PERSEUS_TEST_FULL),,not full)
# As many processes as there are cores; a file's tests stay together (test/conftest.py), in the order of their folders.
PYTEST := -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --durations=10 -m "$(SELECTED)"
# Runs a command in a session of its own, in the time that no other wants: among its session's processes by its policy,
# and among sessions, which Linux serves alike on many machines, by their weight.
IDLE := setsid bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; \
                        exec $(shell chrt --idle 0 true 2>/dev/null && echo chrt --idle 0) "$$@"' idle
# ThreadSanitizer cannot place its shadow under some kernels' address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)
export PATH := $(abspath $(BIN)):$(PATH)
export PERSEUS_BUILD_DIR := $(abspath $(BUILD))
# Most modules of large packages are never imported; Python compiles those that are, and has to keep them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: accuracy help build build-asan build-tsan build-caffe build-meanwhile demo demo-tensorflow demo-mxnet demo-caffe test test-quick test-all test-core test-asan test-tsan \
        test-torch test-gpu test-torch-versions test-tensorflow test-mxnet test-frameworks test-caffe check-aarch64 lint format ptx docs bench clean \
        soak fuzz check-locks environments packages-build packages-fuzz packages-test packages-caffe packages-aarch64 packages-locks

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/make \1|\2/p' Makefile | column -t -s '|'

# ---- what everything stands on ----------------------------------------------------------------------------------

packages-build:
	@$(PYTHON) .ci/system_packages.py build

packages-test: packages-build
	@$(PYTHON) .ci/system_packages.py test

packages-caffe: packages-build
	@$(PYTHON) .ci/system_packages.py caffe

packages-locks: packages-build
	@$(PYTHON) .ci/system_packages.py locks

packages-fuzz: packages-build
	@$(PYTHON) .ci/system_packages.py locks fuzz

packages-aarch64: packages-test
	@$(PYTHON) .ci/system_packages.py aarch64

# Compilers come first: they have the cores while pip waits for PyTorch.
$(VENV)/.build: .ci/requirements-build.txt | packages-build
	@echo "making $(VENV) and installing into it: $<"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r $<
	@touch $@

$(VENV)/.torch: $(VENV)/.build
	@echo "installing into $(VENV): torch 2.13.0"
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.demo: .ci/requirements-demo.txt $(VENV)/.torch
	@echo "installing into $(VENV): $<"
	$(PIP) -r $<
	@touch $@

$(VENV)/.test: .ci/requirements-test.txt .ci/requirements-pytest.txt $(VENV)/.demo
	@echo "installing into $(VENV): $<"
	$(PIP) -r $<
	@touch $@

# Two MPIs do not share an environment.
.venv/mpich/.ready: | packages-build
	@echo "making .venv/mpich and installing mpich 5.0.2 and mpi4py 4.1.2 into it"
	$(PYTHON) -m venv .venv/mpich
	.venv/mpich/bin/python $(PIP_INSTALL) mpich==5.0.2 mpi4py==4.1.2
	@touch $@

# Nothing is built for these: their environments use the package, and the libraries in it, where they are. METADATA has
# its entry points. PyTorch's take 5 to 7 GB each: its wheels bring the libraries of CUDA.
OTHERS := tensorflow tensorflow-2.15 mxnet frameworks torch-2.15 torch-2.14 torch-2.12 torch-2.10
METADATA := build/metadata
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(OTHERS:%=.venv/%/.ready): .venv/%/.ready: .ci/requirements-%.txt .ci/requirements-pytest.txt | packages-build
	@echo "making .venv/$* and installing into it: $<"
	$(PYTHON) -m venv .venv/$*
	printf '%s\n' "$(CURDIR)" "$(abspath $(METADATA))" $(BELOW) > "$$(.venv/$*/bin/python $(PURELIB))/perseus.pth"
	.venv/$*/bin/python $(PIP_INSTALL) -r $<
	@touch $@
# What they lack and $(VENV) has is used where it is, but for mpi4py, which would not find its MPI.
UPON := .venv/frameworks/.ready .venv/torch-2.15/.ready .venv/torch-2.14/.ready
$(UPON): BELOW = "$$($(PY) $(PURELIB))" 'import sys; sys.modules["mpi4py"] = None'
$(UPON): | $(VENV)/.test
.venv/torch-2.12/.ready .venv/torch-2.10/.ready: .ci/requirements-demo.txt

$(BUILD)/build.ninja: $(VENV)/.build
	$(CMAKE) -B $(BUILD) -DPERSEUS_PYTHON=ON -DPython_EXECUTABLE=$(abspath $(PY)) >/dev/null
	@touch $@

# An editable install: Python modules are used where they are, the libraries are made in perseus/.
$(VENV)/.perseus: setup.py pyproject.toml CMakeLists.txt $(VENV)/.build | $(BUILD)/build.ninja
	$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target perseus _core perseus_tensorflow perseus_mxnet perseus_caffe
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(METADATA): $(VENV)/.perseus
	@rm -rf $@ && mkdir -p $@
	@cp -r $(VENV)/lib/python3*/site-packages/perseus_training-*.dist-info $@

# ---- what people ask for ------------------------------------------------------------------------------------------

build: $(VENV)/.perseus $(VENV)/.torch  ## the package, built and installed into .venv/torch (editable)
	@$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target perseus _core perseus_tensorflow perseus_mxnet perseus_caffe

demo: build $(VENV)/.demo  ## train a small CNN on 2 ranks and draw its loss curve
	mkdir -p build/demo
	perseusrun -np 2 python examples/pytorch_mnist.py --plot build/demo/loss.png

demo-tensorflow: build .venv/tensorflow/.ready  ## the same with Keras on TensorFlow
	.venv/tensorflow/bin/python -m perseus.run -np 2 .venv/tensorflow/bin/python examples/tensorflow_keras_mnist.py

demo-mxnet: build .venv/mxnet/.ready  ## the same with gluon on MXNet
	.venv/mxnet/bin/python -m perseus.run -np 2 .venv/mxnet/bin/python examples/mxnet_mnist.py

demo-caffe: build-caffe $(VENV)/.demo  ## the same with Caffe, which is built first, in build/caffe
	$(PY) examples/caffe_mnist.py build/demo/caffe
	cd build/demo/caffe && perseusrun -np 2 $(abspath build/caffe/build/tools/caffe) train --solver lenet_solver.prototxt

# One after the other: they would disturb each other's timings. The tests of Python wait as often as they compute, and
# what they leave idle compiles what comes after them, in a session of its own, so that it ends with this one. pytest's
# summary comes last.
MEANWHILE := build/meanwhile.log
test:  ## everything: checks, C++ tests plain and under sanitizers, Python tests
	@$(MAKE) --no-print-directory -j $(TEST_JOBS) build environments packages-test packages-caffe check-locks
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test-core
	@$(IDLE) $(MAKE) --no-print-directory build-meanwhile >$(MEANWHILE) 2>&1 </dev/null & \
	trap "kill -- -$$! 2>/dev/null || true" EXIT; \
	for part in torch torch-versions tensorflow; do $(MAKE) --no-print-directory test-$$part; done; \
	wait $$! || { tail -n 100 $(MEANWHILE); exit 1; }
	@$(MAKE) --no-print-directory test-asan
	@$(MAKE) --no-print-directory test-tsan
	@$(MAKE) --no-print-directory test-mxnet
	@$(MAKE) --no-print-directory test-frameworks
	@$(MAKE) --no-print-directory test-caffe

# Without $(BUILD), which the tests use at the same time.
build-meanwhile: build-asan build-tsan
	$(PY) .ci/caffe.py build/caffe

test-quick:  ## in five minutes: checks, C++ tests, and the Python tests that start no processes of their own
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory check-locks
	@$(MAKE) --no-print-directory test-core
	@$(MAKE) --no-print-directory test-torch SELECTED="not full and not slow"

test-all: export PERSEUS_TEST_FULL := 1
test-all:  ## the same with full grids instead of their pairwise-covering part, and more versions of frameworks
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory check-aarch64

check-locks: packages-locks  ## whether the core holds the locks that its annotations ask for; needs clang
	$(PYTHON) .ci/check_locks.py

test-core: packages-test $(BUILD)/build.ninja  ## the C++ tests
	@$(BIN)/cmake -DPERSEUS_TESTS=ON $(BUILD) >/dev/null
	$(BIN)/cmake --build $(BUILD) -j $(JOBS)
	$(BIN)/ctest -j $(TEST_JOBS) --test-dir $(BUILD) --output-on-failure

build-asan: SANITIZERS := address,undefined
build-tsan: SANITIZERS := thread
build-asan build-tsan: build-%: packages-test $(VENV)/.build
	@$(CMAKE) -B build/$* -DPERSEUS_TESTS=ON -DPERSEUS_SANITIZE=$(SANITIZERS) >/dev/null
	$(BIN)/cmake --build build/$* -j $(JOBS) --target perseus_tests

test-asan: build-asan  ## the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/ctest -j $(TEST_JOBS) --test-dir build/asan --output-on-failure

test-tsan: build-tsan  ## the C++ tests with ThreadSanitizer
	$(NO_ASLR) $(BIN)/ctest -j $(TEST_JOBS) --test-dir build/tsan --output-on-failure

# Of Python's headers this machine's serve: they differ in names only, and Debian's are in a folder of their machine's name.
AARCH64_TESTS := kernels_test codec_kernels_test gradient_kernels_test half_test codec_test codec_formats_test crc32c_test lossless_test \
                 ring_test collectives_test groups_test tcp_test
check-aarch64: packages-aarch64 $(VENV)/.build  ## compile everything for aarch64, run some C++ tests under qemu
	@$(CMAKE) -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=.ci/aarch64.cmake -DPERSEUS_TESTS=ON -DPERSEUS_PYTHON=ON \
	  -DPERSEUS_PACKAGE_DIR=$(abspath build/aarch64/perseus) -DPython_EXECUTABLE=$(abspath $(PY)) \
	  -DPython_INCLUDE_DIR=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))') >/dev/null
	@mkdir -p build/aarch64/headers
	@ln -sfn /usr/include/$$(uname -m)-linux-gnu build/aarch64/headers/aarch64-linux-gnu
	CPLUS_INCLUDE_PATH=$(abspath build/aarch64/headers) $(BIN)/cmake --build build/aarch64 -j $(JOBS) \
	  --target perseus _core perseus_tensorflow perseus_mxnet perseus_caffe $(AARCH64_TESTS)
	env -u PERSEUS_TEST_FULL $(BIN)/ctest -j $(JOBS) --test-dir build/aarch64 --output-on-failure \
	  -R "^($$(tr ' ' '|' <<<'$(strip $(AARCH64_TESTS))'))$$"

test-torch: build packages-test $(VENV)/.test .venv/mpich/.ready  ## the Python tests, with PyTorch
	$(PY) $(PYTEST) $(if $(PERSEUS_TEST_FULL),,$(NEWEST_ALONE:%=--ignore=%)) $(TEST_DIRS) </dev/null

# On a machine with a GPU, and with a PyTorch that sees it as GPU_PYTHON. The package and its tests must be built.
GPU_PYTHON ?= $(PYTHON)
test-gpu:  ## what needs a GPU; GPU_PYTHON=… names the Python whose PyTorch sees it
	$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available(), "PyTorch sees no GPU"'
	PYTHONPATH=$(CURDIR):$(CURDIR)/test $(GPU_PYTHON) -m pytest test/gpu </dev/null

# What runs PyTorch: everything but the launchers, the core and the tools, which know nothing of its version. Of whole
# programs and trainings, those that depend on it most run with the newest alone, the others with the oldest. `make
# test-all` runs everything with both, and where versions differ most, with more of them.
OLDEST_ALONE := $(patsubst %,test/parallel/test_%.py,accuracy compat convergence doc_snippets elastic_programs keras programs \
                                                     ranks)
VERSION_TESTS := $(filter-out $(OLDEST_ALONE) $(NEWEST_ALONE),$(wildcard test/parallel/test_*.py)) $(NEWEST_ALONE) \
                 $(wildcard test/python/test_torch_*.py test/python/test_ddp_*.py) test/python/test_binding.py \
                 test/python/test_elastic_torch.py test/faults/test_process_group_faults.py
OLDER_TESTS := test/parallel/test_checks.py test/faults/test_process_group_faults.py \
               test/python/test_torch_backend.py test/python/test_torch_ddp_hooks.py \
               test/python/test_ddp_optimizer_steps.py
TORCHES := torch-2.15 $(if $(PERSEUS_TEST_FULL),torch-2.14 torch-2.12 torch-2.10)

test-torch-versions: build packages-test $(METADATA) .venv/mpich/.ready $(TORCHES:%=.venv/%/.ready)  ## the tests of PyTorch with its newest version
	PERSEUS_TEST_OTHER_HALF=1 .venv/torch-2.15/bin/python $(PYTEST) $(if $(PERSEUS_TEST_FULL),$(TEST_DIRS),$(VERSION_TESTS)) </dev/null
	for venv in $(TORCHES:torch-2.15=); do \
	    .venv/$$venv/bin/python $(PYTEST) $(OLDER_TESTS) </dev/null; \
	done

# MXNet 1.9.1 and TensorFlow 2.15.1 do not support newer versions of Python.
OLD_PYTHON := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info < (3, 12) else "")')
UNTESTED = @echo "NOT TESTED: $(1), which needs Python 3.10 or 3.11 (make PYTHON=python3.11 in a clone of its own)"
# The oldest TensorFlow that is served, too, where everything is tested.
TENSORFLOWS := tensorflow $(if $(PERSEUS_TEST_FULL),$(if $(OLD_PYTHON),tensorflow-2.15))

# pip waits for the network and for the disk: several at once, the largest first.
environments: $(TORCHES:%=.venv/%/.ready) $(VENV)/.test $(TENSORFLOWS:%=.venv/%/.ready) .venv/frameworks/.ready $(if $(OLD_PYTHON),.venv/mxnet/.ready) .venv/mpich/.ready

test-tensorflow: build packages-test $(TENSORFLOWS:%=.venv/%/.ready)  ## the Python tests, with TensorFlow
	for venv in $(TENSORFLOWS); do \
	    .venv/$$venv/bin/python $(PYTEST) test/with_tensorflow </dev/null; \
	done
	$(if $(PERSEUS_TEST_FULL),$(if $(OLD_PYTHON),,$(call UNTESTED,TensorFlow 2.15.1)))

test-mxnet: build packages-test $(if $(OLD_PYTHON),.venv/mxnet/.ready)  ## the Python tests, with MXNet
	$(if $(OLD_PYTHON),.venv/mxnet/bin/python $(PYTEST) test/with_mxnet </dev/null,$(call UNTESTED,MXNet))

test-frameworks: build packages-test .venv/frameworks/.ready  ## the examples for Lightning, Hugging Face and Keras, on DDP
	.venv/frameworks/bin/python $(PYTEST) --dist load test/with_frameworks </dev/null

build-caffe: build packages-caffe
	$(PY) .ci/caffe.py build/caffe

test-caffe: build-caffe packages-test $(VENV)/.test .venv/mpich/.ready  ## Caffe with our patches, built in build/caffe
	$(PY) $(PYTEST) test/with_caffe </dev/null

# CUDA's compiler, for whoever changes a kernel, and for the check that nobody has forgotten to compile one.
NVCC := .venv/nvcc/nvidia/cu13/bin/nvcc
$(NVCC): .ci/requirements-nvcc.txt | packages-build
	@echo "installing CUDA's compiler into .venv/nvcc"
	$(PYTHON) $(PIP_INSTALL) --no-deps --upgrade --target .venv/nvcc -r $<
	@touch $@

ptx: $(NVCC)  ## the kernels for GPUs, of common/cuda/*.cu, compiled into .ptx.inc files
	$(PYTHON) .ci/compile_kernels.py $(NVCC)

lint: build $(VENV)/.test $(NVCC)  ## layers, comments, commit messages, kernels, ruff, mypy --strict, clang-format
	$(PY) .ci/compile_kernels.py --check $(NVCC)
	$(PY) .ci/check_layers.py
	$(PY) .ci/draw_layers.py --check
	$(PY) .ci/check_comments.py
	$(PY) .ci/check_commits.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.test  ## lay out C++ and Python files as lint wants them
	@$(CXX_FILES) | xargs $(BIN)/clang-format -i
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

docs: build  ## docs/config.md from the table of variables, and the drawing of the layers from the includes
	$(PY) .ci/make_config_doc.py docs/config.md
	$(PY) .ci/draw_layers.py

soak: build packages-test $(VENV)/.test  ## 300 random faults in an elastic job on virtual hosts; about 45 minutes
	$(PY) test/faults/soak.py --faults $(or $(FAULTS),300)

# New inputs stay in build/fuzz; MERGE=1 keeps those in test/fuzz/corpus that reach code which no other reaches. FUZZ
# names targets: all that have a corpus. Those without a C++ file are parsers in Python, of test/parsers.py.
FUZZ := $(notdir $(wildcard test/fuzz/corpus/*))
FUZZ_CXX = $(filter $(FUZZ),$(patsubst test/fuzz/%_fuzz.cc,%,$(wildcard test/fuzz/*_fuzz.cc)))
FUZZ_SECONDS ?= 60
# FUZZ_PLAIN=1 is without sanitizers, for as many inputs as possible: what crashes, hangs or breaks a promise is found.
FUZZ_SANITIZERS := address,undefined
FUZZ_BUILD := build/fuzz$(if $(FUZZ_PLAIN),-plain)
fuzz: packages-fuzz build $(VENV)/.test  ## let libFuzzer attack every parser of what others say; FUZZ_SECONDS=… for each
	@$(CMAKE) -B $(FUZZ_BUILD) -DPERSEUS_FUZZ=ON -DPERSEUS_SANITIZE=$(if $(FUZZ_PLAIN),,$(FUZZ_SANITIZERS)) \
	    -DCMAKE_CXX_COMPILER=clang++ >/dev/null
	$(if $(FUZZ_CXX),$(BIN)/cmake --build $(FUZZ_BUILD) -j $(JOBS) --target $(FUZZ_CXX:%=%_fuzz))
	for target in $(FUZZ); do \
	    mkdir -p build/fuzz/corpus/$$target test/fuzz/corpus/$$target; \
	    attack="$(FUZZ_BUILD)/test/fuzz/$${target}_fuzz"; \
	    if [ ! -e test/fuzz/$${target}_fuzz.cc ]; then \
	        attack="test/fuzz/fuzz_parsers.py --target=$$target"; \
	        $(PY) -c 'import atheris' 2>/dev/null || { echo "$$target: skipped: atheris has no wheel here"; continue; }; \
	    fi; \
	    $$attack -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/$$target- build/fuzz/corpus/$$target test/fuzz/corpus/$$target \
	        2>build/fuzz/$$target.log || { tail -40 build/fuzz/$$target.log; exit 1; }; \
	    printf '%s: %s\n' $$target "$$(grep -E '(DONE|INITED)' build/fuzz/$$target.log | tail -1)"; \
	    if [ -n "$(MERGE)" ]; then $$attack -merge=1 -use_counters=0 \
	        test/fuzz/corpus/$$target build/fuzz/corpus/$$target 2>>build/fuzz/$$target.log; fi; \
	done

bench: build packages-test $(VENV)/.demo  ## measure against torch gloo; write the tables of README.md and benchmarks/README.md
	mkdir -p build/bench
	perseus-bench --readme README.md --bars benchmarks/README.md --json build/bench/records.jsonl --plot build/bench/records.png
	@$(BIN)/cmake -DPERSEUS_TESTS=ON $(BUILD) >/dev/null
	$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target start_bench
	$(BUILD)/benchmarks/start_bench > build/bench/start.jsonl
	$(PY) benchmarks/start_table.py build/bench/start.jsonl benchmarks/README.md

accuracy: build packages-test $(VENV)/.test  ## train with every codec, in hours, and write docs/accuracy.md; can be stopped and goes on
	$(PY) benchmarks/accuracy/run.py benchmarks/accuracy/scores.jsonl --page docs/accuracy.md

clean:  ## remove what was built; .venv stays
	rm -rf build build-* dist *.egg-info perseus/*.so perseus/examples perseus/include perseus/patches
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	rm -f $(VENV)/.perseus
