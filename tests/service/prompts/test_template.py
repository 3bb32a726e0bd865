"""The template environment: what templates rely on, and what they must not reach."""

from pathlib import Path

import pytest

from engine.text import TextError
from service.conversation import JSONValue
from service.errors import ApiError
from service.prompts import template as template_module
from service.prompts.template import ChatTemplate, OutputTooLong

MODEL = Path("model.gguf")


def render(source: str, **variables: JSONValue) -> str:
    return ChatTemplate(MODEL, source).render(variables, max_characters=1_000)


def refusal(source: str, **variables: JSONValue) -> str:
    with pytest.raises(ApiError) as caught:
        render(source, **variables)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    return caught.value.message


def test_blocks_leave_no_white_space() -> None:
    assert render("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}") == "x\n"


def test_loop_controls() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
    assert render(source + "{% if i == 3 %}{% break %}{% endif %}{% endfor %}") == "023"


def test_tojson_escapes_no_html_and_keeps_the_order() -> None:
    value: JSONValue = {"b": "<é&'>", "a": [1.0, None]}
    assert render("{{ v | tojson }}", v=value) == """{"b": "<é&'>", "a": [1.0, null]}"""
    assert render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"
    compact = "{{ v | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    assert render(compact, v=value) == '{"a":[1.0,null],"b":"<\\u00e9&\'>"}'


def test_generation_marks_render_their_body() -> None:
    assert render("a{% generation %}b{{ v }}{% endgeneration %}c", v="!") == "ab!c"


def test_the_date_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%%') }}") == "%"


def test_namespaces_carry_values_out_of_loops() -> None:
    source = "{% set n = namespace(self=0, x=1) %}{% for i in [2] %}{% set n.x = i %}{% endfor %}"
    assert render(source + "{{ n.x }}{{ n.self }}") == "20"


def test_what_a_template_raises_is_the_message() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.x.y }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ {}['x'].y }}",
    ],
)
def test_a_template_that_fails_is_a_refusal(source: str) -> None:
    assert "chat template cannot render" in refusal(source, messages=[{"a": 1}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set f = '{0.__class__.__mro__}'.format %}{{ f(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=2) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ self._TemplateReference__context.environment.globals.x }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages: list[JSONValue] = [{"a": 1}]
    refusal(source, messages=messages)
    assert messages == [{"a": 1}]


def test_an_attribute_out_of_reach_renders_as_nothing_of_it() -> None:
    assert render("{{ raise_exception.__globals__ is defined }}") == "False"


def test_values_are_never_templates() -> None:
    assert render("{{ v }}", v="{{ 7 * 7 }}{% raw %}") == "{{ 7 * 7 }}{% raw %}"


def test_output_without_end_is_cut_off() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(OutputTooLong):
        ChatTemplate(MODEL, source).render({}, 1000)


def test_a_template_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_S", -1.0)
    assert "it takes longer than" in refusal("{{ v }}", v="x")


def test_a_model_without_template_says_how_to_give_one() -> None:
    with pytest.raises(TextError, match=r"^model\.gguf: .*no chat template.*chat_template\.jinja"):
        ChatTemplate(MODEL, None)


@pytest.mark.parametrize("source", ["{% if %}", "{% nonsense %}", "{{ x | nonsense }}", "{{"])
def test_a_malformed_template_is_an_error_at_the_start(source: str) -> None:
    with pytest.raises(TextError, match=r"^model\.gguf: the chat template is malformed: "):
        ChatTemplate(MODEL, source)


def test_what_a_template_reads_is_known() -> None:
    plain = ChatTemplate(MODEL, "{# tools #}{{ messages }}")
    assert not (plain.reads_tools or plain.mentions_tool_calls or plain.mentions_developer)
    full = ChatTemplate(
        MODEL,
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{{ messages[0].tool_calls }}{{ messages[0].role == 'developer' }}",
    )
    assert full.reads_tools and full.mentions_tool_calls and full.mentions_developer
