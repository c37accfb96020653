"""Templates render as in Hugging Face's transformers, in a sandbox."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_pd.router.chat_template import ChatTemplate, TemplateFailed, special_tokens


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or [{"role": "user", "content": "<é>"}], **options)


def test_templates_follow_hugging_face_conventions() -> None:
    assert render("{% if true %}\n  {% if true %}\nx{% endif %}\n{% endif %}\n") == "x"
    assert render("{{ messages[0]['content'] | tojson }}") == '"<é>"'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ bos_token }}{% generation %}a{% endgeneration %}") == "<s>a"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ mode }}", extra={"mode": "on"}) == "on"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__class__ }}{{ messages[0].__class__.x }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterator.x }}{% endfor %}",
        "{% for m in messages %}{{ m.__class__.x }}{% endfor %}",
        "{% for m in messages %}{{ m['__class__'].x }}{% endfor %}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception('x') }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ '{}'.format() }}",
    ],
)
def test_templates_run_in_a_sandbox_and_fail_cleanly(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)


@pytest.mark.parametrize(
    "read",
    [
        "m.role",
        "m['role']",
        "m.missing is defined",
        "m['missing'] is defined",
        "m.items is defined",
        "m['keys'] is defined",
        "m.keys() | list",
        "m.first",
        "m['first'] ~ loop.first ~ loop['last'] ~ loop.nextitem.role",
        "loop.missing is defined",
        "m.content.strip",
        "m.content['strip'] is defined",
        "nothing.role",
        "nothing['role']",
        "other.first ~ other['first']",
        "number.role is defined",
    ],
)
def test_members_are_read_as_the_sandbox_reads_them(read: str) -> None:
    source = f"{{% for m in messages %}}{{{{ {read} }}}};{{% endfor %}}"
    messages = [{"role": role, "content": " x ", "first": "mine"} for role in ("user", "assistant")]
    variables = {"other": OrderedDict(first="theirs"), "number": 1}

    def outcome(render: Callable[[], str]) -> str:
        try:
            return render()
        except (TemplateFailed, UndefinedError) as e:
            return f"failed: {e}"

    expected = outcome(
        lambda: ImmutableSandboxedEnvironment().from_string(source).render(messages=messages, **variables)
    )
    found = outcome(lambda: render(source, messages, extra=variables))
    address = re.compile("0x[0-9a-f]+")
    assert address.sub("", found) == address.sub("", expected)


def test_special_tokens_are_read_from_text_or_object() -> None:
    assert special_tokens(b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "x": 1}') == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert special_tokens(b"") == {}
    assert special_tokens(b"[]") == {}


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] | list %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% set content = messages[0].content %}{% for c in content %}{{ c.text }}{% endfor %}", True),
        ("{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}", True),
    ],
)
def test_templates_made_for_parts_are_told_from_those_for_texts(source: str, may: bool) -> None:
    assert ChatTemplate(source, {}).may_loop_over_content is may


MESSAGES = [{"role": "system", "content": " <b>é</b> "}, {"role": "user", "content": "x\ny"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SOURCES = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 == 1 %}\n{% break %}{% endif %}\n"
    "{{ m['content'] | trim | tojson(indent=2) }}\n{% endfor %}",
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ flag }}",
    "{% for m in messages %}{{ m.nothing }}{{ m.nothing is defined }}{{ m.items() | list }}{{ m.get('role') }}"
    "{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem is defined }}{{ loop.depth }}{{ loop.cycle('a', 'b') }}"
    "{% endfor %}",
]


@pytest.mark.vllm
@pytest.mark.parametrize("source", SOURCES)
def test_templates_render_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [MESSAGES], tools=[TOOL], chat_template=source, add_generation_prompt=True, bos_token="<s>", flag="on"
    )
    assert [render(source, MESSAGES, tools=[TOOL], extra={"flag": "on"})] == theirs


@pytest.mark.vllm
@pytest.mark.parametrize(
    "last", ["It is", "It is \n", "", " ", "CONTINUE_FINAL_MESSAGE_TAG", [{"type": "text", "text": "It "}]]
)
@pytest.mark.parametrize(
    "trim", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content[0].text }}", "{{ m.role }}"]
)
def test_a_last_message_is_left_open_as_in_transformers(last: Any, trim: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{% for m in messages %}<|{{ m.role }}|>" + trim + "<|end|>\n{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    theirs: str | None
    try:
        (theirs,), _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=False, continue_final_message=True
        )
    except Exception:
        theirs = None
    ours: str | None
    try:
        ours = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    except TemplateFailed:
        ours = None
    assert ours == theirs
