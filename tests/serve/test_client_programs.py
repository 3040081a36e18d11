"""Programs of others that `make test-clients` installs: each is skipped where it is not there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from chat_packs import SPEC, write_chat_pack
from grammar_packs import byte_level, write_grammar_pack
from pydantic import BaseModel
from serving import Running, serving
from tiny_packs import EOS

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
MOST = 300
ENDS = GenerationSettings(logit_bias={EOS: 20.0}, max_new_tokens=MOST)
"""Answers end where their grammar lets them."""
SCRIPT = Path(__file__).with_name("clients.mjs")
MODULES = SCRIPT.parents[2] / "build/clients/node_modules"


class Answer(BaseModel):
    right: bool
    town: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grammar_pack(tmp_path_factory.mktemp("programs") / "tiny.pack", byte_level(), TEMPLATE)


@pytest.fixture(scope="module")
def server(pack: Path) -> Iterator[Running]:
    with serving(pack, defaults=ENDS) as running:
        yield running


@pytest.fixture
def v1(server: Running, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return f"{server.url}/v1"


@pytest.mark.parametrize(("batch", "at_once", "as_ids"), [(1, 1, True), (3, 1, True), (1, 3, True), (1, 1, False)])
def test_lm_eval_finds_the_engines_likelihoods(
    batch: int, at_once: int, as_ids: bool, v1: str, pack: Path, tmp_path: Path
) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    shutil.copy(pack / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    program = completions.LocalCompletionsAPI(
        model="tiny", base_url=f"{v1}/completions", tokenizer=str(tmp_path), tokenizer_backend="huggingface",
        batch_size=batch, num_concurrent=at_once, tokenized_requests=as_ids, max_retries=1,
    )  # fmt: skip
    pairs = [("The town lies", f" by the river {'and the hill ' * count}") for count in range(5)]
    found = program.loglikelihood([instance("loglikelihood", {}, pair, 0) for pair in pairs])
    whole = program.loglikelihood_rolling([instance("loglikelihood_rolling", {}, ("a river",), 0)]) if as_ids else []
    until = {"until": ["\n"], "max_gen_toks": 4, "temperature": 1.0}
    (written,) = program.generate_until([instance("generate_until", {}, ("a river", until), 0)])
    with Engine.open(pack) as engine:
        for (before, behind), (likelihood, _) in zip(pairs, found, strict=True):
            logprobs = engine.score(before + behind).logprobs[len(engine.encode(before)) :]
            assert likelihood == pytest.approx(sum(each or 0.0 for each in logprobs), abs=1e-4)
        if as_ids:
            assert whole == pytest.approx([engine.score([EOS, *engine.encode("a river")]).log_likelihood], abs=1e-4)
        settings = {"max_new_tokens": 4, "temperature": 1.0, "seed": 1234, "logit_bias": ENDS.logit_bias}
        assert written == engine.generate("a river", **settings).text  # type: ignore[arg-type]


@pytest.mark.parametrize("newer", [False, True], ids=["chat", "responses"])
def test_langchain(newer: bool, v1: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    asked = {"model": "tiny", "base_url": v1, "max_retries": 0, "use_responses_api": newer}
    model = langchain.ChatOpenAI(**asked, stream_usage=True, max_tokens=8)
    said = model.invoke("hello")
    pieces = [*model.stream("hello")]
    assert pieces
    assert (
        sum(each.usage_metadata["output_tokens"] for each in pieces if each.usage_metadata)
        == (said.usage_metadata["output_tokens"])
    )
    model = langchain.ChatOpenAI(**asked, max_tokens=MOST)
    bound = model.bind_tools([Answer], tool_choice="Answer", parallel_tool_calls=False)
    whole = bound.invoke("hello")
    (call,) = whole.tool_calls
    assert Answer.model_validate(call["args"])
    joined = None
    for piece in bound.stream("hello"):
        joined = piece if joined is None else joined + piece
    assert [each["args"] for each in joined.tool_calls] == [call["args"]]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "right"}
    assert bound.invoke([("user", "hello"), whole, result]).tool_calls
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Answer, method=method).invoke("hello"), Answer)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_call_a_tool(kind: str, v1: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    seen: list[bool] = []

    def weather(fine: bool) -> str:
        """Tells the weather."""
        seen.append(fine)
        return "sunny"

    async def talk() -> tuple[Any, Any, int]:
        async with openai.AsyncOpenAI(base_url=v1, max_retries=0) as client:
            model = getattr(agents, kind)(model="tiny", openai_client=client)
            settings = agents.ModelSettings(tool_choice="weather", parallel_tool_calls=False)
            agent = agents.Agent(
                name="a", instructions="Be kind.", tools=[agents.function_tool(weather)], model=model,
                model_settings=settings,
            )  # fmt: skip
            whole = await agents.Runner.run(agent, "hello", max_turns=2)
            streamed = agents.Runner.run_streamed(agent, "hello", max_turns=2)
            names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
            typed = await agents.Runner.run(agents.Agent(name="b", model=model, output_type=Answer), "hello")
            return [type(each).__name__ for each in whole.new_items][:2], typed.final_output, names.count("tool_called")

    items, answer, called = asyncio.run(talk())
    assert items == ["ToolCallItem", "ToolCallOutputItem"]
    assert (len(seen), called) == (2, 1)
    assert isinstance(answer, Answer)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_gets_tables_and_calls(kind: str, v1: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=v1, api_key="none")
    model, one = getattr(models, kind)("tiny", provider=provider), {"parallel_tool_calls": False}
    for output in (pydantic_ai.NativeOutput(Answer), pydantic_ai.ToolOutput(Answer)):
        agent = pydantic_ai.Agent(model, output_type=output, model_settings=one)
        assert isinstance(agent.run_sync("hello").output, Answer)
    agent, seen = pydantic_ai.Agent(model, output_type=Answer, model_settings=one, retries=0), list[bool]()

    @agent.tool_plain
    def weather(fine: bool) -> str:
        """Tells the weather."""
        seen.append(fine)
        return "sunny"

    for _ in range(8):
        assert isinstance(agent.run_sync("hello", model_settings={"temperature": 3.0}).output, Answer)
    assert seen, "the model chooses between two tools at random"


def test_llm_knows_it_by_a_file(v1: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    known = {"model_id": "tiny", "model_name": "tiny", "api_base": v1, "supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([known]))  # JSON is YAML

    def run(*options: str) -> str:
        command = [shutil.which("llm", path=str(Path(sys.executable).parent)) or "llm", "-m", "tiny", "hello"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-o", "max_tokens", "4") == run("-o", "max_tokens", "4", "--no-stream")
    found = json.loads(run("--schema", json.dumps(Answer.model_json_schema())))
    assert Answer.model_validate(found)
    run("-T", "llm_version")


@pytest.mark.slow
def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with serving(write_chat_pack(tmp_path / "short.pack", SPEC)) as running:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json", "--seed", "1"]
        limits = ["--max-examples", "10", "--request-timeout", "60", "--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run([*command, *limits], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("part", ["openai", "anthropic"])
def test_programs_of_node(part: str, server: Running) -> None:
    node = shutil.which("node")
    if node is None or not MODULES.is_dir():
        pytest.skip("node, or its packages, are not there: make test-clients")
    script = MODULES.parent / SCRIPT.name  # beside what it imports
    shutil.copy(SCRIPT, script)
    done = subprocess.run([node, script, server.url, part], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["done"]), done.stderr
