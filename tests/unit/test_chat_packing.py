"""A model's chat template goes into its pack, with the tokens that transformers gives to templates."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_olmoe
from transformers import AutoTokenizer

from moeconv.calibration.rendering import ChatTemplate
from moeconv.command.cli import _exit_code
from moeconv.errors import CalibrationError
from moeconv.packing.emit import chat_of
from moeconv.source.checkpoint import CheckpointError
from moert.pack.reader import Pack
from moert.pack.text import load_chat, parse_chat

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("chat") / "m")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def configure(model: Path, **fields: Any) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_model_without_a_template_has_none(model: Path) -> None:
    assert chat_of(model) is None
    (model / "tokenizer_config.json").unlink()
    assert chat_of(model) is None


def test_the_pack_has_the_template_and_the_tokens(model: Path, tmp_path: Path) -> None:
    configure(model, chat_template=TEMPLATE, bos_token="a", eos_token={"content": "b", "__type": "AddedToken"},
              image_token="c", sep_token=None)  # fmt: skip
    assert _exit_code(["quantize", str(model), "--bits", "16", "--out", str(tmp_path / "p"), "--json"]) == 0
    chat = load_chat(Pack.open(tmp_path / "p"))
    assert (chat.template, chat.tool_template) == (TEMPLATE, None)
    assert chat.tokens == AutoTokenizer.from_pretrained(model).special_tokens_map
    assert chat.tokens.items() >= {"bos_token": "a", "eos_token": "b", "image_token": "c"}.items()
    assert "sep_token" not in chat.tokens


def test_named_templates_and_a_file_of_its_own(model: Path) -> None:
    named = [{"name": name, "template": name.upper()} for name in ("rag", "tool_use", "default")]
    configure(model, chat_template=named)
    body = chat_of(model)
    assert (parse_chat(body).template, parse_chat(body).tool_template) == ("DEFAULT", "TOOL_USE")
    (model / "chat_template.jinja").write_text("of the file")
    body = chat_of(model)
    assert (parse_chat(body).template, parse_chat(body).tool_template) == ("of the file", None)


def test_what_can_not_be_used_is_one_line_before_anything_long(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(model, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(CheckpointError, match=r"none of them is called default \(there are rag\)"):
        chat_of(model)
    assert _exit_code(["quantize", str(model), "--bits", "16", "--out", str(tmp_path / "p")]) == 2
    assert not (tmp_path / "p").exists()
    assert capsys.readouterr().err.count("\n") == 1
    configure(model, chat_template="x" * (1 << 20))
    with pytest.raises(CheckpointError, match="at most 1048576 go into"):
        chat_of(model)
    configure(model, chat_template="x")
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="its tokenizer can't be loaded"):
        chat_of(model)
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read as JSON"):
        chat_of(model)


@pytest.mark.parametrize("renders", [False, True])
def test_no_code_that_comes_with_a_model_is_run_or_asked_about(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], renders: bool
) -> None:
    """Of a kind of model for which transformers itself has no tokenizer."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    ran = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoTokenizer": ["evil.Foo", "evil.Foo"]}
    configure(model, chat_template=TEMPLATE, tokenizer_class="Foo", auto_map=auto_map)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail("a question"))
    with suppress(CheckpointError, CalibrationError):
        if renders:
            with ChatTemplate(model) as template:
                template.render([{"role": "user", "content": "a"}], "here")
        else:
            chat_of(model)
    assert not ran.exists()
    assert "[y/N]" not in "".join(capfd.readouterr())
