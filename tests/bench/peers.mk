# The quantisers that `make bench-quant` compares with. ggml is built from llama-cpp-python's sources: ten seconds, not
# the ten minutes that the whole package takes.
PEERS_DIR ?= build/peers

$(PEERS_DIR)/.built: tests/bench/peers.txt tests/bench/ggml/sdist.txt tests/bench/ggml/CMakeLists.txt
	rm -rf $(PEERS_DIR)
	mkdir -p $(PEERS_DIR)/src
	$(PY) -m pip install --quiet --no-deps --target $(PEERS_DIR)/site -r tests/bench/peers.txt
	$(PY) -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(PEERS_DIR) -r tests/bench/ggml/sdist.txt
	tar -xzf $(PEERS_DIR)/llama_cpp_python-*.tar.gz --strip-components=4 -C $(PEERS_DIR)/src --wildcards '*/vendor/llama.cpp/ggml'
	cmake -S tests/bench/ggml -B $(PEERS_DIR)/ggml -DGGML_DIR=$(abspath $(PEERS_DIR))/src -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=ON -DCMAKE_C_FLAGS=-march=native -DGGML_CPU=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF
	cmake --build $(PEERS_DIR)/ggml --target ggml-base --parallel 2
	@touch $@
