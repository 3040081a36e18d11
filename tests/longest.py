"""Files of tests that take most time, longest first: of files beside each other the last one ends with nothing beside
it."""

LONGEST = [
    "conversion_memory", "families", "server_soak", "published_layers", "ray_cluster", "ctrl_c_anywhere", "soak",
    "memory_limit", "kill", "chat_memory", "bench_peers", "reference_models", "opt_sizes", "talk_transcript",
    "walks", "torch_engine", "hostile_text", "state_memory", "activations", "imports", "train_hash", "train_neurons",
    "by_layers", "by_neurons", "serve_cli", "report_page", "beam_search", "ctrl_c", "fisher", "extras",
]  # fmt: skip
