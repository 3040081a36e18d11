"""A hostile chat template gets nothing: no file, no attribute, no other process, no endless loop, no memory."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moert.chat import renderer as module
from moert.chat.renderer import Limits, Renderer
from moert.chat.sandbox import answer
from moert.errors import BudgetTooSmall, InputInvalid, SettingInvalid, TemplateFailed
from moert.pack.text import ChatFormat

HI = [{"role": "user", "content": "hi"}]
SOON = Limits(cpu_s=1)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

NO_END = {
    "a loop": LOOP,
    "a regular power": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a list that grows": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a text that grows": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a long text": "{{ 'x' * 10 ** 10 }}",
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "a wide text": "{{ 'x' | center(10 ** 10) }}",
    "a range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "a macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a deep list": "{{ " + "[" * 200_000 + "]" * 200_000 + " }}",
    "a loop of itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "words": "{{ lipsum(n=10 ** 9) }}",
    "deep json": "{{ ('[' * 10 ** 6) | fromjson }}",
}  # fmt: skip

OUT = {
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "an extension": "{% extends 'x' %}",
    "its class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of a method": "{{ cycler.__init__.__globals__.os }}",
    "a builtin": "{{ joiner.__init__.__builtins__ }}",
    "a filter's attribute": "{{ ([lipsum] | map(attribute='__globals__') | list)[0].os }}",
    "a format": "{{ '{0.__class__.__mro__}'.format('').x.y }}{{ 1 / 0 }}",
    "a format map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}).x.y }}{{ 1 / 0 }}",
    "our own functions": "{{ raise_exception.__globals__['sys'] }}",
    "the context": "{{ self._TemplateReference__context.environment }}",
    "a change": "{{ messages.append(1) }}",
    "a change of a dict": "{{ messages[0].update(a=1) }}",
    "a codec": "{{ 'x'.encode('idna') }}",
}


@pytest.mark.parametrize("case", NO_END)
def test_what_has_no_end_is_ended(case: str) -> None:
    with pytest.raises(TemplateFailed) as error:
        Renderer(ChatFormat(NO_END[case], {}), SOON).render(HI)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("case", OUT)
def test_there_is_no_way_out(case: str) -> None:
    with pytest.raises(TemplateFailed, match=r"can't be rendered \(\w+: .*\): moert run takes prompts without it"):
        Renderer(ChatFormat(OUT[case], {}), SOON).render(HI)


def test_the_same_templates_fail_without_the_process_too() -> None:
    """The sandbox holds by itself; what bounds the process is there if it should not."""
    for case, template in OUT.items():
        if case != "a codec":
            found = answer(Renderer(ChatFormat(template, {})).request(HI, None, None, True))
            assert "failed" in found, case


def test_what_it_says_is_one_harmless_line() -> None:
    bad = "{{ raise_exception('a\\n\\x1b[2J' ~ 'x' * 1000) }}"
    with pytest.raises(TemplateFailed) as error:
        Renderer(ChatFormat(bad, {})).render(HI)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


CONFINED = """
import os, sys
from moert.chat.sandbox import confine
confine(1, 40 << 20)
found = []
for name, attempt in {
    "read": lambda: open("/etc/passwd"),
    "write": lambda: os.write(2, b"x") and open("x", "w"),
    "socket": lambda: __import__("_socket").socket(),
    "memory": lambda: bytearray(100 << 20),
}.items():
    try:
        attempt()
    except (OSError, MemoryError, ImportError):
        found.append(name)
print(found)
while True: pass
"""


def test_a_process_that_broke_out_would_have_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout in ("['read', 'write', 'socket', 'memory']\n", ""), done.stderr
    assert done.returncode == -signal.SIGXCPU


def test_it_is_told_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    told: dict[str, Any] = {}
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        told.update(options)
        return real(command, **options)

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    assert Renderer(ChatFormat("x", {})).render(HI) == "x"
    assert set(told["env"]) <= {"TZ", "LD_LIBRARY_PATH"}
    assert told["cwd"] == "/"


def test_ctrl_c_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    real = module._start

    def start() -> Any:
        made = real()
        started.append(made[0])
        return made

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_start", start)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            Renderer(ChatFormat(LOOP, {}), Limits(cpu_s=300)).render(HI)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert started[0].returncode == -signal.SIGKILL


def test_one_that_does_nothing_is_not_waited_for() -> None:
    with pytest.raises(TemplateFailed, match=r"not done after 0\.3 s"):
        Renderer(ChatFormat(LOOP, {}), Limits(cpu_s=300, wall_s=0.3)).render(HI)


def test_a_process_that_can_not_start_breaks_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends where a pipe breaks; this one must not."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    monkeypatch.setattr(module, "_folders", list)
    with pytest.raises(TemplateFailed, match="ended with status 1"):
        Renderer(ChatFormat("x", {})).render([{"role": "user", "content": "x" * (1 << 20)}])
    monkeypatch.setattr(module.sys, "executable", "/nowhere/python")
    with pytest.raises(TemplateFailed, match="no process can be started"):
        Renderer(ChatFormat("x", {})).render(HI)


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TemplateFailed, match="need the package jinja2"):
        Renderer(ChatFormat("x", {})).render(HI)


@pytest.mark.parametrize(
    ("messages", "variables", "words"),
    [
        ([], None, "at least one"),
        ("hi", None, "should be a list"),
        ([{"content": "hi"}], None, "should be a list"),
        (["hi"], None, "should be a list"),
        ([{"role": "user", "content": {1, 2}}], None, "what JSON can hold"),
        (HI, {"messages": []}, "can't name messages"),
        ([{"role": "user", "content": "x" * (9 << 20)}], None, "at most 8388608"),
    ],
)
def test_what_are_no_messages(messages: Any, variables: Any, words: str) -> None:
    with pytest.raises((InputInvalid, SettingInvalid), match=words):
        Renderer(ChatFormat("x", {})).render(messages, None, variables)


def test_room_is_made_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def no_room(nbytes: int) -> Any:
        asked.append(nbytes)
        raise BudgetTooSmall("no room", 1)

    monkeypatch.setattr(module, "_start", lambda: pytest.fail("started"))
    with pytest.raises(BudgetTooSmall):
        Renderer(ChatFormat("x" * 1000, {}), room=no_room).render(HI)
    assert 20 << 20 < asked[0] < 40 << 20


_TELLS = (
    "import sys; sys.path += sys.argv[1:]\n"
    "from moert.chat import sandbox\n"
    "status, answer = open('/proc/self/status'), sandbox.answer\n"
    "def tell(request): answer(request); status.seek(0); return {'text': status.read()}\n"
    "sandbox.answer = tell; sandbox.main()"
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell what a process holds")
def test_it_takes_no_more_memory_than_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that fills what it may, by what the process itself held at most, but for files that it mapped."""
    asked = list[int]()

    def room(nbytes: int) -> Any:
        asked.append(nbytes)
        return contextlib.nullcontext()

    monkeypatch.setattr(module, "_PROGRAM", _TELLS)
    found = Renderer(ChatFormat(NO_END["a list that grows"], {}), room=room).render(HI)
    held = dict(line.split(":", 1) for line in found.splitlines())
    most, files = (int(held[name].split()[0]) << 10 for name in ("VmHWM", "RssFile"))
    assert asked[0] / 2 < most - files < asked[0]
