# What the benches compare with.

# The quantizers that `make bench-quant` compares with. ggml is built from llama-cpp-python's sources: ten seconds, not
# the ten minutes that the whole package takes.
PEERS_DIR ?= build/peers

$(PEERS_DIR)/.built: recipes/bench/peers.txt recipes/bench/ggml/sdist.txt recipes/bench/ggml/CMakeLists.txt | $(STAMP)
	rm -rf $(addprefix $(PEERS_DIR)/,src site ggml)
	mkdir -p $(PEERS_DIR)/src
	$(PY) -m pip install --quiet --no-deps --target $(PEERS_DIR)/site -r recipes/bench/peers.txt
	$(PY) -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(PEERS_DIR) -r recipes/bench/ggml/sdist.txt
	tar -xzf $(PEERS_DIR)/llama_cpp_python-*.tar.gz --strip-components=4 -C $(PEERS_DIR)/src --wildcards '*/vendor/llama.cpp/ggml'
	cmake -S recipes/bench/ggml -B $(PEERS_DIR)/ggml -DGGML_DIR=$(abspath $(PEERS_DIR))/src -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=ON -DCMAKE_C_FLAGS=-march=native -DGGML_CPU=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF
	cmake --build $(PEERS_DIR)/ggml --target ggml-base --parallel 2
	@touch $@

# llama.cpp whole: the package's own library and bindings in an environment of its own, compiled without options, as pip
# compiles it where it is installed, and its processor's part once more as the released wheels have it.
LLAMA_DIR := $(PEERS_DIR)/llama
LLAMA_CMAKE := -S $(LLAMA_DIR)/src -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_CCACHE=OFF \
    -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_APP=OFF

# All but the library: enough to see that this Python has what the benches' modules import there.
$(LLAMA_DIR)/.environment: recipes/bench/peers-llama.txt | .ci/constraints.txt
	rm -rf $(LLAMA_DIR)
	$(PYTHON) -m venv $(LLAMA_DIR)
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(LLAMA_DIR)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir \
	    -c .ci/constraints.txt -r recipes/bench/peers-llama.txt
	@touch $@

$(LLAMA_DIR)/.built: $(LLAMA_DIR)/.environment recipes/bench/ggml/sdist.txt
	@command -v cmake >/dev/null || { echo 'llama.cpp is built with cmake and a C++ compiler: install them'; exit 1; }
	@echo 'building llama.cpp in $(LLAMA_DIR): about ten minutes on two cores'
	rm -rf $(addprefix $(LLAMA_DIR)/,src build released)
	mkdir $(LLAMA_DIR)/src
	$(LLAMA_DIR)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	    --dest $(LLAMA_DIR) -r recipes/bench/ggml/sdist.txt
	tar -xzf $(LLAMA_DIR)/llama_cpp_python-*.tar.gz --strip-components=3 -C $(LLAMA_DIR)/src --wildcards '*/vendor/llama.cpp'
	cmake $(LLAMA_CMAKE) -B $(LLAMA_DIR)/build
	cmake --build $(LLAMA_DIR)/build --target llama --parallel 2
	cmake $(LLAMA_CMAKE) -B $(LLAMA_DIR)/released -DGGML_NATIVE=off
	cmake --build $(LLAMA_DIR)/released --target ggml-cpu --parallel 2
	cp -an $(LLAMA_DIR)/build/bin/lib*.so* $(LLAMA_DIR)/released/bin
	package=$$(echo $(LLAMA_DIR)/lib/python3*/site-packages/llama_cpp) && mkdir -p "$$package/lib" && \
	    cp -a $(LLAMA_DIR)/build/bin/lib*.so* "$$package/lib"
	$(LLAMA_DIR)/bin/python -c 'import gguf, llama_cpp'
	@touch $@

# onnxruntime and ggml's own products, for `make bench-kernels`.
$(PEERS_DIR)/kernels/.built: recipes/bench/peers-kernels.txt $(PEERS_DIR)/.built | $(STAMP)
	rm -rf $(PEERS_DIR)/kernels
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(PEERS_DIR)/kernels -r recipes/bench/peers-kernels.txt
	cmake -S recipes/bench/ggml -B $(PEERS_DIR)/kernels/ggml -DGGML_DIR=$(abspath $(PEERS_DIR))/src -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF
	cmake --build $(PEERS_DIR)/kernels/ggml --target ggml-cpu --parallel 2
	@touch $@

# The packs of the reference models, which `make bench-peers` compares with their sources.
build/demo/summary.json: | setup
	$(PY) -m recipes.demo

build/references/summary.json: | setup
	$(PY) -m recipes.demo marks wikids --name references
