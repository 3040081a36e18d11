"""The structs and numbers of csrc/moert.h, for ctypes. Pointers are addresses (int) or None."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p

KINDS = {"MXFP4": 5, "F16": 16, "BF16": 17, "F32": 32}  # of a matrix without codes of ours; for codes it is their width
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu_new": 3, "relu2": 4}
SCORES = {"softmax": 0, "sigmoid": 1, "sigmoid_of_chosen": 2, "sparsemixer": 3}


class Matrix(Structure):
    """The struct moert_matrix."""

    _fields_ = [
        ("data", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("bias", c_void_p),
        ("kind", c_int32), ("rows", c_int32), ("cols", c_int32), ("group", c_int32),
        ("block_rows", c_int32), ("power", c_int32), ("blocks", c_void_p),
    ]  # fmt: skip


class Norm(Structure):
    """The struct moert_norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Act(Structure):
    """The struct moert_act."""

    _fields_ = [("kind", c_int32), ("limit", c_float), ("slope", c_float), ("plus", c_float)]


class Ffn(Structure):
    """The struct moert_ffn."""

    _fields_ = [("gate", Matrix), ("up", Matrix), ("down", Matrix)]


class Place(Structure):
    """The struct moert_place."""

    _fields_ = [
        ("data", c_int64), ("scale", c_int64), ("minimum", c_int64), ("bias", c_int64),
        ("kind", c_int32), ("group", c_int32), ("power", c_int32),
    ]  # fmt: skip


class Neurons(Structure):
    """The struct moert_neurons."""

    _fields_ = [
        ("gate", Place), ("up", Place), ("down", Place),
        ("d_model", c_int32), ("d_ff", c_int32), ("block_rows", c_int32),
    ]  # fmt: skip


class Heads(Structure):
    """The struct moert_heads."""

    _fields_ = [
        ("sinks", c_void_p), ("n", c_int32), ("kv", c_int32), ("dim", c_int32), ("value_dim", c_int32),
        ("causal", c_int32), ("window", c_int32), ("chunk", c_int32), ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


class Attention(Structure):
    """The struct moert_attention."""

    _fields_ = [
        ("heads", Heads), ("norm", Norm), ("q_norm", Norm), ("k_norm", Norm), ("v_norm", Norm), ("after", Norm),
        ("q", Matrix), ("k", Matrix), ("v", Matrix), ("o", Matrix), ("gate", Matrix),
        ("rope_dims", c_int32), ("norm_each", c_int32), ("norm_turned", c_int32), ("clip", c_float), ("add", c_float),
    ]  # fmt: skip


class Latent(Structure):
    """The struct moert_latent."""

    _fields_ = [
        ("heads", Heads), ("norm", Norm), ("after", Norm), ("q_norm", Norm), ("kv_norm", Norm),
        ("q_a", Matrix), ("q", Matrix), ("q_turn", Matrix), ("kv_a", Matrix), ("k_turn", Matrix),
        ("keys", Matrix), ("values", Matrix), ("o", Matrix), ("rope_dims", c_int32), ("add", c_float),
    ]  # fmt: skip


class Positions(Structure):
    """The struct moert_positions."""

    _fields_ = [("turns", c_void_p), ("bias", c_void_p), ("bias_stride", c_int64), ("query_scale", c_void_p)]


class Router(Structure):
    """The struct moert_router."""

    _fields_ = [
        ("norm", Norm), ("own", Norm), ("matrix", Matrix), ("choice_bias", c_void_p), ("expert_scale", c_void_p),
        ("score", c_int32), ("top_k", c_int32), ("renormalise", c_int32),
        ("groups", c_int32), ("best_groups", c_int32), ("group_top", c_int32), ("factor", c_float), ("jitter", c_float),
    ]  # fmt: skip


class Keys(Structure):
    """The struct moert_keys."""

    _fields_ = [
        ("pages", c_void_p), ("head", c_int64), ("values", c_int64), ("key_steps", c_int64), ("value_steps", c_int64),
        ("small", c_int32),
    ]  # fmt: skip


class Taps(Structure):
    """The struct moert_taps."""

    _fields_ = [("taps", c_void_p), ("bias", c_void_p), ("channels", c_int32), ("k", c_int32), ("silu", c_int32)]


class Delta(Structure):
    """The struct moert_delta."""

    _fields_ = [
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("decay", c_void_p), ("beta", c_void_p),
        ("state", c_void_p), ("y", c_void_p),
        ("tokens", c_int32), ("key_heads", c_int32), ("heads", c_int32), ("dk", c_int32), ("dv", c_int32),
    ]  # fmt: skip


class Scan(Structure):
    """The struct moert_scan."""

    _fields_ = [
        ("x", c_void_p), ("dt", c_void_p), ("a", c_void_p), ("b", c_void_p), ("c", c_void_p), ("d", c_void_p),
        ("state", c_void_p), ("y", c_void_p),
        ("tokens", c_int32), ("heads", c_int32), ("groups", c_int32), ("p", c_int32), ("n", c_int32), ("each", c_int32),
    ]  # fmt: skip


class Lstm(Structure):
    """The struct moert_lstm."""

    _fields_ = [
        ("inputs", c_void_p), ("recurrent", c_void_p), ("counts", c_void_p), ("state", c_void_p), ("y", c_void_p),
        ("sequences", c_int32), ("width", c_int32), ("backward", c_int32),
    ]  # fmt: skip


class Sparse(Structure):
    """The struct moert_sparse."""

    _fields_ = [
        ("queries", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("spans", c_void_p), ("y", c_void_p),
        ("rows", c_int32), ("width", c_int32),
    ]  # fmt: skip


RULES = {"recency": 0, "frequency": 1, "nearness": 2, "wait": 3}


class Residents(Structure):
    """The struct moert_residents."""

    _fields_ = [
        ("rows", c_int64), ("steps", c_int64), ("place", c_void_p), ("order", c_void_p), ("frequency", c_void_p),
        ("last_used", c_void_p), ("loaded_at", c_void_p), ("last_visit", c_void_p), ("nbytes", c_void_p),
        ("recent", c_void_p), ("visits", c_void_p), ("visited_at", c_void_p), ("interval", c_void_p),
        ("nearness", c_void_p), ("following", c_void_p), ("forgotten", c_void_p), ("forgotten_n", c_int64),
        ("remembered", c_double), ("rule", c_int32), ("experts", c_int32),
    ]  # fmt: skip


PLACING = 6
"""The numbers for each expert in the scratch of moert_assign."""


class Placing(Structure):
    """The struct moert_placing."""

    _fields_ = [
        ("kinds", c_void_p), ("host_call_s", c_double), ("launch_s", c_double), ("row_s", c_double),
        ("pass_s", c_double), ("reluctance", c_double), ("device_s", c_double), ("copy_s", c_double),
        ("read_s", c_double), ("tried", c_int32), ("rule", c_int32),
    ]  # fmt: skip


class Feedback(Structure):
    """The struct moert_feedback."""

    _fields_ = [
        ("values", c_void_p), ("factor", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("group", c_void_p),
        ("codes", c_void_p), ("moved", c_void_p), ("stride", c_int64), ("across", c_int64), ("inputs", c_int32),
        ("columns", c_int32), ("improves", c_int32), ("top", c_float),
    ]  # fmt: skip


class Read(Structure):
    """The struct moert_read."""

    _fields_ = [
        ("offset", c_int64), ("nbytes", c_int64), ("place", c_void_p), ("fd", c_int32), ("crc", c_uint32),
        ("checked", c_int32), ("forget", c_int32), ("found", c_int64), ("error", c_int32), ("wrong", c_int32),
    ]  # fmt: skip
