"""Checkpoints: single and sharded files read the same, and each kind of damage is one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import EOS, reconfigure, rewrite, tiny_of, tiny_olmoe, tiny_switch

from moeconv.command import cli
from moeconv.command.check import check
from moeconv.plan.outlook import Host
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moeconv.source.tensors import FileTensors
from moert.pack.model_spec import ExpertKey
from tests.refusing import one_line
from tests.shapes import shapes_of

HOST = Host(held_bytes=45_000_000, thread_bytes=1 << 20, widened=False)
ABSENT = "{} of {} files of weights are not here ({}): of their tensors the names were checked, by the index"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("olmoe"))


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "hf"))


def shard(path: Path, files: int = 3) -> None:
    """Rewrites model.safetensors as several files with an index."""
    tensors = load_file(path / "model.safetensors")
    weight_map = {name: f"model-{index % files}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "model.safetensors").unlink()


def joined(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for all experts of a layer, as Qwen3.5 is published."""
    tensors, apart = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for name, tensor in sorted(stored.items()):
        layer, found, rest = name.partition(".mlp.experts.")
        if not found:
            tensors[name] = tensor
            continue
        apart.setdefault(f"{layer}{found}{rest.split('.')[1]}", []).append(tensor)
    for name in [name for name in apart if name.endswith("gate_proj")]:
        pairs = zip(apart.pop(name), apart.pop(name.replace("gate_proj", "up_proj")), strict=True)
        tensors[name.replace("gate_proj", "gate_up_proj")] = torch.stack([torch.cat(pair) for pair in pairs])
    return tensors | {name: torch.stack(each) for name, each in apart.items()}


def of_the_larger_one(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}


def turned(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in stored.items()}


@pytest.mark.parametrize(
    ("family", "other"),
    [("qwen3_5_moe", joined), ("qwen3_5_moe_text", joined), ("qwen3_next", joined),
     ("qwen3_5_moe_text", of_the_larger_one), ("qwen3_vl_moe", turned)],
)  # fmt: skip
def test_tensors_may_be_joined_or_named_as_they_are_published(
    family: str, other: Callable[[dict[str, torch.Tensor]], Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_model(family)
    published = Path(shutil.copytree(path, tmp_path / "published"))
    rewrite(published, other)
    mine, theirs = Checkpoint.open(path), Checkpoint.open(published)
    assert (len(theirs.tensors.names) < len(mine.tensors.names)) == (other is joined)
    assert theirs.source_dtype == "BF16"
    for name, shape in shapes_of(mine.spec).items():
        assert torch.equal(mine.backbone_tensor(name, shape), theirs.backbone_tensor(name, shape))
    for key in mine.spec.expert_keys():
        assert all(np.array_equal(weight, theirs.expert(key)[name]) for name, weight in mine.expert(key).items())
    ids = torch.arange(2, 30).view(2, 14)
    with torch.inference_mode():
        assert torch.equal(*(checkpoint.model(torch.float32)(ids).logits for checkpoint in (mine, theirs)))
    if other is joined:
        rewrite(published, lambda stored: {name: each for name, each in stored.items() if "gate_up_proj" not in name})
        with pytest.raises(CheckpointError, match=r"no tensor '.*experts\.gate_up_proj"):
            Checkpoint.open(published)


def test_what_a_published_model_has_beside_its_text_is_left_out_with_a_note(tmp_path: Path) -> None:
    path = tiny_of("qwen3_5_moe")(tmp_path / "hf")
    assert Checkpoint.open(path).notes == ["images are left out: the pack holds the text model alone"]
    rewrite(path, lambda stored: stored | {"mtp.fc.weight": torch.ones(24, 48)})
    assert [note.partition(" are left out")[0] for note in Checkpoint.open(path).notes] == [
        "the layers that predict several tokens at once", "images",
    ]  # fmt: skip


def test_reads_experts_and_backbone(source: Path) -> None:
    checkpoint, stored = Checkpoint.open(source), load_file(source / "model.safetensors")
    expert = checkpoint.expert(ExpertKey("decoder", 1, 3))
    assert set(expert) == {"gate", "up", "down"}
    for projection, weight in expert.items():
        assert weight.dtype == np.float32
        name = f"model.layers.1.mlp.experts.3.{projection}_proj.weight"
        assert np.array_equal(weight, stored[name].float().numpy())
    for canonical, shape in shapes_of(checkpoint.spec).items():
        expected = torch.float32 if canonical.startswith("rope.") else torch.bfloat16
        assert checkpoint.backbone_tensor(canonical, shape).dtype == expected
    assert checkpoint.source_dtype == "BF16"
    assert checkpoint.tokenizer_files == ["tokenizer.json", "tokenizer_config.json"]
    assert torch.equal(checkpoint.backbone_tensor("decoder.norm.weight", (24,)), stored["model.norm.weight"])


def test_shards_read_like_one_file(source: Path) -> None:
    key = ExpertKey("decoder", 0, 5)
    before = Checkpoint.open(source).expert(key)
    shard(source)
    after = Checkpoint.open(source).expert(key)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("counts", ["model-0.safetensors", "overlay.safetensors", "a.safetensors"])
def test_where_two_files_have_a_tensor_the_index_says_which_counts(source: Path, counts: str) -> None:
    """Also for transformers' model, which by itself takes the last of them."""
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    stored = load_file(source / "model.safetensors")[name]
    shard(source, files=1)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in {"overlay.safetensors", counts} - {"model-0.safetensors"}:
        save_file({name: stored + 1, "lm_head.weight": load_file(source / "model-0.safetensors")["lm_head.weight"]},
                  source / file)  # fmt: skip
        index["weight_map"]["lm_head.weight"] = file
    index["weight_map"][name] = counts
    (source / "model.safetensors.index.json").write_text(json.dumps({**index, "metadata": {}}))
    checkpoint, key = Checkpoint.open(source), ExpertKey("decoder", 0, 2)
    expected = (stored if counts == "model-0.safetensors" else stored + 1).float()
    assert np.array_equal(checkpoint.expert(key)["up"], expected.numpy())
    model = checkpoint.model(torch.float32)
    assert torch.equal(checkpoint.family.expert_weight(model, key, "up"), expected)


def test_of_one_file_and_several_the_one_is_read(source: Path) -> None:
    """As transformers does."""
    whole = Path(shutil.copy(source / "model.safetensors", source.parent / "whole"))
    shard(source)
    save_file({name: tensor * 2 for name, tensor in load_file(whole).items()}, source / "model.safetensors")
    checkpoint, key = Checkpoint.open(source), ExpertKey("decoder", 0, 2)
    stored = load_file(whole)["model.layers.0.mlp.experts.2.up_proj.weight"].float() * 2
    assert np.array_equal(checkpoint.expert(key)["up"], stored.numpy())
    assert torch.equal(checkpoint.family.expert_weight(checkpoint.model(torch.float32), key, "up"), stored)


def hub(of: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes `of` the one model of a hub that keeps downloads in `kept`; fills the list with the names of files that
    were fetched."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    fetched: list[str] = []

    def download(hub_id: str, revision: str | None = None, tqdm_class: Any = None, **patterns: Any) -> str:
        assert (hub_id, revision) in {("some/model", None), ("some/model", "c0ffee")}
        (folder := kept / "snapshots" / "c0ffee").mkdir(parents=True, exist_ok=True)
        names = (str(file.relative_to(of)) for file in sorted(of.rglob("*")) if file.is_file())
        for name in filter_repo_objects(names, **patterns):
            fetched.append(name)
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(of / name, folder / name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fetched


SECOND_COPIES = (
    "original/model.safetensors", "original/params.json", "original/tokenizer.model", "consolidated.safetensors",
    "consolidated.00.pth", "metal/model.bin", "model.fp32.safetensors", "pytorch_model.bin",
)  # fmt: skip


@pytest.mark.parametrize("shards", [0, 3])
def test_a_hub_model_is_fetched_once_and_checked_by_its_index(
    source: Path, tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shards:
        shard(source, shards)
    weights = {f"model-{at}.safetensors" for at in range(shards)} or {"model.safetensors"}
    for name in SECOND_COPIES:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"{}")
    fetched = hub(source, tmp_path / "kept", monkeypatch)
    found = check("some/model", HOST)
    index = {"model.safetensors.index.json"} if shards else set()
    assert set(fetched) == {"config.json", "generation_config.json", *index}
    absent = ABSENT.format(shards, shards, ", ".join(sorted(weights)))
    assert (found.notes, found.certain) == (([absent], True) if shards else ([], False))
    checkpoint = Checkpoint.open("some/model")
    assert set(fetched) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                            *index, *weights}  # fmt: skip
    assert checkpoint.sha256 == Checkpoint.open(source).sha256


@pytest.mark.usefixtures("still")
def test_where_some_shards_are_missing_all_else_is_checked(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(source, 3)
    whole = check(str(source), HOST)
    (source / "model-1.safetensors").unlink()
    found, note = check(str(source), HOST), ABSENT.format(1, 3, "model-1.safetensors")
    assert (found.outlooks, found.notes, found.certain) == (whole.outlooks, [note], True)
    assert cli._exit_code(["plan", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [note]
    assert cli._exit_code(["plan", str(source)]) == 0
    assert f"  note        {note}\n" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is named in model"):
        Checkpoint.open(source)
    (source / "model-2.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is damaged"):
        check(str(source), HOST)


@pytest.mark.parametrize(("name", "ends"), [("</s>", [3]), ("</s>", 3), ({"content": "</s>"}, [3, 5])])
def test_another_end_token_of_the_tokenizer_is_a_note(
    source: Path, name: Any, ends: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    for stated, is_noted in ((ends, True), (EOS, False), ([3, EOS], False)):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
        out = tmp_path / f"{stated}.pack"
        assert cli._exit_code(["quantize", str(source), "--bits", "16", "--out", str(out)]) == 0
        said = ", ".join(map(str, stated if isinstance(stated, list) else [stated]))
        note = f"the tokenizer's end token is '</s>' ({EOS}), the model's by generation_config.json or config.json "
        assert (note + said in capsys.readouterr().err) == is_noted


def test_an_index_alone_is_looked_at(source: Path) -> None:
    shard(source)
    whole = check(str(source), HOST)
    for file in source.glob("*.safetensors"):
        file.unlink()
    assert check(str(source), HOST).outlooks == whole.outlooks
    with pytest.raises(CheckpointError, match="is named in model"):
        Checkpoint.open(source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.weight'"):
        check(str(source), HOST)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.float32, "F32")])
def test_other_source_dtypes(source: Path, dtype: torch.dtype, name: str) -> None:
    rewrite(source, lambda stored: {key: value.to(dtype) for key, value in stored.items()})
    assert Checkpoint.open(source).source_dtype == name


def test_the_hash_is_of_contents_not_of_places(original: Path, source: Path) -> None:
    same = Checkpoint.open(original).sha256
    assert Checkpoint.open(source).sha256 == same
    rewrite(source, lambda stored: stored["model.norm.weight"].add_(1))
    changed = Checkpoint.open(source).sha256
    reconfigure(source, rms_norm_eps=1e-4)
    assert len({same, changed, Checkpoint.open(source).sha256}) == 3


def _truncate(path: Path) -> None:
    body = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(body[: len(body) // 2])


def _lose_shard(path: Path) -> None:
    shard(path)
    (path / "model-1.safetensors").unlink()


def _bad_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    (path / "model.safetensors").unlink()


LOST = "model.layers.0.mlp.experts.2.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "config not json": (lambda path: (path / "config.json").write_text("{"), "JSON"),
    "config a list": (lambda path: (path / "config.json").write_text("[]"), "JSON object"),
    "unknown family": (lambda path: reconfigure(path, model_type="mamba"), "'mamba' is not supported"),
    "refused by the family": (lambda path: reconfigure(path, attention_bias=True), "attention_bias"),
    "nonsense value": (lambda path: reconfigure(path, hidden_size="wide"), "no|not a valid"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "neither"),
    "truncated": (_truncate, "damaged"),
    "tensor missing": (lambda path: rewrite(path, lambda stored: [stored.pop(LOST)]), "experts.2.up_proj"),
    "shard missing": (_lose_shard, "model-1.safetensors"),
    "index without a map": (_bad_index, "weight_map"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_line(source: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    act(source)
    with one_line(CheckpointError, words):
        Checkpoint.open(source)


def test_a_shape_that_contradicts_the_config_is_named(source: Path) -> None:
    reconfigure(source, intermediate_size=41)
    with pytest.raises(CheckpointError, match=r"\(40, 24\).*\(41, 24\)"):
        Checkpoint.open(source).expert(ExpertKey("decoder", 0, 0))


def test_embeddings_that_a_pack_would_merge_must_be_equal(tmp_path: Path) -> None:
    source = tiny_switch(tmp_path, tie_word_embeddings=False)
    Checkpoint.open(source)
    rewrite(source, lambda stored: stored["decoder.embed_tokens.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"decoder\.embed_tokens\.weight differ"):
        Checkpoint.open(source)


@pytest.mark.parametrize("where", ["/no/such/directory", "./missing", "a/b/c", "", "nobody/no-such-model"])
def test_a_model_that_is_not_there(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_args: Any, **_kwargs: Any) -> str:
        raise OSError("no network\nand no cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with one_line(CheckpointError):
        Checkpoint.open(where)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    source = tiny_switch(tmp_path, num_sparse_encoder_layers=3, num_sparse_decoder_layers=3)
    with pytest.raises(CheckpointError, match="no layer with experts"):
        Checkpoint.open(source)


def test_an_interrupt_while_reading_is_no_damage(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the library Ctrl-C becomes an error of its own; the same read works when it is tried again."""
    checkpoint = Checkpoint.open(source)
    name = checkpoint.description.backbone["embed.weight"].name
    read, calls = FileTensors._read, []

    def interrupted(self: FileTensors, file: Path, wanted: str, index: int | None) -> torch.Tensor:
        calls.append(wanted)
        if len(calls) == 1:
            raise RuntimeError("could not determine the shape")
        return read(self, file, wanted, index)

    monkeypatch.setattr(FileTensors, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.tensors.fetch(name)
    assert calls == [name, name]
