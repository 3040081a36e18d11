# What the benches compare with.

# The quantisers that `make bench-quant` compares with. ggml is built from llama-cpp-python's sources: ten seconds, not
# the ten minutes that the whole package takes.
PEERS_DIR ?= build/peers

$(PEERS_DIR)/.built: tests/bench/peers.txt tests/bench/ggml/sdist.txt tests/bench/ggml/CMakeLists.txt | $(STAMP)
	rm -rf $(addprefix $(PEERS_DIR)/,src site ggml)
	mkdir -p $(PEERS_DIR)/src
	$(PY) -m pip install --quiet --no-deps --target $(PEERS_DIR)/site -r tests/bench/peers.txt
	$(PY) -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(PEERS_DIR) -r tests/bench/ggml/sdist.txt
	tar -xzf $(PEERS_DIR)/llama_cpp_python-*.tar.gz --strip-components=4 -C $(PEERS_DIR)/src --wildcards '*/vendor/llama.cpp/ggml'
	cmake -S tests/bench/ggml -B $(PEERS_DIR)/ggml -DGGML_DIR=$(abspath $(PEERS_DIR))/src -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=ON -DCMAKE_C_FLAGS=-march=native -DGGML_CPU=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF
	cmake --build $(PEERS_DIR)/ggml --target ggml-base --parallel 2
	@touch $@

# llama.cpp whole, for `make bench-peers`: compiled for this machine with its package's own settings.
$(PEERS_DIR)/llama/.built: tests/bench/peers-llama.txt .ci/constraints.txt
	@echo 'building llama.cpp in $(PEERS_DIR)/llama: about ten minutes on two cores'
	rm -rf $(PEERS_DIR)/llama
	$(PYTHON) -m venv $(PEERS_DIR)/llama
	$(PEERS_DIR)/llama/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/bench/peers-llama.txt
	@touch $@

# onnxruntime, for `make bench-kernels`.
$(PEERS_DIR)/kernels/.built: tests/bench/peers-kernels.txt | $(STAMP)
	rm -rf $(PEERS_DIR)/kernels
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(PEERS_DIR)/kernels -r tests/bench/peers-kernels.txt
	@touch $@

# The packs of the reference models, which `make bench-peers` compares with their sources.
build/demo/summary.json: | $(STAMP)
	$(PY) -m recipes.demo
