"""What the README shows to Python programs, and how mistakes are called there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tiny_packs

import moert
from moert.command import cli
from moert.engine.generation import GenerationOptions
from moert.engine.settings import EngineOptions
from moert.errors import RunError
from moert.machine import held_bytes


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("api") / "some.pack", tiny_packs.DECODER, paths=False)


def test_sizes_are_strings_or_numbers_as_on_the_command_line(pack: Path) -> None:
    texts, enough = set(), held_bytes() + 10**9
    for memory in (f"{enough / 1e9:.3f}GB", enough, "90%", "auto", None):
        with moert.load(pack, memory=memory, predict="none") as model:
            texts.add(model.generate("hello", max_new_tokens=6).text)
    for cache in ("50%", 10**6):
        with moert.load(str(pack), cache=cache, predict="none") as model:
            texts.add("".join(model.stream("hello", max_new_tokens=6)))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memry": "1GB"}, "memry is no setting: did you mean memory? There are memory, cache, eviction, predict, "
                           "io, threads, kernels, kv, "),
        ({"memory": "1.5XB"}, "memory '1.5XB' is not a size: expected one like 1.5GB"),
        ({"memory": "1GB", "cache": "1GB"}, "memory and cache exclude each other"),
        ({"eviction": "best"}, "eviction 'best' is none of auto, "),
        ({"predict": "transitions"}, "predict='transitions' needs path tables"),
        ({"kv": 4}, "kv is 4: it should be 8 or 16"),
        ({"threads": 0}, "threads 0 can't compute anything"),
        ({"io": "fast"}, "io='fast' is none of auto, direct, buffered"),
        ({"memory": "1MB"}, "memory="),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_name_arguments(pack: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(RunError) as error:
        moert.load(pack, **settings)
    assert message in str(error.value)
    assert "--" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "1.5XB"), "moert: --memory '1.5XB' is not a size"),
        (("--tune", "predict=transitions"), "moert: --tune predict=transitions needs path tables"),
        (("--tune", "io=fast"), "moert: --tune io=fast is none of"),
        (("--tune", "top-p=2"), "moert: --tune top-p is 2.0: it should be above 0 and at most 1"),
        (("--stop", ""), "moert: --stop has an empty stop string"),
        (("--memory", "1GB", "--tune", "cache=1GB"), "moert: --memory and --tune cache exclude each other"),
    ],
)
def test_the_command_line_names_options(
    pack: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._exit_code(["run", str(pack), "hello", *options]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.fixture(scope="module")
def model(pack: Path) -> Iterator[moert.Engine]:
    with moert.load(pack, predict="none") as opened:
        yield opened


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": 5}, "stop is 5: it should be text or a list, each text"),
        ({"stop": ["a", 1]}, "stop is ['a', 1]: it should be text or a list, each text"),
        ({"stop_strings": "a"}, "stop_strings is no setting: did you mean stop? There are max_new_tokens, "),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5': it should be a whole number"),
        ({"temperature": True}, "temperature is True: it should be a number"),
        ({"beams": 2.0}, "beams is 2.0: it should be a whole number"),
        ({"settings": {"seed": 1}}, "settings is {'seed': 1}: it should be GenerationSettings(...), or settings by"),
    ],
)
def test_what_can_be_asked_has_a_type(model: moert.Engine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(moert.Error, match=re.escape(message)):
        model.generate("hello", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 1.5e9}, "memory is 1500000000.0: it should be a whole number or text or None"),
        ({"predictor": "none"}, "predictor is no setting: did you mean predict?"),
        ({"kv_bits": 8}, "kv_bits is no setting: did you mean kv?"),
        ({"threads": "2"}, "threads is '2': it should be a whole number or None"),
        ({"eviction": None}, "eviction is None: it should be text"),
        ({"path": 5}, "path is 5: it should be the folder of a pack, as text or a path"),
    ],
)
def test_how_a_pack_is_opened_has_a_type(pack: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(moert.Error, match=re.escape(message)):
        moert.load(**{"path": pack, **settings})


def test_one_stop_string_is_one(model: moert.Engine) -> None:
    whole = model.generate("hello", max_new_tokens=12)
    for stop in (whole.text[5:8], [whole.text[5:8]], (whole.text[5:8], "never")):
        answer = model.generate("hello", max_new_tokens=12, stop=stop)
        assert (answer.text, answer.stop_reason) == (whole.text[: whole.text.index(whole.text[5:8])], "stop_string")
    assert (whole.stop_reason, len(whole.tokens)) == ("max_new_tokens", 12)
    assert model.generate(whole.tokens, max_new_tokens=2, stop=[]).text == ""


@pytest.mark.parametrize("prompt", [123, None, ["some", "texts"], b"bytes", {"role": "user"}, [1.5], [None]], ids=str)
def test_a_prompt_is_text_or_token_ids(model: moert.Engine, prompt: Any) -> None:
    told = r"^the prompt is .*: give text, or a list of token ids$"
    with pytest.raises(moert.Error, match=told):
        model.generate(prompt)
    with pytest.raises(moert.Error, match=told):
        next(model.stream(prompt))
    with pytest.raises(moert.Error, match=told):
        next(model.generate_many([prompt]))
    with pytest.raises(moert.Error, match=told):
        model.check(prompt, 5)


def test_several_prompts_are_a_list(model: moert.Engine) -> None:
    for prompts in ("text", b"text", 5, None):
        with pytest.raises(moert.Error, match=r"^the prompts are .*: give a list, even of one$"):
            next(model.generate_many(prompts))  # type: ignore[arg-type]
    ids = model.encode("hello")
    assert model.generate(np.array(ids), max_new_tokens=3).tokens == model.generate(ids, max_new_tokens=3).tokens


def test_a_closed_engine_says_so(pack: Path) -> None:
    model = moert.load(pack, predict="none")
    stream = model.stream("hello", max_new_tokens=30)
    next(stream)
    model.close()
    with pytest.raises(moert.Error, match=r"^the session is closed: "):
        list(stream)
    model.close()
    for ask in (
        lambda: model.generate("hello"), lambda: next(model.stream("hello")), lambda: model.session(),
        lambda: next(model.generate_many(["hello"])), lambda: model.check("hello", 5), lambda: model.conversation(),
    ):  # fmt: skip
        with pytest.raises(moert.Error, match=r"^the engine is closed: open the pack again with moert.load$"):
            ask()


def test_what_users_name_is_there() -> None:
    assert {name: getattr(moert, name) for name in moert.__all__}.keys() <= {*dir(moert), *moert.__all__}
    assert issubclass(moert.PackError, moert.Error)
    assert issubclass(moert.RunError, moert.Error)
    for settings, options in ((moert.EngineSettings, EngineOptions), (moert.GenerationSettings, GenerationOptions)):
        assert get_type_hints(options) == get_type_hints(settings)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = moert.Motor


async def _collected(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


def test_requests_of_asyncio_wait_for_each_other(model: moert.Engine) -> None:
    prompts = ("hello", "again", "and more")
    expected = [model.generate(prompt, max_new_tokens=6).text for prompt in prompts]

    async def together() -> list[str]:
        return await asyncio.gather(*(_collected(model.astream(prompt, max_new_tokens=6)) for prompt in prompts))

    assert asyncio.run(together()) == expected
    with pytest.raises(moert.Error, match="give text, or a list of token ids"):
        asyncio.run(_collected(model.astream(123)))  # type: ignore[arg-type]


def test_a_task_that_is_cancelled_gives_the_engine_back(model: moert.Engine) -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()

        async def first() -> None:
            async for _ in model.astream("hello", max_new_tokens=200):
                begun.set()
                await asyncio.Event().wait()  # the session stays open

        running = asyncio.create_task(first())
        await begun.wait()
        waiting = asyncio.create_task(_collected(model.astream("again", max_new_tokens=6)))
        await asyncio.sleep(0.05)
        for task in (waiting, running):  # the one that waits ends while the other runs
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async for _ in model.astream("hello", max_new_tokens=200):
            break  # and so does one that is left

    asyncio.run(asyncio.wait_for(cancelled(), 60))
    assert model.generate("hello", max_new_tokens=3).tokens


def test_importing_it_is_cheap() -> None:
    command = (
        "import sys, moert; print(sorted(name for name in sys.modules if name in ('numpy', 'typer', 'tokenizers')))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
